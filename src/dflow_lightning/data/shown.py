"""Does each text of a conversation stand in what the chat template made of it?

A template may drop what it is given without a word: a system text, a text beside a tool call, the
reasoning of an answer. Such a row would teach the drafter answers to questions that the target
never reads. One thing is left out on purpose, by the templates of all reasoning models: what the
target thought in earlier turns. It is not asked for, since the target does not see it either.

Templates trim texts, and write those of tools as JSON or XML. So a text counts as shown however its
white space, quotes and backslashes come out.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from reprlib import repr as short
from typing import Any, NamedTuple

from markupsafe import escape

# What JSON, XML and the trimming of templates change around and within a text.
LOOSE = re.compile(r"[\s\\\"']+")
THINK_MARK = re.compile(r"</?think>")
# Families spell the end of reasoning in their own way.
THINK_END = re.compile(r"</[\w:]*think\w*>|\[/THINK\]", re.IGNORECASE)
TAKEN = "\0"  # no text has it: control characters are refused where rows are read


class Written(NamedTuple):
    """A text of a conversation, and what it is, for messages."""

    what: str
    text: str


def left_out(
    rendered: str, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any], last: int | None
) -> str:
    """The first text that `rendered` lacks, described; empty where it has them all.

    A text that stands there once is found once, however many texts equal it.

    Args:
        last: index of the answer that is shown as it was written; earlier ones may lack their
            reasoning.
    """
    wanted = list(_written(messages, tools, last))
    missing = set()
    remaining = _squeezed(rendered)
    # The longest first: a short text that is a part of a longer one is not found in its place.
    for number in sorted(range(len(wanted)), key=lambda i: len(wanted[i].text), reverse=True):
        spellings = [one for one in _spellings(wanted[number].text) if one]
        found = next((one for one in spellings if one in remaining), None)
        if found is not None:
            remaining = remaining.replace(found, TAKEN, 1)
        elif spellings:
            missing.add(number)
    if not missing:
        return ""
    first = wanted[min(missing)]
    return f"{first.what} ({short(first.text.strip())})"


def _written(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Any], last: int | None
) -> Iterator[Written]:
    for number, message in enumerate(messages, start=1):
        content, place = message.get("content") or "", f"message {number}"
        if message["role"] != "assistant":
            yield Written(f"the {message['role']}'s text, {place}", content)
            continue
        whole = number - 1 == last
        *thought, said = (THINK_MARK if whole else THINK_END).split(content)
        if whole:
            thoughts = [message.get("reasoning_content") or "", *thought]
            yield from (Written(f"the reasoning of {place}", one) for one in thoughts)
        yield Written(f"the assistant's text, {place}", said)
        for call in message.get("tool_calls") or ():
            function = call["function"]
            parts = chain([function["name"]], _leaves(function.get("arguments")))
            yield from (Written(f"a tool call of {place}", one) for one in parts)
    # After the calls, which may name the tool where its definition is left out.
    for tool in tools:
        function = tool.get("function", tool) if isinstance(tool, Mapping) else {}
        name = function.get("name") if isinstance(function, Mapping) else None
        if isinstance(name, str):
            yield Written("the definition of a tool", name)


def _leaves(value: Any) -> Iterator[str]:
    """The keys, texts and numbers of arguments."""
    if isinstance(value, Mapping):
        for key, one in value.items():
            yield str(key)
            yield from _leaves(one)
    elif isinstance(value, list | tuple):
        for one in value:
            yield from _leaves(one)
    elif isinstance(value, str | int | float) and not isinstance(value, bool):
        yield str(value)


def _spellings(text: str) -> Iterator[str]:
    """A text as it is, as JSON with and without non-ASCII letters, and with HTML's entities."""
    text = text.strip()
    yield _squeezed(text)
    yield _squeezed(json.dumps(text, ensure_ascii=False))
    yield _squeezed(json.dumps(text))
    yield _squeezed(str(escape(text)))


def _squeezed(text: str) -> str:
    return LOOSE.sub("", text)
