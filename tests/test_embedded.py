"""The embedded default: what a wheel carries, `dflow-train init` and `demo`."""

import runpy
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

import pytest
import yaml
from targets import ROOT

from dflow_lightning import demo, embedded
from dflow_lightning.doctor import environment
from dflow_lightning.errors import InputError

if TYPE_CHECKING:
    from launch import Launcher

pytest_plugins = ["launch"]


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkout whose default has three small files."""
    root = tmp_path / "checkout"
    for name in ("data/README.md", "data/tiny-qwen3/config.json", "recipes/a/b.yaml"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(name)
    monkeypatch.setattr(embedded, "IN_WHEEL", tmp_path / "nowhere")
    monkeypatch.setattr(embedded, "IN_CHECKOUT", root)
    return root


def test_the_default_is_what_git_has_but_for_the_scripts_that_made_it() -> None:
    listed = subprocess.run(
        ["git", "ls-files", "data", "recipes"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    known = {name for name in listed if not name.startswith("data/build/")}
    assert {str(path) for path in embedded.files()} == known


def test_the_wheel_has_what_a_checkout_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """The build hook names the same folders; an editable install gets no second copy."""
    interface = ModuleType("hatchling.builders.hooks.plugin.interface")
    interface.BuildHookInterface = object  # type: ignore[attr-defined]
    for name in ("", ".builders", ".builders.hooks", ".builders.hooks.plugin"):
        monkeypatch.setitem(sys.modules, f"hatchling{name}", ModuleType(f"hatchling{name}"))
    monkeypatch.setitem(sys.modules, interface.__name__, interface)
    hook = runpy.run_path(str(ROOT / "hatch_build.py"))["EmbeddedDefault"]()
    for kind, parts in {
        "standard": (*embedded.EMBEDDED, "constraints/cpu.txt"),
        "editable": (),
    }.items():
        build_data: dict = {"force_include": {}}
        hook.initialize(kind, build_data)
        expected = {part: f"dflow_lightning/{embedded.IN_WHEEL.name}/{part}" for part in parts}
        assert build_data["force_include"] == expected


def test_files_are_written_once_and_those_of_others_left_alone(small: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert embedded.write_out(out) == 3
    assert (out / "recipes/a/b.yaml").read_text() == "recipes/a/b.yaml"
    (out / "recipes/own.yaml").write_text("mine")
    (out / "recipes/a/b.yaml").unlink()
    assert [embedded.write_out(out), embedded.write_out(out)] == [1, 0]
    assert (out / "recipes/own.yaml").read_text() == "mine"
    assert embedded.write_out(small) == 0  # a checkout's own root


@pytest.mark.parametrize("way", ["changed", "folder"])
def test_nothing_is_written_over(small: Path, tmp_path: Path, way: str) -> None:
    out = tmp_path / "out"
    embedded.write_out(out)
    in_the_way = out / "recipes/a/b.yaml"
    in_the_way.unlink()
    in_the_way.write_text("my own lr") if way == "changed" else in_the_way.mkdir()
    (out / "data/README.md").unlink()
    with pytest.raises(InputError, match=r"b\.yaml is there and differs .*; move it away"):
        embedded.write_out(out)
    assert not (out / "data/README.md").exists()


def test_a_place_that_is_no_folder_is_refused(small: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match=r"out: .*file is not a writable folder"):
        embedded.write_out(tmp_path / "file")


def test_a_package_without_its_default_says_so(
    small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.rmtree(small / "data/tiny-qwen3")
    with pytest.raises(InputError, match="lacks the embedded default; install"):
        embedded.root()


def test_init_says_what_there_is_and_what_to_do(small: Path, launch: "Launcher") -> None:
    done = launch("init", "--out", "here")
    assert (done.status, done.err) == (0, "")
    assert done.out.startswith("here/data and here/recipes: 3 files written")
    assert done.out.splitlines()[-1] == "in that folder: cd here"
    assert "all files are there already" in launch("init", "--out", "here").out


# ---------------------------------------------------------------- demo


def test_demo_runs_its_commands_in_their_order_and_stops_at_the_first_that_fails(
    small: Path, launch: "Launcher", monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    statuses = [0, 0, 0, 0]

    def run_command(command: list[str], folder: Path) -> int:
        assert (folder / "data/tiny-qwen3/config.json").is_file()
        asked.append(command[0])
        return statuses[len(asked) - 1]

    monkeypatch.setattr(demo, "run_command", run_command)
    done = launch("demo", "--steps", 7)
    assert (done.status, asked) == (0, ["fit", "export", "bench", "report"])
    assert "$ dflow-train fit --config recipes/tiny-dflow.yaml" in done.out
    assert "--trainer.max_steps 7" in done.out
    assert "cd dflow-demo && dflow-train ui --run runs/demo" in done.out

    asked.clear()
    statuses[1] = 130
    done = launch("demo", "--out", "other")
    assert (done.status, asked) == (130, ["fit", "export"])


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--steps", 0), "steps is 0; give 1 or more"),
        (("--per_family", 0), "per_family is 0; give 1 or more"),
        (("--out", "out"), "run_dir: out/runs/demo exists; remove it or name another"),
    ],
)
def test_demo_refuses_before_it_writes(
    small: Path, launch: "Launcher", options: tuple, says: str
) -> None:
    (launch.folder / "out/runs/demo").mkdir(parents=True)
    done = launch("demo", *options)
    assert (done.status, done.out) == (2, "")
    assert done.err.startswith(f"error: {says}")
    assert not (launch.folder / "dflow-demo").exists()
    assert not (launch.folder / "out/data").exists()


def test_a_short_demo_is_validated_too_so_that_there_is_a_best_checkpoint() -> None:
    recipe = yaml.safe_load((ROOT / "recipes/tiny-dflow.yaml").read_text())
    assert recipe["trainer"]["val_check_interval"] == demo.VALIDATED_EVERY
    for steps, added in {20: ["--trainer.val_check_interval", "20"], demo.STEPS: []}.items():
        fit = demo.commands(Path("runs/demo"), steps, 1)[0]
        assert fit[fit.index("--trainer.max_steps") + 2 :] == added


def test_every_command_of_the_demo_is_one_of_ours(tmp_path: Path) -> None:
    assert demo.run_command(["--help"], tmp_path) == 0
    assert demo.run_command(["nothing"], tmp_path) == 2


# ---------------------------------------------------------------- doctor in a wheel


def test_doctor_names_the_versions_file_that_an_installation_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert environment.TESTED == ROOT / "constraints/cpu.txt"
    assert environment.install_command() == "pip install -c constraints/cpu.txt -e ."
    assert environment.install_command("deepspeed").endswith(
        "-c constraints/cpu.txt -e '.[deepspeed]'"
    )
    monkeypatch.setattr(embedded, "IN_WHEEL", tmp_path)
    (tmp_path / "constraints").mkdir()
    inside = tmp_path / "constraints/cpu.txt"
    inside.write_text("torch==1.0")
    monkeypatch.setattr(environment, "TESTED", embedded.constraints_file())
    assert environment.tested_versions() == {"torch": "1.0"}
    expected = f"pip install -c {inside} 'dflow-lightning[deepspeed]'"
    assert environment.install_command("deepspeed") == expected
