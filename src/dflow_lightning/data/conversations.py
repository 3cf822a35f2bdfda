"""Prompts and conversations from JSONL, JSON and Parquet files as other people write them.

    {"messages": [{"role": "user", "content": "Hi"}, ...]}        OpenAI, with system and tools
    {"conversations": [{"from": "human", "value": "Hi"}, ...]}    ShareGPT
    {"instruction": "Add.", "input": "2, 3", "output": "5"}       Alpaca
    {"prompt": "Hi", "answer": "Hello."}                          plain; the answer may be missing
    {"prompt": [{"role": ...}, ...], "completion": [...]}         TRL; both lists of messages

Every command that takes conversations or prompts reads them here, so a row has the same messages
and the same id in whatever file it stands and wherever it is used. A row may also have `id`,
`family`, `system`, `tools`, and `"finished": false` where the last answer reached its token limit
instead of its end. Keys that could hold a part of the conversation and are not read (`context`,
`history`, ...) make the row a reject; all others are notes.

The way of a row: `raw_rows` (bytes of a file, not looked into) -> `to_conversation` -> either
`ConversationReader`, which counts and lists rejects (`prepare`), or `read_conversations`, which
raises on the first one (everything that may not skip rows). Files are streamed: memory does not
grow with them. A file that cannot be read at all, or not to its end, is an `InputError`.
"""

from __future__ import annotations

import hashlib
import io
import json
import re
import sqlite3
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from reprlib import repr as short
from typing import Any, BinaryIO, Protocol, TextIO, cast

from dflow_lightning.errors import InputError
from dflow_lightning.formats.integrity import file_sha256
from dflow_lightning.terminal import labelled

MAX_ROW = 16 * 2**20  # bytes of a JSON row, above what any conversation takes
_CHUNK = 2**20
FORMATS = {".jsonl": "JSONL", ".ndjson": "JSONL", ".json": "JSON", ".parquet": "Parquet"}
PACKED = {".gz": "gzip", ".zst": "zstd"}  # suffixes that may follow, in pyarrow's names
# A file is unpacked by what it holds, not by its name.
SIGNATURES = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd"}
UTF16 = (b"\xff\xfe", b"\xfe\xff")
WHITE = re.compile(r"[ \t\r\n]*")
# A JSON object over several lines, mostly one that holds the list of rows under some key.
WRAPPER = re.compile(rb'\{\s*("[^"]*"\s*:\s*\[?\s*)?')

FAMILY = re.compile(r"[A-Za-z0-9_.-]+")  # families are part of metric names
ROLES = {
    **{role: role for role in ("system", "user", "assistant", "tool")},
    **{"developer": "system", "human": "user", "gpt": "assistant", "model": "assistant"},
    **{"function_call": "assistant", "observation": "tool", "function_response": "tool"},
}
FOLLOWS = {  # the roles that may stand after each
    "system": ("user",),
    "user": ("assistant",),
    "assistant": ("user",),
    "assistant with tool calls": ("tool",),
    "tool": ("tool", "assistant"),
}
LISTS = ("messages", "conversations")
ANSWERS = ("answer", "output", "completion", "response")
MAX_DEPTH = 100  # of tool definitions and arguments
MEDIA = {"image", "images", "video", "videos", "audio", "audios"}
# Fields that are part of the conversation and never reach a template: of a row, of a message.
UNREAD_IN_ROW = {
    "available_tools", "chat_template_kwargs", "context", "documents", "functions",
    "function_call", "history", "reasoning", "reasoning_content", "system_prompt", "thinking",
}  # fmt: skip
UNREAD = {
    "function_call", "refusal", "reasoning", "reasoning_details", "thinking", "thinking_blocks",
    "thinking_content", "thought", "tools",
}  # fmt: skip
# What other trainers call an answer that is not learned from; here it is weight 0.
NOT_LEARNED = {
    "train": False, "training": False, "trainable": False, "loss": False, "loss_mask": False,
    "masked": True,
}  # fmt: skip
CALL_KEYS = {"id", "type", "index", "function"}
FUNCTION_KEYS = {"name", "arguments"}
UNREAD_OF_OTHERS = UNREAD | {"reasoning_content", "tool_calls"}  # roles but the assistant
CONTROL = re.compile(r"[\x00-\x08\x0e-\x1f\x7f]")
SURROGATE = re.compile(r"[\ud800-\udfff]")


@dataclass(frozen=True)
class Conversation:
    """One normalised row.

    A message has `role` (system, user, assistant, tool) and `content`, an assistant's also
    `reasoning_content` and `tool_calls` where given, a tool's also `name` and `tool_call_id`. After
    an optional system message user and assistant take turns; the last message may be any but the
    system's.

    Args:
        tools: definitions of the functions that the assistant could call.
        finished: whether the last answer ended by itself.
        unsupervised: indices of answers that are context only (OpenAI's `"weight": 0`).
        where: the row's setting, file and line, for messages to the user.
    """

    id: str
    family: str
    messages: list[dict[str, Any]]
    tools: tuple[Any, ...] = ()
    finished: bool = True
    unsupervised: frozenset[int] = frozenset()
    where: str = field(default="", compare=False)

    @property
    def is_answered(self) -> bool:
        return self.messages[-1]["role"] == "assistant"

    @property
    def prompt(self) -> list[dict[str, Any]]:
        """The messages up to the last answer."""
        return self.messages[:-1] if self.is_answered else self.messages

    @property
    def num_supervised(self) -> int:
        """Answers that are not context only."""
        answers = sum(message["role"] == "assistant" for message in self.messages)
        return answers - len(self.unsupervised)


@dataclass(frozen=True)
class Reject:
    """Why a row cannot be used: `reason` is one of a few phrases, `detail` a sentence."""

    reason: str
    detail: str


class RejectedError(Exception):
    """Raised while a row is read; carries its `Reject`."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reject = Reject(reason, detail)


Rows = Iterator[tuple[int, Conversation | Reject]]  # with their lines


# ---------------------------------------------------------------- whole files


def parse_conversations(path: Path, *, field: str = "data") -> Rows:
    """Every row of a file with its line, as a conversation or as a reject; blank lines are skipped.

    In a JSON array or a Parquet file the line is the row's number. Ids are not compared.

    Raises:
        InputError: the file cannot be read, or not to its end.
    """
    return _parsed(raw_rows(path, field), path.name)


def read_conversations(
    path: Path,
    *,
    field: str,
    need_answer: bool = True,
    keep_repeats: bool = False,
) -> list[Conversation]:
    """All rows of a file, for commands that may not skip a bad one.

    A row that repeats an earlier one under another id is left out with a warning, as `prepare` does
    it: the whole conversation where answers are needed, else what the target is asked.

    Args:
        field: the setting that named the file, for messages.
        need_answer: whether a row must end with an answer.
        keep_repeats: keep rows that repeat an earlier one.

    Raises:
        InputError: anything is wrong with the file or with one row of it.
    """
    rows: list[Conversation] = []
    ids: dict[str, int] = {}
    contents: dict[int, int] = {}
    repeats: list[tuple[int, int]] = []
    for line, row in parse_conversations(path, field=field):
        where = f"{field}: line {line} of {path}"
        if isinstance(row, Reject):
            advice = "fix the row"
            advice += ", or let dflow-train prepare leave such rows out" if need_answer else ""
            raise InputError(f"{where} is rejected ({row.reason}): {row.detail}; {advice}")
        if (earlier := ids.setdefault(row.id, line)) != line:
            raise InputError(
                f"{where} has the id {row.id!r} of line {earlier}; give every row its own id"
            )
        named = f"{where} (id {row.id!r})"
        if need_answer:
            _check_answered(row, named)
        content = (conversation_hash if need_answer else asked_hash)(row)
        if (earlier := contents.setdefault(content, line)) != line and not keep_repeats:
            repeats.append((line, earlier))
            continue
        rows.append(replace(row, where=named))
    if not rows:
        raise InputError(f"{field}: {path} is empty; it needs at least one row")
    if repeats:
        line, earlier = repeats[0]
        warn(
            f"{field}: {len(repeats)} of {len(ids)} rows of {path} repeat an earlier row and are "
            f"left out, the first on line {line} (as line {earlier})"
        )
    return rows


def warn(text: str) -> None:
    """Print a warning of the data once a run, not once a process."""
    from lightning.pytorch.utilities import rank_zero_only

    rank_zero_only(lambda: print(labelled("warning: ", text, sys.stderr), file=sys.stderr))()


def _check_answered(row: Conversation, where: str) -> None:
    if not row.is_answered:
        raise InputError(
            f"{where} does not end with an answer; add it, or let dflow-train prepare have the "
            "target write it"
        )
    if not row.num_supervised:
        raise InputError(f"{where} has the weight 0 on every answer, so nothing to learn; drop it")


def check_messages(messages: Sequence[Mapping[str, Any]], name: str) -> list[dict[str, Any]]:
    """Messages that a caller of the Python API gives, as those of a file would be read.

    Raises:
        InputError: they do not make a conversation.
    """
    given: Any = messages
    if isinstance(given, str | bytes | Mapping) or not isinstance(given, Iterable):
        raise InputError(f"{name} is {messages!r}; give a text, or a list of messages")
    try:
        return to_conversation({"messages": list(messages)}, "").messages
    except RejectedError as error:
        raise InputError(f"{name}: {error.reject.detail}") from error


def prompt_hash(conversation: Conversation) -> int:
    """Hash of everything except the answers, 64 bits, signed."""
    asked = [
        (message["role"], message["content"])
        for message in conversation.messages
        if message["role"] != "assistant"
    ]
    return _hash([asked, list(conversation.tools)])


def conversation_hash(conversation: Conversation) -> int:
    """Hash of all messages and tools."""
    return _hash([conversation.messages, list(conversation.tools)])


def asked_hash(conversation: Conversation) -> int:
    """Hash of everything before the last answer."""
    return _hash([conversation.prompt, list(conversation.tools)])


def _hash(value: Any) -> int:
    text = json.dumps(value, sort_keys=True, ensure_ascii=True, default=str)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big", signed=True)


# ---------------------------------------------------------------- rejects, counted and listed


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
        on_reject: called with the line and the reject, for each one.

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


# ---------------------------------------------------------------- sources


class Source(Protocol):
    """Rows that come in the same order each time they are read."""

    path: Path

    def rows(self) -> Rows:
        """Every row with its line, as a conversation or as a reject."""
        ...

    def describe(self) -> dict[str, Any]:
        """Its name, and a checksum that changes with its content."""
        ...


class FileSource:
    """A JSONL, JSON or Parquet file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        next(self.rows(), None)  # refuses what cannot be read, before it is hashed
        self._sha256 = file_sha256(path)

    def rows(self) -> Rows:
        """See `Source`."""
        return parse_conversations(self.path)

    def describe(self) -> dict[str, Any]:
        """The file's name without its folder, and its checksum."""
        return {"name": self.path.name, "sha256": self._sha256}


class HubSource:
    """A split of a data set that `datasets` can load; its Arrow cache is read, not memory."""

    def __init__(self, name: str, config: str | None, split: str) -> None:
        import datasets

        self.path, self._config, self._split = Path(name), config, split
        try:
            self._rows = datasets.load_dataset(name, config, split=split)
        except (datasets.exceptions.DatasetsError, OSError, ValueError) as error:
            reason = " ".join(str(error).split())[:300]
            raise InputError(
                f"data: {name} is no file and no data set that can be loaded ({reason}); give a "
                f"{', '.join(FORMATS)} file, or a hub id with --config_name and --split"
            ) from error

    def rows(self) -> Rows:
        """See `Source`; the line is the row's number."""
        return _parsed(enumerate(iter(self._rows), start=1), self.path.name)

    def describe(self) -> dict[str, Any]:
        """The hub id with its split, and the fingerprint that `datasets` gives the content."""
        name = "/".join(filter(None, [str(self.path), self._config, self._split]))
        return {"name": name, "fingerprint": self._rows._fingerprint}


class FirstRows:
    """The first rows of another source."""

    def __init__(self, source: Source, limit: int) -> None:
        if limit < 1:
            raise InputError(f"limit is {limit}; give 1 or more")
        self.path, self._source, self._limit = source.path, source, limit

    def rows(self) -> Rows:
        """See `Source`."""
        for number, row in enumerate(self._source.rows()):
            if number == self._limit:
                return
            yield row

    def describe(self) -> dict[str, Any]:
        """The whole source, and how many of its rows are read."""
        return {**self._source.describe(), "limit": self._limit}


def conversations(source: Source) -> Iterator[tuple[int, Conversation]]:
    """The rows of a source that are conversations, with their lines."""
    for line, row in source.rows():
        if isinstance(row, Conversation):
            yield line, row


def open_source(data: str, *, config: str | None, split: str, limit: int | None) -> Source:
    """The source that `--data` names.

    Raises:
        InputError: it cannot be read.
    """
    path = Path(data).expanduser()
    # What reads like a hub id is looked for there, unless its folder lies here.
    local = path.exists() or data.count("/") != 1 or file_format(path) or path.parent.exists()
    source: Source = FileSource(path) if local else HubSource(data, config, split)
    return source if limit is None else FirstRows(source, limit)


# ---------------------------------------------------------------- a file as raw rows


def _parsed(raw: Iterable[tuple[int, Any]], name: str) -> Rows:
    """Raw rows with their lines, as conversations or as rejects; `name` is the source's."""
    for line, row in raw:
        try:
            yield line, to_conversation(load_record(row), f"{name}:{line}")
        except RejectedError as error:
            yield line, error.reject


def file_format(path: Path) -> str | None:
    """JSONL, JSON or Parquet, by the suffix before that of a compression; None for any other."""
    name = path.with_suffix("") if path.suffix.lower() in PACKED else path
    return FORMATS.get(name.suffix.lower())


def raw_rows(path: Path, field: str) -> Iterator[tuple[int, Any]]:
    """Rows not looked into: bytes or text of JSON, None for one that is too long, a Parquet row.

    Gzip and zstd are unpacked on the way.
    """
    where = f"{field}: {path}"
    if path.is_dir():
        raise InputError(f"{where} is a directory; give one file in it")
    if not path.exists():
        raise InputError(f"{where} does not exist; give a JSONL, JSON or Parquet file")
    if not path.is_file():
        raise InputError(f"{where} is not a regular file; save the rows to one")
    if file_format(path) is None:
        raise InputError(
            f"{where} has the suffix {path.suffix!r}; give a file named {', '.join(FORMATS)}, "
            f"which may be compressed ({', '.join(PACKED)})"
        )
    try:
        with _unpacked(path, where) as file:
            yield from _rows_of(file, path, where)
    except OSError as error:
        reason = error.strerror or str(error).partition("\n")[0]
        raise InputError(f"{where} cannot be read ({reason}); give a readable file") from error


@contextmanager
def _unpacked(path: Path, where: str) -> Iterator[io.BufferedReader]:
    with path.open("rb") as file:
        head = file.peek(4096)
        kind = next((kind for sign, kind in SIGNATURES.items() if head.startswith(sign)), None)
        if kind is None:
            if path.suffix.lower() in PACKED and head:
                raise InputError(f"{where} is not compressed; name it by its format")
            yield file
            return
        import pyarrow

        # One reader for both; the standard library has zstd from Python 3.14 on.
        with pyarrow.CompressedInputStream(pyarrow.PythonFile(file), kind) as stream:
            yield io.BufferedReader(cast(io.RawIOBase, stream))


def _rows_of(file: io.BufferedReader, path: Path, where: str) -> Iterator[tuple[int, Any]]:
    head, kind = file.peek(4096), file_format(path)
    if head.startswith(UTF16):
        raise InputError(f"{where} is UTF-16 text; save it as UTF-8")
    parquet = head.startswith(b"PAR1")
    if parquet != (kind == "Parquet") and head:
        what = "a Parquet file" if parquet else "no Parquet file"
        raise InputError(f"{where} is {what}; name it by its format")
    if parquet and not file.seekable():
        raise InputError(
            f"{where} is a compressed Parquet file, which is read from its end; unpack it"
        )
    if parquet:
        yield from _parquet_rows(file, where)
    elif kind == "JSON" and _without_mark(head).lstrip()[:1] == b"[":
        yield from _array_rows(file, where)
    else:
        yield from _lines(file, where)


def _lines(file: BinaryIO, where: str) -> Iterator[tuple[int, bytes | None]]:
    number = 0
    first = True
    while line := file.readline(MAX_ROW + 1):
        number += 1
        if len(line) > MAX_ROW:
            while not line.endswith(b"\n") and (line := file.readline(_CHUNK)):
                pass
            first = False
            yield number, None
            continue
        line = (_without_mark(line) if number == 1 else line).strip()
        if not line:
            continue
        if first and WRAPPER.fullmatch(line):
            raise InputError(
                f"{where} begins with a JSON object over several lines; write one row per line, or "
                "a .json file that is the list of rows itself"
            )
        first = False
        yield number, line


def _without_mark(text: bytes) -> bytes:
    return text.removeprefix(b"\xef\xbb\xbf")


def _array_rows(file: BinaryIO, where: str) -> Iterator[tuple[int, str]]:
    """The texts of an array's elements; only so much is held as one element needs."""
    number = 0
    try:
        with io.TextIOWrapper(file, encoding="utf-8-sig", newline="") as reader:
            for number, text in _elements(reader, where):
                yield number, text
    except UnicodeDecodeError as error:
        raise InputError(
            f"{where} is not UTF-8 text after element {number} ({error.reason}); save it as UTF-8"
        ) from error
    except RecursionError as error:
        raise InputError(f"{where}: element {number + 1} is nested too deep; fix it") from error


def _elements(reader: TextIO, where: str) -> Iterator[tuple[int, str]]:
    """Numbered texts; `reader` stands before the array."""
    # By hand, since a bad element must be one reject: ijson stops for good at the first NaN or raw
    # control character, and takes the last of two equal keys without a word. The decoder only finds
    # where an element ends and is content with more than JSON; `load_record` is strict.
    scanner = json.JSONDecoder(strict=False, parse_int=str, parse_float=str)
    number = 0
    buffer = reader.read(_CHUNK)
    at = buffer.index("[") + 1
    closed = ""
    while closed != "]":
        start = _skip_white(buffer, at)
        end, closed = start, ""
        if number == 0 and buffer[start : start + 1] == "]":
            at, closed = start + 1, "]"
            continue
        try:
            end = scanner.raw_decode(buffer, start)[1]
            at = _skip_white(buffer, end)
            closed = buffer[at : at + 1]
        except json.JSONDecodeError:
            pass
        if closed in (",", "]"):
            number, at = number + 1, at + 1
            yield number, buffer[start:end]
            continue
        held = len(buffer) - start
        more = reader.read(max(_CHUNK, held)) if held <= MAX_ROW else ""
        if not more:
            raise InputError(
                f"{where}: element {number + 1} of the array is broken, cut off or longer than "
                f"{MAX_ROW >> 20} MiB, and nothing after it can be read; fix the file"
            )
        buffer, at, closed = buffer[start:] + more, 0, ""
    if (buffer[at:] + reader.read(_CHUNK)).strip():
        raise InputError(
            f"{where} goes on after its array; write one array, or one object per line in a "
            ".jsonl file"
        )


def _skip_white(text: str, at: int) -> int:
    found = WHITE.match(text, at)
    return found.end() if found else at


def _parquet_rows(file: BinaryIO, where: str) -> Iterator[tuple[int, Any]]:
    """Record batches of one row each."""
    from pyarrow import ArrowException
    from pyarrow.parquet import ParquetFile

    number = 0
    try:
        for batch in ParquetFile(file).iter_batches(batch_size=256):
            for i in range(batch.num_rows):
                number += 1
                yield number, batch.slice(i, 1)
    except ArrowException as error:
        reason = str(error).partition("\n")[0]
        raise InputError(
            f"{where} is a damaged Parquet file, unreadable after row {number} ({reason}); "
            "fetch or write it again"
        ) from error


# ---------------------------------------------------------------- a raw row as a conversation


def load_record(raw: Any) -> dict[str, Any]:
    """The object that a raw row holds."""
    if raw is None:
        raise RejectedError("too long", f"the row is longer than {MAX_ROW >> 20} MiB")
    try:
        if isinstance(raw, dict):
            return _without_nulls(raw)
        if not isinstance(raw, (bytes, str)):
            return _without_nulls(raw.to_pylist()[0])
        record = DECODER.decode(raw.decode() if isinstance(raw, bytes) else raw)
    except UnicodeDecodeError as error:
        raise RejectedError("not UTF-8", f"the row is not UTF-8 text ({error.reason})") from error
    except json.JSONDecodeError as error:
        detail = f"the row is not valid JSON ({error.msg} at column {error.colno})"
        raise RejectedError("not JSON", detail) from error
    except (ValueError, RecursionError) as error:
        raise RejectedError("not JSON", f"the row is not valid JSON ({error})") from error
    if not isinstance(record, dict):
        detail = f"the row is a {type(record).__name__} instead of an object with messages"
        raise RejectedError("not an object", detail)
    return record


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON number")


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        key = Counter(key for key, _ in pairs).most_common(1)[0][0]
        raise RejectedError("repeated key", f"the key {short(key)} is there twice in one object")
    return found


DECODER = json.JSONDecoder(parse_constant=_refuse_constant, object_pairs_hook=_unique_keys)


def _without_nulls(value: Any) -> Any:
    """Parquet fills the fields that a nested value lacks with nulls."""
    if isinstance(value, dict):
        return {key: _without_nulls(one) for key, one in value.items() if one is not None}
    return [_without_nulls(one) for one in value] if isinstance(value, list) else value


def to_conversation(record: dict[str, Any], fallback_id: str) -> Conversation:
    identity = record.get("id")
    if isinstance(identity, int) and not isinstance(identity, bool):
        identity = str(identity)
    elif identity is not None:
        identity = check_text(identity, "the id")
    family = record.get("family")
    if family is not None and not (isinstance(family, str) and FAMILY.fullmatch(family)):
        detail = f"the family is {short(family)}; use letters, digits and _ . - only"
        raise RejectedError("family", detail)
    if media := sorted(key for key in MEDIA if record.get(key)):
        raise RejectedError("not text", f"the row has {media[0]}; only text is read")
    if unread := sorted(key for key in UNREAD_IN_ROW if record.get(key)):
        detail = f"the row has {unread[0]}, which is not read; put it into the messages"
        raise RejectedError("unread field", detail)
    messages = _with_system(_messages(record), record.get("system"))
    _check_order(messages)
    tools = _tools(record.get("tools"))
    unsupervised = frozenset(i for i, one in enumerate(messages) if one.pop("weight", 1) == 0)
    finished = record.get("finished")
    if finished is not None and not isinstance(finished, bool):
        detail = f"finished is {short(finished)}; give true or false"
        raise RejectedError("finished", detail)
    name = identity or fallback_id
    return Conversation(
        name, family or "default", messages, tools, finished is not False, unsupervised
    )


def _messages(record: dict[str, Any]) -> list[dict[str, Any]]:
    """The messages of any of the four shapes."""
    shapes = [key for key in (*LISTS, "instruction", "prompt") if record.get(key) is not None]
    if not shapes:
        detail = "the row has no messages, conversations, instruction or prompt"
        if held := [key for key, value in record.items() if _is_messages(value)]:
            detail += f"; if {short(held[0])} holds the messages, name it messages"
        lists = [key for key, value in record.items() if value and isinstance(value, list)]
        wrapped = [key for key in lists if all(isinstance(one, dict) for one in record[key])]
        if wrapped and not held:
            detail += f"; if {short(wrapped[0])} is the list of rows, give that list as the file"
        raise RejectedError("unknown shape", detail)
    given = record[shapes[0]]
    if shapes == ["prompt"] and _is_messages(given):
        given = [*given, *_completion(record)]
    elif shapes[0] not in LISTS:
        return _question(record, shapes)
    if isinstance(given, dict) and all(isinstance(column, list) for column in given.values()):
        # `datasets` once stored lists of objects as an object of lists.
        columns = {len(column) for column in given.values()}
        if len(columns) == 1:
            rows = zip(*given.values(), strict=True)
            given = [_without_nulls(dict(zip(given, row, strict=True))) for row in rows]
    if not isinstance(given, list):
        detail = f"{shapes[0]} is a {type(given).__name__}; give a list of objects"
        raise RejectedError("no messages", detail)
    if not given:
        raise RejectedError("no messages", f"{shapes[0]} is an empty list")
    messages = [_message(one, f"message {i}") for i, one in enumerate(given, start=1)]
    more = record.get("input")
    if more is not None and not (isinstance(more, str) and not more.strip()):
        raise RejectedError(
            "several shapes", f"the row has both {shapes[0]} and input; keep one of them"
        )
    # Some data sets repeat the first question as the row's prompt.
    first = next((one["content"] for one in messages if one["role"] == "user"), None)
    if shapes[1:] and (shapes[1:] != ["prompt"] or record["prompt"] != first):
        raise RejectedError(
            "several shapes", f"the row has both {shapes[0]} and {shapes[1]}; keep one of them"
        )
    return messages


def _is_messages(value: Any) -> bool:
    """Whether a value is a list of objects with roles."""
    return bool(value) and isinstance(value, list) and all(
        isinstance(one, dict) and ("role" in one or "from" in one) for one in value
    )  # fmt: skip


def _completion(record: dict[str, Any]) -> list[Any]:
    """The messages that answer a prompt of messages; none where there is no answer."""
    answer = _answer(record)
    if answer is None:
        return []
    given = record[answer]
    return given if _is_messages(given) else [{"role": "assistant", "content": given}]


def _answer(record: dict[str, Any]) -> str | None:
    """The key of a row's one answer."""
    given = [key for key in ANSWERS if record.get(key) is not None]
    if len(given) > 1:
        raise RejectedError(
            "several shapes", f"the row has both {given[0]} and {given[1]}; keep one"
        )
    return given[0] if given else None


def _question(record: dict[str, Any], shapes: Sequence[str]) -> list[dict[str, Any]]:
    """A question and, where there is one, its answer."""
    key = _answer(record)
    inputs = ["prompt", "input"] if shapes[0] == "prompt" and record.get("input") else []
    for several in (shapes, inputs):
        if len(several) > 1:
            raise RejectedError(
                "several shapes", f"the row has both {several[0]} and {several[1]}; keep one"
            )
    content = check_text(record[shapes[0]], f"the {shapes[0]}")
    more = record.get("input")
    if more is not None and not (isinstance(more, str) and not more.strip()):
        content += "\n\n" + check_text(more, "the input")
    messages = [{"role": "user", "content": content}]
    if key:
        answer = check_text(record[key], f"the {key}", blank="empty answer")
        messages.append({"role": "assistant", "content": answer})
    return messages


def _with_system(messages: list[dict[str, Any]], system: Any) -> list[dict[str, Any]]:
    if system in (None, ""):
        return messages
    first = {"role": "system", "content": check_text(system, "the system text")}
    if messages[0]["role"] != "system":
        return [first, *messages]
    if messages[0] != first:
        raise RejectedError(
            "several shapes", "the row has a system text and another system message; keep one"
        )
    return messages


def _message(given: Any, name: str) -> dict[str, Any]:
    if not isinstance(given, dict):
        detail = f"{name} is a {type(given).__name__}; give an object with role and content"
        raise RejectedError("message not an object", detail)
    written = given.get("role", given.get("from"))
    if written is None:
        raise RejectedError("no role", f"{name} has no role")
    role = ROLES.get(written) if isinstance(written, str) else None
    if role is None:
        detail = f"{name} has the role {short(written)}; use system, user, assistant or tool"
        raise RejectedError("unknown role", detail)
    other = given.get("from", written)
    if not isinstance(other, str) or ROLES.get(other) != role:
        raise RejectedError("several shapes", f"{name} has both role and from; keep one")
    if media := sorted(key for key in MEDIA if given.get(key)):
        raise RejectedError("not text", f"{name} has {media[0]}; only text is read")
    unread = UNREAD if role == "assistant" else UNREAD_OF_OTHERS
    if found := sorted(key for key in unread if given.get(key)):
        raise RejectedError("unread field", f"{name} has {found[0]}, which is not read")
    content = given.get("content", given.get("value"))
    if given.get("value") not in (None, content):
        raise RejectedError("several shapes", f"{name} has both content and value; keep one")
    if written == "function_call":
        return {"role": role, "content": "", "tool_calls": _tool_calls(content, name)}
    if role != "assistant":
        names = {key: given.get(key) for key in ("name", "tool_call_id") if role == "tool"}
        kept = {k: check_text(v, f"{name}'s {k}") for k, v in names.items() if v is not None}
        return {"role": role, "content": check_text(content, name), **kept}
    message: dict[str, Any] = {"role": role}
    if left := [key for key, value in NOT_LEARNED.items() if given.get(key) == value]:
        detail = f"{name} has {left[0]} {given[left[0]]}, which is not read; give it weight 0"
        raise RejectedError("unread field", detail)
    weight = given.get("weight")
    if weight not in (None, 0, 1):
        raise RejectedError("weight", f"{name} has the weight {short(weight)}; give 0 or 1")
    if weight == 0:
        message["weight"] = 0  # taken out again by `to_conversation`: templates are not given it
    if calls := given.get("tool_calls"):
        message["content"] = "" if content in (None, "") else check_text(content, name)
        message["tool_calls"] = _tool_calls(calls, name)
    else:
        message["content"] = check_text(content, name, blank="empty answer")
    if given.get("reasoning_content") not in (None, ""):
        message["reasoning_content"] = check_text(given["reasoning_content"], f"{name}'s reasoning")
    return message


def _tools(given: Any) -> tuple[dict[str, Any], ...]:
    """Definitions of tools; some data sets write the list, or each of them, as JSON text."""
    try:
        tools = _decoded(given or [])
        if not isinstance(tools, list):
            raise RejectedError("tools", f"tools is a {type(tools).__name__}; give a list")
        tools = [_decoded(tool) for tool in tools]
    except (ValueError, RecursionError) as error:
        detail = f"tools is not valid JSON ({error}); give a list of objects"
        raise RejectedError("tools", detail) from error
    if other := [tool for tool in tools if not isinstance(tool, dict)]:
        raise RejectedError("tools", f"tools has {short(other[0])}; give a list of objects")
    _check_nested(tools, "tools")
    return tuple(tools)


def _decoded(value: Any) -> Any:
    """What a JSON text says; anything but a text is left as it is."""
    return DECODER.decode(value) if isinstance(value, str) else value


def _tool_calls(given: Any, name: str) -> list[dict[str, Any]]:
    """Calls in OpenAI's form, with arguments as an object, as chat templates want them."""
    calls = []
    with suppress(ValueError, RecursionError):  # complained of below, as a single call
        given = _decoded(given)
    for call in given if isinstance(given, list) else [given]:
        try:
            call = _decoded(call)
            function = call.get("function", call)
            known = FUNCTION_KEYS | CALL_KEYS if function is call else FUNCTION_KEYS
            unread = [one for one in function if one not in known and function[one]]
            if function is not call:
                unread += [one for one in call if one not in CALL_KEYS and call[one]]
            if unread:
                detail = f"{name} has a tool call with {short(unread[0])}, which is not read"
                raise RejectedError("tool call", f"{detail}; give a name and arguments")
            arguments = function.get("arguments", {})
            arguments = _decoded(arguments)
            if not isinstance(arguments, dict) or not isinstance(function["name"], str):
                raise TypeError
        except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
            detail = f"{name} has the tool call {short(call)}; give a name and an arguments object"
            raise RejectedError("tool call", detail) from error
        _check_nested([function["name"], arguments], name)
        identity = {"id": check_text(call["id"], f"{name}'s id")} if call.get("id") else {}
        function = {"name": function["name"], "arguments": arguments}
        calls.append(identity | {"type": "function", "function": function})
    if not calls:
        raise RejectedError("tool call", f"{name} has no tool call in its list of them")
    return calls


def check_text(value: Any, name: str, *, blank: str = "empty text") -> str:
    """A text, or text parts joined."""
    if value is None:
        raise RejectedError("no content", f"{name} has no text")
    if isinstance(value, list):
        kinds = [part.get("type") if isinstance(part, dict) else part for part in value]
        if other := [kind for kind in kinds if kind != "text"]:
            detail = f"{name} has a part of the type {short(other[0])}; only text parts are read"
            raise RejectedError("not text", detail)
        if not all(isinstance(part.get("text"), str) for part in value):
            raise RejectedError("not text", f"{name} has a text part without text")
        value = "".join(part["text"] for part in value)
    if not isinstance(value, str):
        raise RejectedError("not text", f"{name} is a {type(value).__name__}; give it as text")
    if not value.strip():
        raise RejectedError(blank, f"{name} is blank; fill it in or drop the row")
    _check_characters(value, name)
    return value


def _check_characters(text: str, name: str) -> None:
    if found := CONTROL.search(text) or SURROGATE.search(text):
        detail = f"{name} has the character {found[0]!r} in its text; take it out"
        raise RejectedError("control characters", detail)


def _check_nested(value: Any, name: str) -> None:
    """What templates walk through recursively, and the tokenizer reads as text."""
    if _is_deeper(value, MAX_DEPTH):
        raise RejectedError("nested too deep", f"{name} is nested deeper than {MAX_DEPTH} levels")
    _check_characters(json.dumps(value, ensure_ascii=False, default=str), name)


def _is_deeper(value: Any, levels: int) -> bool:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return levels < 0 or any(_is_deeper(one, levels - 1) for one in inner)


def _check_order(messages: Sequence[Mapping[str, Any]]) -> None:
    """An optional system message, then turns as `FOLLOWS` has them."""
    previous = "system"
    for i, message in enumerate(messages, start=1):
        role = message["role"]
        if role not in FOLLOWS[previous] and not (i == 1 and role == "system"):
            raise RejectedError(
                "order of roles",
                f"message {i} is of the {role} instead of the {' or '.join(FOLLOWS[previous])}",
            )
        previous = "assistant with tool calls" if message.get("tool_calls") else role
    if previous == "system":
        raise RejectedError("order of roles", "the row has only a system message")
