"""What is asked of the target: a conversation's answers, turn by turn.

Prompts go to the target as token ids, rendered here, and answers come back as token ids. So a row
holds what the target read and what it chose, whoever ran it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, Protocol

from dflow_lightning.data.conversations import Conversation
from dflow_lightning.data.template import ChatEncoder
from dflow_lightning.data.turns import TargetAnswer
from dflow_lightning.errors import InputError

SEED_BITS = 31  # servers take signed 32-bit seeds


@dataclass(frozen=True, kw_only=True)
class AnswerSettings:
    """How the target answers.

    Args:
        temperature: 0 is greedy.
        top_p: sample among the most likely tokens that together reach this probability.
        max_new_tokens: upper limit of an answer.
        samples_per_prompt: answers to each prompt; more than one needs a temperature.
        seed: of the sampling noise; with a row's id, sample and turn it decides the noise.
        max_length: longest row, in tokens.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    max_new_tokens: int = 2048
    samples_per_prompt: int = 1
    seed: int = 0
    max_length: int = 3072

    def __post_init__(self) -> None:
        """Raise `InputError` for a setting out of its range."""
        for name, least in (("max_new_tokens", 1), ("samples_per_prompt", 1), ("max_length", 3)):
            if getattr(self, name) < least:
                raise InputError(f"{name} is {getattr(self, name)}; give {least} or more")
        if not 0 <= self.temperature < float("inf"):
            raise InputError(f"temperature is {self.temperature}; give 0 or a positive number")
        if not 0 < self.top_p <= 1:
            raise InputError(f"top_p is {self.top_p}; give a number above 0, up to 1")
        if self.samples_per_prompt > 1 and self.temperature == 0:
            raise InputError(
                f"samples_per_prompt is {self.samples_per_prompt}, but at temperature 0 all are "
                "equal; give a temperature above 0"
            )

    def describe(self) -> dict[str, Any]:
        """The settings by name."""
        return asdict(self)


@dataclass(frozen=True)
class Ask:
    """One prompt for the target."""

    prompt_ids: list[int]
    max_new_tokens: int
    temperature: float
    top_p: float
    seed: int


class Dialogue:
    """One conversation whose answers are being written again, one after the other.

    It ends early, with the answers it has, where the next prompt leaves no room for an answer,
    after an answer that did not end by itself, and after one to which the file's next message is a
    tool's: that result belongs to the call that stood there.

    Args:
        line: of the conversation in its source.
        sample: which of the answers to the same prompt this is, from 0.
    """

    def __init__(
        self,
        line: int,
        sample: int,
        conversation: Conversation,
        encoder: ChatEncoder,
        sampling: AnswerSettings,
    ) -> None:
        self.line, self.sample, self.conversation = line, sample, conversation
        self._encoder, self._sampling = encoder, sampling
        self.messages: list[dict[str, Any]] = []
        self.answers: dict[int, TargetAnswer] = {}
        self._ended = False
        self._read()

    def next(self) -> Ask | None:
        """The next prompt; None when the dialogue has ended.

        Raises:
            InputError: the template refuses the conversation.
        """
        if self._ended:
            return None
        prompt_ids = self._encoder.prompt(self.messages, self.conversation.tools)
        room = self._sampling.max_length - len(prompt_ids)
        if room < 1:
            self._ended = True
            return None
        return Ask(
            prompt_ids,
            min(room, self._sampling.max_new_tokens),
            self._sampling.temperature,
            self._sampling.top_p,
            self._seed(),
        )

    def add(self, answer: TargetAnswer) -> None:
        """Take the answer to the last prompt."""
        self.answers[len(self.messages)] = answer
        ids = answer.token_ids[:-1] if answer.finished else answer.token_ids
        text = self._encoder.tokenizer.decode(ids, skip_special_tokens=False)
        self.messages.append({"role": "assistant", "content": text})
        self._ended = not answer.finished or self._follows() in ("", "tool")
        if not self._ended:
            self._read()

    @property
    def cut(self) -> Literal["", "room", "unfinished", "tool"]:
        """Why there are fewer answers than the conversation has room for; empty if there are not.

        `room` is also what a dialogue says that is still being answered.
        """
        if len(self.messages) not in [index + 1 for index in self.answers]:
            return "room"
        if len(self.messages) == len(self.conversation.messages) or not self._follows():
            return ""
        return "tool" if self.answers[len(self.messages) - 1].finished else "unfinished"

    def replay(self, answers: Sequence[TargetAnswer]) -> None:
        """Take answers that were written down."""
        for answer in answers:
            self.add(answer)

    def _follows(self) -> str:
        """The role of the file's next message."""
        given = self.conversation.messages
        return given[len(self.messages)]["role"] if len(self.messages) < len(given) else ""

    def _read(self) -> None:
        """Copy messages from the conversation up to where an answer is due."""
        given = self.conversation.messages
        while len(self.messages) < len(given):
            if given[len(self.messages)]["role"] == "assistant":
                break
            self.messages.append(given[len(self.messages)])
        self._ended = self.messages[-1]["role"] not in ("user", "tool")

    def _seed(self) -> int:
        """Depends on nothing but the seed and what is asked."""
        name = f"{self._sampling.seed} {self.conversation.id} {self.sample} {len(self.messages)}"
        digest = hashlib.sha256(name.encode()).digest()
        return int.from_bytes(digest[:4], "big") >> (32 - SEED_BITS)


def check_room(ask: Ask, limit: int | None, whose: str) -> None:
    """Raise `InputError` for a prompt that leaves no room for its answer; no try can cure that.

    Args:
        limit: tokens of prompt and answer together; None if it is not known.
        whose: the owner of the limit.
    """
    total = len(ask.prompt_ids) + ask.max_new_tokens
    if limit is not None and total > limit:
        raise InputError(
            f"a prompt of {len(ask.prompt_ids)} tokens and an answer of up to "
            f"{ask.max_new_tokens} exceed the context of {whose}, {limit} tokens; lower max_length "
            f"to {limit}"
        )


Done = Callable[[Dialogue], None]


class Failed(Protocol):
    """Called for a dialogue without an answer; `again` if another run may bring one."""

    def __call__(self, dialogue: Dialogue, error: str, *, again: bool) -> None: ...


class Generator(Protocol):
    """Answers prompts with the target, in process or over HTTP."""

    def describe(self) -> dict[str, Any]:
        """What the manifest says about it."""
        ...

    def run(self, dialogues: Any, done: Done, failed: Failed) -> None:
        """Answer all dialogues, many at a time, and report each one when it has ended.

        Raises:
            InputError: nothing can be answered any more.
        """
        ...
