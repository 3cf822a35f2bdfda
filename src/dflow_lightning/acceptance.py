"""Which draft tokens the target confirms, and which tokens the target chooses.

Shapes: K slots of a block (slot 0 is the anchor), V vocabulary; `...` any leading dimensions.
"""

from __future__ import annotations

import torch
from torch import Tensor


def accept(drafts: Tensor, chosen: Tensor) -> Tensor:
    """Number of leading draft tokens that equal the target's choice: the definition of acceptance.

    Args:
        drafts: draft tokens of slots 1..K-1, `[..., K-1]`.
        chosen: what the target chose for the same positions, `[..., K-1]`.

    Returns:
        `num_accepted`, `[...]`, between 0 and K-1. The acceptance length tau counts one more, the
        bonus token.
    """
    return leading_run(drafts == chosen)


def leading_run(hits: Tensor) -> Tensor:
    """Length of the unbroken run of true values from the start of the last dimension."""
    return hits.long().cumprod(-1).sum(-1)


def rejected_token(drafts: Tensor, num_accepted: Tensor) -> Tensor:
    """The draft after the accepted ones, `[...]`; any draft where all were accepted.

    Args:
        drafts: draft tokens of slots 1..K-1, `[..., K-1]`.
        num_accepted: from `accept`, `[...]`.
    """
    slot = num_accepted.clamp(max=drafts.shape[-1] - 1).unsqueeze(-1)
    return drafts.gather(-1, slot).squeeze(-1)


def position_uniforms(seed: int, length: int) -> Tensor:
    """The sampling noise of a request: one uniform number per absolute position, `[length]`.

    The first numbers do not depend on how many are drawn.
    """
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(length, generator=generator, dtype=torch.float64)


def choose(logits: Tensor, temperature: Tensor, uniforms: Tensor) -> Tensor:
    """The target's token for each row: the argmax, or a sample at its temperature.

    Sampling inverts the cumulative distribution with one uniform number per absolute position, so
    a token depends on its prefix, the request's seed and its position alone. A draft is accepted
    when it equals the sample (`sample_match`), which leaves the target's distribution untouched.

    Args:
        logits: `[B, Q, V]`.
        temperature: `[B]`; zero means greedy.
        uniforms: numbers in [0, 1), `[B, Q]`.

    Returns:
        token ids, `[B, Q]`.
    """
    greedy = logits.argmax(-1)
    if not (temperature > 0).any():
        return greedy
    scaled = logits.double() / temperature.clamp(min=1e-6).double()[:, None, None]
    cumulative = scaled.softmax(-1).cumsum(-1)
    threshold = (uniforms.double() * cumulative[..., -1]).unsqueeze(-1)
    sampled = torch.searchsorted(cumulative, threshold, right=True).squeeze(-1)
    sampled = sampled.clamp(max=logits.shape[-1] - 1)
    return torch.where(temperature[:, None] > 0, sampled, greedy)
