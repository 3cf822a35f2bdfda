"""The queue between a training and its tracking store: a file in the run folder.

    <run_dir>/tracking/<key>.jsonl     records, one JSON object a line, in order
    <run_dir>/tracking/<key>.json      the store, the run's id there, and how many bytes were sent
    <run_dir>/tracking/refused.jsonl   records that the store rejected for good, with its reason

Training appends a line and goes on. Lines that were not sent when it ends, or is killed, are sent
later: by `dflow-train sync`, `ui`, or the next training in the folder. The folder is removed when
nothing is left to send.
"""

import errno
import fcntl
import json
import os
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from dflow_lightning.files import write_text

TRACKING_FOLDER = "tracking"
REFUSED_FILE = "refused.jsonl"
_CHUNK = 1 << 20  # bytes read at once, unless a single line is longer
LARGEST = 1 << 30  # bytes that a journal may grow to while its store is away
EMPTIED_AT = 16 << 20  # bytes from which a journal that was sent completely is truncated
HELD = 10_000  # records held in memory while the disk is full

Record = dict[str, Any]


@dataclass
class Destination:
    """The store and the run in it that records are sent to.

    Args:
        key: identifies the run until the store has given it an id, and across stores.
        uri: address of the store.
        run_id: the store's id of the run, once it is known.
        artifacts: where a new experiment keeps its artifacts; the store's choice when None.
    """

    key: str
    uri: str
    experiment: str
    run_name: str
    run_id: str | None = None
    artifacts: str | None = None


class Entry(NamedTuple):
    """A record to send, and the offset of the next one in the journal."""

    record: Record
    end: int | None  # None: the record is held in memory


class Journal:
    """Records of one run on their way to the store; one process writes, one thread of it reads.

    Nothing here raises, since a record is never worth a training: records that cannot be written
    are held in memory, and those beyond `HELD` are dropped and listed in `lost`.
    """

    def __init__(self, run_dir: Path, destination: Destination) -> None:
        self.destination = destination
        self.folder = run_dir / TRACKING_FOLDER
        self.path = self.folder / f"{destination.key}.jsonl"
        self.offset = 0  # bytes that the store has
        self.lost: dict[str, int] = {}  # names of dropped records, with their last step
        self.mine = True  # False where another process writes this journal
        self.died = False  # an earlier process was killed before it could write the end
        self._held: deque[Record] = deque()
        self._guard = threading.Lock()
        self._file: int | None = None
        with suppress(OSError):
            self._open()

    def _open(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self._file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        # A record lock (lockf), not flock: it ends with the process however that dies, and forked
        # loader workers, which may outlive it, do not inherit it. For the same reason not the
        # filelock package, which uses flock. It is on the journal itself: a lock file would have
        # to be removed by someone.
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EACCES, errno.EAGAIN):  # not: a file system without locks
                self.mine = False
                return
        state, size = read_state(self.path), self._size()
        if state is not None:
            known, self.offset = state[0], min(state[1], size)
            if known.uri == self.destination.uri:
                self.destination = known
            self.died = not self._ended()
        if size and os.pread(self._file, 1, size - 1) != b"\n":
            os.write(self._file, b"\n")  # ends the line that a killed process left unfinished
        self.save()

    # ---------------------------------------------------------------- writing

    def append(self, record: Record) -> None:
        """Add a record; takes microseconds, whatever state the store is in."""
        with self._guard:
            while self._held and self._write(self._held[0]):
                self._held.popleft()
            if self._held or not self._write(record):  # records keep their order
                if len(self._held) < HELD:
                    self._held.append(record)
                else:
                    self._lose(record)

    def _write(self, record: Record) -> bool:
        line = json.dumps(record, ensure_ascii=False).encode() + b"\n"
        if self._file is None or not self.mine:
            return False
        before = self._size()
        if before + len(line) > LARGEST:
            return False
        try:
            if os.write(self._file, line) == len(line):
                return True
        except OSError:
            pass
        with suppress(OSError):  # the next line would be appended to half a line
            os.ftruncate(self._file, before)
        return False

    def _lose(self, record: Record) -> None:
        for name in record.get("values", {record["do"]: 0}):
            self.lost[name] = record.get("step", 0)

    # ---------------------------------------------------------------- reading

    def entries(self) -> list[Entry]:
        """The next records to send, in order; none if all were sent."""
        if self._file is not None and self.mine and self.offset < self._size():
            return self._read(self.offset)
        with self._guard:
            return [Entry(record, None) for record in list(self._held)[:100]]

    def _read(self, offset: int) -> list[Entry]:
        assert self._file is not None
        size, found, end = _CHUNK, list[Entry](), offset
        while b"\n" not in (chunk := os.pread(self._file, size, offset)):
            if len(chunk) < size:  # a line that is being written right now
                return []
            size *= 2
        for line in chunk[: chunk.rindex(b"\n") + 1].splitlines(keepends=True):
            end += len(line)
            try:
                record = json.loads(line)
            except ValueError:
                record = {"do": "nothing"}
            found.append(Entry(record, end))
        return found

    def arrived(self, entry: Entry) -> None:
        """Mark a record as sent."""
        if entry.end is not None:
            self.offset = entry.end
            return
        with self._guard:
            if self._held and self._held[0] is entry.record:
                self._held.popleft()

    def refuse(self, record: Record, reason: str) -> None:
        """Set aside a record that the store rejects for good, so that it holds up no others."""
        line = json.dumps({"reason": reason, **record}, ensure_ascii=False)
        with suppress(OSError), (self.folder / REFUSED_FILE).open("a", encoding="utf-8") as file:
            file.write(line + "\n")

    def save(self) -> None:
        """Write how much was sent; a large journal that was sent completely starts empty."""
        with self._guard:
            if self._file is not None and self.offset == self._size() > EMPTIED_AT:
                with suppress(OSError):
                    os.ftruncate(self._file, 0)
                    self.offset = 0
        state = json.dumps({**asdict(self.destination), "offset": self.offset}, indent=2)
        with suppress(OSError):
            write_text(self.path.with_suffix(".json"), state + "\n")

    # ---------------------------------------------------------------- how much is left

    def _size(self) -> int:
        return 0 if self._file is None else os.fstat(self._file).st_size

    @property
    def waiting(self) -> bool:
        """Whether records are left to send."""
        return bool(self._held) or (self.mine and self.offset < self._size())

    def left(self) -> dict[str, int]:
        """How many records of each kind are left to send; metrics count by their points."""
        counts: dict[str, int] = {}
        for record in self._left():
            kind = KINDS.get(record["do"], "")
            if kind:
                points = len(record["values"]) if kind == "metric points" else 1
                counts[kind] = counts.get(kind, 0) + points
        return counts

    def close_dead_run(self) -> None:
        """Append the end that a killed process could not write: FAILED, at its last record."""
        if not self.died:
            return
        self.died = False
        at = int(self.path.stat().st_mtime * 1000)
        tags = {"failure": "ended without a word: kill -9, out of memory, or the machine went down"}
        self.append({"do": "end", "time": at, "status": "FAILED", "tags": tags})

    def _left(self) -> Iterator[Record]:
        offset = self.offset
        while self._file is not None and self.mine and offset < self._size():
            entries = self._read(offset)
            if not entries:
                break
            yield from (entry.record for entry in entries)
            offset = entries[-1].end or offset
        yield from list(self._held)

    def _ended(self) -> bool:
        """Whether the last record is the end of the run."""
        if self._file is None or not self._size():
            return False
        # Through this handle: closing any other handle of the file would release the record lock.
        tail = os.pread(self._file, _CHUNK, max(0, self._size() - _CHUNK))
        with suppress(ValueError):
            return bool(json.loads(tail.splitlines()[-1])["do"] == "end")
        return False

    def remove(self) -> None:
        """Remove the files of a journal that was sent, and the folder with the last one."""
        self.close()
        with suppress(OSError):
            self.path.unlink(missing_ok=True)
            self.path.with_suffix(".json").unlink(missing_ok=True)
            self.folder.rmdir()

    def close(self) -> None:
        """Release the lock."""
        if self._file is not None:
            os.close(self._file)
            self._file = None


KINDS = {
    "metrics": "metric points",
    "text": "artifacts",
    "bytes": "artifacts",
    "recipe": "parameters",
    "tags": "tags",
    "datasets": "datasets",
    "end": "status",
}


def read_state(path: Path) -> tuple[Destination, int] | None:
    """Destination and offset of a journal; None if they cannot be read."""
    try:
        state = json.loads(path.with_suffix(".json").read_text(encoding="utf-8"))
        offset = state.pop("offset")
        return Destination(**state), offset
    except (OSError, ValueError, KeyError, TypeError):
        return None


def journals(run_dir: Path) -> list[Path]:
    """The journals of a run folder with records left to send, oldest first."""
    folder = run_dir / TRACKING_FOLDER
    found = [path for path in folder.glob("*.jsonl") if path.name != REFUSED_FILE]
    return sorted(found, key=lambda path: path.stat().st_mtime)
