"""The MLflow record: parameters, artifact, status, resume, and a store that cannot be reached."""

import os
import signal
import subprocess
import sys
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import mlflow
import pytest
import yaml

from dflow_lightning.module import DrafterModule
from dflow_lightning.signals import Stopped
from dflow_lightning.tracking import PARAM_LIMIT, Tracking, flatten

if TYPE_CHECKING:
    from launch import Launcher
    from mlflow.entities import Run

pytest_plugins = ["launch"]

CRASH = """
from lightning.pytorch import Callback

class Crash(Callback):
    def on_train_batch_start(self, trainer, *args):
        if trainer.global_step == 1:
            raise RuntimeError("crash at step 2")
"""


@pytest.fixture
def run_options(run_options: list[str]) -> list[str]:
    """The small run, recorded."""
    return [option for option in run_options if not option.startswith("--tracking")]


@pytest.fixture(scope="session")
def empty_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sqlite store with its tables; making them takes seconds."""
    path = tmp_path_factory.mktemp("store") / "mlflow.db"
    mlflow.MlflowClient(f"sqlite:///{path}").search_experiments()
    return path


@pytest.fixture
def run_dir(tmp_path: Path, empty_store: Path) -> Path:
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "mlflow.db").write_bytes(empty_store.read_bytes())
    return folder


def recorded(run_dir: Path) -> list["Run"]:
    """The runs of a folder's store, oldest first."""
    client = mlflow.MlflowClient(f"sqlite:///{run_dir / 'mlflow.db'}")
    experiments = [experiment.experiment_id for experiment in client.search_experiments()]
    return list(client.search_runs(experiments, order_by=["attributes.start_time ASC"]))


def test_a_run_is_recorded_whole(
    launch: "Launcher", recipe: Path, run_options: list[str], run_dir: Path
) -> None:
    done = launch("fit", "--config", recipe, *run_options, f"--run_dir={run_dir}")
    assert done.status == 0, done.err
    assert f"dflow-train ui --run {run_dir.name}" in done.out
    (run,) = recorded(run_dir)
    assert run.info.status == "FINISHED"
    assert run.info.run_name == "run"
    assert run.data.params["model.drafter.block_size"] == "4"
    assert run.data.tags["version.torch"]
    expected = {"train/loss", "train/tau_round0", "train/tau_round2", "val/loss", "val/tau"}
    expected |= {"val/tau_relay_off", "val/math/tau", "val/code/tau_relay_off"}
    expected |= {"val/position_acceptance/3"}
    assert expected <= run.data.metrics.keys()
    # The artifact is the whole recipe, the same as beside the checkpoints, and stays in the folder.
    (artifact,) = (run_dir / "artifacts").rglob("config.yaml")
    text = artifact.read_text()
    assert text == (run_dir / "config.yaml").read_text()
    assert yaml.safe_load(text)["rollout"]["mode"] == "online"
    assert {path.name for path in launch.folder.iterdir()} == {"recipes", "run", "small.yaml"}

    # A resume continues the run; what it changed shows as tags, since parameters never change.
    more = ("--ckpt_path=last", "--trainer.max_steps=6")
    again = launch("fit", "--config", recipe, *run_options, f"--run_dir={run_dir}", *more)
    assert again.status == 0, again.err
    (resumed,) = recorded(run_dir)
    assert resumed.info.run_id == run.info.run_id
    assert resumed.info.status == "FINISHED"
    assert resumed.data.params["trainer.max_steps"] == "4"
    assert resumed.data.tags["resume.trainer.max_steps"] == "6"
    client = mlflow.MlflowClient(f"sqlite:///{run_dir / 'mlflow.db'}")
    steps = [point.step for point in client.get_metric_history(run.info.run_id, "val/tau")]
    assert steps == [1, 3, 5]  # Lightning counts the steps before the one it logs

    # Testing a checkpoint is a run of its own and leaves the training's recipe alone.
    tested = launch(
        "test", "--config", recipe, *run_options, f"--run_dir={run_dir}", "--ckpt_path=best"
    )
    assert tested.status == 0, tested.err
    assert [run.info.run_name for run in recorded(run_dir)] == ["run", "run-test"]
    assert "test/tau" in recorded(run_dir)[1].data.metrics


@pytest.mark.slow  # imports everything in a second process
def test_a_crash_is_status_1_and_a_failed_run(
    recipe: Path, run_options: list[str], run_dir: Path
) -> None:
    (run_dir.parent / "crash.py").write_text(CRASH)
    options = ["fit", "--config", str(recipe), *run_options, f"--run_dir={run_dir}"]
    done = subprocess.run(
        [sys.executable, "-m", "dflow_lightning", *options, "--trainer.callbacks+=crash.Crash"],
        cwd=run_dir.parent,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([".", *sys.path])},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1, done.stderr
    assert "RuntimeError: crash at step 2" in done.stderr.splitlines()[-1]
    (run,) = recorded(run_dir)
    assert run.info.status == "FAILED"


@pytest.mark.parametrize(
    ("raised", "status", "outcome"),
    [
        (KeyboardInterrupt(), 130, "KILLED"),
        (Stopped(signal.SIGTERM, "stopped by SIGTERM"), 143, "KILLED"),
    ],
)
def test_a_stopped_run_is_killed_not_failed(
    raised: BaseException,
    status: int,
    outcome: str,
    launch: "Launcher",
    recipe: Path,
    run_options: list[str],
    run_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def stop(*args: Any) -> None:
        raise raised

    monkeypatch.setattr(DrafterModule, "training_step", stop)
    done = launch("fit", "--config", recipe, *run_options, f"--run_dir={run_dir}")
    assert done.status == status
    assert [run.info.status for run in recorded(run_dir)] == [outcome]


def test_many_and_long_parameters(run_dir: Path) -> None:
    logger = Tracking().open(run_dir)
    recipe = {"many": {f"key{i}": i for i in range(150)}, "long": "x" * 1000, "unset": None}
    logger.log_recipe(recipe)
    logger.finalize()
    (run,) = recorded(run_dir)
    assert len(run.data.params) == 150
    assert run.data.params["many.key149"] == "149"
    (artifact,) = (run_dir / "artifacts").rglob("config.yaml")
    assert yaml.safe_load(artifact.read_text()) == recipe


def test_flatten() -> None:
    assert flatten({"a": {"b": 1, "c": {"d": [1, 2]}}, "e": None}) == {
        "a.b": "1",
        "a.c.d": "[1, 2]",
    }
    assert PARAM_LIMIT == 250


def test_a_store_that_fails_costs_one_warning(run_dir: Path) -> None:
    tracking = Tracking(uri=f"sqlite:///{run_dir / 'mlflow.db'}")
    logger = tracking.open(run_dir)
    logger.log_metrics({"a": 1.0}, step=1)
    calls = 0

    class Broken:
        def log_batch(self, *args: Any, **kwargs: Any) -> None:
            nonlocal calls
            calls += 1
            raise ConnectionError("no route")

    logger._mlflow_client = Broken()
    with pytest.warns(UserWarning, match=r"ConnectionError: no route.*training goes on"):
        logger.log_metrics({"a": 2.0}, step=2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for step in range(3, 10):
            logger.log_metrics({"a": 2.0}, step=step)
        logger.finalize()
    assert calls == 3


def test_a_server_that_is_down_does_not_stop_the_training(
    launch: "Launcher",
    recipe: Path,
    run_options: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    with pytest.warns(UserWarning, match="training goes on without it"):
        done = launch("fit", "--config", recipe, *run_options)
    assert done.status == 0, done.err
    assert (launch.folder / "runs/small/checkpoints/best.ckpt").is_file()


def test_a_run_of_another_store_starts_anew(run_dir: Path) -> None:
    logger = Tracking().open(run_dir, run_id="0" * 32)
    logger.log_metrics({"a": 1.0}, step=1)
    (run,) = recorded(run_dir)
    assert run.info.run_id == logger.run_id != "0" * 32
    assert not logger.continued
