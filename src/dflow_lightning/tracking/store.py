"""A run in an MLflow store, updated from the records of a journal.

Sending a record twice changes nothing, so a sender that does not know whether a call succeeded
repeats it: MLflow keeps metric points by name, step, time and value, and a run is found again by
the tag `dflow.key`.

    {"do": "open", "time": ms, "step": n}      the run begins, or goes on at step n
    {"do": "recipe", "time": ms, "params": {name: value}}
    {"do": "metrics", "time": ms, "step": n, "values": {name: number}}
    {"do": "tags", "values": {name: text}}
    {"do": "datasets", "sets": [{"name", "digest", "source", "context", "rows"}]}
    {"do": "text" | "bytes", "path": "charts/a.png", "content": text or base64}
    {"do": "end", "time": ms, "status": "FINISHED", "tags": {name: text}}
"""

import base64
import hashlib
import json
import logging
import os
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from importlib import import_module
from itertools import count
from pathlib import Path
from typing import Any

from dflow_lightning.tracking.address import remove_stray_folder, sqlite_file, sqlite_uri
from dflow_lightning.tracking.journal import Destination, Record

METRICS_PER_CALL = 1000  # MLflow refuses more in one call
PARAMS_PER_CALL = 100
TAG_LIMIT = 5000  # characters; older servers refuse more
KEY_TAG = "dflow.key"
NOTE_TAG = "mlflow.note.content"  # what the dashboard shows as description
# MLflow 3 guesses the kind of an experiment, and takes one without scikit-learn or the like for
# GenAI; its runs then open as "evaluation runs", without charts.
EXPERIMENT_TAGS = {"mlflow.experimentKind": "custom_model_development"}
NAME_LIMIT = 250
# Defaults of variables that MLflow's client reads; what the user has set stays.
TIME_LIMITS = {
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",  # seconds; a call must not hang for minutes
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",  # the sender tries again itself
}
QUIET = {
    "MLFLOW_LOGGING_LEVEL": "ERROR",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",  # the terminal is not this thread's
}
# Error codes that a retry does not cure.
REFUSALS = ("INVALID_PARAMETER_VALUE", "RESOURCE_ALREADY_EXISTS", "RESOURCE_DOES_NOT_EXIST")


def refused(error: Exception) -> bool:
    """Whether the store rejected the record itself, as opposed to being away, full or broken."""
    return getattr(error, "error_code", None) in REFUSALS


def import_mlflow(uri: str) -> None:
    """Import what a client of the store at `uri` needs, without MLflow's messages.

    Call it in the main thread before workers are forked: one that is forked while another thread
    imports inherits a held import lock and hangs.
    """
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)
    import mlflow  # noqa: F401 - sets its log level to INFO, once

    for name in ("mlflow", "alembic"):
        logging.getLogger(name).setLevel("ERROR")
    import_module("mlflow.tracking")
    if uri.startswith("sqlite:"):
        import_module("mlflow.store.tracking.sqlalchemy_store")


def open_client(uri: str) -> Any:
    """MLflow's client of the store at `uri`; a local file is made where there is none."""
    import_mlflow(uri)
    from mlflow import MlflowClient

    make_database(uri)
    client = MlflowClient(uri, uri)
    remove_stray_folder(uri)
    return client


def training_experiment(client: Any, name: str, artifacts: str | None) -> str:
    """The id of the experiment of this name, made where there is none.

    A user may have deleted it, and MLflow keeps the name of a deleted one taken: then it is the
    first numbered one that exists or is free. One that was made elsewhere without a kind is
    marked as model training, or the dashboard opens its runs in the view for GenAI evaluations.
    """
    for number in count(1):
        numbered = name + (f"-{number}" if number > 1 else "")
        experiment = client.get_experiment_by_name(numbered)
        if experiment is None:
            return str(client.create_experiment(numbered, artifacts, EXPERIMENT_TAGS))
        if experiment.lifecycle_stage != "deleted":
            for tag, value in EXPERIMENT_TAGS.items():
                if tag not in experiment.tags:
                    client.set_experiment_tag(experiment.experiment_id, tag, value)
            return str(experiment.experiment_id)
    raise AssertionError("the numbers do not end")


def clean_name(name: str) -> str:
    """A name that MLflow accepts; a changed one ends in a hash of the old, so none collide."""
    parts = [re.sub(r"[^\w .:-]", "_", part).strip() for part in name.split("/")]
    parts = [part if part.strip(".") else "_" for part in parts]
    clean = "/".join(parts)
    if clean == name and len(name) <= NAME_LIMIT:
        return name
    return f"{clean[: NAME_LIMIT - 7]}-{hashlib.sha256(name.encode()).hexdigest()[:6]}"


class RunStore:
    """Sends a run's records to its MLflow store.

    Nothing is imported and no call is made before the first record. Methods raise what MLflow
    raises.
    """

    def __init__(self, destination: Destination) -> None:
        self.destination = destination
        self._opened = False
        for name, value in TIME_LIMITS.items():
            os.environ.setdefault(name, value)

    @cached_property
    def client(self) -> Any:
        return open_client(self.destination.uri)

    def send(self, records: Sequence[Record]) -> None:
        """Send one record, or several metric records in one call."""
        run_id = self.run_id(records[0].get("time"))
        if records[0]["do"] == "metrics":
            from mlflow.entities import Metric

            points = [
                Metric(name, value, record["time"], record["step"])
                for record in records
                for name, value in record["values"].items()
            ]
            for part in parts(points, METRICS_PER_CALL):
                self.client.log_batch(run_id, metrics=part, synchronous=True)
            return
        for record in records:
            self._actions[record["do"]](run_id, record)

    @property
    def _actions(self) -> Mapping[str, Callable[[str, Record], None]]:
        return {
            "open": self._open,
            "recipe": self._recipe,
            "tags": lambda run_id, record: self._tags(run_id, record["values"]),
            "datasets": self._datasets,
            "text": lambda run_id, record: self.client.log_text(
                run_id, record["content"], record["path"]
            ),
            "bytes": self._bytes,
            "end": self._end,
            "nothing": lambda run_id, record: None,
        }

    # ---------------------------------------------------------------- the run

    def run_id(self, time: int | None = None) -> str:
        """The run's id in the store; found by its key, or a new run."""
        if not self._opened:
            self.destination.run_id = self._find() or self._create(time)
            self._opened = True
        assert self.destination.run_id is not None
        return self.destination.run_id

    def existing_run(self) -> str:
        """The run's id, without making a run.

        Raises:
            LookupError: the store has no such run.
        """
        run_id = self._find()
        if run_id is None:
            raise LookupError("the store does not hold the run")
        return run_id

    def _find(self) -> str | None:
        from mlflow.exceptions import MlflowException

        known = self.destination.run_id
        if known is not None:
            try:
                return str(self.client.get_run(known).info.run_id)
            except MlflowException as error:
                if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                    raise
        chosen = f"tags.`{KEY_TAG}` = '{self.destination.key}'"
        found = self.client.search_runs([self._experiment_id], chosen, max_results=1)
        return str(found[0].info.run_id) if found else None

    def _create(self, time: int | None) -> str:
        tags = {KEY_TAG: self.destination.key}
        run = self.client.create_run(
            self._experiment_id, start_time=time, tags=tags, run_name=self.destination.run_name
        )
        return str(run.info.run_id)

    @cached_property
    def _experiment_id(self) -> str:
        destination = self.destination
        return training_experiment(self.client, destination.experiment, destination.artifacts)

    def _open(self, run_id: str, record: Record) -> None:
        """A resumed run is running again; why it had ended is kept in the tags of its resume."""
        run = self.client.get_run(run_id)
        if run.info.status != "RUNNING":
            self.client.update_run(run_id, status="RUNNING")
        if not record["resumed"]:
            return
        number = resume_number(run.data.tags, record["time"])
        ended = next((t for n in ("failure", "stopped") if (t := run.data.tags.get(n))), None)
        tags = {f"resume_{number}": str(record["time"])}
        if ended:
            tags[f"resume_{number}.after"] = ended
        self._tags(run_id, tags)
        for name in {"failure", "stopped", NOTE_TAG} & run.data.tags.keys():
            self.client.delete_tag(run_id, name)

    def _recipe(self, run_id: str, record: Record) -> None:
        """MLflow never changes a parameter: values that a resume changed become tags."""
        from mlflow.entities import Param

        params, run = record["params"], self.client.get_run(run_id)
        before = run.data.params
        if record["resumed"] and before:
            number = resume_number(run.data.tags, record["time"])
            changed = {k: v for k, v in params.items() if before.get(k) != v}
            self._tags(run_id, {f"resume_{number}.{key}": v for key, v in changed.items()})
            return
        rows = [Param(name, value) for name, value in params.items()]
        for part in parts(rows, PARAMS_PER_CALL):
            self.client.log_batch(run_id, params=part, synchronous=True)

    def _tags(self, run_id: str, values: Mapping[str, str]) -> None:
        from mlflow.entities import RunTag

        rows = [RunTag(name, value[:TAG_LIMIT]) for name, value in values.items()]
        for part in parts(rows, PARAMS_PER_CALL):
            self.client.log_batch(run_id, tags=part, synchronous=True)

    def _datasets(self, run_id: str, record: Record) -> None:
        from mlflow.entities import Dataset, DatasetInput, InputTag

        inputs = []
        for one in record["sets"]:
            source = json.dumps({"uri": one["source"]})
            dataset = Dataset(one["name"], one["digest"], "local", source, profile=one["profile"])
            inputs.append(DatasetInput(dataset, [InputTag("mlflow.data.context", one["context"])]))
        self.client.log_inputs(run_id, inputs)

    def _bytes(self, run_id: str, record: Record) -> None:
        path = Path(record["path"])
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / path.name
            file.write_bytes(base64.b64decode(record["content"]))
            inside = None if path.parent == Path() else str(path.parent)
            self.client.log_artifact(run_id, str(file), inside)

    def _end(self, run_id: str, record: Record) -> None:
        why = next(iter(record["tags"].values()), None)
        note = {NOTE_TAG: f"**{record['status']}** {why}"} if why else {}
        self._tags(run_id, record["tags"] | note)
        self.client.set_terminated(run_id, record["status"], record["time"])


def make_database(uri: str) -> None:
    """Make the file of a new local store under another name, and then rename it.

    MLflow makes the tables step by step, which takes seconds. A process that is killed in between
    would leave a file that no version of MLflow opens.
    """
    path = sqlite_file(uri)
    if path is None or path.exists():
        return
    from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore

    path.parent.mkdir(parents=True, exist_ok=True)
    for left in path.parent.glob(f".{path.name}.*.partial*"):
        if not Path(f"/proc/{left.name.split('.')[-2]}").exists():  # its process was killed
            left.unlink(missing_ok=True)
    staged = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        store = SqlAlchemyStore(sqlite_uri(staged), (path.parent / "artifacts").as_uri())
        store.engine.dispose()
        try:
            os.link(staged, path)
        except OSError:  # another process was quicker, or the disk has no links
            if not path.exists():
                staged.rename(path)
    finally:
        staged.unlink(missing_ok=True)
        remove_stray_folder(sqlite_uri(staged))


def resume_number(tags: Mapping[str, str], time: int) -> int:
    """Number of the resume that began at `time`, from 1: one that the tags list, or the next."""
    known = {
        int(m[1]): at for name, at in tags.items() if (m := re.fullmatch(r"resume_(\d+)", name))
    }
    return next((n for n, at in known.items() if at == str(time)), max(known, default=0) + 1)


def parts(rows: list[Any], size: int) -> Iterator[list[Any]]:
    """A list in pieces of at most `size`."""
    for start in range(0, len(rows), size):
        yield rows[start : start + size]
