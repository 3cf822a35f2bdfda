"""The quick part of `make fake-cuda`: small shapes, in a process of its own.

That process changes what torch believes about its devices, which no other test must see.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from fake_cuda import grid
from fake_cuda.grid import METHODS, PLANTS, QUICK_VARIANTS, RULES

pytest.importorskip("deepspeed")
NAMES = ["first", "second", "third"]
GRID = Path(__file__).parent / "grid.py"


@pytest.fixture(scope="module")
def lines(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """The table's lines by name."""
    out = tmp_path_factory.mktemp("grid") / "lines.json"
    command = [sys.executable, str(GRID), "--quick", "--json", str(out)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=1200, check=False
    )
    assert out.is_file(), done.stdout + done.stderr
    found = {one["case"]: one for one in json.loads(out.read_text())}
    assert (done.returncode == 0) == (not any(one["failed"] for one in found.values()))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_a_step_has_one_device_and_fitting_dtypes(lines, method):
    assert lines[f"small {method}"]["failed"] == ""


@pytest.mark.slow
@pytest.mark.parametrize("variant", QUICK_VARIANTS)
def test_a_step_in_other_settings(lines, variant):
    assert lines[f"small dflow, {variant}"]["failed"] == ""


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_a_round_copies_nothing_between_host_and_device(lines, method):
    rounds = {name: one for name, one in lines.items() if name.startswith(f"small {method}, ")}
    rounds = {name: one for name, one in rounds.items() if name.split()[-1] in RULES}
    assert len(rounds) >= len(RULES)  # one of them in float32 too; some have no tree
    assert {name: one["failed"] for name, one in rounds.items() if one["failed"]} == {}


@pytest.mark.slow
@pytest.mark.parametrize("plant", PLANTS)
def test_a_planted_fault_is_seen(lines, plant):
    assert lines[f"planted: {plant}"]["failed"] == ""


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of cases as they run; `stop` among them kills the run instead. None traces anything."""
    names: list[str] = []

    def run(case: grid.Case, *_: Any) -> list[tuple[str, grid.Found]]:
        if names[-1:] == ["stop"]:
            raise KeyboardInterrupt
        names.append(case.name)
        return [(case.name, grid.Found(peak=2 * grid.GIB, planned=2 * grid.GIB))]

    found = [grid.Case(name, "small", [f"--model.{name}=1"]) for name in NAMES]
    monkeypatch.setattr(grid, "run", run)
    monkeypatch.setattr(grid, "cases", lambda *_: found)
    monkeypatch.setattr(grid, "allow_fake_devices", lambda: None)
    monkeypatch.setattr(grid, "HAS_BACKWARD", False)
    monkeypatch.setattr(grid, "commit", lambda: "abc")
    return names


def main(monkeypatch: pytest.MonkeyPatch, *args: str) -> int:
    monkeypatch.setattr(sys, "argv", ["grid.py", *args])
    return grid.main()


def test_a_second_run_goes_on_and_prints_the_whole_table(ran, tmp_path, monkeypatch, capsys):
    out = ["--out", str(tmp_path / "new" / "grid.jsonl")]
    assert main(monkeypatch, *out, "--only", "first") == 0
    assert main(monkeypatch, *out) == 0
    assert ran == NAMES  # the first one ran once
    capsys.readouterr()
    assert main(monkeypatch, *out) == 0
    assert ran == NAMES
    printed = capsys.readouterr().out
    assert [row.split()[0] for row in printed.splitlines() if " ok " in row] == NAMES
    assert "3 passed, 0 failed" in printed


def test_a_killed_run_loses_only_the_case_it_was_at(ran, tmp_path, monkeypatch):
    out = tmp_path / "grid.jsonl"
    main(monkeypatch, "--out", str(out), "--only", "first")
    ran.append("stop")
    with pytest.raises(KeyboardInterrupt):
        main(monkeypatch, "--out", str(out))
    out.write_text(out.read_text() + '{"key": "cut sh')  # killed while it wrote
    ran.clear()
    main(monkeypatch, "--out", str(out))
    main(monkeypatch, "--out", str(out))
    assert ran == NAMES[1:]


def test_fresh_runs_the_chosen_cases_again(ran, tmp_path, monkeypatch, capsys):
    out = ["--out", str(tmp_path / "grid.jsonl")]
    main(monkeypatch, *out)
    ran.clear()
    monkeypatch.setattr(grid, "commit", lambda: "def")
    main(monkeypatch, *out, "--only", "second", "--fresh")
    assert ran == ["second"]
    main(monkeypatch, *out)
    assert ran == ["second"]
    assert "of commit abc; here is def" in capsys.readouterr().out


def test_other_settings_are_another_case(tmp_path):
    base, recipe = tmp_path / "base.yaml", tmp_path / "recipe.yaml"
    base.write_text("a: 1\n")
    recipe.write_text("base: base.yaml\nb: 1\n")

    def key(*args: str) -> str:
        return grid.key_of(grid.Case("one", "small", list(args)))

    first = key(f"--config={recipe}")
    assert key(f"--config={recipe}", "--data.pack=true") != first
    recipe.write_text("base: base.yaml\nb: 2\n")
    second = key(f"--config={recipe}")
    base.write_text("a: 2\n")
    assert len({first, second, key(f"--config={recipe}")}) == 3


def test_finished_cases_are_compared_with_what_plan_says_now(ran, tmp_path, monkeypatch, capsys):
    out = ["--out", str(tmp_path / "grid.jsonl")]
    assert main(monkeypatch, *out, "--only", "first") == 0
    monkeypatch.setattr(grid, "compares", lambda case: True)
    monkeypatch.setattr(grid, "planned", lambda args, config: 4 * grid.GIB)
    capsys.readouterr()
    assert main(monkeypatch, *out, "--verdicts") == 1
    printed = capsys.readouterr().out
    assert ran == NAMES[:1]  # it runs nothing, and says nothing of cases that never ran
    assert "peak -50% off plan" in printed
    assert "0 passed, 1 failed" in printed
    assert main(monkeypatch, *out) == 1
