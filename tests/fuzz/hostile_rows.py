"""Rows of conversations as nobody should write them, and as people do."""

import copy
from typing import Any

from hypothesis import strategies as st

TRIMMINGS = (
    "", "", "", " ", "\n", "\n\n", "\t", "<think>", "</think>", "<think>\n", "\n</think>\n\n",
    "<|im_end|>", "<|im_start|>assistant\n", "<tool_call>", "<tool_response>", "[/INST]", "</s>",
    '"', "'", "\\", "\\n", "{{", "{% raw %}", "<b>&", "é", "🙂", "\u3000", "\ue000", "\ufeff",
)  # fmt: skip
BROKEN = ("\x00", "\x1b[31m", "\x7f", "\ud800")
SPOKEN = ("content", "value", "reasoning_content", "tool_calls")
NOTES = ("id", "family", "finished", "score", "source", "name", "weight", "tool_call_id")
UNREAD = (
    "context", "history", "images", "image", "audio", "function_call", "refusal", "thinking",
    "reasoning", "system_prompt", "documents", "functions",
)  # fmt: skip

words = st.text("abcdefghijklmnopqrstuvwxyz", min_size=5, max_size=9)


@st.composite
def texts(draw: st.DrawFn, broken: bool = False) -> str:
    """A few words between characters that templates, tokenizers and JSON treat in their own way."""
    trimmings = st.sampled_from(TRIMMINGS + (BROKEN if broken else ()))
    parts = draw(st.lists(st.tuples(trimmings, words, trimmings), min_size=1, max_size=3))
    return " ".join("".join(part) for part in parts)


scalars = st.none() | st.booleans() | st.integers() | st.floats() | texts(broken=True) | st.just("")
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(words, inner, max_size=3),
    max_leaves=5,
)
arguments = st.dictionaries(
    words, st.integers() | texts() | st.lists(texts(), max_size=2), max_size=2
)
calls = st.builds(
    lambda name, given: {"type": "function", "function": {"name": name, "arguments": given}},
    words, arguments,
)  # fmt: skip
tools = st.builds(
    lambda name, text: {"type": "function", "function": {"name": name, "description": text}},
    words, texts(),
)  # fmt: skip
parts = st.lists(texts().map(lambda text: {"type": "text", "text": text}), min_size=1, max_size=2)


@st.composite
def answers(draw: st.DrawFn) -> dict[str, Any]:
    """An assistant's message, without its role."""
    message: dict[str, Any] = {"content": draw(texts() | parts)}
    kind = draw(st.sampled_from(["text", "text", "thought", "thought in text", "call", "both"]))
    if kind == "thought":
        message["reasoning_content"] = draw(texts())
    elif kind == "thought in text":
        message["content"] = f"<think>\n{draw(texts())}\n</think>\n\n{draw(texts())}"
    elif kind in ("call", "both"):
        message["tool_calls"] = draw(st.lists(calls, min_size=1, max_size=2))
        message["content"] = "" if kind == "call" else message["content"]
    if draw(st.integers(0, 9)) == 0:
        message["weight"] = draw(st.sampled_from([0, 1, 0.0, 2, "0"]))
    return message


@st.composite
def messages(draw: st.DrawFn) -> list[dict[str, Any]]:
    """A conversation in good order."""
    found = []
    if draw(st.booleans()):
        found.append(
            {"role": draw(st.sampled_from(["system", "developer"])), "content": draw(texts())}
        )
    for _ in range(draw(st.integers(1, 3))):
        found.append({"role": "user", "content": draw(texts() | parts)})
        answer = {"role": "assistant", **draw(answers())}
        found.append(answer)
        while answer.get("tool_calls"):
            found.append({"role": "tool", "content": draw(texts())})
            answer = {"role": "assistant", **draw(answers())}
            found.append(answer)
    if draw(st.integers(0, 4)) == 0:
        found.pop()
    return found


@st.composite
def questions(draw: st.DrawFn) -> dict[str, Any]:
    """A prompt or an instruction, mostly with an answer."""
    asked = draw(st.sampled_from(["prompt", "instruction"]))
    answer = draw(st.sampled_from(["answer", "output", "completion", "response", "solution"]))
    row = {asked: draw(texts()), answer: draw(texts())}
    if draw(st.booleans()):
        row["input"] = draw(texts() | values)
    return row


def _sharegpt(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    roles = {"user": "human", "assistant": "gpt", "tool": "observation"}
    return [
        {"from": roles.get(one["role"], one["role"]), "value": one["content"]}
        | {key: value for key, value in one.items() if key not in ("role", "content")}
        for one in found
    ]


@st.composite
def rows(draw: st.DrawFn) -> Any:
    """A row, mostly a good one, with up to three things changed in it."""
    kinds = ["messages", "messages", "conversations", "prompt", "question", "anything"]
    kind = draw(st.sampled_from(kinds))
    if kind == "anything":
        return draw(values)
    row: dict[str, Any]
    if kind == "question":
        row = draw(questions())
    else:
        found = draw(messages())
        row = {kind: _sharegpt(found) if kind == "conversations" else found}
        if kind == "prompt" and draw(st.booleans()):
            at = draw(st.integers(1, len(found)))
            row = {"prompt": found[:at], "completion": found[at:] or draw(texts())}
    if draw(st.integers(0, 3)) == 0:
        row["tools"] = draw(st.lists(tools, max_size=2))
    if draw(st.integers(0, 3)) == 0:
        row["system"] = draw(texts())
    if draw(st.booleans()):
        return row
    for _ in range(draw(st.integers(1, 3))):
        _change(draw, row)
    return row


def _dicts(value: Any) -> list[dict[str, Any]]:
    return [one for one in value if isinstance(one, dict)] if isinstance(value, list) else []


def _change(draw: st.DrawFn, row: dict[str, Any]) -> None:
    """Add, replace or remove a key of the row or of one of its messages."""
    inner = [one for value in row.values() if isinstance(value, list) for one in value]
    inner += [
        call for one in inner if isinstance(one, dict) for call in _dicts(one.get("tool_calls"))
    ]
    inner += [one["function"] for one in _dicts(inner) if isinstance(one.get("function"), dict)]
    place = draw(st.sampled_from([row, *_dicts(inner)]))
    known = ("messages", "prompt", "instruction", "input", "answer", "output", "system", "tools")
    whole = copy.deepcopy(row.get("messages"))
    groups = [SPOKEN, NOTES, UNREAD, known, ("role", "from"), ("arguments", "args", "name")]
    key = draw(st.sampled_from(draw(st.sampled_from([*groups, tuple(place) or SPOKEN]))))
    if draw(st.integers(0, 3)) == 0:
        place.pop(key, None)
    else:
        place[key] = draw(values | st.just(whole))
