"""The block loss against the target's own distribution instead of the data's tokens.

Shapes: B batch, S sequence, N blocks per sequence, K block size, T slots of a chunk, D hidden, V
vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import kl_div, linear
from torch.utils.checkpoint import checkpoint

from dflow_lightning.loss import HeadLoss


def soft_losses(
    hidden_BNKD: Tensor, clean_BSD: Tensor | None, rows_BNK: Tensor,
    head: Callable[[Tensor], Tensor], chunk_blocks: int, weight_VD: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Divergence `KL(p || q)` of every slot, without ever holding all logits.

    p is the target's distribution at temperature 1 on the data's own path, q the drafter's. This is
    the forward divergence that distillation for speculative decoding began with (DistillSpec, arXiv
    2310.08461). The target's logits are made chunk by chunk from its clean hidden states too.

    Args:
        hidden_BNKD: drafter output of the predicted slots, `[B, N, K-1, D]`.
        clean_BSD: what the target's head reads at the clean tokens, without gradient.
        rows_BNK: position of the clean token before each slot, whose row predicts the slot; those
            that do not count may lie behind the sequence. `[B, N, K-1]`.
        head: hidden states to logits.
        weight_VD: the head's matrix, frozen, where it is nothing more; then no logit of the
            drafter is computed twice.

    Returns:
        float32 losses and the drafter's greedy ids, both shaped like the rows.
    """
    assert clean_BSD is not None, "the clean forward stopped at the taps"
    length = clean_BSD.shape[1]
    first_B = torch.arange(clean_BSD.shape[0], device=rows_BNK.device) * length
    rows = (rows_BNK.clamp(max=length - 1) + first_B[:, None, None]).flatten(0, 1)
    hidden, clean = hidden_BNKD.flatten(0, 1), clean_BSD.flatten(0, 1)
    if weight_VD is not None:

        def of_chunk(part: slice, drafted_TD: Tensor, gradient: bool):
            clean_TD = clean[rows[part].flatten()].to(weight_VD.dtype)
            return _soft_loss(drafted_TD, clean_TD, weight_VD, gradient=gradient)

        losses, predicted = HeadLoss.apply(hidden, weight_VD.dtype, chunk_blocks, of_chunk)
    else:
        parts = [
            checkpoint(_chunk, part, clean[of_part], head, use_reentrant=False)
            for part, of_part in zip(
                hidden.split(chunk_blocks), rows.split(chunk_blocks), strict=True
            )
        ]
        losses, predicted = (torch.cat(one) for one in zip(*parts, strict=True))
    return losses.view_as(rows_BNK), predicted.view_as(rows_BNK)


def _chunk(
    hidden: Tensor, clean: Tensor, head: Callable[[Tensor], Tensor]
) -> tuple[Tensor, Tensor]:
    """The slow twin: logits are computed once more in the backward pass."""
    logits = head(hidden).float()
    wanted = head(clean).float().log_softmax(-1)
    losses = kl_div(logits.log_softmax(-1), wanted, reduction="none", log_target=True).sum(-1)
    return losses, logits.detach().argmax(-1)


def _soft_loss(
    drafted_TD: Tensor, clean_TD: Tensor, weight_VD: Tensor, *, gradient: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Losses, predictions and unit gradients `(q - p) W` of one chunk; softmaxes are float32."""
    with torch.autocast(drafted_TD.device.type, enabled=False):
        logits_TV = linear(drafted_TD, weight_VD).float()
        predicted_T = logits_TV.argmax(-1)
        log_q_TV = logits_TV.log_softmax(-1)
        log_p_TV = linear(clean_TD, weight_VD).float().log_softmax(-1)
        p_TV = log_p_TV.exp()
        losses_T = (p_TV * (log_p_TV - log_q_TV)).sum(-1)
        unit_TD = None
        if gradient:
            unit_TD = log_q_TV.exp_().sub_(p_TV).to(weight_VD.dtype) @ weight_VD
    return losses_T, predicted_T, unit_TD
