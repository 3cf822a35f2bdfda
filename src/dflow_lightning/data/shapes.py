"""A raw row in any of the shapes that people write, as one `Conversation`, or why it is none."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from reprlib import repr as short
from typing import Any

from dflow_lightning.data.files import MAX_ROW
from dflow_lightning.data.rows import FAMILY

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


@dataclass(frozen=True)
class Conversation:
    """One normalised row.

    A message has `role` (system, user, assistant, tool) and `content`, an assistant's also
    `reasoning_content` and `tool_calls` where given, a tool's also `name` and `tool_call_id`. After
    an optional system message user and assistant take turns; the last message may be any but the
    system's. `tools` are the definitions of the functions that the assistant could call; `finished`
    is whether the last answer ended by itself.
    """

    id: str
    family: str
    messages: list[dict[str, Any]]
    tools: tuple[Any, ...] = ()
    finished: bool = True


@dataclass(frozen=True)
class Reject:
    """Why a row cannot be used: `reason` is one of a few phrases, `detail` a sentence."""

    reason: str
    detail: str


class RejectedError(Exception):
    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reject = Reject(reason, detail)


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
        identity = _text(identity, "the id")
    family = record.get("family")
    if family is not None and not (isinstance(family, str) and FAMILY.fullmatch(family)):
        detail = f"the family is {short(family)}; use letters, digits and _ . - only"
        raise RejectedError("family", detail)
    if media := sorted(key for key in MEDIA if record.get(key)):
        raise RejectedError("not text", f"the row has {media[0]}; only text is read")
    messages = _with_system(_messages(record), record.get("system"))
    _check_order(messages)
    tools = record.get("tools") or []
    if not isinstance(tools, list):
        raise RejectedError("tools", f"tools is a {type(tools).__name__}; give a list")
    finished = record.get("finished")
    if finished is not None and not isinstance(finished, bool):
        detail = f"finished is {short(finished)}; give true or false"
        raise RejectedError("finished", detail)
    name = identity or fallback_id
    return Conversation(name, family or "default", messages, tuple(tools), finished is not False)


def _messages(record: dict[str, Any]) -> list[dict[str, Any]]:
    """The messages of any of the four shapes."""
    shapes = [key for key in (*LISTS, "instruction", "prompt") if record.get(key) is not None]
    if not shapes:
        raise RejectedError(
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
        raise RejectedError("no messages", detail)
    if not given:
        raise RejectedError("no messages", f"{shapes[0]} is an empty list")
    messages = [_message(one, f"message {i}") for i, one in enumerate(given, start=1)]
    # Some data sets repeat the first question as the row's prompt.
    said = next((one["content"] for one in messages if one["role"] == "user"), None)
    if shapes[1:] and (shapes[1:] != ["prompt"] or record["prompt"] != said):
        raise RejectedError(
            "several shapes", f"the row has both {shapes[0]} and {shapes[1]}; keep one of them"
        )
    return messages


def _question(record: dict[str, Any], shapes: Sequence[str]) -> list[dict[str, Any]]:
    """A question and, where there is one, its answer."""
    given = [key for key in ANSWERS if record.get(key) is not None]
    inputs = ["prompt", "input"] if shapes[0] == "prompt" and record.get("input") else []
    for several in (shapes, given, inputs):
        if len(several) > 1:
            raise RejectedError(
                "several shapes", f"the row has both {several[0]} and {several[1]}; keep one"
            )
    if record.get("history"):
        raise RejectedError("unread field", "the row has a history; write it as messages")
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
    if media := sorted(key for key in MEDIA if given.get(key)):
        raise RejectedError("not text", f"{name} has {media[0]}; only text is read")
    if unread := sorted(key for key in UNREAD if given.get(key)):
        raise RejectedError("unread field", f"{name} has {unread[0]}, which is not read")
    if given.get("weight") == 0:
        raise RejectedError("unread field", f"{name} has the weight 0; drop what is not learned")
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
            raise RejectedError("tool call", detail) from error
        _check_characters(function["name"] + json.dumps(arguments, ensure_ascii=False), name)
        identity = {"id": _text(call["id"], f"{name}'s id")} if call.get("id") else {}
        function = {"name": function["name"], "arguments": arguments}
        calls.append(identity | {"type": "function", "function": function})
    return calls


def _text(value: Any, name: str, *, blank: str = "empty text") -> str:
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
