"""Files and folders that appear whole or not at all."""

import ctypes
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dflow_lightning.errors import InputError

AT_FDCWD, RENAME_EXCHANGE = -100, 2


def check_writable(path: Path, field: str) -> None:
    """Refuse a file that could not be written, before hours are spent on its content."""
    folder = next(parent for parent in path.absolute().parents if parent.exists())
    if path.is_dir():
        raise InputError(f"{field}: {path} is a folder; name a file")
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        raise InputError(
            f"{field}: {folder} is no folder that can be written to; name another place"
        )


def write_text(path: Path, text: str) -> None:
    """Write a file under a temporary name, then rename it: a kill leaves the previous one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    staged = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        staged.write_text(text, encoding="utf-8")
        staged.replace(path)
    finally:
        staged.unlink(missing_ok=True)


@contextmanager
def staged_folder(out: Path) -> Iterator[Path]:
    """A new folder beside `out` that takes its place, and that of what was there, on success."""
    out = out.absolute()
    out.parent.mkdir(parents=True, exist_ok=True)
    staged = out.with_name(f".{out.name}.{os.getpid()}.partial")
    shutil.rmtree(staged, ignore_errors=True)
    staged.mkdir()
    try:
        yield staged
        if out.exists():
            _exchange(staged, out)
        else:
            staged.rename(out)
    finally:
        shutil.rmtree(staged, ignore_errors=True)


def _exchange(staged: Path, out: Path) -> None:
    """Swap two folders in one step where the system can, else in two renames."""
    try:
        rename = ctypes.CDLL(None, use_errno=True).renameat2
        failed = rename(AT_FDCWD, os.fsencode(staged), AT_FDCWD, os.fsencode(out), RENAME_EXCHANGE)
    except (AttributeError, OSError):
        failed = -1
    if failed:
        previous = staged.with_suffix(".previous")
        out.rename(previous)
        staged.rename(out)
        shutil.rmtree(previous, ignore_errors=True)
