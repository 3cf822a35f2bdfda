"""A killed export leaves nothing, the whole old export or the whole new one."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from dflow_lightning import files

SCRIPT = Path(__file__).with_name("export_process.py")
LEFTOVER = re.compile(r"\.out\.[0-9a-f]+\.(partial|previous)")


@pytest.fixture(scope="module")
def rows(tmp_path_factory, tiny_target_dir) -> list[dict]:
    """What `export_process.py` prints."""
    folder = tmp_path_factory.mktemp("killed")
    done = subprocess.run(
        [sys.executable, SCRIPT, tiny_target_dir, folder],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.slow
@pytest.mark.parametrize("before", ["fresh", "over"])
def test_a_killed_export_is_whole_or_not_there(rows, before):
    mine = [row for row in rows if row["before"] == before]
    whole = {"fresh": {"absent", "new"}, "over": {"old", "new"}}[before]
    assert {row["state"] for row in mine} == whole
    for kind in ("operation", "moment"):
        assert sum(row["how"].startswith(kind) and row["killed"] for row in mine) >= 20
    assert all(row["state"] == "new" for row in mine if not row["killed"])


@pytest.mark.slow
def test_what_a_kill_leaves_is_hidden_and_cleared_by_the_next_export(rows):
    left = [row["left"] for row in rows if row["killed"]]
    assert any(left)
    assert all(LEFTOVER.fullmatch(name) for names in left for name in names)
    assert max(len(names) for names in left) == 1
    assert all(row["left"] == [] for row in rows if not row["killed"])


def test_a_leftover_is_removed_and_what_is_like_it_is_not(tmp_path):
    names = [".out.1a2b.partial", ".out.77.partial", ".out.partial", ".out.b.1a.partial", ".outs"]
    for name in names:
        (tmp_path / name).mkdir()
    with files.staged_folder(tmp_path / "out"):
        pass
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([*names[2:], "out"])


def test_a_folder_that_is_being_written_is_left_alone(tmp_path):
    out = tmp_path / "out"
    with files.staged_folder(out) as first:
        (first / "first").touch()
        with files.staged_folder(out) as second:
            (second / "second").touch()
        assert (first / "first").exists()
        assert [path.name for path in out.iterdir()] == ["second"]
    assert [path.name for path in out.iterdir()] == ["first"]
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_what_was_set_aside_comes_back(tmp_path):
    """Where two renames replace one exchange, a kill between them leaves no folder at `out`."""
    out, aside = tmp_path / "out", tmp_path / ".out.1a2b.previous"
    aside.mkdir()
    (aside / "old").touch()
    with pytest.raises(ZeroDivisionError), files.staged_folder(out):
        raise ZeroDivisionError
    assert [path.name for path in out.iterdir()] == ["old"]
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
