"""The prompts of a bench: embedded, of benchmark tasks, or of a file."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dflow_lightning.bench.row import template_hash
from dflow_lightning.data.conversations import RejectedError, load_record, raw_rows
from dflow_lightning.data.prompts import Prompt, read_prompts
from dflow_lightning.data.tasks import (
    TASKS,
    TaskRow,
    conversation_prompts,
    read_turns,
    rows_digest,
    select,
    task_prompts,
)
from dflow_lightning.data.template import ChatEncoder
from dflow_lightning.decode import SpeculativeDecoder
from dflow_lightning.errors import InputError, check_counts
from dflow_lightning.models.target import FrozenTarget

TINY_SUITE = Path("prompts/test.jsonl")  # beside the weights of the embedded target
ANSWERED_TOGETHER = 8  # first turns, when the second ones are asked for


@dataclass(frozen=True, kw_only=True)
class SuiteChoice:
    """What prompts are wanted; also a group of options of the command.

    Args:
        suite: `tiny` (the embedded target's test prompts), `all` or some of the benchmark tasks
            gsm8k, math500, humaneval, mbpp, mt-bench and alpaca, separated by commas, or a JSONL
            file of prompts or of conversations in turns.
        suite_dir: folder with the tasks as `<task>.jsonl`; tasks without a file are left out, and
            by default all come from the hub.
        limit: conversations of each task, always the same ones (seed 42); by default all.
        per_family: prompts of each family of the suite `tiny` or of a file.
        thinking: let the target think first, where its chat template knows how.
        max_new_tokens: upper limit of an answer.
    """

    suite: str = "tiny"
    suite_dir: Path | None = None
    limit: int | None = None
    per_family: int = 32
    thinking: bool = False
    max_new_tokens: int = 128

    @property
    def named(self) -> list[str]:
        """The benchmark tasks that are named; none for a file."""
        if self.suite == "all":
            return list(TASKS)
        names = self.suite.split(",")
        return names if any(name in TASKS for name in names) else []

    @property
    def missing(self) -> list[str]:
        """Named tasks that have no file in `suite_dir`; none where tasks come from the hub."""
        if self.suite_dir is None:
            return []
        there = self.suite_dir.expanduser()
        known = [name for name in self.named if name in TASKS]
        return [name for name in known if not (there / f"{name}.jsonl").is_file()]

    @property
    def tasks(self) -> list[str]:
        """The tasks that are asked: all that are named but for missing ones."""
        return [name for name in self.named if name not in self.missing]

    def check(self, concurrency: int = 1) -> None:
        """Raise `InputError` for what can be seen before the target is loaded.

        Args:
            concurrency: the largest; every family has to have so many prompts.
        """
        if self.named and not self.tasks:
            raise InputError(
                f"suite_dir: {self.suite_dir} holds none of {', '.join(self.missing)} as "
                "<task>.jsonl; put one there, or leave suite_dir out to read them from the hub"
            )
        check_counts(limit=self.limit, per_family=self.per_family)
        if self.suite_dir is not None and not self.named:
            raise InputError(
                f"suite_dir is given but suite {self.suite} names no task; choose from "
                f"{', '.join(TASKS)} or all"
            )
        if len(set(self.tasks)) < len(self.tasks):
            raise InputError(f"suite {self.suite} names a task twice; name each once")
        # A conversation of mt-bench has two prompts, all others one.
        single = [name for name in self.tasks if name != "mt-bench"]
        if self.limit is not None and single and self.limit < concurrency:
            raise InputError(
                f"concurrency holds {concurrency}, but limit leaves {self.limit} prompts of "
                f"{single[0]}; raise limit, or stay at {self.limit} or below"
            )
        if self.suite == "tiny" and self.limit is None and self.per_family < concurrency:
            raise InputError(
                f"concurrency holds {concurrency}, but per_family is {self.per_family}; raise it, "
                f"or stay at {self.per_family} or below"
            )


@dataclass(frozen=True)
class Suite:
    """Prompts, and what has to be known to compare numbers that come from them.

    Args:
        left_out: number of a task's turns that do not fit the target's context.
        missing: tasks that were named and have no file in `suite_dir`.
    """

    name: str
    prompts: list[Prompt]
    digest: str
    thinking: bool
    template: str
    sources: dict[str, str]
    left_out: dict[str, int]
    missing: list[str]

    def lines(self) -> list[str]:
        """For people: what is asked, and how."""
        families = [prompt.family for prompt in self.prompts]
        counts = ", ".join(f"{name} {families.count(name)}" for name in dict.fromkeys(families))
        lines = [
            f"suite {self.name} ({self.digest}): {counts} prompts",
            f"template {self.template}, thinking {'on' if self.thinking else 'off'}",
        ]
        if self.left_out:
            named = ", ".join(f"{name} {count}" for name, count in self.left_out.items())
            lines.append(f"left out, longer than the target's context: {named}")
        if self.missing:
            lines.append(f"left out, no file in suite_dir: {', '.join(self.missing)}")
        return lines


def suite_path(suite: str, target: str) -> Path:
    """The file a suite's name stands for.

    Raises:
        InputError: it does not exist.
    """
    if suite != "tiny":
        path = Path(suite).expanduser()
        if not path.exists():
            raise InputError(
                f"suite: {suite} does not exist; give tiny, all, some of {', '.join(TASKS)}, or a "
                "JSONL file"
            )
        return path
    path = Path(target).expanduser() / TINY_SUITE
    if not path.is_file():
        raise InputError(
            f"suite: {target} holds no {TINY_SUITE}, which the suite tiny reads; give a JSONL file"
        )
    return path


def read_suite(choice: SuiteChoice, target: FrozenTarget, decoder: SpeculativeDecoder) -> Suite:
    """All prompts of a suite.

    Later turns of a conversation stand behind what the target itself says at temperature 0,
    decoded plainly; so every drafter and temperature is asked the same.

    Raises:
        InputError: the suite cannot be read, or a prompt does not fit.
    """
    encoder = ChatEncoder(
        target.tokenizer, enable_thinking=choice.thinking, vocab_size=target.vocab_size
    )
    room = target.config.max_position_embeddings - 1

    def answer(prompts: list[list[int]]) -> list[str]:
        completions = decoder.generate_plain(
            prompts,
            max_new_tokens=choice.max_new_tokens,
            batch_size=min(ANSWERED_TOGETHER, len(prompts)),
        )
        decode = target.tokenizer.decode
        return [decode(one.token_ids, skip_special_tokens=True) for one in completions]

    def suite(prompts: list[Prompt], digest: str, sources: dict, left_out: dict) -> Suite:
        template = template_hash(target.tokenizer)
        return Suite(
            choice.suite, prompts, digest, choice.thinking, template, sources, left_out,
            choice.missing,
        )  # fmt: skip

    if choice.tasks:
        found = task_prompts(
            choice.tasks, encoder, limit=choice.limit, suite_dir=choice.suite_dir, max_length=room,
            answer=answer,
        )  # fmt: skip
        return suite(found.prompts, found.digest, found.sources, found.left_out)
    path = suite_path(choice.suite, target.name)
    if _has_turns(path):
        rows = _chosen(read_turns(path, path.stem, field="suite"), choice.limit, encoder, room)
        prompts, left_out = conversation_prompts(rows, encoder, max_length=room, answer=answer)
        return suite(prompts, rows_digest(rows), {path.stem: str(path)}, left_out)
    prompts = read_prompts(
        target.tokenizer,
        path,
        enable_thinking=choice.thinking,
        vocab_size=target.vocab_size,
        per_family=choice.per_family if choice.limit is None else choice.limit,
        max_length=room,
        field="suite",
    )
    content = hashlib.sha256(path.read_bytes()).hexdigest()[:16]
    return suite(prompts, content, {choice.suite: str(path)}, {})


def _chosen(
    rows: Sequence[TaskRow], limit: int | None, encoder: ChatEncoder, room: int
) -> list[TaskRow]:
    """`limit` conversations of each family."""
    families = dict.fromkeys(row.family for row in rows)
    chosen = (
        select([row for row in rows if row.family == name], limit, encoder, room)
        for name in families
    )
    return [row for some in chosen for row in some]


def _has_turns(path: Path) -> bool:
    """Whether a file holds conversations to be held, `turns`, instead of prompts."""
    try:
        _, raw = next(raw_rows(path, "suite"), (0, b"{}"))
        record = load_record(raw)
    except RejectedError:
        return False  # the reader of prompts says what is wrong with the row
    return "turns" in record and "prompt" not in record
