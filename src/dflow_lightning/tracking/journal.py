"""The queue between a training and its tracking store: a file in the run folder.

    <run_dir>/tracking/<key>.jsonl     what was recorded, one JSON object a line, in order
    <run_dir>/tracking/<key>.json      where it goes, the run's id there, bytes that have arrived
    <run_dir>/tracking/refused.jsonl   what the store will never take, with its reason

A training appends a line and goes on. What has not arrived when it ends, or is killed, stays here
and is sent later. The folder goes when everything has arrived.
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

FOLDER = "tracking"
REFUSED = "refused.jsonl"
CHUNK = 1 << 20  # bytes read at once, unless a single line is longer
LARGEST = 1 << 30  # bytes a journal may grow to while its store is away
EMPTIED_AT = 16 << 20  # an arrived journal of so many bytes starts anew
HELD = 10_000  # records held in memory while the disk is full

Record = dict[str, Any]


@dataclass
class Destination:
    """Where a run's records go.

    Args:
        key: names the run wherever its id in the store is not known yet.
        uri: address of the store.
        run_id: in the store, once it is known.
        artifacts: where a new experiment keeps its artifacts; the store's choice when None.
    """

    key: str
    uri: str
    experiment: str
    run_name: str
    run_id: str | None = None
    artifacts: str | None = None


class Entry(NamedTuple):
    """A record that has not arrived, and where the journal goes on behind it."""

    record: Record
    end: int | None  # None: it is held in memory


class Journal:
    """Records of one run that are on their way; one process writes, one thread of it reads.

    Nothing here raises: what cannot be written is held in memory, and what finds no room there is
    counted in `lost`.
    """

    def __init__(self, run_dir: Path, destination: Destination) -> None:
        self.destination = destination
        self.folder = run_dir / FOLDER
        self.path = self.folder / f"{destination.key}.jsonl"
        self.offset = 0  # bytes that have arrived
        self.lost: dict[str, int] = {}  # what was recorded, and at which step for the last time
        self.mine = True  # False where another process writes this journal
        self.died = False  # its process ended without a word
        self._held: deque[Record] = deque()
        self._guard = threading.Lock()
        self._file: int | None = None
        with suppress(OSError):
            self._open()

    def _open(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self._file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        try:  # the lock ends with the process, and its loaders' workers do not hold it
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
            os.write(self._file, b"\n")  # of a process that was killed while it wrote
        self.save()

    # ---------------------------------------------------------------- writing

    def append(self, record: Record) -> None:
        """Adds a record; takes microseconds whatever the store does."""
        with self._guard:
            while self._held and self._write(self._held[0]):
                self._held.popleft()
            if self._held or not self._write(record):  # none overtakes another
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
        with suppress(OSError):  # half a line would spoil the next one
            os.ftruncate(self._file, before)
        return False

    def _lose(self, record: Record) -> None:
        for name in record.get("values", {record["do"]: 0}):
            self.lost[name] = record.get("step", 0)

    # ---------------------------------------------------------------- reading

    def entries(self) -> list[Entry]:
        """The next records to send, in order; none where all have arrived."""
        if self._file is not None and self.mine and self.offset < self._size():
            return self._read(self.offset)
        with self._guard:
            return [Entry(record, None) for record in list(self._held)[:100]]

    def _read(self, offset: int) -> list[Entry]:
        assert self._file is not None
        size, found, end = CHUNK, list[Entry](), offset
        while b"\n" not in (chunk := os.pread(self._file, size, offset)):
            if len(chunk) < size:  # an unfinished line; `_open` ends those of killed processes
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
        """Takes note that a record is in the store."""
        if entry.end is not None:
            self.offset = entry.end
            return
        with self._guard:
            if self._held and self._held[0] is entry.record:
                self._held.popleft()

    def refuse(self, record: Record, reason: str) -> None:
        """Sets a record aside that the store will never take."""
        line = json.dumps({"reason": reason, **record}, ensure_ascii=False)
        with suppress(OSError), (self.folder / REFUSED).open("a", encoding="utf-8") as file:
            file.write(line + "\n")

    def save(self) -> None:
        """Writes down how far the store has come."""
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
        """Whether some record has not arrived."""
        return bool(self._held) or (self.mine and self.offset < self._size())

    def left(self) -> dict[str, int]:
        """Kinds of what has not arrived: metric points by their number, the rest by its name."""
        counts: dict[str, int] = {}
        for record in self._left():
            kind = KINDS.get(record["do"], "")
            if kind:
                points = len(record["values"]) if kind == "metric points" else 1
                counts[kind] = counts.get(kind, 0) + points
        return counts

    def close_dead_run(self) -> None:
        """Writes the end that a killed process could not write."""
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
        # Not by the path: closing a second handle would give up the lock.
        tail = os.pread(self._file, CHUNK, max(0, self._size() - CHUNK))
        with suppress(ValueError):
            return bool(json.loads(tail.splitlines()[-1])["do"] == "end")
        return False

    def remove(self) -> None:
        """Removes what has arrived, and the folder with the last of it."""
        self.close()
        with suppress(OSError):
            self.path.unlink(missing_ok=True)
            self.path.with_suffix(".json").unlink(missing_ok=True)
            self.folder.rmdir()

    def close(self) -> None:
        """Lets another process have the journal."""
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
    """Destination and offset of a journal; None where they cannot be read."""
    try:
        state = json.loads(path.with_suffix(".json").read_text(encoding="utf-8"))
        offset = state.pop("offset")
        return Destination(**state), offset
    except (OSError, ValueError, KeyError, TypeError):
        return None


def journals(run_dir: Path) -> list[Path]:
    """The journals of a run folder that have not arrived, oldest first."""
    folder = run_dir / FOLDER
    found = [path for path in folder.glob("*.jsonl") if path.name != REFUSED]
    return sorted(found, key=lambda path: path.stat().st_mtime)
