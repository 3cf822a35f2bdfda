"""The MLflow record: parameters, artifact, status, resume, and a store that cannot be reached."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import mlflow
import pytest
import torch
import yaml
from processes import free_port

from dflow_lightning.run.signals import Stopped
from dflow_lightning.tracking.callback import Tracking
from dflow_lightning.tracking.logger import PARAM_LIMIT, flatten
from dflow_lightning.training.module import DrafterModule

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
    assert {"version.torch", "hardware.cpu", "target.fingerprint"} <= run.data.tags.keys()
    assert len(run.data.tags["data.train.sha256"]) == 64
    assert {d.dataset.name for d in run.inputs.dataset_inputs} == {
        f"{split}.jsonl" for split in ("train", "validation", "test")
    }
    expected = {"train/loss", "train/tau_round0", "train/tau_round2", "val/loss", "val/tau"}
    expected |= {"val/tau_relay_off", "val/math/tau", "val/code/tau_relay_off"}
    expected |= {"val/position_acceptance/3", "train/relay_rows_round2", "train/epoch"}
    expected |= {f"system/{n}" for n in ("tokens_per_second", "step_seconds", "rollout_seconds")}
    expected |= {"system/validation_seconds", "system/process_memory_gb", "system/cpu_cores_used"}
    assert expected <= run.data.metrics.keys()
    # The artifact is the whole recipe, the same as beside the checkpoints, and stays in the folder.
    (artifact,) = (run_dir / "artifacts").rglob("config.yaml")
    text = artifact.read_text()
    assert text == (run_dir / "config.yaml").read_text()
    assert yaml.safe_load(text)["rollout"]["mode"] == "online"
    assert {path.name for path in launch.folder.iterdir()} == {"recipes", "run", "small.yaml"}
    assert not (run_dir / "tracking").exists()  # all has arrived
    charts = {f"{p.parent.name}/{p.name}" for p in (run_dir / "artifacts").rglob("*.png")}
    steps = ("step0000002", "step0000004")
    assert charts == {f"{step}/{name}.png" for step in steps for name in ("acceptance", "tau")}
    page = next((run_dir / "artifacts").rglob("answers/step0000004.html")).read_text()
    assert "Relay on: tau" in page
    assert "Relay off: tau" in page

    # A resume continues the run; what it changed shows as tags, since parameters never change.
    more = ("--ckpt_path=last", "--trainer.max_steps=6")
    again = launch("fit", "--config", recipe, *run_options, f"--run_dir={run_dir}", *more)
    assert again.status == 0, again.err
    (resumed,) = recorded(run_dir)
    assert resumed.info.run_id == run.info.run_id
    assert resumed.info.status == "FINISHED"
    assert resumed.data.params["trainer.max_steps"] == "4"
    assert resumed.data.tags["resume_1.trainer.max_steps"] == "6"
    client = mlflow.MlflowClient(f"sqlite:///{run_dir / 'mlflow.db'}")
    steps = [point.step for point in client.get_metric_history(run.info.run_id, "val/tau")]
    assert steps == [2, 4, 6]

    # Testing a checkpoint is a run of its own and leaves the training's recipe alone.
    tested = launch(
        "test", "--config", recipe, *run_options, f"--run_dir={run_dir}", "--ckpt_path=best"
    )
    assert tested.status == 0, tested.err
    assert [run.info.run_name for run in recorded(run_dir)] == ["run", "run-test"]
    test = recorded(run_dir)[1]
    assert [p.step for p in client.get_metric_history(test.info.run_id, "test/tau")] == [
        torch.load(run_dir / "checkpoints/best.ckpt", weights_only=True)["global_step"]
    ]

    # An export becomes a version of a model, with the tau table of its validation.
    export = ("export", "--checkpoint", run_dir / "checkpoints/last.ckpt", "--out", "export")
    registered = launch(*export, "--register_as", "tiny")
    assert "registered as tiny, version 1" in registered.out
    version = client.get_model_version("tiny", "1")
    assert version.run_id == run.info.run_id
    assert "| task | relay on | relay off |" in version.description
    assert version.tags["step"] == "6"
    files = {path.name for path in Path(version.source.removeprefix("file://")).iterdir()}
    assert {"config.json", "model.safetensors", "relay", "README.md"} <= files
    assert "registered" not in launch(*export, "--register=false").out


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
    assert run.data.tags["failure"] == "RuntimeError at step 1: crash at step 2"
    assert run.data.tags["mlflow.note.content"].startswith("**FAILED** RuntimeError at step 1")
    (trace,) = (run_dir / "artifacts").rglob("failure.txt")
    assert "in on_train_batch_start" in trace.read_text()


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


def test_odd_names_and_numbers(run_dir: Path) -> None:
    logger = Tracking().open(run_dir)
    odd = {
        "acc@1": 1.0,
        "acc#1": 2.0,
        "": 3.0,
        "a//b": 4.0,
        "../c": 5.0,
        "x" * 400: 6.0,
        "数学": 7.0,
    }
    logger.log_metrics(odd | {"bad": float("nan"), "worse": float("inf")}, step=3)
    logger.log_recipe({"a b": {"c@d": 1}})
    logger.finalize()
    (run,) = recorded(run_dir)
    assert sorted(run.data.metrics.values()) == [1.0, 2.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]
    assert run.data.metrics["train/nonfinite_count"] == 2
    assert run.data.metrics["数学"] == 7
    assert not (run_dir / "tracking").exists()  # nothing was refused


def test_a_server_that_is_down_does_not_stop_the_training(
    launch: "Launcher",
    recipe: Path,
    run_options: list[str],
    monkeypatch: pytest.MonkeyPatch,
    empty_store: Path,
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{free_port()}")
    done = launch("fit", "--config", recipe, *run_options)
    assert done.status == 0, done.err
    run_dir = launch.folder / "runs/small"
    assert (run_dir / "checkpoints/best.ckpt").is_file()
    assert done.err.count("tracking:") == 2  # when it began and what is left
    assert "metric points" in done.err
    listed = launch("sync", "--run", run_dir, "--list")
    assert "metric points" in listed.out
    assert launch("sync", "--run", run_dir).status == 1

    # The server is back, as another kind of store: all arrives, in the run that failed to begin.
    (state,) = (run_dir / "tracking").glob("*.json")
    store = launch.folder / "back.db"
    store.write_bytes(empty_store.read_bytes())
    content = json.loads(state.read_text())
    state.write_text(json.dumps(content | {"uri": f"sqlite:///{store}", "artifacts": None}))
    assert launch("sync", "--run", run_dir).status == 0
    client = mlflow.MlflowClient(f"sqlite:///{store}")
    (run,) = client.search_runs([content.get("experiment_id", "1")])
    assert run.info.status == "FINISHED"
    losses = client.get_metric_history(run.info.run_id, "train/loss")
    assert [point.step for point in losses] == [1, 2, 3, 4]
    assert launch("sync", "--run", run_dir).out == f"{run_dir}: nothing left to send\n"


def test_a_run_of_another_store_starts_anew(run_dir: Path) -> None:
    logger = Tracking().open(run_dir, run_id="0" * 32)
    logger.log_metrics({"a": 1.0}, step=1)
    logger.finalize()
    (run,) = recorded(run_dir)
    assert run.info.run_id == logger.run_id != "0" * 32
