"""Which draft tokens the target confirms, and which tokens the target chooses.

Shapes: R requests, Q rows, K slots of a block (slot 0 is the anchor), J = K-1 drafts, V vocabulary;
`...` any leading dimensions.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


def accept(drafts: Tensor, chosen: Tensor) -> Tensor:
    """Number of leading draft tokens that equal the target's choice: the definition of acceptance.

    Args:
        drafts: draft tokens of slots 1..K-1, `[..., J]`.
        chosen: what the target chose for the same positions, `[..., J]`.

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
        drafts: draft tokens of slots 1..K-1, `[..., J]`.
        num_accepted: from `accept`, `[...]`.
    """
    slot = num_accepted.clamp(max=drafts.shape[-1] - 1).unsqueeze(-1)
    return drafts.gather(-1, slot).squeeze(-1)


def position_uniforms(seed: int, length: int, columns: int = 1) -> Tensor:
    """A request's sampling noise: uniform numbers for each absolute position, `[length, columns]`.

    The first rows do not depend on how many are drawn.
    """
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(length, columns, generator=generator, dtype=torch.float64)


@dataclass(frozen=True)
class TokenSampling:
    """How each request turns logits into probabilities, `[R]` each.

    Args:
        temperature_R: 0 is greedy.
        top_k_R: keep the tokens that are among the k most likely; 0 keeps all.
        top_p_R: keep the most likely tokens that together reach this probability; 1 keeps all.
    """

    temperature_R: Tensor
    top_k_R: Tensor
    top_p_R: Tensor


def probabilities(logits_RQV: Tensor, sampling: TokenSampling, *, filtered: bool = True) -> Tensor:
    """The distribution a token is drawn from, float64 `[R, Q, V]`; greedy requests have one token.

    The order is temperature, top-k, top-p, as in vLLM; tokens that tie with the last kept one are
    kept as well.

    Args:
        filtered: false skips top-k and top-p, where it is known that no request uses them.
    """
    temperature_R11 = sampling.temperature_R.double()[:, None, None]
    scaled_RQV = logits_RQV.double() / temperature_R11.clamp(min=1e-6)
    if filtered:
        scaled_RQV = _filter(scaled_RQV, sampling)
    best_RQ = logits_RQV.argmax(-1, keepdim=True)
    one_hot_RQV = torch.zeros_like(scaled_RQV).scatter_(-1, best_RQ, 1.0)
    return torch.where(temperature_R11 > 0, scaled_RQV.softmax(-1), one_hot_RQV)


def _filter(scaled_RQV: Tensor, sampling: TokenSampling) -> Tensor:
    """Minus infinity where top-k or top-p drops a token."""
    vocabulary = scaled_RQV.shape[-1]
    sorted_RQV = scaled_RQV.sort(dim=-1, descending=True).values
    top_k_R = torch.where(sampling.top_k_R > 0, sampling.top_k_R, vocabulary)
    last_RQ1 = (top_k_R.clamp(max=vocabulary) - 1)[:, None, None].expand(*scaled_RQV.shape[:2], 1)
    kth_RQ1 = sorted_RQV.gather(-1, last_RQ1)
    kept_RQV = sorted_RQV.masked_fill(sorted_RQV < kth_RQ1, float("-inf")).softmax(-1)
    # A token is inside the nucleus while those before it have not reached top-p.
    top_p_R11 = sampling.top_p_R.double()[:, None, None]
    inside_RQV = (kept_RQV.cumsum(-1) - kept_RQV < top_p_R11) & (kept_RQV > 0)
    lowest_RQ1 = sorted_RQV.masked_fill(~inside_RQV, float("inf")).amin(-1, keepdim=True)
    return scaled_RQV.masked_fill(scaled_RQV < lowest_RQ1, float("-inf"))


def draw(probabilities_V: Tensor, uniforms: Tensor) -> Tensor:
    """Tokens by inversion of the cumulative distribution: `[..., V]` and `[...]` to `[...]`.

    The probabilities need not sum to one.
    """
    cumulative = probabilities_V.cumsum(-1)
    threshold = (uniforms.double() * cumulative[..., -1]).unsqueeze(-1)
    token = torch.searchsorted(cumulative, threshold, right=True).squeeze(-1)
    return token.clamp(max=probabilities_V.shape[-1] - 1)


def choose(
    logits_RQV: Tensor, sampling: TokenSampling, uniforms_RQ: Tensor, *, filtered: bool = True
) -> Tensor:
    """The target's token for each row, `[R, Q]`: the argmax, or a sample at its temperature.

    Sampling inverts the cumulative distribution with one uniform number per absolute position, so
    a token depends on its prefix, the request's seed and its position alone. A draft is accepted
    when it equals the sample (`sample_match`), which leaves the target's distribution untouched.
    """
    sampled_RQ = draw(probabilities(logits_RQV, sampling, filtered=filtered), uniforms_RQ)
    # The argmax itself, and not a draw from one token: the two may differ in a tie.
    return torch.where(sampling.temperature_R[:, None] > 0, sampled_RQ, logits_RQV.argmax(-1))


def accept_or_resample(
    drafts_RJ: Tensor, draft_RJV: Tensor, target_RKV: Tensor, accept_RJ: Tensor, choice_RK: Tensor
) -> tuple[Tensor, Tensor]:
    """Rejection sampling (Leviathan et al. 2023): what is committed has the target's distribution.

    A draft x is accepted with probability min(1, p(x) / q(x)); the token after the accepted ones is
    drawn from the normalised positive part of p - q, or from p where all drafts were accepted.

    Args:
        drafts_RJ: tokens drawn from the drafter's distribution.
        draft_RJV: that distribution, q.
        target_RKV: the target's distribution after each row, p.
        accept_RJ, choice_RK: independent uniform numbers.

    Returns:
        the number of accepted drafts, `[R]`, and what is committed, `[R, K]`: accepted drafts, then
        the resampled token, arbitrary afterwards.
    """
    num_drafts = drafts_RJ.shape[-1]
    index_RJ1 = drafts_RJ.unsqueeze(-1)
    p_RJ = target_RKV[:, :num_drafts].gather(-1, index_RJ1).squeeze(-1)
    q_RJ = draft_RJV.gather(-1, index_RJ1).squeeze(-1)
    num_accepted_R = leading_run(accept_RJ * q_RJ < p_RJ)
    # Slot J has no draft: its q is zero, and the residual is p itself.
    padded_RKV = torch.cat([draft_RJV, torch.zeros_like(target_RKV[:, :1])], dim=1)
    residual_RKV = (target_RKV - padded_RKV).clamp(min=0)
    # p = q leaves no residual, and no rejection either, but for rounding.
    empty_RK1 = residual_RKV.sum(-1, keepdim=True) <= 0
    resampled_RK = draw(torch.where(empty_RK1, target_RKV, residual_RKV), choice_RK)
    slots_K = torch.arange(num_drafts + 1, device=drafts_RJ.device)
    drafts_RK = torch.nn.functional.pad(drafts_RJ, (0, 1))
    return num_accepted_R, torch.where(
        slots_K < num_accepted_R.unsqueeze(1), drafts_RK, resampled_RK
    )
