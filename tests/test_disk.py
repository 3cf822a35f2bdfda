"""What a disk refuses is one sentence, and nothing is left half-written."""

import errno
import os
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from dflow_lightning import __main__ as program
from dflow_lightning import files
from dflow_lightning.commandline.json_output import JsonOutput
from dflow_lightning.errors import InputError

ROOT = Path(__file__).resolve().parents[1]


def full(*_, **__):
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (OSError(errno.ENOSPC, "x"), "No space left on device; make room"),
        (OSError(errno.EROFS, "x", "a/b"), "a/b: Read-only file system; choose another path"),
        (OSError(errno.EACCES, "x", "a/b"), "a/b: Permission denied; choose another path"),
        (RuntimeError("PytorchStreamWriter failed writing file data/0"), "No space left"),
        (Exception("Error: I/O error: No space left (os error 28)"), "No space left on device"),
        (sqlite3.OperationalError("attempt to write a readonly database"), "Read-only"),
    ],
)
def test_f33_what_the_disk_refuses_is_one_sentence(error, said, monkeypatch, capsys):
    """F33: whichever library met it, and however it says so; no traceback, exit status 2."""

    def command(args):
        raise error

    monkeypatch.setattr(program, "dispatch", command)
    assert program.main(["fit"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert said in lines[0]


def test_f33_other_errors_keep_their_traceback(monkeypatch):
    """F33: a defect, or a file that is not there, is not blamed on the disk."""
    for error in (ValueError("x"), FileNotFoundError(errno.ENOENT, "x", "a")):
        monkeypatch.setattr(program, "dispatch", lambda _, e=error: (_ for _ in ()).throw(e))
        with pytest.raises(type(error)):
            program.main(["fit"])


def test_f33_a_full_disk_is_named_by_the_file_that_was_asked_for(tmp_path, monkeypatch):
    """F33: not by the hidden name; the old text stays and nothing half-written does."""
    path = tmp_path / "a.html"
    path.write_text("old")
    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(OSError, match=r"a\.html") as met:
        files.write_text(path, "new")
    assert met.value.filename == str(path)
    with pytest.raises(OSError, match="out") as met, files.staged_folder(tmp_path / "out"):
        full()
    assert met.value.filename == str(tmp_path / "out")
    assert [p.name for p in tmp_path.iterdir()] == ["a.html"]
    assert path.read_text() == "old"


def test_f33_torch_and_json_lines_on_a_full_disk():
    """F33: what torch and line-by-line JSON meet on a real full device."""
    with pytest.raises(OSError, match="/dev/full") as met:
        JsonOutput(Path("/dev/full")).write_line({})
    assert "/dev/full: No space left" in str(files.refusal(met.value))
    with pytest.raises(RuntimeError) as torch_met:
        torch.save({"a": torch.zeros(100_000)}, "/dev/full")
    assert "make room" in str(files.refusal(torch_met.value))


def run(code: str, redirect: str) -> subprocess.CompletedProcess:
    line = f'exec "$0" -c "{code}" {redirect}'
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    return subprocess.run(
        ["sh", "-c", line, sys.executable], capture_output=True, text=True, env=environment
    )


@pytest.mark.parametrize(
    ("redirect", "status", "lines"),
    [(">&-", 0, 0), ("2>&-", 0, 0), ("<&- >&- 2>&-", 0, 0), (">/dev/full", 2, 1)],
)
def test_f37_closed_and_full_streams(redirect, status, lines):
    """F37: `>&-` is no error, and a full disk behind standard output is one sentence."""
    code = "import sys; from dflow_lightning.__main__ import main; sys.exit(main(['--help']))"
    ended = run(code, redirect)
    assert ended.returncode == status
    assert len(ended.stderr.splitlines()) == lines
    assert "Traceback" not in ended.stderr


@pytest.mark.parametrize("there", [True, False])
def test_f40_a_link_is_written_where_it_leads(tmp_path, there):
    """F40: `export --out LINK` fills the linked folder, made or not yet; the link stays."""
    disk, link = tmp_path / "disk/folder", tmp_path / "link"
    disk.parent.mkdir()
    if there:
        disk.mkdir()
        (disk / "old").touch()
    link.symlink_to(disk)
    with files.staged_folder(link) as staged:
        (staged / "new").touch()
    assert link.is_symlink()
    assert [p.name for p in disk.iterdir()] == ["new"]
    assert [p.name for p in disk.parent.iterdir()] == ["folder"]


def test_f40_a_linked_file_and_a_device(tmp_path):
    """F40: `--json LINK` writes the linked file, and never puts a file in a device's place."""
    link, file = tmp_path / "link", tmp_path / "file"
    link.symlink_to(file)
    files.write_text(link, "text")
    assert link.is_symlink()
    assert file.read_text() == "text"
    files.check_writable(Path("/dev/null"), "json")
    files.write_text(Path("/dev/null"), "text")
    assert not Path("/dev/null").is_file()


def test_f40_a_linked_checkpoint_is_replaced(tmp_path):
    """F40: a checkpoint's link may lead into another run, whose file is not ours to write."""
    other, link, staged = (tmp_path / name for name in ("other", "last.ckpt", "staged"))
    other.write_text("other run")
    staged.write_text("this run")
    link.symlink_to(other)
    files.take_place(staged, link)
    assert other.read_text() == "other run"
    assert link.read_text() == "this run"
    with pytest.raises(InputError, match="is a folder"):
        files.check_writable(tmp_path, "out")
