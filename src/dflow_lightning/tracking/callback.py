"""The callbacks that record a run: metrics, charts and answers in MLflow, and its recipe."""

import os
import time
import traceback
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.cli import SaveConfigCallback
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning.pytorch.utilities.rank_zero import rank_zero_only

from dflow_lightning.errors import InputError
from dflow_lightning.files import hold, write_text
from dflow_lightning.tracking import provenance
from dflow_lightning.tracking.journal import Destination
from dflow_lightning.tracking.logger import RunLogger, new_key, store_address
from dflow_lightning.tracking.meters import Meters
from dflow_lightning.tracking.store import clean_name, import_mlflow
from dflow_lightning.training.validation import ValidationDecoding

KEY, RUN_ID = "tracking_key", "mlflow_run_id"  # in a checkpoint


class Tracking(Callback):
    """Records the run in MLflow and keeps its id in the checkpoint, so that a resume continues it.

    Args:
        enabled: False trains without a record.
        experiment: Name of the MLflow experiment.
        run_name: Name of the run; the run folder's name when left out.
        uri: Address of the MLflow store. When left out: the variable MLFLOW_TRACKING_URI, or else
            the file mlflow.db in the run folder.
        tags: More tags of the run, for example of a series of runs.
    """

    def __init__(
        self,
        *,
        enabled: bool = True,
        experiment: str = "dflow",
        run_name: str | None = None,
        uri: str | None = None,
        tags: dict[str, str] | None = None,
    ):
        self.enabled = enabled
        self.experiment = experiment
        self.run_name = run_name
        self.uri = uri
        self.tags = tags or {}
        self.logger: RunLogger | None = None
        self._meters = Meters()
        self._began_validation = 0.0

    def open(
        self, run_dir: Path, run_id: str | None = None, suffix: str = "", key: str | None = None
    ) -> RunLogger:
        """The logger of a run in `run_dir`.

        Args:
            run_id: the store's id of the run to continue.
            suffix: appended to the run's name.
            key: our key of the run to continue, for a checkpoint from before the store gave an id.
        """
        uri = store_address(run_dir, self.uri)
        local = uri.startswith("sqlite:")  # MLflow would put artifacts into the working directory
        if rank_zero_only.rank == 0:  # type: ignore[attr-defined]
            run_dir.mkdir(parents=True, exist_ok=True)
            import_mlflow(uri)
        destination = Destination(
            key=key or new_key(),
            uri=uri,
            experiment=self.experiment,
            run_name=(self.run_name or run_dir.resolve().name) + suffix,
            run_id=run_id,
            artifacts=(run_dir / "artifacts").resolve().as_uri() if local else None,
        )
        resumed = run_id is not None or key is not None
        self.logger = RunLogger(run_dir, destination, resumed=resumed)
        return self.logger

    # ---------------------------------------------------------------- numbers of each step

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Training metrics are recorded at the number of completed steps."""
        if self.logger is not None and stage == "fit":
            self.logger.shift = 1

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start the clock."""
        self._meters = Meters()
        if self.logger is not None:
            self._meters.watch_rollouts(trainer)

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        """Measure the rounds that the rollout made."""
        prepared = getattr(pl_module, "prepared", None)
        if self.logger is not None and prepared is not None and self._due(trainer):
            self._meters.see_rounds(prepared.rounds)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Count the batch; record speed and memory at the steps at which the loss is recorded."""
        self._meters.count(batch.input_ids_BS.numel() * trainer.world_size)
        if self.logger is not None and trainer.global_step and self._due(trainer, made=True):
            self.logger.record_metrics(self._meters.take(trainer), trainer.global_step)

    def _due(self, trainer: Trainer, *, made: bool = False) -> bool:
        every = trainer.log_every_n_steps  # type: ignore[attr-defined]
        return (trainer.global_step + (not made)) % max(1, every) == 0

    # ---------------------------------------------------------------- validation

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start the clock of the validation."""
        self._began_validation = time.perf_counter()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Record charts, answers and the time that the validation took."""
        fit = trainer.state.fn == "fit" and not trainer.sanity_checking
        if self.logger is not None and fit and trainer.is_global_zero:
            took = time.perf_counter() - self._began_validation
            self.logger.record_metrics({"system/validation_seconds": took}, trainer.global_step)
            self._show_decoded(trainer, pl_module)
        self._meters.resume()

    def _show_decoded(self, trainer: Trainer, module: Any) -> None:
        measured = next(
            (c.latest for c in trainer.callbacks if isinstance(c, ValidationDecoding)),  # type: ignore[attr-defined]
            None,
        )
        if measured is None or measured.step != trainer.global_step or self.logger is None:
            return
        from dflow_lightning.tracking import plots, samples

        step = f"step{measured.step:07}"
        self.logger.artifact(
            f"answers/{step}.html", samples.sample_page(module.target.tokenizer, measured)
        )
        self.logger.artifact(f"charts/{step}/acceptance.png", plots.acceptance_plot(measured))
        self.logger.artifact(f"charts/{step}/tau.png", plots.tau_plot(measured))

    # ---------------------------------------------------------------- checkpoints and the end

    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Store what identifies the run, for a resume."""
        if self.logger is not None:
            checkpoint[KEY], checkpoint[RUN_ID] = self.logger.key, self.logger.run_id

    def on_load_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Metrics of `test` and `validate` are recorded at the checkpoint's step."""
        if self.logger is not None and trainer.state.fn != "fit":
            self.logger.shift = checkpoint["global_step"]

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """Distinguish an interrupted run (Ctrl-C, a scheduler's SIGTERM) from a failed one."""
        if self.logger is None:
            return
        step = f"at step {trainer.global_step}"
        if isinstance(exception, KeyboardInterrupt | SIGTERMException):
            reason = getattr(exception, "said", None) or f"interrupted {step}"
            self.logger.ends("KILLED", {"stopped": reason})
            return
        text = " ".join(str(exception).split())
        failure = f"{type(exception).__name__} {step}: {text}"
        self.logger.ends("FAILED", {"failure": failure})
        self.logger.artifact("failure.txt", "".join(traceback.format_exception(exception)))


class RecipeRecord(SaveConfigCallback):
    """Writes the resolved recipe to `<run_dir>/config.yaml`, to MLflow and to every checkpoint."""

    _lock: int | None = None  # of the run folder, while this process trains in it

    @cached_property
    def recipe(self) -> dict[str, Any]:
        """The recipe as plain values, without this run's folder and checkpoint, to be rerun."""
        recipe = yaml.safe_load(self.parser.dump(self.config, skip_none=False, format="yaml"))
        recipe["trainer"]["default_root_dir"] = None
        return recipe | {"run_dir": None, "ckpt_path": None, "quiet": False}

    def save_config(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Called once, on rank zero, before anything runs."""
        if stage == "fit":
            folder = Path(trainer.default_root_dir)
            folder.mkdir(parents=True, exist_ok=True)
            self._lock = hold(folder / ".lock")
            if self._lock is None:
                raise InputError(
                    f"run_dir: another process trains in {folder}, and both would write the same "
                    "checkpoints; choose another folder"
                )
            text = yaml.safe_dump(self.recipe, sort_keys=False)
            write_text(folder / "config.yaml", text)
        for logger in trainer.loggers:
            if isinstance(logger, RunLogger):
                logger.log_recipe(self.recipe)
                record_provenance(logger, trainer, pl_module)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Release the lock of the run folder."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Store the recipe, which a resume compares with its own."""
        checkpoint["recipe"] = self.recipe


def record_provenance(logger: RunLogger, trainer: Trainer, module: Any) -> None:
    """Record command, versions, machine and code of a run, and fingerprints of its inputs."""
    tags, sets = provenance.fingerprints(module, trainer.datamodule)  # type: ignore[attr-defined]
    more = [c.tags for c in trainer.callbacks if isinstance(c, Tracking)]  # type: ignore[attr-defined]
    tags = provenance.run_tags(trainer.world_size) | tags | (more[0] if more else {})
    tags["run_dir"] = str(Path(trainer.default_root_dir).resolve())
    logger.record("tags", values={clean_name(name): value for name, value in tags.items()})
    logger.record("datasets", sets=sets)
    if (diff := provenance.git_diff()) is not None:
        logger.artifact("git.diff", diff)
