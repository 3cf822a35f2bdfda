"""Which checkpoints a run keeps, and how they are written."""

import errno
import shutil
import warnings
from pathlib import Path
from typing import Any, Literal

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

from dflow_lightning.errors import InputError
from dflow_lightning.files import recover, remove, take_place

CHECKPOINT_FOLDER = "checkpoints"
PROCESSES_KEY = "processes"
COPIES = 3  # of a parameter in a checkpoint: itself and Adam's two moments


class Checkpointing(ModelCheckpoint):
    """Keeps `checkpoints/best.ckpt`, by real decoding, and `checkpoints/last.ckpt`.

    Checkpoints are taken at optimizer steps: batches whose gradients were only accumulated, or
    whose step failed, count as unread and are read again on resume. A checkpoint is written under a
    hidden name and then renamed, so that a kill or a full disk leaves the previous one intact.

    Args:
        monitor: Metric that selects the best checkpoint.
        mode: Whether the largest or the smallest value is best.
        save_top_k: Number of best checkpoints to keep; above 1 file names contain step and value.
        every_n_steps: Also write `last.ckpt` every N steps, not only after validation.
    """

    def __init__(
        self,
        *,
        monitor: str = "val/tau",
        mode: Literal["max", "min"] = "max",
        save_top_k: int = 1,
        every_n_steps: int | None = None,
    ):
        if every_n_steps is not None and every_n_steps < 1:
            raise InputError(f"checkpoint.every_n_steps is {every_n_steps}; give 1 or more")
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
        self._boundary: dict[str, Any] | None = None  # the loops' state at the last optimizer step
        self._boundary_step = 0
        self._resumed_from: Path | None = None  # the folder of the checkpoint

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Files go to the run folder, never to a path made from a run id."""
        self.dirpath = str(Path(trainer.default_root_dir).resolve() / CHECKPOINT_FOLDER)
        with warnings.catch_warnings():  # a resume finds its own files there
            warnings.filterwarnings("ignore", message="Checkpoint directory .* exists")
            super().setup(trainer, pl_module, stage)

    def on_load_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Keeps the state that was resumed, for a run that fails before its first step.

        Raises:
            InputError: the run had another number of processes.
        """
        before = checkpoint.get(PROCESSES_KEY, trainer.world_size)
        if trainer.state.fn == "fit" and before != trainer.world_size:
            raise InputError(
                f"ckpt_path: the run had {before} processes, this command has "
                f"{trainer.world_size}, and other batches would make a step; resume with as many "
                "(trainer.devices, trainer.num_nodes), or start a new run from exported weights "
                "with model.init_from"
            )
        self._boundary = checkpoint["loops"]["fit_loop"]
        self._boundary_step = checkpoint["global_step"]
        self._resumed_from = Path(trainer.ckpt_path).resolve().parent if trainer.ckpt_path else None

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes over the best scores, also where the run folder has moved since.

        Lightning compares the absolute folder and forgets the scores where it differs, after which
        a worse model would replace `best.ckpt`. A checkpoint of another run folder brings no
        scores: its best files are not here.
        """
        if self.dirpath is not None and self._resumed_from == Path(self.dirpath):
            here = self._resumed_from
            names = ("best_model_path", "kth_best_model_path", "last_model_path")
            scores = state_dict.get("best_k_models", {})
            state_dict = {
                **state_dict,
                **{name: str(here / Path(state_dict[name]).name) for name in names
                   if state_dict.get(name)},
                "best_k_models": {str(here / Path(path).name): v for path, v in scores.items()},
                "dirpath": self.dirpath,
            }  # fmt: skip
        super().load_state_dict(state_dict)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Starts counting at the resumed step, and looks whether the checkpoints fit on the disk.

        Raises:
            InputError: they do not.
        """
        super().on_train_start(trainer, pl_module)
        self._last_step = trainer.global_step
        if self._boundary is None:
            self._boundary = trainer.fit_loop.state_dict()
        if not trainer.fast_dev_run:  # type: ignore[attr-defined]
            free, folder = self._free_bytes(), Path(self.dirpath or ".")
            require_room(
                folder,
                needed=self._needed_bytes(pl_module),
                free=trainer.strategy.broadcast(free),
                files=max(0, self.save_top_k) + 2,
            )

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, *args: Any, **kwargs: Any
    ) -> None:
        """Writes `last.ckpt` between validations where `every_n_steps` asks for it."""
        if trainer.global_step != self._boundary_step:
            self._boundary = trainer.fit_loop.state_dict()
            self._boundary_step = trainer.global_step
        super().on_train_batch_end(trainer, pl_module, *args, **kwargs)
        if self.every_n_steps and trainer.global_step % self.every_n_steps == 0:
            self.write_last(trainer)

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
        before = self.best_model_score
        super().on_validation_end(trainer, pl_module)
        if self.best_model_score is not before:
            self._last_step = -1  # what `every_n_steps` wrote at this step does not know the score
        self.write_last(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """The final weights are always on disk."""
        self.write_last(trainer)

    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Puts the position in the data back to the last optimizer step, where the weights are."""
        if self._boundary is not None and self._boundary_step == trainer.global_step:
            checkpoint["loops"]["fit_loop"] = self._boundary
        checkpoint[PROCESSES_KEY] = trainer.world_size

    def write_last(self, trainer: Trainer) -> None:
        """Writes `last.ckpt`, unless this step's is there.

        Lightning's own `save_last` skips a validation that brought no new best.
        """
        dry = trainer.fast_dev_run  # type: ignore[attr-defined]
        if dry or self._last_step == trainer.global_step:
            return
        self.last_model_path = str(Path(self.dirpath or ".") / "last.ckpt")
        self._write(trainer, Path(self.last_model_path))
        self._last_step = trainer.global_step

    def _save_checkpoint(self, trainer: Trainer, filepath: str) -> None:
        """Lightning's way to write the best ones."""
        self._write(trainer, Path(filepath))
        self._last_global_step_saved = trainer.global_step
        self._last_checkpoint_saved = filepath
        if trainer.is_global_zero:
            for logger in trainer.loggers:
                logger.after_save_checkpoint(self)

    def _write(self, trainer: Trainer, path: Path) -> None:
        """The checkpoint, a file or a folder, gets its name when all processes have written."""
        staged = path.with_name(f".{path.name}.partial")  # the same for all processes
        if trainer.is_global_zero:
            remove(staged)  # of a run that was killed
        trainer.strategy.barrier()
        try:
            trainer.save_checkpoint(staged)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            remove(staged)
            raise InputError(
                f"checkpoint: the disk of {path.parent} is full at step {trainer.global_step}; "
                "make room and continue with --ckpt_path last, which is the checkpoint before"
            ) from error
        if trainer.is_global_zero:
            take_place(staged, path)
        trainer.strategy.barrier()

    def _needed_bytes(self, module: LightningModule) -> int:
        """Bytes of one checkpoint: weights and both moments of all that is trained."""
        trained = (p for p in module.parameters() if p.requires_grad)
        # ZeRO-3 leaves empty parameters behind and keeps their size apart.
        return COPIES * sum(getattr(p, "ds_numel", p.numel()) * p.element_size() for p in trained)

    def _free_bytes(self) -> int:
        """Room on the disk; checkpoints of this folder will be replaced, so theirs counts."""
        folder = Path(self.dirpath or ".")
        folder.mkdir(parents=True, exist_ok=True)
        files = (path for path in folder.rglob("*") if path.is_file())
        return shutil.disk_usage(folder).free + sum(path.stat().st_size for path in files)


def require_room(folder: Path, *, needed: int, free: int, files: int) -> None:
    """Raise `InputError` where `files` checkpoints of `needed` bytes each have no room."""
    if files * needed > free:
        raise InputError(
            f"checkpoint: {folder} has room for {free / 1e9:.2f} GB but this run writes "
            f"{files * needed / 1e9:.2f} GB ({files} checkpoints of {needed / 1e9:.2f} GB, the one "
            "being written included); make room, name another run_dir, or lower "
            "checkpoint.save_top_k"
        )


def find_checkpoint(run_dir: Path, name: str) -> Path | None:
    """The file or folder that `last`, `best`, `auto` or a path stands for.

    Returns:
        None for `auto` in a run folder without a checkpoint: the run has not begun.
    """
    path = Path(name)
    if name in ("last", "best", "auto"):
        file = "best.ckpt" if name == "best" else "last.ckpt"
        path = run_dir / CHECKPOINT_FOLDER / file
    recover(path)
    if not path.exists():
        if name == "auto":
            return None
        where = f" ({path})" if name != str(path) else ""
        raise InputError(f"ckpt_path: {name}{where} does not exist; name a checkpoint that does")
    return path
