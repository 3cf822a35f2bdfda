"""Benchmark tasks: where the field's prompts come from and how they are worded.

Wording and sources are those of the DFlash benchmark script, so that tau can be set beside
published numbers; alpaca is the one that DFlow adds. A task is read from its hub source, or from a
folder with one JSONL file a task: `<task>.jsonl`, whose rows have the source's own fields, or
`turns`, the user's messages as they are to be asked.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

from dflow_lightning.data.conversations import (
    FAMILY,
    RejectedError,
    check_text,
    load_record,
    raw_rows,
)
from dflow_lightning.data.prompts import Prompt
from dflow_lightning.data.template import ChatEncoder
from dflow_lightning.errors import InputError

TaskName = Literal["gsm8k", "math500", "humaneval", "mbpp", "mt-bench", "alpaca"]
SUBSET_SEED = 42  # of the subset that `limit` draws, as in the field's scripts
STEP_BY_STEP = "\nPlease reason step by step, and put your final answer within \\boxed{}."
HUMANEVAL = "Write a solution to the following problem and make sure that it passes the tests:\n"

AnswerPrompts = Callable[[list[list[int]]], list[str]]


class TaskRow(NamedTuple):
    """One conversation to be held; `turns` are the user's messages."""

    id: str
    family: str
    turns: list[str]


@dataclass(frozen=True)
class Task:
    """A hub data set and what it asks: `turns` words one of its rows."""

    source: str
    config: str | None
    split: str
    turns: Callable[[Mapping[str, Any]], list[str]]


def _alpaca(row: Mapping[str, Any]) -> list[str]:
    given = row.get("input")
    return [f"{row['instruction']}\n\nInput:\n{given}" if given else row["instruction"]]


TASKS: dict[str, Task] = {
    "gsm8k": Task("openai/gsm8k", "main", "test", lambda row: [row["question"] + STEP_BY_STEP]),
    "math500": Task(
        "HuggingFaceH4/MATH-500", None, "test", lambda row: [row["problem"] + STEP_BY_STEP]
    ),
    "humaneval": Task(
        "openai/openai_humaneval", None, "test",
        lambda row: [f"{HUMANEVAL}```python\n{row['prompt']}\n```"],
    ),
    "mbpp": Task(
        "google-research-datasets/mbpp", "sanitized", "test", lambda row: [row["prompt"]]
    ),
    "mt-bench": Task(
        "HuggingFaceH4/mt_bench_prompts", None, "train", lambda row: list(row["prompt"])
    ),
    "alpaca": Task("tatsu-lab/alpaca", None, "train", _alpaca),
}  # fmt: skip


@dataclass(frozen=True)
class TaskPrompts:
    """Prompts of tasks, ready to be decoded.

    Args:
        left_out: turns a task whose prompt does not fit the target's context.
        sources: where each task was read.
        digest: of what is asked, to know the same prompts again.
    """

    prompts: list[Prompt]
    left_out: dict[str, int]
    sources: dict[str, str]
    digest: str


def task_prompts(
    names: Sequence[str],
    encoder: ChatEncoder,
    *,
    limit: int | None = None,
    suite_dir: Path | None = None,
    max_length: int | None = None,
    answer: AnswerPrompts | None = None,
    field: str = "suite",
) -> TaskPrompts:
    """Prompts of several tasks.

    Args:
        limit: at most this many conversations of each task that fit, drawn with seed 42.
        suite_dir: folder with the tasks' files; by default they come from the hub.
        max_length: longest prompt allowed, in tokens; longer ones are left out and counted.
        answer: what the target says to prompts, for conversations of several turns; None leaves
            all but the first turns out.
        field: the setting that named the tasks, for messages.

    Raises:
        InputError: a task is unknown or cannot be read, or none of its prompts fits.
    """
    rows: list[TaskRow] = []
    sources = {}
    for name in names:
        if name not in TASKS:
            known = ", ".join(get_args(TaskName))
            raise InputError(f"{field}: there is no task {name!r}; choose of {known}")
        found, sources[name] = read_task(name, suite_dir, field)
        rows += select(found, limit, encoder, max_length)
    prompts, left_out = conversation_prompts(rows, encoder, max_length=max_length, answer=answer)
    for name in names:
        if not any(prompt.family == name for prompt in prompts):
            raise InputError(
                f"{field}: no prompt of {name} has at most {max_length} tokens, which the target's "
                "context holds; leave the task out"
            )
    return TaskPrompts(prompts, left_out, sources, rows_digest(rows))


def read_task(name: str, suite_dir: Path | None, field: str) -> tuple[list[TaskRow], str]:
    """All rows of a task in the order of its source, and the source's name."""
    task = TASKS[name]
    if suite_dir is not None:
        path = suite_dir.expanduser() / f"{name}.jsonl"
        if not path.is_file():
            raise InputError(
                f"suite_dir: {suite_dir} holds no {name}.jsonl; put the task there, or leave "
                "suite_dir out to read it from the hub"
            )
        return read_turns(path, name, task.turns), str(path)
    records, source = _hub_rows(name, task, field)
    rows = [TaskRow(f"{name}-{i}", name, task.turns(row)) for i, row in enumerate(records)]
    return rows, source


def read_turns(
    path: Path,
    family: str,
    wording: Callable[[Mapping[str, Any]], list[str]] | None = None,
    field: str = "suite_dir",
) -> list[TaskRow]:
    """Rows of a JSONL file, each with `turns` or, where `wording` is given, its task's fields."""
    rows: list[TaskRow] = []
    for number, raw in raw_rows(path, field):
        where = f"{field}: line {number} of {path}"
        try:
            record = load_record(raw)
            turns = record["turns"] if "turns" in record or wording is None else wording(record)
            if not isinstance(turns, list) or not turns:
                raise RejectedError("no turns", "its turns are not a list of messages")
            for i, turn in enumerate(turns, start=1):
                check_text(turn, f"turn {i}")
        except (RejectedError, KeyError, TypeError) as error:
            reason = str(error)
            if isinstance(error, KeyError):
                reason = f"it has no {error}"
            elif isinstance(error, TypeError):  # from `wording`, which joins texts
                reason = "turn 1 is not text"
            raise InputError(
                f"{where} is no row of {family} ({reason}); give turns, a list of the user's "
                "messages"
            ) from error
        name = record.get("family", family)
        if not isinstance(name, str) or not FAMILY.fullmatch(name):
            raise InputError(f"{where} has the family {name!r}; use letters, digits and _ . - only")
        rows.append(TaskRow(f"{family}-{len(rows)}", name, turns))
    if not rows:
        raise InputError(f"{field}: {path} is empty; it needs at least one row")
    return rows


def _hub_rows(name: str, task: Task, field: str) -> tuple[Iterable[Mapping[str, Any]], str]:
    from datasets import load_dataset

    source = " ".join(part for part in (task.source, task.config, task.split) if part)
    try:
        return load_dataset(task.source, task.config, split=task.split), source
    except (OSError, ValueError, RuntimeError) as error:
        reason = str(error).splitlines()[0][:200]
        raise InputError(
            f"{field}: {name} could not be read from the hub ({source}: {reason}); give suite_dir, "
            f"a folder with {name}.jsonl"
        ) from error


def select(
    rows: Sequence[TaskRow], limit: int | None, encoder: ChatEncoder, max_length: int | None
) -> list[TaskRow]:
    """At most `limit` rows whose first turn fits, shuffled with seed 42; all in order for None."""
    if limit is None:
        return list(rows)
    shuffled = list(rows)
    random.Random(SUBSET_SEED).shuffle(shuffled)
    chosen: list[TaskRow] = []
    for row in shuffled:
        if len(chosen) == limit:
            break
        if max_length is None or len(encoder.prompt(_said([row.turns[0]]))) <= max_length:
            chosen.append(row)
    return chosen


def conversation_prompts(
    rows: Sequence[TaskRow],
    encoder: ChatEncoder,
    *,
    max_length: int | None = None,
    answer: AnswerPrompts | None = None,
) -> tuple[list[Prompt], dict[str, int]]:
    """A prompt a turn, the later ones behind the target's own answers; and what does not fit."""
    prompts: list[Prompt] = []
    left_out: dict[str, int] = {}
    said = {row.id: [row.turns[0]] for row in rows}
    for turn in range(max((len(row.turns) for row in rows), default=0)):
        asked: dict[str, list[int]] = {}
        for row in rows:
            if len(row.turns) <= turn or row.id not in said:
                continue
            ids = encoder.prompt(_said(said[row.id]))
            if max_length is not None and len(ids) > max_length:
                left_out[row.family] = left_out.get(row.family, 0) + len(row.turns) - turn
                del said[row.id]
                continue
            name = row.id if len(row.turns) == 1 else f"{row.id}/turn-{turn + 1}"
            prompts.append(Prompt(name, row.family, ids, []))
            if len(row.turns) > turn + 1:
                asked[row.id] = ids
        if not asked or answer is None:
            break
        answers = dict(zip(asked, answer(list(asked.values())), strict=True))
        for row in rows:
            if row.id in answers:
                said[row.id] += [answers[row.id], row.turns[turn + 1]]
    return prompts, left_out


def _said(texts: Sequence[str]) -> list[dict[str, str]]:
    """User and assistant in turn."""
    roles = ("user", "assistant")
    return [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)]


def rows_digest(rows: Sequence[TaskRow]) -> str:
    """A hash of what is asked."""
    return hashlib.sha256(json.dumps([list(row) for row in rows]).encode()).hexdigest()[:16]
