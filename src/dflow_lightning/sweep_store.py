"""The MLflow record of a sweep: one parent run, and a child for each of its runs."""

import json
import os
from collections.abc import Sequence
from typing import Any

from dflow_lightning.sweep_folder import SweepFolder
from dflow_lightning.tracking_logger import URI_VARIABLE
from dflow_lightning.tracking_store import calmly

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
        calmly()
        from mlflow import MlflowClient

        path = folder.path.resolve()
        uri = os.environ.get(URI_VARIABLE) or f"sqlite:///{path / 'mlflow.db'}"
        client = MlflowClient(uri)
        name = folder.path.name
        found = client.get_experiment_by_name(name)
        if found is None:
            # MLflow would put artifacts into the working directory.
            place = (path / "artifacts").as_uri() if uri.startswith("sqlite:") else None
            experiment_id = client.create_experiment(name, artifact_location=place)
        else:
            experiment_id = found.experiment_id
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
            "--tracking.uri", self.uri, "--tracking.experiment", self.experiment,
            "--tracking.tags", json.dumps({PARENT_TAG: self.run_id}),
        ]  # fmt: skip

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
