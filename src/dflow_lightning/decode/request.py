"""Requests and answers of the decoder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from dflow_lightning.errors import InputError, check_counts, is_number, is_whole
from dflow_lightning.models.target import FrozenTarget
from dflow_lightning.tensors.metrics import acceptance_summary

INT64 = 2**63  # torch takes seeds and counts below it


@dataclass(frozen=True, kw_only=True)
class Request:
    """One prompt and how to answer it.

    Args:
        prompt_ids: token ids.
        max_new_tokens: upper limit of the answer; the target's context may end it earlier.
        temperature: 0 is greedy.
        top_k: sample among the k most likely tokens; 0 takes all.
        top_p: sample among the most likely tokens that reach this probability; 1 takes all.
        seed: of the sampling noise; the answer depends on nothing else.
        stop_token_ids: end the answer; None takes the target's end-of-sequence ids.
    """

    prompt_ids: list[int]
    max_new_tokens: int = 128
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    stop_token_ids: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        """Raise `InputError` for a setting out of its range."""
        check_counts(max_new_tokens=self.max_new_tokens)
        if not is_number(self.temperature) or not 0 <= self.temperature < float("inf"):
            raise InputError(
                f"temperature is {self.temperature!r}; give 0 for greedy decoding or a positive "
                "number"
            )
        if not is_whole(self.top_k) or not 0 <= self.top_k < INT64:
            raise InputError(f"top_k is {self.top_k!r}; give 0 for all tokens, or 1 or more")
        if not is_number(self.top_p) or not 0 < self.top_p <= 1:
            raise InputError(f"top_p is {self.top_p!r}; give a number above 0, up to 1")
        if not is_whole(self.seed) or not -INT64 <= self.seed < INT64:
            raise InputError(f"seed is {self.seed!r}; give a whole number of at most 63 bits")
        if not _are_ids(self.prompt_ids):
            raise InputError(
                f"prompt: {_brief(self.prompt_ids)} is no list of token ids; encode a text first, "
                "and give a tensor as tensor.tolist()"
            )
        if self.stop_token_ids is not None and not _are_ids(self.stop_token_ids):
            raise InputError(
                f"stop_token_ids is {_brief(self.stop_token_ids)}; give a tuple of token ids"
            )

    def check(self, target: FrozenTarget, max_length: int) -> None:
        """Raise `InputError` for a prompt that is empty, does not fit or is of another target."""
        if not self.prompt_ids:
            raise InputError("prompt: no tokens; give a text that is not empty")
        if len(self.prompt_ids) >= max_length:
            raise InputError(
                f"prompt: {len(self.prompt_ids)} tokens do not fit the target's context of "
                f"{max_length}; give a shorter prompt"
            )
        outside = [one for one in self.prompt_ids if not 0 <= one < target.vocab_size]
        if outside:
            raise InputError(
                f"prompt: token id {outside[0]} is outside the vocabulary of {target.vocab_size}; "
                "encode the prompt with the target's tokenizer"
            )


def check_answer_length(max_new_tokens: int, field: str = "max_new_tokens") -> None:
    """Refuse to measure answers of one token: it comes with the prompt and takes no round.

    Args:
        field: the option or recipe key that holds the number.

    Raises:
        InputError: it is below 2.
    """
    if max_new_tokens < 2:
        raise InputError(
            f"{field} is {max_new_tokens}; give 2 or more, since the first token comes with the "
            "prompt and takes no round"
        )


def _are_ids(value: Any) -> bool:
    """Tensors are none: they have no truth value, and each entry would wait for the device."""
    return (
        isinstance(value, Sequence)
        and not isinstance(value, str | bytes)
        and all(type(one) is int or is_whole(one) for one in value)
    )


def _brief(value: Any) -> str:
    text = " ".join(repr(value).split())
    return text if len(text) <= 60 else f"{text[:60]}..."


@dataclass(frozen=True)
class Completion:
    """The answer to one prompt.

    Attributes:
        token_ids: generated tokens, the stop token included.
        accepted: tokens gained per round, less one. That is the number of accepted drafts, cut in a
            request's last round at the stop token or the length limit.
        finish_reason: `stop`, `length` or `cancelled`.
        seconds: wall time from the first token to the last, shared evenly by the requests in
            flight; over all requests they sum to the wall time of decoding without prefill.
        latency: wall time from the first token to the last.
        time_to_first_token: wall time from submission to the first token, the queue included.
    """

    token_ids: list[int]
    accepted: list[int]
    finish_reason: str
    seconds: float = 0.0
    latency: float = 0.0
    time_to_first_token: float = 0.0

    @property
    def tau(self) -> float:
        """Acceptance length of this answer: tokens a round, bonus included; 1 without drafts."""
        return acceptance_summary([self.accepted], max(self.accepted, default=0)).tau


@dataclass(frozen=True)
class Answer:
    """A completion as text.

    Attributes:
        text: the answer without special tokens.
        completion: its tokens, accepted drafts and times.
    """

    text: str
    completion: Completion

    @property
    def tau(self) -> float:
        """Acceptance length: tokens per forward of the target."""
        return self.completion.tau

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True)
class Update:
    """What one round brought a request: its new tokens, and its completion when it has ended."""

    request_id: int
    token_ids: list[int] = field(default_factory=list)
    completion: Completion | None = None
