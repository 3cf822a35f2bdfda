"""Which checkpoints a run keeps, and what a resume may change."""

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

from dflow_lightning.errors import InputError
from dflow_lightning.tracking import flatten

FOLDER = "checkpoints"
# What shapes a training: the same on resume, or its second half is another run.
TRAINING_KEYS = ("model.", "data.", "rollout.", "seed_everything")
FREE_KEYS = (  # a resume may change these: they do not reach the weights
    "model.init_from",
    "model.gradient_checkpointing",
    "model.target.attn_implementation",
    "model.target.shard",
    "data.num_workers",
    "data.validation",
    "data.test",
    "data.limit_",
)
PATH_KEYS = ("model.target.path", "data.train")  # compared by name: folders move


class Checkpointing(ModelCheckpoint):
    """Keeps `checkpoints/best.ckpt`, by real decoding, and `checkpoints/last.ckpt`.

    Args:
        monitor: The metric that chooses the best checkpoint.
        mode: Whether the largest or the smallest value is best.
        save_top_k: How many of the best to keep; above 1 their names hold step and value.
        every_n_steps: Also write `last.ckpt` every so many steps, not only after validation.
    """

    def __init__(
        self,
        *,
        monitor: str = "val/tau",
        mode: Literal["max", "min"] = "max",
        save_top_k: int = 1,
        every_n_steps: int | None = None,
    ):
        name = "best" if save_top_k == 1 else f"step{{step}}-{{{monitor}:.3f}}"
        super().__init__(
            monitor=monitor,
            mode=mode,
            save_top_k=save_top_k,
            filename=name,
            auto_insert_metric_name=False,
            enable_version_counter=False,
            save_on_train_epoch_end=False,  # the metric exists after validation
        )
        self.every_n_steps = every_n_steps
        self._last_step = 0

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Files go to the run folder, never to a path made from a run id."""
        self.dirpath = str(Path(trainer.default_root_dir).resolve() / FOLDER)
        with warnings.catch_warnings():  # a resume finds its own files there
            warnings.filterwarnings("ignore", message="Checkpoint directory .* exists")
            super().setup(trainer, pl_module, stage)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Starts counting at the resumed step."""
        super().on_train_start(trainer, pl_module)
        self._last_step = trainer.global_step

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, *args: Any, **kwargs: Any
    ) -> None:
        """Writes `last.ckpt` between validations where `every_n_steps` asks for it."""
        super().on_train_batch_end(trainer, pl_module, *args, **kwargs)
        if self.every_n_steps and trainer.global_step % self.every_n_steps == 0:
            self._save_last(trainer)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Writes the best checkpoint if this is it, and the last one always."""
        if trainer.state.fn != "fit" or trainer.sanity_checking:
            return
        logged = trainer.callback_metrics
        if self.monitor not in logged:
            names = ", ".join(sorted(name for name in logged if name.startswith("val/")))
            raise InputError(
                f"checkpoint.monitor is {self.monitor}, which is not logged; choose of {names}"
            )
        super().on_validation_end(trainer, pl_module)
        self._save_last(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """The final weights are always on disk."""
        self._save_last(trainer)

    def _save_last(self, trainer: Trainer) -> None:
        """Lightning's own `save_last` skips a validation that brought no new best."""
        dry = trainer.fast_dev_run  # type: ignore[attr-defined]
        if dry or self._last_step == trainer.global_step:
            return
        self._last_step = trainer.global_step
        self.last_model_path = str(Path(self.dirpath or ".") / "last.ckpt")
        trainer.save_checkpoint(self.last_model_path)


@dataclass(frozen=True)
class SavedRun:
    """What a checkpoint tells about the run that wrote it."""

    path: Path
    recipe: dict[str, Any]
    run_id: str | None

    @classmethod
    def read(cls, path: Path) -> "SavedRun":
        """Reads what the callbacks of `tracking.py` stored; the tensors stay on disk."""
        content = torch.load(path, weights_only=True, map_location="cpu", mmap=True)
        if "recipe" not in content:
            raise InputError(
                f"ckpt_path: {path} holds no recipe; `dflow-train fit` did not write it"
            )
        return cls(path, content["recipe"], content.get("mlflow_run_id"))

    def require_same(self, recipe: Mapping[str, Any]) -> None:
        """Refuses to resume with a recipe that differs where the training depends on it."""
        saved, current = flatten(self.recipe), flatten(recipe)
        for key in sorted(saved.keys() | current.keys()):
            if not key.startswith(TRAINING_KEYS) or key.startswith(FREE_KEYS):
                continue
            old, new = saved.get(key, "null"), current.get(key, "null")
            if key in PATH_KEYS and Path(old).name == Path(new).name:
                continue
            if old != new:
                raise InputError(
                    f"ckpt_path: {self.path} was trained with {key} = {old}, this command says "
                    f"{new}; resume with the same recipe, or start a new run from exported weights "
                    "with model.init_from"
                )


def find_checkpoint(run_dir: Path, name: str) -> Path:
    """The file that `last`, `best` or a path stands for."""
    path = run_dir / FOLDER / f"{name}.ckpt" if name in ("last", "best") else Path(name)
    if not path.exists():
        where = f" ({path})" if name != str(path) else ""
        raise InputError(f"ckpt_path: {name}{where} does not exist; name a checkpoint that does")
    return path
