"""A conversation to the rows that train on it: one, or one for each answer.

A chat template may show an earlier answer otherwise than it was written. Qwen3 leaves out the
reasoning of earlier turns, and their empty think block. In such a history the answer's tokens do
not follow what the target had before it when it chose them; they are no examples of its choices:

    as written      ... <|im_start|>assistant\\n<think>\\n\\n</think>\\n\\nHello.<|im_end|>
    as history      ... <|im_start|>assistant\\nHello.<|im_end|>\\n<|im_start|>user\\n ...

An answer that is shown as it was written is supervised where it stands. Every other one gets a row
of its own, which ends with it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, NamedTuple

from dflow_lightning.data.template import ChatEncoder, EncodedRow, Message, Supervise
from dflow_lightning.errors import InputError

THINKING = ("<think>", "</think>")


@dataclass(frozen=True)
class Answer:
    """What the target wrote: its tokens, the end token included where it ended by itself.

    `from_text`: the tokens are those of its text, which need not be those it chose.
    """

    token_ids: list[int]
    finished: bool
    from_text: bool = False


class TurnRow(NamedTuple):
    """A row for training; `turn` counts the answers from 1, up to the row's last."""

    turn: int
    tokens: EncodedRow
    finished: bool


def training_rows(
    encoder: ChatEncoder,
    messages: Sequence[Message],
    tools: Sequence[Any] = (),
    *,
    answers: Mapping[int, Answer] | None = None,
    supervise: Supervise = "all_turns",
    supervise_thinking: bool = True,
    max_length: int | None = None,
) -> list[TurnRow]:
    """The rows of one conversation, in the order of their turns.

    Args:
        messages: the conversation, up to an assistant's message or beyond.
        answers: tokens of assistant's messages, by their index; the texts of others are tokenized.
        supervise: learn from every answer, or from the last one that fits.
        supervise_thinking: learn from the reasoning as well.
        max_length: longest row, in tokens; turns that end beyond it are left out.

    Raises:
        InputError: the template does not fit the conversation, or its mask cannot be right.
    """
    answers = answers or {}
    rows: list[TurnRow] = []
    turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    for number, turn in enumerate(turns, start=1):
        one = _row(encoder, messages[: turn + 1], tools, answers.get(turn), supervise_thinking)
        if max_length is not None and len(one.tokens.input_ids) > max_length:
            break  # later ones are longer
        one = one._replace(turn=number)
        if supervise == "last_turn":
            rows = [one]
        elif rows and (joined := _join(rows[-1], one)):
            rows[-1] = joined
        else:
            rows.append(one)
    return rows


def num_anchors(loss_mask: Sequence[bool]) -> int:
    """Positions that `draw_anchors` may choose: supervised, and the next one as well."""
    return sum(a and b for a, b in pairwise(loss_mask))


def _row(
    encoder: ChatEncoder,
    messages: Sequence[Message],
    tools: Sequence[Any],
    answer: Answer | None,
    supervise_thinking: bool,
) -> TurnRow:
    """The row that ends with the last message, which alone is supervised."""
    if answer is not None:
        prompt_ids = encoder.prompt(messages[:-1], tools)
        ids, given, finished = [*prompt_ids, *answer.token_ids], len(prompt_ids), answer.finished
    else:
        segments = encoder.segments(messages, tools)[:-1]
        only_last = [replace(one, supervised=one is segments[-1]) for one in segments]
        tokens = encoder.encode([only_last])[0]
        ids, given, finished = tokens.input_ids, tokens.loss_mask.count(False), True
    if not given:
        raise InputError(
            "every token is supervised; use a chat template that shows the user's text"
        )
    if given == len(ids):
        raise InputError("no token is supervised; give an answer that is not empty")
    if not supervise_thinking:
        given += _thinking_length(encoder.tokenizer, ids[given:], finished)
    mask = [False] * given + [True] * (len(ids) - given)
    return TurnRow(0, EncodedRow(ids, mask), finished)


def _join(earlier: TurnRow, later: TurnRow) -> TurnRow | None:
    """Both as one row, if the later one shows the earlier one as it was written."""
    known = earlier.tokens.loss_mask
    length = len(known)
    if later.tokens.input_ids[:length] != earlier.tokens.input_ids:
        return None
    mask = [*known, *later.tokens.loss_mask[length:]]
    return later._replace(tokens=EncodedRow(later.tokens.input_ids, mask))


def _thinking_length(tokenizer: Any, answer_ids: Sequence[int], finished: bool) -> int:
    """Tokens of an answer up to the end of its reasoning; all of them if that never ended."""
    begin, end = (single_token(tokenizer, text) for text in THINKING)
    if end in answer_ids:
        return answer_ids.index(end) + 1
    return len(answer_ids) if begin in answer_ids and not finished else 0


def single_token(tokenizer: Any, text: str) -> int | None:
    """The id of a text that the tokenizer knows as one token."""
    return tokenizer.get_vocab().get(text)
