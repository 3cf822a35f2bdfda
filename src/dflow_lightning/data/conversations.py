"""Prompts and conversations from JSONL, JSON and Parquet files as other people write them.

    {"messages": [{"role": "user", "content": "Hi"}, ...]}        OpenAI, with system and tools
    {"conversations": [{"from": "human", "value": "Hi"}, ...]}    ShareGPT
    {"instruction": "Add.", "input": "2, 3", "output": "5"}       Alpaca
    {"prompt": "Hi", "answer": "Hello."}                          plain; the answer may be missing

Each becomes one `Conversation`. A row may also have `id`, `family`, `system`, `tools`, and
`"finished": false` where the last answer reached its limit instead of its end; other keys are notes
and are not read. Files are streamed, so memory does not grow with them.

A row that does not fit is a reject with a reason, never left out in silence. A file that cannot be
read at all, or not to its end, is an `InputError`.
"""

from __future__ import annotations

import json
import sqlite3
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing
from pathlib import Path
from reprlib import repr as short
from typing import Any, TextIO

from dflow_lightning.data.files import MAX_ROW, raw_rows
from dflow_lightning.data.shapes import (
    Conversation,
    Reject,
    RejectedError,
    load_record,
    to_conversation,
)
from dflow_lightning.errors import InputError

__all__ = ["MAX_ROW", "Conversation", "ConversationReader", "Reject", "parse_conversations"]

Rows = Iterator[tuple[int, Conversation | Reject]]  # with their lines


class ConversationReader:
    """Iterates over the conversations of a file in its order, and keeps account of the rejects.

    Rejects are written to `<out>.rejects.jsonl`, one object with line, reason and detail each; the
    file exists only if there are any. In a JSON array or a Parquet file the line is the row's
    number. What was yielded counts only once iteration has ended: the share of rejects is known
    then.

    Args:
        path: a JSONL, JSON or Parquet file.
        out: what the caller makes of the file; it names the file of rejects.
        max_reject_share: share of rejects among all rows above which iteration ends in an error.
        field: the setting that named the file, for messages.
        rows: where the rows come from, if not from the file; `path` is then their name.
        on_reject: is told of each reject, with its line.

    Attributes:
        num_rows: rows read so far, rejects included.
        rejects: how many there are so far, by reason.
        line: that of the conversation that was yielded last.

    Raises:
        InputError: the file cannot be read, has no row, or has too many rejects.
    """

    def __init__(
        self,
        path: Path,
        *,
        out: Path,
        max_reject_share: float = 0.01,
        field: str = "data",
        rows: Callable[[], Rows] | None = None,
        on_reject: Callable[[int, Reject], None] | None = None,
    ) -> None:
        if not 0 <= max_reject_share <= 1:
            raise InputError(
                f"max_reject_share is {max_reject_share}; give a share between 0 and 1"
            )
        self.path, self.field, self.max_reject_share = path, field, max_reject_share
        self.rejects_path = out.with_name(out.name + ".rejects.jsonl")
        self._rows = rows or (lambda: parse_conversations(path, field=field))
        self._on_reject = on_reject
        self.num_rows = self.line = 0
        self.rejects: Counter[str] = Counter()

    def __iter__(self) -> Iterator[Conversation]:
        self.num_rows, self.rejects = 0, Counter()
        first: dict[str, str] = {}
        with self._open_rejects() as rejects_file:
            try:
                yield from self._accepted(first, rejects_file)
            finally:
                if not self.rejects:
                    self.rejects_path.unlink(missing_ok=True)
        if not self.num_rows:
            raise InputError(f"{self.field}: {self.path} is empty; it needs at least one row")
        self._check_share(first)

    def _accepted(self, first: dict[str, str], rejects_file: TextIO) -> Iterator[Conversation]:
        """Writes the rejects down; `first` gets the first of each reason."""
        with closing(SeenIds()) as seen:
            for line, row in self._rows():
                self.num_rows += 1
                if isinstance(row, Conversation) and (earlier := seen.add(row.id, line)):
                    detail = f"the id {short(row.id)} is that of line {earlier}"
                    row = Reject("duplicate id", f"{detail}; give every row its own")
                if isinstance(row, Conversation):
                    self.line = line
                    yield row
                    continue
                self.rejects[row.reason] += 1
                if self._on_reject:
                    self._on_reject(line, row)
                first.setdefault(row.reason, f"line {line}: {row.detail}")
                record = {"line": line, "reason": row.reason, "detail": row.detail}
                rejects_file.write(json.dumps(record) + "\n")

    def _open_rejects(self) -> TextIO:
        """Opened before the first row is read, so that a mistake shows at once."""
        path = self.rejects_path
        if path.exists() and self.path.exists() and path.samefile(self.path):
            raise InputError(f"out: the rejects would overwrite {path}; name another output")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            return path.open("w", encoding="utf-8", buffering=1)
        except OSError as error:
            raise InputError(
                f"out: {path} cannot be written ({error.strerror}); name another output"
            ) from error

    def _check_share(self, first: Mapping[str, str]) -> None:
        count = self.rejects.total()
        if count <= self.max_reject_share * self.num_rows:
            return
        reason, most = self.rejects.most_common(1)[0]
        raise InputError(
            f"{self.field}: {count} of {self.num_rows} rows of {self.path} are rejected, more than "
            f"the {self.max_reject_share:.3g} allowed by max_reject_share, most often ({most}) for "
            f"{reason!r}, first {first[reason]} (all are in {self.rejects_path})"
        )


def parse_conversations(path: Path, *, field: str = "data") -> Rows:
    """Every row of a file with its line, as a conversation or as a reject; blank lines are none.

    Ids are not compared.

    Raises:
        InputError: the file cannot be read, or not to its end.
    """
    return convert_rows(raw_rows(path, field), path.name)


def convert_rows(raw: Iterable[tuple[int, Any]], name: str) -> Rows:
    """Raw rows with their lines, as conversations or as rejects; `name` is the source's."""
    for line, row in raw:
        try:
            yield line, to_conversation(load_record(row), f"{name}:{line}")
        except RejectedError as error:
            yield line, error.reject


class SeenIds:
    """Ids and their lines in a temporary database, which spills to the disk by itself."""

    def __init__(self) -> None:
        self._database = sqlite3.connect("", check_same_thread=False)
        self._database.execute("PRAGMA journal_mode = OFF")
        self._database.execute("CREATE TABLE ids (id TEXT PRIMARY KEY, line INT) WITHOUT ROWID")

    def add(self, identity: str, line: int) -> int:
        """The line that had the id before; 0 if none had."""
        added = self._database.execute("INSERT OR IGNORE INTO ids VALUES (?, ?)", (identity, line))
        if added.rowcount:
            return 0
        query = "SELECT line FROM ids WHERE id = ?"
        return self._database.execute(query, (identity,)).fetchone()[0]

    def close(self) -> None:
        self._database.close()
