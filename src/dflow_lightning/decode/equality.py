"""When two decoded answers count as equal.

Answers are compared token for token. A first difference is excused only where the target itself
cannot tell the two tokens apart: recomputed in float64, both lie within `TIE` of its choice.

Shapes: S sequence, V vocabulary.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dflow_lightning.models.target import FrozenTarget
from dflow_lightning.tensors.acceptance import position_uniforms

if TYPE_CHECKING:
    from dflow_lightning.data.prompts import Prompt

TIE = 1e-4


@dataclass(frozen=True, kw_only=True)
class Difference:
    """The first place where an answer leaves the plain one.

    Args:
        prompt: id of the prompt.
        position: index into the answer.
        token: the token there; None where the answer has ended.
        plain_token: the plain answer's token there; None where it has ended.
        margin: how far the less likely of the two is from being the target's choice, in float64.
        excused: the margin is below the tie threshold.
    """

    prompt: str
    position: int
    token: int | None
    plain_token: int | None
    margin: float | None
    excused: bool


def first_difference(token_ids: list[int], plain_ids: list[int]) -> int | None:
    """Index of the first token that differs, an early end included; None when they are equal."""
    for index, (token, plain) in enumerate(zip(token_ids, plain_ids, strict=False)):
        if token != plain:
            return index
    return None if len(token_ids) == len(plain_ids) else min(len(token_ids), len(plain_ids))


def _at(token_ids: list[int], position: int) -> int | None:
    return token_ids[position] if position < len(token_ids) else None


def choice_margin(logits_V: Tensor, token: int, temperature: float, uniform: float) -> float:
    """How far a token is from being chosen: 0 for the choice itself.

    At temperature 0 the logit gap to the best token; above it the distance from the position's
    uniform number to the token's interval of the cumulative distribution.
    """
    if temperature == 0:
        return float(logits_V.max() - logits_V[token])
    cumulative = (logits_V / temperature).softmax(-1).cumsum(-1)
    upper = float(cumulative[token])
    lower = float(cumulative[token - 1]) if token else 0.0
    threshold = uniform * float(cumulative[-1])
    return max(lower - threshold, threshold - upper, 0.0)


class EqualityCheck:
    """Compares answers with the plain ones; the target's float64 twin is made on demand."""

    def __init__(self, target: FrozenTarget) -> None:
        self.target = target
        self._twin: Any = None

    def compare(
        self,
        prompt: str,
        prompt_ids: list[int],
        token_ids: list[int],
        plain_ids: list[int],
        *,
        temperature: float,
        seed: int,
    ) -> Difference | None:
        """None when the answers are equal."""
        position = first_difference(token_ids, plain_ids)
        if position is None:
            return None
        token, plain_token = _at(token_ids, position), _at(plain_ids, position)
        margin = None
        if token is not None and plain_token is not None:
            prefix = prompt_ids + plain_ids[:position]
            logits_V, uniform = (
                self._logits(prefix),
                float(position_uniforms(seed, len(prefix) + 1)[-1]),
            )
            margin = max(
                choice_margin(logits_V, one, temperature, uniform) for one in (token, plain_token)
            )
        return Difference(
            prompt=prompt,
            position=position,
            token=token,
            plain_token=plain_token,
            margin=margin,
            excused=margin is not None and margin < TIE,
        )

    def differences(
        self, prompts: Sequence[Prompt], answers: Sequence[list[int]],
        plain: Sequence[list[int]], *, temperature: float, seeds: Sequence[int],
    ) -> list[Difference]:  # fmt: skip
        """Every answer that is not the plain one, excused or not."""
        found = [
            self.compare(
                prompt.id, prompt.token_ids, ours, theirs, temperature=temperature, seed=seed
            )
            for prompt, ours, theirs, seed in zip(prompts, answers, plain, seeds, strict=True)
        ]
        return [one for one in found if one]

    @torch.inference_mode()
    def _logits(self, prefix: list[int]) -> Tensor:
        """The target's float64 logits for the token after `prefix`, `[V]`."""
        if self._twin is None:
            self._twin = copy.deepcopy(self.target.model).double()
        input_ids_1S = torch.tensor([prefix], device=self.target.device)
        return self._twin(input_ids_1S, logits_to_keep=1).logits[0, -1]
