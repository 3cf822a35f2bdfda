"""Files and folders appear whole or not at all."""

import pytest

from dflow_lightning import files
from dflow_lightning.errors import InputError


def test_a_failed_write_leaves_the_old_text(tmp_path, monkeypatch):
    path = tmp_path / "new/a.txt"
    files.write_text(path, "old")
    monkeypatch.setattr("pathlib.Path.replace", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        files.write_text(path, "new")
    assert path.read_text() == "old"
    assert [p.name for p in path.parent.iterdir()] == ["a.txt"]


@pytest.mark.parametrize("can_exchange", [True, False])
def test_a_folder_takes_the_place_of_another(tmp_path, monkeypatch, can_exchange):
    if not can_exchange:
        monkeypatch.setattr("ctypes.CDLL", lambda *_, **__: object())
    out = tmp_path / "out"
    for text in ("first", "second"):
        with files.staged_folder(out) as folder:
            (folder / text).touch()
        assert [p.name for p in out.iterdir()] == [text]
        assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_a_failure_leaves_the_old_folder(tmp_path):
    out = tmp_path / "out"
    with files.staged_folder(out) as folder:
        (folder / "old").touch()
    with pytest.raises(ZeroDivisionError), files.staged_folder(out):
        raise ZeroDivisionError
    assert [p.name for p in out.iterdir()] == ["old"]
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_places_that_cannot_be_written(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match=r"out: .* is a folder"):
        files.check_writable(tmp_path, "out")
    with pytest.raises(InputError, match="is not a writable folder"):
        files.check_writable(tmp_path / "file/x", "out")
    files.check_writable(tmp_path / "not/yet/x", "out")
