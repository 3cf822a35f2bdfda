"""Train DFlow drafters for lossless speculative decoding, and hand them to serving stacks."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dflow_lightning.data.datamodule import ChatDataModule
    from dflow_lightning.decode import SpeculativeDecoder
    from dflow_lightning.module import DrafterModule

__version__ = "0.1.0"
__all__ = ["ChatDataModule", "DrafterModule", "SpeculativeDecoder", "__version__"]

_HOMES = {
    "ChatDataModule": "dflow_lightning.data.datamodule",
    "DrafterModule": "dflow_lightning.module",
    "SpeculativeDecoder": "dflow_lightning.decode",
}


def __getattr__(name: str) -> Any:
    """Import the heavy parts when they are first named."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)
