"""The folder of a sweep: what is in it, and who works in it."""

import fcntl
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dflow_lightning import files
from dflow_lightning.errors import InputError
from dflow_lightning.tracking.address import sqlite_uri
from dflow_lightning.tracking.logger import URI_VARIABLE
from dflow_lightning.tracking.store import open_client, training_experiment

RECORD, LOCK = "sweep.json", "sweep.lock"


@dataclass
class SweepFolder:
    """A folder that one sweep works in at a time.

    Attributes:
        lock: descriptor of the lock; a run inherits it, so that one that outlives its sweep keeps
            others out of the folder.
        record: what the sweep is of: recipes by name, options of trainings and measurements.
    """

    path: Path
    lock: int
    record: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def open(cls, path: Path) -> "SweepFolder":
        """Take the folder, new or of an earlier call.

        Raises:
            InputError: another sweep is running in it, or it is not the folder of a sweep.
        """
        if path.exists() and not path.is_dir():
            raise InputError(f"out: {path} is a file; name a folder")
        record = path / RECORD
        held = path.is_dir() and any(one.name != LOCK for one in path.iterdir())
        if held and not record.is_file():
            raise InputError(
                f"out: {path} is not empty and not the folder of a sweep; choose a new folder, or "
                "one of a sweep to resume"
            )
        files.check_writable(record, "out")
        path.mkdir(parents=True, exist_ok=True)
        # flock on a descriptor of our own, not the filelock package: trainings inherit the
        # descriptor (`pass_fds`), and with it the lock, which then outlives a killed sweep.
        lock = os.open(path / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(lock)
            raise InputError(
                f"out: another sweep is running in {path}, or a run it left behind; wait for it, "
                "or name another folder"
            ) from None
        try:
            content = json.loads(record.read_text(encoding="utf-8")) if held else {}
        except ValueError:
            os.close(lock)
            raise InputError(f"out: {record} cannot be read; name a new folder") from None
        return cls(path, lock, content)

    def __enter__(self) -> "SweepFolder":
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self.lock)

    def agree(
        self, recipes: dict[str, str], overrides: Sequence[str], bench_options: Sequence[str]
    ) -> None:
        """Add recipes to what the folder is of; its runs must stay comparable.

        Args:
            recipes: a hash of all their values, by name.

        Raises:
            InputError: earlier runs were made with other options or another recipe of that name.
        """
        found = {"overrides": list(overrides), "bench": list(bench_options)}
        for name, given in found.items():
            before = self.record.get(name, given)
            if before != given:
                said = " ".join(before) or "none"
                raise InputError(
                    f"out: {self.path} has runs with {name} options {said}, this command has "
                    f"{' '.join(given) or 'none'}; give the same ones, or choose another folder"
                )
        known = self.record.get("recipes", {})
        for name, digest in recipes.items():
            if known.get(name, digest) != digest:
                raise InputError(
                    f"config: the recipe {name} has changed since its runs in {self.path} were "
                    f"made; name another folder, or remove {self.path / name}-* and its line in "
                    f"{RECORD}"
                )
        self.update(format=1, recipes=known | recipes, **found)

    def update(self, **values: Any) -> None:
        """Set values of the record and write it."""
        self.record |= values
        files.write_text(self.path / RECORD, json.dumps(self.record, indent=1) + "\n")


PARENT_TAG = "mlflow.parentRunId"  # by which MLflow's own pages nest runs


class SweepStore:
    """The store that all runs of a sweep share."""

    def __init__(self, client: Any, uri: str, experiment: str, run_id: str) -> None:
        self.uri, self.experiment, self.run_id = uri, experiment, run_id
        self._client = client

    @classmethod
    def open(cls, folder: SweepFolder, command: str) -> "SweepStore":
        """The file `mlflow.db` of the sweep's folder, or the server of MLFLOW_TRACKING_URI.

        A parent run of an earlier call is continued.
        """
        path = folder.path.resolve()
        uri = os.environ.get(URI_VARIABLE) or sqlite_uri(path / "mlflow.db")
        client, name = open_client(uri), folder.path.name
        # MLflow would put artifacts into the working directory.
        place = (path / "artifacts").as_uri() if uri.startswith("sqlite:") else None
        experiment_id = training_experiment(client, name, place)
        run_id = folder.record.get("mlflow_run_id")
        if run_id is None:
            run_id = client.create_run(experiment_id, run_name=name).info.run_id
            folder.update(mlflow_run_id=run_id)
        client.update_run(run_id, status="RUNNING")
        client.set_tag(run_id, "command", command)
        return cls(client, uri, name, run_id)

    def options(self) -> list[str]:
        """What a training is told, to be a child of the sweep's run."""
        return [
            "--tracking.uri",
            self.uri,
            "--tracking.experiment",
            self.experiment,
            "--tracking.tags",
            json.dumps({PARENT_TAG: self.run_id}),
        ]

    def record(self, name: str, rows: Sequence[dict]) -> None:
        """Log what the bench has measured with the run of that name."""
        experiment = self._client.get_experiment_by_name(self.experiment)
        found = self._client.search_runs(
            [experiment.experiment_id],
            f"tags.`{PARENT_TAG}` = '{self.run_id}' and attributes.run_name = '{name}'",
        )
        for row in rows:
            key = f"test/T{row['temperature']:g}/{row['family']}/tau_relay_{row['relay']}"
            for one in found:
                self._client.log_metric(one.info.run_id, key, row["tau"])

    def end(self, status: str) -> None:
        """FINISHED, FAILED or KILLED."""
        self._client.set_terminated(self.run_id, status)
