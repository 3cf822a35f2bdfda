"""The run's record: an MLflow run, and the recipe that made it."""

import logging
import os
import shlex
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import cached_property
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import yaml
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.cli import SaveConfigCallback
from lightning.pytorch.loggers import MLFlowLogger
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning.pytorch.utilities.rank_zero import rank_zero_only, rank_zero_warn

PARAM_LIMIT = 250  # characters; a longer value stays in the recipe artifact alone
PARAMS_PER_CALL = 100  # MLflow refuses more in one batch
URI_VARIABLE = "MLFLOW_TRACKING_URI"
PARENT_TAG = "mlflow.parentRunId"  # by which MLflow's own pages nest runs
GIVE_UP_AFTER = 3  # failures in a row: a dead server must not cost a timeout at every step


def flatten(recipe: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Dotted keys and text values of a nested recipe; unset values are left out."""
    flat: dict[str, str] = {}
    for key, value in recipe.items():
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{prefix}{key}.")
        elif value is not None:
            flat[f"{prefix}{key}"] = str(value)
    return flat


def calmly() -> None:
    """Import MLflow without its messages."""
    import mlflow  # noqa: F401 - sets its log level to INFO, once

    for name in ("mlflow", "alembic"):
        logging.getLogger(name).setLevel("ERROR")


class RunLogger(MLFlowLogger):
    """Lightning's MLflow logger, made safe for long runs.

    It keeps the local store inside the run folder, continues a run on resume, ends it with the
    right status, and lets no failure of the tracking store stop the training.
    """

    def __init__(
        self,
        run_dir: Path,
        *,
        experiment: str,
        run_name: str,
        uri: str,
        run_id: str | None = None,
        parent_run_id: str | None = None,
    ):
        local = uri.startswith("sqlite:")  # MLflow would put artifacts into the working directory
        super().__init__(
            experiment_name=experiment,
            run_name=run_name,
            tracking_uri=uri,
            run_id=run_id,
            tags={PARENT_TAG: parent_run_id} if parent_run_id else None,
            artifact_location=(run_dir / "artifacts").resolve().as_uri() if local else None,
        )
        self.outcome: str | None = None  # set where Lightning would only say "failed"
        self.continued = False
        self._run_dir = run_dir
        self._failures = 0

    @property
    def save_dir(self) -> str:
        """The run folder, whatever the address of the store."""
        return str(self._run_dir)

    @property
    def experiment(self) -> Any:
        """The MLflow client, or None while the store cannot be reached."""
        return self._mlflow_client if self._initialized else self._attempt(self._client)

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Logs metrics; a failure is a warning."""
        if self.experiment is not None:
            self._attempt(super().log_metrics, metrics, step)

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        """Nothing: `log_recipe` logs the module's arguments with everything else."""

    @rank_zero_only
    def log_recipe(self, recipe: dict[str, Any]) -> None:
        """Logs the recipe as an artifact, and its short values as parameters."""
        if self.experiment is not None:
            self._attempt(self._log_recipe, recipe)

    def finalize(self, status: str = "success") -> None:
        """Ends the run as FINISHED, FAILED or KILLED."""
        if self._initialized:
            self._attempt(super().finalize, self.outcome or status)

    def _client(self) -> Any:
        first = rank_zero_only.rank == 0  # type: ignore[attr-defined]
        if first and not self._initialized and self._run_id is not None:
            self._reopen(self._run_id)
        chosen = os.environ.get(URI_VARIABLE)
        client = super().experiment
        # MLflow has now written this run's address into the variable that means the user's choice.
        os.environ.pop(URI_VARIABLE, None)
        if chosen is not None:
            os.environ[URI_VARIABLE] = chosen
        return client

    def _reopen(self, run_id: str) -> None:
        """Continues the run of a resumed training, unless this store does not hold it."""
        from mlflow.exceptions import MlflowException

        try:
            self._mlflow_client.update_run(run_id, status="RUNNING")
            self.continued = True
        except MlflowException as error:
            if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                raise
            self._run_id = None

    def _log_recipe(self, recipe: dict[str, Any]) -> None:
        from mlflow.entities import Param

        client, run_id = self.experiment, self.run_id
        client.log_text(run_id, yaml.safe_dump(recipe, sort_keys=False), "config.yaml")
        for key, value in provenance().items():
            client.set_tag(run_id, key, value)
        params = {k: v for k, v in flatten(recipe).items() if v and len(v) <= PARAM_LIMIT}
        if self.continued:  # parameters of a run never change in MLflow: changes become tags
            before = client.get_run(run_id).data.params
            for key in (key for key, value in params.items() if before.get(key) != value):
                client.set_tag(run_id, f"resume.{key}", params[key])
            return
        rows = [Param(key, value) for key, value in params.items()]
        for start in range(0, len(rows), PARAMS_PER_CALL):
            client.log_batch(run_id, params=rows[start : start + PARAMS_PER_CALL])

    def _attempt(self, call: Callable[..., Any], *args: Any) -> Any:
        """Calls; an exception becomes one warning, and after some in a row nothing is tried."""
        if self._failures >= GIVE_UP_AFTER:
            return None
        try:
            result = call(*args)
        except Exception as error:
            if not self._failures:
                rank_zero_warn(
                    f"tracking at {self._tracking_uri} failed ({type(error).__name__}: {error}); "
                    "training goes on without it"
                )
            self._failures += 1
            return None
        self._failures = 0
        return result


def provenance() -> dict[str, str]:
    """The command and the versions that made a run."""
    tags = {"command": shlex.join(sys.argv)[:PARAM_LIMIT]}
    for name in ("dflow-lightning", "torch", "lightning", "transformers"):
        with suppress(PackageNotFoundError):  # run from a source tree that is not installed
            tags[f"version.{name}"] = version(name)
    return tags


class Tracking(Callback):
    """Records the run in MLflow and keeps its id in the checkpoint, so that a resume continues it.

    Args:
        enabled: False trains without a record.
        experiment: Name of the MLflow experiment.
        run_name: Name of the run; the run folder's name when left out.
        uri: Address of the MLflow store. When left out: the variable MLFLOW_TRACKING_URI, or else
            the file mlflow.db in the run folder.
        parent_run_id: An MLflow run of the same store to nest this one under.
    """

    def __init__(
        self,
        *,
        enabled: bool = True,
        experiment: str = "dflow",
        run_name: str | None = None,
        uri: str | None = None,
        parent_run_id: str | None = None,
    ):
        self.enabled = enabled
        self.experiment = experiment
        self.run_name = run_name
        self.uri = uri
        self.parent_run_id = parent_run_id
        self.logger: RunLogger | None = None

    def open(self, run_dir: Path, run_id: str | None = None, suffix: str = "") -> RunLogger:
        """The logger of a run in `run_dir`, continuing `run_id` where the store holds it."""
        calmly()
        uri = self.uri or os.environ.get(URI_VARIABLE)
        if uri is None:
            run_dir.mkdir(parents=True, exist_ok=True)
            uri = f"sqlite:///{(run_dir / 'mlflow.db').resolve()}"
        elif uri.startswith("http"):  # a dead server is given up in seconds, not minutes
            os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
        self.logger = RunLogger(
            run_dir,
            experiment=self.experiment,
            run_name=(self.run_name or run_dir.name) + suffix,
            uri=uri,
            run_id=run_id,
            parent_run_id=self.parent_run_id,
        )
        return self.logger

    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Stores the run's id, for a resume."""
        checkpoint["mlflow_run_id"] = self.logger.run_id if self.logger else None

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """Tells an interrupted run (Ctrl-C, a scheduler's SIGTERM) from a failed one."""
        if self.logger and isinstance(exception, KeyboardInterrupt | SIGTERMException):
            self.logger.outcome = "KILLED"


class RecipeRecord(SaveConfigCallback):
    """Writes the whole resolved recipe to `<run_dir>/config.yaml`, MLflow and every checkpoint."""

    @cached_property
    def recipe(self) -> dict[str, Any]:
        """The recipe as plain values, without this run's folder and checkpoint: it can be rerun."""
        recipe = yaml.safe_load(self.parser.dump(self.config, skip_none=False, format="yaml"))
        recipe["trainer"]["default_root_dir"] = None
        return recipe | {"run_dir": None, "ckpt_path": None}

    def save_config(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Called once, on rank zero, before anything runs."""
        if stage == "fit":
            folder = Path(trainer.default_root_dir)
            folder.mkdir(parents=True, exist_ok=True)
            text = yaml.safe_dump(self.recipe, sort_keys=False)
            (folder / "config.yaml").write_text(text, encoding="utf-8")
        for logger in trainer.loggers:
            if isinstance(logger, RunLogger):
                logger.log_recipe(self.recipe)

    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Stores the recipe, which a resume compares with its own."""
        checkpoint["recipe"] = self.recipe
