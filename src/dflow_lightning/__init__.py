"""Train DFlow drafters for lossless speculative decoding, and hand them to serving stacks.

    train               a recipe to a trained drafter, as `dflow-train fit` does
    load_decoder        an export and its target to a decoder: `answer`, `generate`, `stream`

For a Lightning trainer of your own:

    DrafterModule       the LightningModule, with its settings TargetConfig, DrafterConfig,
                        RelayConfig, LossConfig and OptimizerConfig
    ChatDataModule      the LightningDataModule
    OnlineRollout       the callback of reject-conditioned rounds, without which DFlow is DFlash
    ValidationDecoding  the callback that decodes held-out prompts

Decoding without a recipe: FrozenTarget, SpeculativeDecoder, Engine, Request. A user's mistake is
an InputError of one sentence, a run that cannot continue a RunError. Names are imported when they
are first used, so that importing the package costs nothing.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dflow_lightning.api import TrainedRun, train
    from dflow_lightning.data.datamodule import ChatDataModule
    from dflow_lightning.decode import (
        Answer,
        Completion,
        Engine,
        Request,
        SpeculativeDecoder,
        load_decoder,
    )
    from dflow_lightning.errors import InputError, RunError
    from dflow_lightning.models.dims import DrafterConfig
    from dflow_lightning.models.relay import RelayConfig
    from dflow_lightning.models.target import FrozenTarget
    from dflow_lightning.tensors.loss import LossConfig
    from dflow_lightning.training.module import DrafterModule, TargetConfig
    from dflow_lightning.training.optimizer import OptimizerConfig
    from dflow_lightning.training.rollout import OnlineRollout
    from dflow_lightning.training.validation import ValidationDecoding

__version__ = "0.1.0"
__all__ = [
    "Answer",
    "ChatDataModule",
    "Completion",
    "DrafterConfig",
    "DrafterModule",
    "Engine",
    "FrozenTarget",
    "InputError",
    "LossConfig",
    "OnlineRollout",
    "OptimizerConfig",
    "RelayConfig",
    "Request",
    "RunError",
    "SpeculativeDecoder",
    "TargetConfig",
    "TrainedRun",
    "ValidationDecoding",
    "__version__",
    "load_decoder",
    "train",
]

_HOMES = {
    "data.datamodule": ["ChatDataModule"],
    "decode": ["Answer", "Completion", "Engine", "Request", "SpeculativeDecoder", "load_decoder"],
    "models.dims": ["DrafterConfig"],
    "errors": ["InputError", "RunError"],
    "tensors.loss": ["LossConfig"],
    "training.module": ["DrafterModule", "TargetConfig"],
    "training.optimizer": ["OptimizerConfig"],
    "models.relay": ["RelayConfig"],
    "training.rollout": ["OnlineRollout"],
    "models.target": ["FrozenTarget"],
    "api": ["TrainedRun", "train"],
    "training.validation": ["ValidationDecoding"],
}


def __getattr__(name: str) -> Any:
    """Import the heavy parts when they are first named."""
    for home, names in _HOMES.items():
        if name in names:
            from importlib import import_module

            return getattr(import_module(f"{__name__}.{home}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
