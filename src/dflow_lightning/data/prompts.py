"""Held-out prompts for real decoding."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

from dflow_lightning.data.conversations import Conversation, read_conversations
from dflow_lightning.data.template import ChatEncoder
from dflow_lightning.data.token_rows import PreparedRows, last_answer
from dflow_lightning.data.turns import training_rows
from dflow_lightning.errors import InputError


@dataclass(frozen=True)
class Prompt:
    """A conversation that waits for its answer; `reference_ids` is the file's, end token included.

    Without an answer in the file `reference_ids` is empty; one that is unfinished has no end token.
    """

    id: str
    family: str
    token_ids: list[int]
    reference_ids: list[int]


def read_prompts(
    tokenizer: Any,
    path: Path,
    *,
    enable_thinking: bool = False,
    vocab_size: int | None = None,
    per_family: int | None = None,
    max_length: int | None = None,
    field: str = "prompts",
) -> list[Prompt]:
    """Prompts of a file of conversations, which need no answer; a repeated prompt counts once.

    Args:
        vocab_size: rows of the target's embedding.
        per_family: take that many of each family (`first_per_family`).
        max_length: longest prompt allowed, in tokens.
        field: the setting that named the file, for messages.

    Raises:
        InputError: the file, a row of it or the tokenizer does not fit.
    """
    rows = first_per_family(read_conversations(path, field=field, need_answer=False), per_family)
    encoder = ChatEncoder(tokenizer, enable_thinking=enable_thinking, vocab_size=vocab_size)
    prompts = make_prompts(encoder, rows)
    for row, prompt in zip(rows, prompts, strict=True):
        if max_length is not None and len(prompt.token_ids) > max_length:
            raise InputError(
                f"{row.where} has a prompt of {len(prompt.token_ids)} tokens, more than "
                f"{max_length}; shorten it"
            )
    return prompts


def make_prompts(encoder: ChatEncoder, rows: Iterable[Conversation]) -> list[Prompt]:
    """Cut each conversation before its last answer."""
    prompts = []
    for row in rows:
        try:
            token_ids = encoder.prompt(row.prompt, row.tools)
            answered = [
                one.tokens
                for one in training_rows(
                    encoder, row.messages, row.tools, finished=row.finished, supervise="last_turn"
                )
                if row.is_answered
            ]
        except InputError as error:
            raise InputError(f"{row.where}: {error}") from error
        reference_ids = [
            token
            for one in answered
            for token, supervised in zip(one.input_ids, one.loss_mask, strict=True)
            if supervised
        ]
        prompts.append(Prompt(row.id, row.family, token_ids, reference_ids))
    return prompts


def prepared_prompts(rows: PreparedRows, numbers: Iterable[int]) -> list[Prompt]:
    """Rows of a prepared folder, cut before their last answer."""
    names = rows.names()
    prompts = []
    for number in numbers:
        tokens, loss_mask = rows.read(number)
        answer = last_answer(loss_mask)
        ids = tokens.tolist()
        name = names[number]
        prompts.append(Prompt(name.id, name.family, ids[: answer.start], ids[answer]))
    return prompts


class Named(Protocol):
    """What has an id and a family."""

    @property
    def id(self) -> str: ...

    @property
    def family(self) -> str: ...


NamedRow = TypeVar("NamedRow", bound=Named)


def first_per_family(rows: Sequence[NamedRow], count: int | None) -> list[NamedRow]:
    """At most `count` rows of each family, all of them for None, family by family.

    Which rows these are follows from their ids alone: not from a seed, so that runs with different
    seeds are measured on the same prompts, and not from the order of the file.
    """
    families: dict[str, list[NamedRow]] = defaultdict(list)
    for row in sorted(rows, key=lambda row: hashlib.sha256(row.id.encode()).digest()):
        families[row.family].append(row)
    return [row for family in sorted(families) for row in families[family][:count]]
