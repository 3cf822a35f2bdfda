"""Conversations in JSONL files, checked line by line.

A row is `{"prompt": ..., "answer": ...}` or `{"messages": [{"role": ..., "content": ...}, ...]}`,
with an optional `id` and `family`; `"finished": false` says that the last answer reached its limit
instead of its end. Other keys are notes and are not read.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflow_lightning.errors import InputError

TEXT_FIELDS = {"role", "content", "reasoning_content"}
FAMILY = re.compile(r"[A-Za-z0-9_.-]+")  # families are part of metric names


@dataclass(frozen=True)
class Row:
    """One conversation; `where` names its file and line for messages to the user."""

    id: str
    family: str
    messages: list[dict[str, str]]
    where: str
    finished: bool = True

    @property
    def is_answered(self) -> bool:
        return self.messages[-1]["role"] == "assistant"

    @property
    def prompt(self) -> list[dict[str, str]]:
        """The conversation up to the last answer."""
        return self.messages[:-1] if self.is_answered else self.messages


def read_rows(path: Path, *, field: str, need_answer: bool = True) -> list[Row]:
    """Read and check every row of a JSONL file.

    Args:
        field: the setting that named the file, for messages.
        need_answer: whether a row must end with an answer.

    Raises:
        InputError: anything is wrong with the file or with one row of it.
    """
    rows: list[Row] = []
    seen: set[str] = set()
    for number, line in _lines(path, field):
        where = f"{field}: line {number} of {path}"
        row = _parse(line, where, need_answer)
        if row.id in seen and row.id != _content_id(row.messages):
            raise InputError(
                f"{where} has the id {row.id!r} of an earlier line; give every row its own id"
            )
        seen.add(row.id)
        rows.append(row)
    if not rows:
        raise InputError(f"{field}: {path} is empty; it needs at least one row")
    return rows


def check_disjoint(train: Sequence[Row], held_out: Sequence[Row], field: str) -> None:
    """Refuse held-out prompts that are trained on.

    Raises:
        InputError: with how many they are.
    """
    known = {_content_id(row.prompt) for row in train}
    shared = [row for row in held_out if _content_id(row.prompt) in known]
    if shared:
        raise InputError(
            f"{field}: {len(shared)} of {len(held_out)} prompts also stand in data.train, first "
            f"{shared[0].id!r}; take them out of one of the two files"
        )


def _lines(path: Path, field: str) -> Iterator[tuple[int, str]]:
    """Lines that are not blank, with their numbers."""
    if path.is_dir():
        raise InputError(f"{field}: {path} is a directory; give a JSONL file in it")
    if not path.exists():
        raise InputError(f"{field}: {path} does not exist; give a JSONL file")
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                text = line.decode("utf-8-sig" if number == 1 else "utf-8").strip()
                if text:
                    yield number, text
    except UnicodeDecodeError as error:
        raise InputError(
            f"{field}: line {number} of {path} is not UTF-8 text ({error.reason}); "
            "save the file as UTF-8"
        ) from error
    except OSError as error:
        raise InputError(
            f"{field}: {path} cannot be read ({error.strerror}); give a readable JSONL file"
        ) from error


def _parse(line: str, where: str, need_answer: bool) -> Row:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise InputError(
            f"{where} is not valid JSON ({error.msg} at column {error.colno}); "
            "write one JSON object per line"
        ) from error
    if not isinstance(record, dict):
        raise InputError(
            f"{where} is not a JSON object; write one with prompt and answer, or messages"
        )
    if record.get("id") is not None:
        identity = (
            str(record["id"]) if isinstance(record["id"], int) else _text(record, "id", where)
        )
        where = f"{where} (id {identity!r})"
    messages = _messages(record, where, need_answer)
    family = _text(record, "family", where) if record.get("family") is not None else "default"
    if not FAMILY.fullmatch(family):
        raise InputError(
            f"{where} has the family {family!r}; use letters, digits and _ . - only, "
            "because it becomes part of metric names"
        )
    if record.get("tools"):
        raise InputError(f"{where} has tools; let dflow-train prepare render them")
    finished = record.get("finished")
    if finished is not None and not isinstance(finished, bool):
        raise InputError(f"{where} has the finished {finished!r}; give true or false")
    if record.get("id") is None:
        identity = _content_id(messages)
    return Row(identity, family, messages, where, finished is not False)


def _messages(record: dict[str, Any], where: str, need_answer: bool) -> list[dict[str, str]]:
    if "messages" in record and "prompt" in record:
        raise InputError(f"{where} has both messages and prompt; keep one of them")
    if "messages" not in record:
        if "prompt" not in record:
            raise InputError(f"{where} has no prompt; give prompt and answer, or messages")
        messages = [{"role": "user", "content": _text(record, "prompt", where)}]
        if need_answer or record.get("answer") is not None:
            messages.append({"role": "assistant", "content": _text(record, "answer", where)})
        return messages
    given = record["messages"]
    if not isinstance(given, list) or not given:
        raise InputError(f"{where} has no messages; give a list of role and content")
    messages = [_message(one, f"message {i}", where) for i, one in enumerate(given, start=1)]
    _check_order([message["role"] for message in messages], where, need_answer)
    return messages


def _message(given: Any, name: str, where: str) -> dict[str, str]:
    if not isinstance(given, dict):
        raise InputError(
            f"{where}: {name} is a {type(given).__name__}; give an object with role and content"
        )
    unknown = [key for key, value in given.items() if value is not None and key not in TEXT_FIELDS]
    if unknown:
        raise InputError(
            f"{where}: {name} has {unknown[0]!r}, which is not supported; keep to role and content"
        )
    present = [key for key in ("role", "content", "reasoning_content") if key in given]
    fields = dict.fromkeys(["role", "content", *(k for k in present if given[k] is not None)])
    return {key: _text(given, key, f"{where}: {name}") for key in fields}


def _check_order(roles: list[str], where: str, need_answer: bool) -> None:
    """An optional system message, then user and assistant in turn."""
    if need_answer and "assistant" not in roles:
        raise InputError(
            f"{where} has no supervised token, because no message is an assistant's; add the answer"
        )
    start = 1 if roles[0] == "system" else 0
    for i, role in enumerate(roles[start:]):
        expected = ("user", "assistant")[i % 2]
        if role != expected:
            raise InputError(
                f"{where}: message {start + i + 1} has the role {role!r} instead of {expected!r}; "
                "let user and assistant take turns after an optional system message"
            )
    if len(roles) == start:
        raise InputError(f"{where} has only a system message; add the user's")
    if need_answer and roles[-1] != "assistant":
        raise InputError(
            f"{where} ends with a message of the user; add the answer or drop the message"
        )


def _text(record: dict[str, Any], key: str, where: str) -> str:
    """A field that must hold text."""
    if record.get(key) is None:
        raise InputError(f"{where} has no {key}; give it as text")
    if not isinstance(record[key], str):
        raise InputError(
            f"{where} has a {key} of type {type(record[key]).__name__}; give it as text"
        )
    if not record[key].strip():
        raise InputError(f"{where} has a blank {key}; fill it in or drop the row")
    return record[key]


def _content_id(messages: Sequence[dict[str, str]]) -> str:
    """A name that depends on nothing but the conversation."""
    return hashlib.sha256(json.dumps(messages).encode()).hexdigest()[:16]
