"""Answered conversations to rows of tokens and masks, each checked before it is written."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from dflow_lightning.data.prepared import PreparedRow, PreparedWriter
from dflow_lightning.data.shapes import Conversation, Reject
from dflow_lightning.data.template import ASSISTANT_TOKENS, ChatEncoder, Message
from dflow_lightning.data.turns import (
    Answer,
    Supervise,
    TurnRow,
    named,
    num_anchors,
    training_rows,
    with_anchors,
)
from dflow_lightning.errors import InputError
from dflow_lightning.prepare.dialogue import Dialogue, Sampling
from dflow_lightning.prepare.journal import Journal
from dflow_lightning.prepare.progress import PrepareProgress
from dflow_lightning.prepare.source import Source, conversations, prompt_hash

TooLong = Literal["truncate", "reject"]


@dataclass(frozen=True, kw_only=True)
class RowOptions:
    """What becomes of an answered conversation.

    Args:
        supervise: learn from every answer, or from the last one.
        supervise_thinking: learn from the reasoning as well.
        max_length: longest row, in tokens.
        too_long: end longer conversations at the last turn that fits, or reject them.
    """

    supervise: Supervise
    supervise_thinking: bool
    max_length: int
    too_long: TooLong

    def describe(self) -> dict[str, Any]:
        """The settings by name."""
        return asdict(self)


class RowMaker:
    """Makes the rows of conversations and counts what becomes of them.

    Args:
        stop_ids: tokens that may end an answer.

    Attributes:
        counts: what is written into the manifest; cut conversations are those that end early.
    """

    def __init__(
        self, encoder: ChatEncoder, options: RowOptions, stop_ids: tuple[int, ...]
    ) -> None:
        self.encoder, self.options = encoder, options
        self._stop_ids = frozenset(stop_ids)
        tokenizer = encoder.tokenizer
        written = {tokenizer.get_vocab().get(text) for text in ASSISTANT_TOKENS}
        self._special = frozenset(tokenizer.all_special_ids) - written
        self._size = len(tokenizer)
        names = ("rows", "tokens", "supervised_tokens", "anchors", "unfinished", "from_text")
        self.counts = Counter(dict.fromkeys((*names, "without_anchors", "cut"), 0))

    def rows(
        self,
        conversation: Conversation,
        messages: list[dict[str, Any]],
        answers: dict[int, Answer],
        sample: str = "",
        cut: str = "",
    ) -> Iterator[PreparedRow] | Reject:
        """The rows of one conversation, or why it has none; `counts` grows with the rows.

        Args:
            messages: the conversation as the target wrote it.
            answers: its tokens, by the index of the message.
            sample: added to the id.
            cut: why the target wrote fewer answers than the conversation has room for.
        """
        try:
            turns = self._turns(conversation, messages, answers)
        except InputError as error:
            return Reject("template", str(error))
        answered = sum(message["role"] == "assistant" for message in messages)
        too_long = cut == "room" or not turns or turns[-1].turn < answered
        if not turns or (too_long and self.options.too_long == "reject"):
            detail = f"it is longer than max_length {self.options.max_length}"
            return Reject("too long", detail)
        for one in turns:
            if problem := self._problem(one.tokens.input_ids, one.tokens.loss_mask):
                return Reject("token in an answer", problem)
        learned = with_anchors(turns)
        if not learned:
            return Reject("no anchor", "its answers have no two supervised tokens in a row")
        self.counts["without_anchors"] += len(turns) - len(learned)
        self.counts["cut"] += too_long or bool(cut)
        self.counts["from_text"] += any(one.from_text for one in answers.values())
        return self._prepared(conversation, learned, sample)

    def _turns(
        self, conversation: Conversation, messages: Sequence[Message], answers: dict[int, Answer]
    ) -> list[TurnRow]:
        return training_rows(
            self.encoder,
            messages,
            conversation.tools,
            answers=answers,
            finished=conversation.finished,
            supervise=self.options.supervise,
            supervise_thinking=self.options.supervise_thinking,
            max_length=self.options.max_length,
        )

    def _problem(self, ids: list[int], mask: list[bool]) -> str:
        """What a supervised token must not be: unknown, or special before the answer's end."""
        last = len(ids) - 1
        for i, (token, supervised) in enumerate(zip(ids, mask, strict=True)):
            if not supervised:
                continue
            if token >= self._size:
                return f"token {token} is none of the tokenizer's {self._size}, as a mask token is"
            ends = i == last or not mask[i + 1]
            if token in self._special and not (ends and token in self._stop_ids):
                return f"{self.encoder.tokenizer.convert_ids_to_tokens(token)!r} stands inside it"
        return ""

    def _prepared(
        self, conversation: Conversation, turns: list[TurnRow], sample: str
    ) -> Iterator[PreparedRow]:
        said = prompt_hash(conversation)
        for name, one in named(f"{conversation.id}{sample}", turns):
            ids, mask = one.tokens.input_ids, one.tokens.loss_mask
            self.counts["rows"] += 1
            self.counts["tokens"] += len(ids)
            self.counts["supervised_tokens"] += sum(mask)
            self.counts["anchors"] += num_anchors(mask)
            self.counts["unfinished"] += not one.finished
            yield PreparedRow(name, conversation.family, ids, mask, one.finished, said)


def write_rows(
    source: Source,
    journal: Journal,
    maker: RowMaker,
    writer: PreparedWriter,
    sampling: Sampling | None,
    progress: PrepareProgress,
) -> None:
    """Write the rows of all conversations, in the order of the source.

    Args:
        journal: has the answers, and is told of the rejects.
        sampling: how the answers were asked for; None takes those of the source.
    """
    journal.forget_late()
    for line, conversation in conversations(source):
        if journal.is_rejected(line):
            continue
        for sample in range(sampling.samples_per_prompt if sampling else 1):
            if sampling is None:
                found = _kept(maker, conversation)
            else:
                found = _answered(maker, conversation, journal, line, sample, sampling)
            tokens = 0
            if isinstance(found, Reject):
                counted = found.reason != "no anchor"
                journal.reject_late(line, sample, found, counted=counted)
            else:
                for row in found:
                    tokens += len(row.input_ids)
                    writer.write(row)
            progress.count(tokens)


def _kept(maker: RowMaker, conversation: Conversation) -> Iterator[PreparedRow] | Reject:
    messages = conversation.messages
    if all(message["role"] != "assistant" for message in messages):
        return Reject("no answer", "it has no answer to keep; let the target answer, or drop it")
    return maker.rows(conversation, messages, {})


def _answered(
    maker: RowMaker,
    conversation: Conversation,
    journal: Journal,
    line: int,
    sample: int,
    sampling: Sampling,
) -> Iterator[PreparedRow] | Reject:
    answers = journal.answers(line, sample)
    if not isinstance(answers, list):
        return Reject("not answered", answers or "it was never asked")
    dialogue = Dialogue(line, sample, conversation, maker.encoder, sampling)
    dialogue.replay(answers)
    name = f"@{sample}" if sampling.samples_per_prompt > 1 else ""
    return maker.rows(conversation, dialogue.messages, dialogue.answers, name, dialogue.cut)
