"""Prompts and conversations from JSONL, JSON and Parquet files as other people write them.

    {"messages": [{"role": "user", "content": "Hi"}, ...]}        OpenAI, with system and tools
    {"conversations": [{"from": "human", "value": "Hi"}, ...]}    ShareGPT
    {"instruction": "Add.", "input": "2, 3", "output": "5"}       Alpaca
    {"prompt": "Hi", "answer": "Hello."}                          plain; the answer may be missing

Each becomes one `Conversation`. A row may also have `id`, `family`, `system` and `tools`; other
keys are notes and are not read. Files are streamed, so memory does not grow with them.

A row that does not fit is a reject with a reason, never left out in silence. A file that cannot be
read at all, or not to its end, is an `InputError`.
"""

from __future__ import annotations

import io
import json
import re
import sqlite3
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from reprlib import repr as short
from typing import Any, BinaryIO, TextIO

from dflow_lightning.data.rows import FAMILY
from dflow_lightning.errors import InputError

MAX_ROW = 16 * 2**20  # bytes of a JSON row, above what any conversation takes
CHUNK = 2**20
FORMATS = {".jsonl": "JSONL", ".ndjson": "JSONL", ".json": "JSON", ".parquet": "Parquet"}
SIGNATURES = {
    b"\x1f\x8b": ("gzip-compressed", "unpack it"),
    b"\x28\xb5\x2f\xfd": ("zstd-compressed", "unpack it"),
    b"\xff\xfe": ("UTF-16 text", "save it as UTF-8"),
    b"\xfe\xff": ("UTF-16 text", "save it as UTF-8"),
}
ROLES = {
    **{role: role for role in ("system", "user", "assistant", "tool")},
    **{"developer": "system", "human": "user", "gpt": "assistant", "model": "assistant"},
    **{"function_call": "assistant", "observation": "tool", "function_response": "tool"},
}
FOLLOWS = {  # the roles that may stand after one
    "system": ("user",),
    "user": ("assistant",),
    "assistant": ("user",),
    "assistant with tool calls": ("tool",),
    "tool": ("tool", "assistant"),
}
LISTS = ("messages", "conversations")
ANSWERS = ("answer", "output", "completion", "response")
MEDIA = {"image", "images", "video", "videos", "audio", "audios"}
# Fields of a message that change what it says and that no template here is given.
UNREAD = {"function_call", "refusal", "reasoning", "thinking"}
CONTROL = re.compile(r"[\x00-\x08\x0e-\x1f\x7f]")
SURROGATE = re.compile(r"[\ud800-\udfff]")
WHITE = re.compile(r"[ \t\r\n]*")


@dataclass(frozen=True)
class Conversation:
    """One normalised row.

    A message has `role` (system, user, assistant, tool) and `content`, an assistant's also
    `reasoning_content` and `tool_calls` where given, a tool's also `name` and `tool_call_id`. After
    an optional system message user and assistant take turns; the last message may be any but the
    system's. `tools` are the definitions of the functions that the assistant could call.
    """

    id: str
    family: str
    messages: list[dict[str, Any]]
    tools: tuple[Any, ...] = ()


@dataclass(frozen=True)
class Reject:
    """Why a row cannot be used: `reason` is one of a few phrases, `detail` a sentence."""

    reason: str
    detail: str


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

    Attributes:
        num_rows: rows read so far, rejects included.
        rejects: how many there are so far, by reason.

    Raises:
        InputError: the file cannot be read, has no row, or has too many rejects.
    """

    def __init__(
        self, path: Path, *, out: Path, max_reject_share: float = 0.01, field: str = "data"
    ) -> None:
        if not 0 <= max_reject_share <= 1:
            raise InputError(
                f"max_reject_share is {max_reject_share}; give a share between 0 and 1"
            )
        self.path, self.field, self.max_reject_share = path, field, max_reject_share
        self.rejects_path = out.with_name(out.name + ".rejects.jsonl")
        self.num_rows = 0
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
        with closing(_SeenIds()) as seen:
            for line, row in parse_conversations(self.path, field=self.field):
                self.num_rows += 1
                if isinstance(row, Conversation) and (earlier := seen.add(row.id, line)):
                    detail = f"the id {short(row.id)} is that of line {earlier}"
                    row = Reject("duplicate id", f"{detail}; give every row its own")
                if isinstance(row, Conversation):
                    yield row
                    continue
                self.rejects[row.reason] += 1
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


def parse_conversations(
    path: Path, *, field: str = "data"
) -> Iterator[tuple[int, Conversation | Reject]]:
    """Every row of a file with its line, as a conversation or as a reject; blank lines are none.

    Ids are not compared.

    Raises:
        InputError: the file cannot be read, or not to its end.
    """
    for line, raw in _raw_rows(path, field):
        try:
            yield line, _conversation(_load(raw), f"{path.name}:{line}")
        except _RejectedError as error:
            yield line, error.reject


class _RejectedError(Exception):
    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reject = Reject(reason, detail)


class _SeenIds:
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


# ---------------------------------------------------------------- files to raw rows


def _raw_rows(path: Path, field: str) -> Iterator[tuple[int, Any]]:
    """Rows not looked into: bytes or text of JSON, None for one that is too long, a Parquet row."""
    where = f"{field}: {path}"
    if path.is_dir():
        raise InputError(f"{where} is a directory; give one file in it")
    if not path.exists():
        raise InputError(f"{where} does not exist; give a JSONL, JSON or Parquet file")
    if not path.is_file():
        raise InputError(f"{where} is not a regular file; save the rows to one")
    if path.suffix.lower() not in FORMATS:
        known = ", ".join(FORMATS)
        raise InputError(f"{where} has the suffix {path.suffix!r}; give a file named {known}")
    try:
        with path.open("rb") as file:
            head = file.read(4096)
            file.seek(0)
            for signature, (what, mend) in SIGNATURES.items():
                if head.startswith(signature):
                    raise InputError(f"{where} is {what}; {mend}")
            parquet = head.startswith(b"PAR1")
            if parquet != (FORMATS[path.suffix.lower()] == "Parquet") and head:
                what = "a Parquet file" if parquet else "no Parquet file"
                raise InputError(f"{where} is {what}; name it by its format")
            if parquet:
                yield from _parquet_rows(file, where)
            elif path.suffix.lower() == ".json" and _without_mark(head).lstrip()[:1] == b"[":
                yield from _array_rows(file, where)
            else:
                yield from _lines(file)
    except OSError as error:
        reason = error.strerror or str(error).partition("\n")[0]
        raise InputError(f"{where} cannot be read ({reason}); give a readable file") from error


def _lines(file: BinaryIO) -> Iterator[tuple[int, bytes | None]]:
    number = 0
    while line := file.readline(MAX_ROW + 1):
        number += 1
        if len(line) > MAX_ROW:
            while not line.endswith(b"\n") and (line := file.readline(CHUNK)):
                pass
            yield number, None
            continue
        line = (_without_mark(line) if number == 1 else line).strip()
        if line:
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
        raise InputError(f"{where}: element {number + 1} is nested too deep; mend it") from error


def _elements(reader: TextIO, where: str) -> Iterator[tuple[int, str]]:
    """Numbered texts; `reader` stands before the array."""
    # Finds where an element ends and is content with more than JSON; `_load` is strict.
    scanner = json.JSONDecoder(strict=False, parse_int=str, parse_float=str)
    number = 0
    buffer = reader.read(CHUNK)
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
        more = reader.read(max(CHUNK, held)) if held <= MAX_ROW else ""
        if not more:
            raise InputError(
                f"{where}: element {number + 1} of the array is broken, cut off or longer than "
                f"{MAX_ROW >> 20} MiB, and nothing after it can be read; mend the file"
            )
        buffer, at, closed = buffer[start:] + more, 0, ""
    if (buffer[at:] + reader.read(CHUNK)).strip():
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


# ---------------------------------------------------------------- a raw row to a conversation


def _load(raw: Any) -> dict[str, Any]:
    """The object that a raw row holds."""
    if raw is None:
        raise _RejectedError("too long", f"the row is longer than {MAX_ROW >> 20} MiB")
    try:
        if not isinstance(raw, (bytes, str)):
            return _without_nulls(raw.to_pylist()[0])
        record = DECODER.decode(raw.decode() if isinstance(raw, bytes) else raw)
    except UnicodeDecodeError as error:
        raise _RejectedError("not UTF-8", f"the row is not UTF-8 text ({error.reason})") from error
    except json.JSONDecodeError as error:
        detail = f"the row is not valid JSON ({error.msg} at column {error.colno})"
        raise _RejectedError("not JSON", detail) from error
    except (ValueError, RecursionError) as error:
        raise _RejectedError("not JSON", f"the row is not valid JSON ({error})") from error
    if not isinstance(record, dict):
        detail = f"the row is a {type(record).__name__} instead of an object with messages"
        raise _RejectedError("not an object", detail)
    return record


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON number")


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        key = Counter(key for key, _ in pairs).most_common(1)[0][0]
        raise _RejectedError("repeated key", f"the key {short(key)} is there twice in one object")
    return found


DECODER = json.JSONDecoder(parse_constant=_refuse_constant, object_pairs_hook=_unique_keys)


def _without_nulls(value: Any) -> Any:
    """Parquet fills the fields that a nested value lacks with nulls."""
    if isinstance(value, dict):
        return {key: _without_nulls(one) for key, one in value.items() if one is not None}
    return [_without_nulls(one) for one in value] if isinstance(value, list) else value


def _conversation(record: dict[str, Any], fallback_id: str) -> Conversation:
    identity = record.get("id")
    if isinstance(identity, int) and not isinstance(identity, bool):
        identity = str(identity)
    elif identity is not None:
        identity = _text(identity, "the id")
    family = record.get("family")
    if family is not None and not (isinstance(family, str) and FAMILY.fullmatch(family)):
        detail = f"the family is {short(family)}; use letters, digits and _ . - only"
        raise _RejectedError("family", detail)
    if media := sorted(key for key in MEDIA if record.get(key)):
        raise _RejectedError("not text", f"the row has {media[0]}; only text is read")
    messages = _with_system(_messages(record), record.get("system"))
    _check_order(messages)
    tools = record.get("tools") or []
    if not isinstance(tools, list):
        raise _RejectedError("tools", f"tools is a {type(tools).__name__}; give a list")
    return Conversation(identity or fallback_id, family or "default", messages, tuple(tools))


def _messages(record: dict[str, Any]) -> list[dict[str, Any]]:
    """The messages of any of the four shapes."""
    shapes = [key for key in (*LISTS, "instruction", "prompt") if record.get(key) is not None]
    if not shapes:
        raise _RejectedError(
            "unknown shape", "the row has no messages, conversations, instruction or prompt"
        )
    if shapes[0] not in LISTS:
        return _question(record, shapes)
    given = record[shapes[0]]
    if isinstance(given, dict) and all(isinstance(column, list) for column in given.values()):
        # `datasets` once stored lists of objects as an object of lists.
        columns = {len(column) for column in given.values()}
        if len(columns) == 1:
            rows = zip(*given.values(), strict=True)
            given = [_without_nulls(dict(zip(given, row, strict=True))) for row in rows]
    if not isinstance(given, list):
        detail = f"{shapes[0]} is a {type(given).__name__}; give a list of objects"
        raise _RejectedError("no messages", detail)
    if not given:
        raise _RejectedError("no messages", f"{shapes[0]} is an empty list")
    messages = [_message(one, f"message {i}") for i, one in enumerate(given, start=1)]
    # Some data sets repeat the first question as the row's prompt.
    said = next((one["content"] for one in messages if one["role"] == "user"), None)
    if shapes[1:] and (shapes[1:] != ["prompt"] or record["prompt"] != said):
        raise _RejectedError(
            "several shapes", f"the row has both {shapes[0]} and {shapes[1]}; keep one of them"
        )
    return messages


def _question(record: dict[str, Any], shapes: Sequence[str]) -> list[dict[str, Any]]:
    """A question and, where there is one, its answer."""
    given = [key for key in ANSWERS if record.get(key) is not None]
    inputs = ["prompt", "input"] if shapes[0] == "prompt" and record.get("input") else []
    for several in (shapes, given, inputs):
        if len(several) > 1:
            raise _RejectedError(
                "several shapes", f"the row has both {several[0]} and {several[1]}; keep one"
            )
    if record.get("history"):
        raise _RejectedError("unread field", "the row has a history; write it as messages")
    content = _text(record[shapes[0]], f"the {shapes[0]}")
    more = record.get("input")
    if more is not None and not (isinstance(more, str) and not more.strip()):
        content += "\n\n" + _text(more, "the input")
    messages = [{"role": "user", "content": content}]
    if given:
        answer = _text(record[given[0]], f"the {given[0]}", blank="empty answer")
        messages.append({"role": "assistant", "content": answer})
    return messages


def _with_system(messages: list[dict[str, Any]], system: Any) -> list[dict[str, Any]]:
    if system in (None, ""):
        return messages
    first = {"role": "system", "content": _text(system, "the system text")}
    if messages[0]["role"] != "system":
        return [first, *messages]
    if messages[0] != first:
        raise _RejectedError(
            "several shapes", "the row has a system text and another system message; keep one"
        )
    return messages


def _message(given: Any, name: str) -> dict[str, Any]:
    if not isinstance(given, dict):
        detail = f"{name} is a {type(given).__name__}; give an object with role and content"
        raise _RejectedError("message not an object", detail)
    written = given.get("role", given.get("from"))
    if written is None:
        raise _RejectedError("no role", f"{name} has no role")
    role = ROLES.get(written) if isinstance(written, str) else None
    if role is None:
        detail = f"{name} has the role {short(written)}; use system, user, assistant or tool"
        raise _RejectedError("unknown role", detail)
    if media := sorted(key for key in MEDIA if given.get(key)):
        raise _RejectedError("not text", f"{name} has {media[0]}; only text is read")
    if unread := sorted(key for key in UNREAD if given.get(key)):
        raise _RejectedError("unread field", f"{name} has {unread[0]}, which is not read")
    if given.get("weight") == 0:
        raise _RejectedError("unread field", f"{name} has the weight 0; drop what is not learned")
    content = given.get("content", given.get("value"))
    if written == "function_call":
        return {"role": role, "content": "", "tool_calls": _tool_calls([content], name)}
    if role != "assistant":
        names = {key: given.get(key) for key in ("name", "tool_call_id") if role == "tool"}
        kept = {k: _text(v, f"{name}'s {k}") for k, v in names.items() if v is not None}
        return {"role": role, "content": _text(content, name), **kept}
    message: dict[str, Any] = {"role": role}
    if calls := given.get("tool_calls"):
        message["content"] = "" if content in (None, "") else _text(content, name)
        message["tool_calls"] = _tool_calls(calls, name)
    else:
        message["content"] = _text(content, name, blank="empty answer")
    if given.get("reasoning_content") not in (None, ""):
        message["reasoning_content"] = _text(given["reasoning_content"], f"{name}'s reasoning")
    return message


def _tool_calls(given: Any, name: str) -> list[dict[str, Any]]:
    """Calls in OpenAI's form, with arguments as an object, as chat templates want them."""
    calls = []
    for call in given if isinstance(given, list) else [given]:
        try:
            call = DECODER.decode(call) if isinstance(call, str) else call
            function = call.get("function", call)
            arguments = function.get("arguments", {})
            arguments = DECODER.decode(arguments) if isinstance(arguments, str) else arguments
            if not isinstance(arguments, dict) or not isinstance(function["name"], str):
                raise TypeError
        except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
            detail = f"{name} has the tool call {short(call)}; give a name and an arguments object"
            raise _RejectedError("tool call", detail) from error
        _check_characters(function["name"] + json.dumps(arguments, ensure_ascii=False), name)
        identity = {"id": _text(call["id"], f"{name}'s id")} if call.get("id") else {}
        function = {"name": function["name"], "arguments": arguments}
        calls.append(identity | {"type": "function", "function": function})
    return calls


def _text(value: Any, name: str, *, blank: str = "empty text") -> str:
    """A text, or text parts joined."""
    if value is None:
        raise _RejectedError("no content", f"{name} has no text")
    if isinstance(value, list):
        kinds = [part.get("type") if isinstance(part, dict) else part for part in value]
        if other := [kind for kind in kinds if kind != "text"]:
            detail = f"{name} has a part of the type {short(other[0])}; only text parts are read"
            raise _RejectedError("not text", detail)
        if not all(isinstance(part.get("text"), str) for part in value):
            raise _RejectedError("not text", f"{name} has a text part without text")
        value = "".join(part["text"] for part in value)
    if not isinstance(value, str):
        raise _RejectedError("not text", f"{name} is a {type(value).__name__}; give it as text")
    if not value.strip():
        raise _RejectedError(blank, f"{name} is blank; fill it in or drop the row")
    _check_characters(value, name)
    return value


def _check_characters(text: str, name: str) -> None:
    if found := CONTROL.search(text) or SURROGATE.search(text):
        detail = f"{name} has the character {found[0]!r} in its text; take it out"
        raise _RejectedError("control characters", detail)


def _check_order(messages: Sequence[Mapping[str, Any]]) -> None:
    """An optional system message, then turns as `FOLLOWS` has them."""
    previous = "system"
    for i, message in enumerate(messages, start=1):
        role = message["role"]
        if role not in FOLLOWS[previous] and not (i == 1 and role == "system"):
            raise _RejectedError(
                "order of roles",
                f"message {i} is of the {role} instead of the {' or '.join(FOLLOWS[previous])}",
            )
        previous = "assistant with tool calls" if message.get("tool_calls") else role
    if previous == "system":
        raise _RejectedError("order of roles", "the row has only a system message")
