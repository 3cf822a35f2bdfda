"""Files and folders that appear whole or not at all."""

import ctypes
import errno
import fcntl
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from dflow_lightning.errors import InputError

AT_FDCWD, RENAME_EXCHANGE = -100, 2


def check_writable(path: Path, field: str) -> None:
    """Raise `InputError` for a file that cannot be written, before hours go into its content."""
    folder = next(parent for parent in path.absolute().parents if parent.exists())
    if path.is_dir():
        raise InputError(f"{field}: {path} is a folder; name a file")
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        raise InputError(f"{field}: {folder} is not a writable folder; choose another path")


def write_text(path: Path, text: str) -> None:
    """Write a file atomically."""
    with staged_file(path) as staged:
        staged.write_text(text, encoding="utf-8")


@contextmanager
def staged_file(path: Path) -> Iterator[Path]:
    """A temporary name that is changed to `path` on success: a kill leaves the previous file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    staged = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        yield staged
        staged.replace(path)
    finally:
        staged.unlink(missing_ok=True)


@contextmanager
def staged_folder(out: Path) -> Iterator[Path]:
    """A new folder beside `out` that takes its place, and that of what was there, on success.

    A process that is killed leaves hidden folders beside `out`, never a part of one at `out`; the
    next call for the same `out` removes them. Folders of processes that still run are locked, and
    left alone.
    """
    out = out.absolute()
    out.parent.mkdir(parents=True, exist_ok=True)
    staged = out.with_name(f".{out.name}.{secrets.token_hex(4)}.partial")
    with _lock(out.parent, wait=True):  # nobody clears up between making a folder and locking it
        _clear_leftovers(out)
        staged.mkdir()
        lock = _lock(staged)
    with lock:
        try:
            yield staged
            if os.path.lexists(out):
                _exchange(staged, out, aside=staged.with_suffix(".previous"))
            else:
                staged.rename(out)
        finally:
            remove(staged)


def take_place(staged: Path, out: Path) -> None:
    """Move a complete file or folder to `out`, replacing what was there.

    A process that is killed leaves the one or the other at `out`; where the system cannot exchange
    two folders in one step, `recover` brings back what had been set aside.
    """
    if not os.path.lexists(out) or (staged.is_file() and out.is_file()):
        staged.replace(out)
        return
    _exchange(staged, out, aside=_aside(out))
    remove(staged)


def recover(out: Path) -> None:
    """Bring back what a killed `take_place` had set aside."""
    if not os.path.lexists(out):
        with suppress(FileNotFoundError):  # nothing was, or another process has done it
            _aside(out).rename(out)


def _aside(out: Path) -> Path:
    return out.with_name(f".{out.name}.previous")


def hold(path: Path) -> int | None:
    """Lock a file for this process until it ends, loaders' workers excluded.

    Returns:
        The handle that keeps the lock, None where another process has it. A file system without
        locks gives none, and a handle all the same.
    """
    # A record lock (lockf), which forked workers of a loader do not inherit; filelock uses flock.
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EAGAIN):
            os.close(handle)
            return None
    return handle


class _Lock:
    """The kernel's lock on a folder; it ends with the process, however that dies.

    On the folder itself: a lock file, which the filelock package needs, would be in what is staged.
    """

    def __init__(self, handle: int, held: bool) -> None:
        self.handle, self.held = handle, held

    def __enter__(self) -> bool:
        return self.held

    def __exit__(self, *_: object) -> None:
        os.close(self.handle)


def _lock(folder: Path, *, wait: bool = False) -> _Lock:
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:  # another process holds it, or the file system has no locks
        return _Lock(handle, False)
    return _Lock(handle, True)


def _clear_leftovers(out: Path) -> None:
    """Remove what killed processes left beside `out`, and bring back what one had set aside."""
    name = re.compile(rf"\.{re.escape(out.name)}\.[0-9a-f]+\.(partial|previous)")
    for left in [path for path in out.parent.iterdir() if name.fullmatch(path.name)]:
        if not left.is_dir() or left.is_symlink():
            continue
        with _lock(left) as held:
            if held and left.suffix == ".previous" and not os.path.lexists(out):
                left.rename(out)
            elif held:
                remove(left)


def remove(path: Path) -> None:
    """Remove a file, a folder or a link, if it is there."""
    if path.is_symlink() or path.is_file():  # what a link leads to is not ours
        path.unlink()
    else:
        shutil.rmtree(path, ignore_errors=True)


def _exchange(staged: Path, out: Path, *, aside: Path) -> None:
    """Swap two folders in one step where the system can, else in two renames by way of `aside`."""
    try:
        rename = ctypes.CDLL(None, use_errno=True).renameat2
        failed = rename(AT_FDCWD, os.fsencode(staged), AT_FDCWD, os.fsencode(out), RENAME_EXCHANGE)
    except (AttributeError, OSError):
        failed = -1
    if failed:
        remove(aside)
        with _lock(out):
            out.rename(aside)
            staged.rename(out)
            remove(aside)
