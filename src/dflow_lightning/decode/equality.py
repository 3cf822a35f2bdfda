"""When two decoded answers count as equal.

Answers are compared token for token. A first difference is excused only where the target itself
cannot tell the two tokens apart: recomputed in float64, both lie within `TIE` of its choice. That
is worth asserting in float32 alone: in half precision ties are so common that a difference says
nothing, so it is reported and not recomputed.

Shapes: S sequence, D hidden, V vocabulary.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from dflow_lightning.models.target import FrozenTarget
from dflow_lightning.tensors.acceptance import position_uniforms

if TYPE_CHECKING:
    from dflow_lightning.data.prompts import Prompt

TIE = 1e-4
HEAD_ROWS = 8192  # of the head in float64 at a time: 0.25 GiB at a width of 4,096


@dataclass(frozen=True, kw_only=True)
class Difference:
    """The first place where an answer leaves the plain one.

    Args:
        prompt: id of the prompt.
        position: index into the answer.
        token: the token there; None where the answer has ended.
        plain_token: the plain answer's token there; None where it has ended.
        margin: how far the less likely of the two is from being the target's choice, in float64;
            None where one of the answers has ended, and for a target in half precision.
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
    """Compares answers with the plain ones of the same target."""

    def __init__(self, target: FrozenTarget) -> None:
        self.target = target

    @property
    def asserted(self) -> bool:
        """Whether a difference that is no tie proves a fault: in float32 or better."""
        return self.target.dtype in (torch.float32, torch.float64)

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
        if self.asserted and token is not None and plain_token is not None:
            prefix = prompt_ids + plain_ids[:position]
            logits_V = self._logits(prefix)
            uniform = float(position_uniforms(seed, len(prefix) + 1)[-1])
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
        return float64_logits(self.target.model, prefix)


def float64_logits(model: Any, token_ids: list[int]) -> Tensor:
    """Logits for the token after `token_ids`, computed in float64, `[V]`.

    What `copy.deepcopy(model).double()` gives. That copy would be twice the size of a float32
    target and would stay beside it, so the weights are widened one decoder layer at a time instead,
    and the head by `HEAD_ROWS` rows.

    Args:
        model: a causal language model of transformers; it is not changed.
    """
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    decoder = copy.copy(model.get_decoder())
    parts = {
        name: nn.ModuleList(map(_widened, part)) if name == "layers" else _widened(part)
        for name, part in decoder._modules.items()
        if part is not None and part is not embedding
    }
    decoder._modules = decoder._modules | parts
    ids_1S = torch.tensor([token_ids], device=embedding.weight.device)
    output = decoder(inputs_embeds=embedding(ids_1S).double(), use_cache=False)
    last_D = output.last_hidden_state[0, -1]
    logits_V = torch.cat([rows.double() @ last_D for rows in head.weight.split(HEAD_ROWS)])
    return logits_V if head.bias is None else logits_V + head.bias.double()


def _widened(module: nn.Module) -> nn.Module:
    """A shallow copy that computes in float64, with weights that are widened for each call."""
    widened = copy.copy(module)

    def forward(*args: Any, **kwargs: Any) -> Any:
        held = dict(module.named_parameters()) | dict(module.named_buffers())
        wide = {name: one.double() for name, one in held.items() if one.is_floating_point()}
        return functional_call(module, wide, args, kwargs)

    widened.forward = forward
    return widened
