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
from fake_cuda.grid import METHODS, PLANTS, QUICK_VARIANTS, RULES

pytest.importorskip("deepspeed")
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
