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
# What a disk may refuse, whatever was asked of it, and what helps.
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
NOT_ALLOWED = (errno.EACCES, errno.EPERM, errno.EROFS, errno.EBUSY)
NO_PLACE = (errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG, errno.ELOOP)
# Libraries that write in C tell what the disk said in their text alone.
TOLD_BY_TEXT = {
    "PytorchStreamWriter failed": errno.ENOSPC,
    ". unexpected pos ": errno.ENOSPC,  # torch's too
    "database or disk is full": errno.ENOSPC,
    "readonly database": errno.EROFS,
    "unable to open database file": errno.EACCES,
}


def refusal(error: BaseException) -> str | None:
    """What the disk refused, in one sentence; None for an error that is none of the disk's.

    The one owner of such sentences: a command need not foresee each write of each library.
    """
    found: BaseException | None = error
    while found is not None:
        number, name = _told(found)
        where = "a file or standard output" if name is None else str(name)
        if number in NO_ROOM:
            return f"{where}: {os.strerror(number)}; make room, or choose a path on another disk"
        if number in NOT_ALLOWED and name is not None:
            return f"{where}: {os.strerror(number)}; choose another path, or change who may use it"
        if number in NO_PLACE and name is not None:
            return f"{where}: {os.strerror(number)}; choose another path"
        if number == errno.EIO:
            return f"{where}: {os.strerror(number)}; the disk may be failing: see the system's log"
        found = found.__cause__ or found.__context__
    return None


def _told(error: BaseException) -> tuple[int, str | bytes | int | None]:
    """The system's number of an error, 0 where it has none, and the file that it is about."""
    if isinstance(error, OSError):
        return error.errno or 0, error.filename2 or error.filename
    if by_system := re.search(r"\(os error (\d+)\)", str(error)):  # as Rust's libraries say it
        return int(by_system[1]), None
    numbers = (number for text, number in TOLD_BY_TEXT.items() if text in str(error))
    number = next(numbers, 0)
    return number, None if number in NO_ROOM or not number else "the tracking store's database"


def check_writable(path: Path, field: str) -> None:
    """Raise `InputError` for a file that cannot be written, before hours go into its content."""
    if path.is_dir():
        raise InputError(f"{field}: {path} is a folder; name a file")
    if _is_stream(path):
        return
    if path.exists() and not os.access(path, os.W_OK):
        raise InputError(f"{field}: {path} cannot be written; choose another path")
    folder = next(parent for parent in _where_it_leads(path).parents if parent.exists())
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        raise InputError(f"{field}: {folder} is not a writable folder; choose another path")


def check_no_chain(path: Path, field: str) -> None:
    """Raise `InputError` for a path that fsspec, which writes checkpoints and rows, would split.

    It takes `a::b` for a file in an archive, and writes to another place without a word.
    """
    if "::" in str(path.expanduser().absolute()):
        raise InputError(
            f"{field}: {path} has :: in its path, which the libraries that write there take for a "
            "chain of addresses; choose a folder without it"
        )


def write_text(path: Path, text: str) -> None:
    """Write a file atomically."""
    with staged_file(path) as staged:
        staged.write_text(text, encoding="utf-8")


@contextmanager
def staged_file(path: Path) -> Iterator[Path]:
    """A temporary name that is changed to `path` on success: a kill leaves the previous file.

    Where `path` is a link, the file that it leads to is written. A pipe or a device, such as
    /dev/stdout, is written to as it is: it must not be replaced by a file.
    """
    if _is_stream(path):
        yield path
        return
    path = _where_it_leads(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    staged = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        with refused_by_name(path, staged):
            yield staged
            staged.replace(path)
    finally:
        staged.unlink(missing_ok=True)


@contextmanager
def staged_folder(out: Path) -> Iterator[Path]:
    """A new folder beside `out` that takes its place, and that of what was there, on success.

    Where `out` is a link, as for a disk that has the room, the folder that it leads to is replaced.
    A process that is killed leaves hidden folders beside `out`, never a part of one at `out`; the
    next call for the same `out` removes them. Folders of processes that still run are locked, and
    left alone.
    """
    out = _where_it_leads(out)
    out.parent.mkdir(parents=True, exist_ok=True)
    staged = out.with_name(f".{out.name}.{secrets.token_hex(4)}.partial")
    with _lock(out.parent, wait=True):  # nobody clears up between making a folder and locking it
        _clear_leftovers(out)
        staged.mkdir()
        lock = _lock(staged)
    with lock:
        try:
            with refused_by_name(out, staged):
                yield staged
                if os.path.lexists(out):
                    _exchange(staged, out, aside=staged.with_suffix(".previous"))
                else:
                    staged.rename(out)
        finally:
            remove(staged)


@contextmanager
def refused_by_name(path: Path, staged: Path | None = None) -> Iterator[None]:
    """What a disk refuses is an OSError about `path`: a reader does not know the staged name."""
    try:
        yield
    except Exception as error:
        number, name = _told(error)
        if not number or (name is not None and not str(name).startswith(str(staged or path))):
            raise
        raise OSError(number, os.strerror(number), str(path)) from error


def take_place(staged: Path, out: Path) -> None:
    """Move a complete file or folder to `out`, replacing what was there.

    A link is replaced too: a checkpoint that leads into another run's folder is not ours to write.
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


def _where_it_leads(path: Path) -> Path:
    """The absolute path behind all links, also where nothing is yet."""
    return Path(os.path.realpath(path))


def _is_stream(path: Path) -> bool:
    """Whether a pipe, a socket or a device is there."""
    return path.exists() and not path.is_file() and not path.is_dir()


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
