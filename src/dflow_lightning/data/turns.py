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

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Literal, NamedTuple

from dflow_lightning.data.conversations import Conversation
from dflow_lightning.data.template import ChatEncoder, EncodedRow, Message
from dflow_lightning.errors import InputError

Supervise = Literal["all_turns", "last_turn"]
THINKING = ("<think>", "</think>")


@dataclass(frozen=True)
class TargetAnswer:
    """What the target wrote: its tokens, the end token included where it ended by itself.

    `from_text`: the tokens are those of its text, which need not be those it chose.
    """

    token_ids: list[int]
    finished: bool
    from_text: bool = False


class TurnRow(NamedTuple):
    """A row for training, which ends with an answer.

    `turn` counts the answers from 1, up to the row's last. `closing` are the tokens that the
    template puts after that answer, such as a line break.
    """

    turn: int
    tokens: EncodedRow
    finished: bool
    closing: list[int]


def training_rows(
    encoder: ChatEncoder,
    messages: Sequence[Message],
    tools: Sequence[Any] = (),
    *,
    answers: Mapping[int, TargetAnswer] | None = None,
    finished: bool = True,
    supervise: Supervise = "all_turns",
    supervise_thinking: bool = True,
    max_length: int | None = None,
    unsupervised: Collection[int] = (),
) -> list[TurnRow]:
    """The rows of one conversation, in the order of their turns.

    Args:
        messages: the conversation, up to an assistant's message or beyond.
        answers: tokens of assistant's messages, by their index; the texts of others are tokenized.
        finished: whether the last answer ended by itself, where it is given as text.
        supervise: learn from every answer, or from the last one that fits.
        supervise_thinking: learn from the reasoning as well.
        max_length: longest row, in tokens; turns that end beyond it are left out.
        unsupervised: indices of answers that are context only.

    Raises:
        InputError: the template does not fit the conversation, or its mask cannot be right.
    """
    answers = answers or {}
    rows: list[TurnRow] = []
    turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    for number, turn in enumerate(turns, start=1):
        if turn in unsupervised:
            continue
        said, ended = messages[: turn + 1], finished or turn != turns[-1]
        one = _row(encoder, said, tools, answers.get(turn), ended, supervise_thinking)
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


def written_rows(
    encoder: ChatEncoder, conversation: Conversation, supervise: Supervise = "all_turns"
) -> list[tuple[str, TurnRow]]:
    """The rows of a conversation of a file, with their ids, as training reads them.

    Answers that are too short for an anchor have no row of their own. A row goes on to where the
    template ends, so that it is the whole conversation where there is one answer.

    Raises:
        InputError: see `training_rows`.
    """
    rows = training_rows(
        encoder,
        conversation.messages,
        conversation.tools,
        finished=conversation.finished,
        supervise=supervise,
        unsupervised=conversation.unsupervised,
    )
    rows = with_anchors(rows) or rows
    return [(name, _closed(row)) for name, row in named(conversation.id, rows)]


def with_anchors(rows: Sequence[TurnRow]) -> list[TurnRow]:
    """Those in which a block can begin."""
    return [row for row in rows if num_anchors(row.tokens.loss_mask)]


def named(identity: str, rows: Sequence[TurnRow]) -> list[tuple[str, TurnRow]]:
    """The rows of one conversation with their ids: its own, or `id#turn` where they are several."""
    several = len(rows) > 1
    return [(f"{identity}#{row.turn}" if several else identity, row) for row in rows]


def num_anchors(loss_mask: Sequence[bool]) -> int:
    """Positions that `draw_anchors` may choose: supervised, and the next one as well."""
    return sum(a and b for a, b in pairwise(loss_mask))


def _row(
    encoder: ChatEncoder,
    messages: Sequence[Message],
    tools: Sequence[Any],
    answer: TargetAnswer | None,
    finished: bool,
    supervise_thinking: bool,
) -> TurnRow:
    """The row that ends with the last message, which alone is supervised."""
    if answer is not None:
        prompt_ids = encoder.prompt(messages[:-1], tools)
        ids, given, finished = [*prompt_ids, *answer.token_ids], len(prompt_ids), answer.finished
        closing: list[int] = []
    else:
        *past, answered, rest = encoder.segments(messages, tools, finished=finished)
        if not finished and _is_open(answered.text):
            # Templates close reasoning in what they render; the target had nothing before it.
            past = encoder.segments(messages[:-1], tools, answer_next=True)
        past = [replace(one, supervised=False) for one in past]
        tokens, after = encoder.encode([[*past, answered], [rest] if finished else []])
        ids, given, closing = tokens.input_ids, tokens.loss_mask.count(False), after.input_ids
    if not given:
        raise InputError(
            "every token is supervised; use a chat template that shows the user's text"
        )
    if given == len(ids):
        raise InputError("no token is supervised; give an answer that is not empty")
    if not supervise_thinking:
        given += _thinking_length(encoder.tokenizer, ids[given:], finished)
    mask = [False] * given + [True] * (len(ids) - given)
    return TurnRow(0, EncodedRow(ids, mask), finished, closing)


def _join(earlier: TurnRow, later: TurnRow) -> TurnRow | None:
    """Both as one row, if the later one shows the earlier one as it was written."""
    known = earlier.tokens.loss_mask
    length = len(known)
    if later.tokens.input_ids[:length] != earlier.tokens.input_ids:
        return None
    mask = [*known, *later.tokens.loss_mask[length:]]
    return later._replace(tokens=EncodedRow(later.tokens.input_ids, mask))


def _is_open(answer: str) -> bool:
    """Whether an answer's text stops within its reasoning."""
    begin, end = THINKING
    return begin in answer and end not in answer


def _closed(row: TurnRow) -> TurnRow:
    """With its closing tokens, which are not supervised."""
    ids = [*row.tokens.input_ids, *row.closing]
    mask = [*row.tokens.loss_mask, *(False for _ in row.closing)]
    return row._replace(tokens=EncodedRow(ids, mask), closing=[])


def _thinking_length(tokenizer: Any, answer_ids: Sequence[int], finished: bool) -> int:
    """Tokens of an answer up to the end of its reasoning; all of them if that never ended."""
    begin, end = (single_token(tokenizer, text) for text in THINKING)
    if end in answer_ids:
        return answer_ids.index(end) + 1
    return len(answer_ids) if begin in answer_ids and not finished else 0


def single_token(tokenizer: Any, text: str) -> int | None:
    """The id of a text that the tokenizer knows as one token."""
    return tokenizer.get_vocab().get(text)
