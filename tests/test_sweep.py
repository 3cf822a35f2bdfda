"""Sweeps: what is run, what is kept, what a crash or a signal leaves, and what is refused."""

import fcntl
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from dflow_lightning.__main__ import main
from dflow_lightning.errors import InputError
from dflow_lightning.sweep.command import split
from dflow_lightning.sweep.folder import SweepFolder
from dflow_lightning.sweep.member import Children, Member

if TYPE_CHECKING:
    from launch import Launcher

pytest_plugins = ["launch"]
ROWS = [{"family": "pooled", "relay": "on", "temperature": 0.0, "tau": 2.5}]


@pytest.fixture
def commands(monkeypatch) -> list[list[str]]:
    """Every command a sweep gives, run in this process."""
    given: list[list[str]] = []

    def here(self: Children, arguments: list[str], log: Path) -> tuple[int, float]:
        given.append(list(arguments))
        return main(arguments), 1.5

    monkeypatch.setattr(Children, "run", here)
    return given


@pytest.fixture
def imitated(monkeypatch) -> Callable[..., list[str]]:
    """Commands that only leave the files that real ones leave; some of them fail."""

    def imitate(fails: Callable[[str, str], int] = lambda *_: 0) -> list[str]:
        given: list[str] = []

        def run(self: Children, arguments: list[str], log: Path) -> tuple[int, float]:
            command, name = arguments[0], log.stem
            given.append(f"{command} {name}")
            if status := fails(command, name):
                return status, 1.0
            folder = log.parent / name
            (folder / "export").mkdir(parents=True, exist_ok=True)
            if command == "export":
                (folder / "export/config.json").write_text("{}")
            if command == "bench":
                (folder / "bench.json").write_text(json.dumps({"rows": ROWS}))
            return 0, 1.0

        monkeypatch.setattr(Children, "run", run)
        return given

    return imitate


@pytest.fixture
def sweep(
    launch: "Launcher", recipe: Path, run_options: list[str], data_dir: Path
) -> Callable[..., Any]:
    """A small sweep; its options can be replaced."""
    own = ("--out", "s", "--suite", data_dir / "test.jsonl")

    def run(*options: Any, recipes: tuple[Path, ...] = (recipe,)) -> Any:
        return launch("sweep", "--config", *recipes, *run_options, *own, *options)

    return run


def test_a_whole_sweep(commands, recipe, run_options, launch, data_dir, tmp_path):
    """Two seeds of a real recipe: folders, one store with parent and children, table, report."""
    from mlflow import MlflowClient

    options = [one for one in run_options if "tracking" not in one]
    bench = ["--suite", data_dir / "test.jsonl", "--per_family", 1, "--concurrency", 1]
    asked = ["sweep", "--config", recipe, "--seeds", 2, "--out", "s", *bench, *options]
    done = launch(*asked, "--max_new_tokens", 6)
    assert done.status == 0, done.err
    assert "2 of 2 runs finished" in done.out
    for seed in (0, 1):
        folder = tmp_path / f"s/small-{seed}"
        assert {one.name for one in folder.iterdir()} >= {"export", "bench.json", "seconds.json"}
        assert json.loads((folder / "seconds.json").read_text()) == {"seconds": 1.5, "steps": 4}
    fits = [one for one in commands if one[0] == "fit"]
    assert [one[one.index("--model.seed") + 1] for one in fits] == ["0", "1"]
    client = MlflowClient(f"sqlite:///{tmp_path / 's/mlflow.db'}")
    (experiment,) = [one for one in client.search_experiments() if one.name == "s"]
    runs = {one.info.run_name: one for one in client.search_runs([experiment.experiment_id])}
    assert runs.keys() == {"s", "small-0", "small-1"}
    parent = runs["s"].info
    assert parent.status == "FINISHED"
    for name in ("small-0", "small-1"):
        assert runs[name].data.tags["mlflow.parentRunId"] == parent.run_id
        assert runs[name].data.metrics["test/T0/pooled/tau_relay_on"] >= 1
    number = len(commands)
    assert launch(*asked, "--max_new_tokens", 6).status == 0  # nothing is left to do
    assert len(commands) == number
    page = launch("report", "--sweep", "s", "--out", "r.html")
    assert page.status == 0, page.err
    assert (tmp_path / "r_files/curves.png").is_file()


def test_a_crash_ends_one_run_and_not_the_sweep(sweep, imitated):
    given = imitated(lambda command, name: 1 if (command, name) == ("fit", "small-0") else 0)
    done = sweep("--seeds", 2)
    assert done.status == 1
    assert given == ["fit small-0", "fit small-1", "export small-1", "bench small-1"]
    assert "1 of 2 runs finished" in done.out
    assert "failed: small-0, see s/small-0.log" in done.out
    assert "resume with: dflow-train sweep --config" in done.out
    again = imitated()
    assert sweep("--seeds", 2).status == 0
    assert again == ["fit small-0", "export small-0", "bench small-0"]


def test_only_what_is_missing_is_done(sweep, imitated):
    imitated(lambda command, name: command == "bench")
    assert sweep("--seeds", 1).status == 1
    given = imitated()
    assert sweep("--seeds", 2).status == 0  # more seeds may come later
    assert given == ["bench small-0", "fit small-1", "export small-1", "bench small-1"]


def test_every_recipe_has_its_first_seed_before_any_has_a_second(sweep, imitated, recipe, tmp_path):
    other = tmp_path / "other.yaml"
    other.write_text(
        recipe.read_text().replace("enabled: true", "enabled: true\n    hidden_size: 8")
    )
    given = imitated()
    assert sweep("--seeds", 2, recipes=(recipe, other)).status == 0
    fits = [one.removeprefix("fit ") for one in given if one.startswith("fit")]
    assert fits == ["small-0", "other-0", "small-1", "other-1"]


def test_a_training_is_continued_and_its_seconds_added(tmp_path, recipe):
    member = Member(recipe, 3, tmp_path, 40, "target", ["--a.b", "1"], ["--suite", "x"])
    member.folder.mkdir()
    member._note(5.0, whole=False)
    (name, fit, done), *_ = member.stages(["--tracking.uri", "u"])
    assert (name, done.exists()) == ("fit", False)
    assert fit[-2:] == ["--ckpt_path", "auto"]
    assert fit[fit.index("--seed_everything") + 1] == "3"
    member._note(2.5, whole=True)
    assert json.loads(done.read_text()) == {"seconds": 7.5, "steps": 40}
    _, export, _ = member.stages([])[1]
    assert export[2].endswith("last.ckpt")  # a recipe without validation has no best one
    (member.folder / "checkpoints").mkdir()
    (member.folder / "checkpoints/best.ckpt").touch()
    assert member.stages([])[1][1][2].endswith("best.ckpt")


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--seeds", "0"], "seeds is 0; give 1 or more"),
        (["--seeds", "many"], "seeds: "),
        (["--per_family", "0"], "per_family is 0"),
        (["--model.drafter.layers", "2"], "unknown key 'model.drafter.layers'; did you mean"),
        (["--trainer.max_steps", "few"], "trainer.max_steps: "),
        (["--run_dir", "x"], "run_dir is set by the sweep"),
        (["--tracking.uri=x"], "tracking.uri is set by the sweep"),
    ],
)
def test_bad_options_are_refused_before_anything_is_made(sweep, imitated, options, expected):
    given = imitated()
    done = sweep(*options)
    assert done.status == 2
    assert done.err.startswith("error: ")
    assert expected in done.err
    assert len(done.err.splitlines()) == 1
    assert given == []
    assert not Path("s").exists()


def test_bad_recipes(sweep, launch, recipe, tmp_path):
    assert "config is missing" in launch("sweep").err
    assert launch("sweep", "--config").status == 2
    assert "--seeds SEEDS" in launch("sweep", "--help").out
    assert "nope.yaml does not exist" in sweep(recipes=(tmp_path / "nope.yaml",)).err
    twin = tmp_path / "folder" / recipe.name
    twin.parent.mkdir()
    twin.write_text(recipe.read_text())
    assert "have the same name" in sweep(recipes=(recipe, twin)).err
    twin.write_text(recipe.read_text() + "\nrelays: 1\n")
    done = sweep(recipes=(twin,))
    line = twin.read_text().splitlines().index("relays: 1") + 1
    assert f"error: {twin}: line {line}: unknown key 'relays'" in done.err
    assert not Path("s").exists()


def test_folders_in_use(sweep, imitated, recipe, tmp_path):
    imitated()
    (tmp_path / "s").mkdir()
    (tmp_path / "s/thesis.txt").touch()
    assert "is not empty and not the folder of a sweep" in sweep().err
    (tmp_path / "s/thesis.txt").unlink()
    assert sweep("--seeds", 1).status == 0
    assert "has runs with bench options" in sweep("--seeds", 1, "--per_family", 5).err
    assert "has runs with overrides options" in sweep("--model.num_anchors", 5).err
    recipe.write_text(recipe.read_text() + "\nseed_everything: 7\n")
    assert "the recipe small has changed" in sweep("--seeds", 1).err


def test_one_sweep_at_a_time(tmp_path):
    first = SweepFolder.open(tmp_path / "s")
    with first, pytest.raises(InputError, match="another sweep is running in"):
        SweepFolder.open(tmp_path / "s")
    with SweepFolder.open(tmp_path / "s"):
        pass  # free again


def test_a_run_that_outlives_its_sweep_keeps_others_out(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "executable", "/bin/sh")
    folder = SweepFolder.open(tmp_path / "s")
    children = Children(folder.lock)
    waiting = threading.Thread(target=children.run, args=(["-c", "exit 0"], tmp_path / "log"))
    # `sh -m dflow_lightning -c ...` would not do: the script stands in for the whole command.
    script = tmp_path / "dflow_lightning"
    script.write_text(f"while [ ! -e {tmp_path}/go ]; do sleep 0.05; done\n")
    monkeypatch.chdir(tmp_path)
    waiting.start()
    until = time.monotonic() + 10
    while children._process is None and time.monotonic() < until:
        time.sleep(0.01)
    os.close(folder.lock)  # the sweep is gone
    handle = os.open(tmp_path / "s/sweep.lock", os.O_RDWR)
    with pytest.raises(OSError, match="unavailable"):
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    (tmp_path / "go").touch()
    waiting.join(10)
    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.close(handle)


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_run_at_hand_and_then_the_sweep(tmp_path, monkeypatch, signum):
    """The run is told once, and waited for; no other is begun."""
    monkeypatch.setattr(sys, "executable", "/bin/sh")
    monkeypatch.chdir(tmp_path)
    Path("dflow_lightning").write_text(
        "trap 'echo INT >> told; exit 130' INT\ntrap 'echo TERM >> told; exit 143' TERM\n"
        "touch ready\nwhile true; do sleep 0.05; done\n"
    )

    def send() -> None:
        until = time.monotonic() + 20
        while not Path("ready").exists() and time.monotonic() < until:
            time.sleep(0.02)
        os.kill(os.getpid(), signum)

    with Path(os.devnull).open() as file, Children(file.fileno()) as children:
        sender = threading.Thread(target=send)
        sender.start()
        status, _ = children.run([], tmp_path / "log")
        sender.join()
        assert children.stopped == signum
        assert status == 128 + signum
        assert Path("told").read_text().split() == [signal.Signals(signum).name[3:]]
        assert children.run([], tmp_path / "log") == (128 + signum, 0.0)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_a_stopped_sweep_says_how_to_go_on(sweep, imitated, monkeypatch):
    given = imitated()
    run = Children.run

    def stopped(self: Children, arguments: list[str], log: Path) -> tuple[int, float]:
        if arguments[0] == "export":
            self.stopped = signal.SIGINT
            return 130, 0.0
        return run(self, arguments, log)

    monkeypatch.setattr(Children, "run", stopped)
    done = sweep("--seeds", 2)
    assert done.status == 130
    assert given == ["fit small-0"]
    assert "stopped at export" in done.out
    assert "0 of 2 runs finished" in done.out
    assert "resume with: dflow-train sweep" in done.out
    assert "failed" not in done.out


def test_options_of_sweep_and_trainings():
    own, rest = split(
        [
            "--config",
            "a.yaml",
            "b.yaml",
            "--seeds=2",
            "--trainer.max_steps",
            "5",
            "-c",
            "c.yaml",
            "--model.x=[1,2]",
            "--dtype=float32",
            "--out",
            "o",
        ]
    )
    assert own == [
        "--config",
        "a.yaml",
        "--config",
        "b.yaml",
        "--seeds",
        "2",
        "--config",
        "c.yaml",
        "--dtype",
        "float32",
        "--out",
        "o",
    ]
    assert rest == ["--trainer.max_steps", "5", "--model.x=[1,2]"]
