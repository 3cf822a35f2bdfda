"""Cross-entropy to the target's whole distribution, without ever holding all logits.

Shapes: B batch, N blocks per sequence, K steps of a block, T tokens of a chunk, D hidden, V
vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear
from torch.utils.checkpoint import checkpoint


def soft_losses(
    hidden_BNKD: Tensor, target_hidden_BNKD: Tensor, head: Callable[[Tensor], Tensor],
    chunk_blocks: int, weight_VD: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`-sum_v p(v) log q(v)` of every step, and the drafter's greedy prediction.

    Args:
        hidden_BNKD: the drafter's output: q is the softmax of its logits.
        target_hidden_BNKD: the target's last hidden states: p is the softmax of theirs.
        head: hidden states to logits, the same for both.
        weight_VD: the head's matrix, where it is nothing more; then no logit is computed twice.

    Returns:
        float32 losses and predicted ids, both `[B, N, K]`.
    """
    hidden, wanted = hidden_BNKD.flatten(0, 1), target_hidden_BNKD.flatten(0, 1)
    if weight_VD is not None:
        losses, predicted = _SoftHeadLoss.apply(hidden, wanted, weight_VD, chunk_blocks)
    else:
        parts = [
            checkpoint(_chunk, *part, head, use_reentrant=False)
            for part in zip(hidden.split(chunk_blocks), wanted.split(chunk_blocks), strict=True)
        ]
        losses, predicted = (torch.cat(one) for one in zip(*parts, strict=True))
    shape = hidden_BNKD.shape[:-1]
    return losses.view(shape), predicted.view(shape)


def _chunk(
    hidden: Tensor, wanted: Tensor, head: Callable[[Tensor], Tensor]
) -> tuple[Tensor, Tensor]:
    """The slow twin: logits are computed once more in the backward pass."""
    logits = head(hidden).float()
    with torch.no_grad():
        wanted_probabilities = head(wanted).float().softmax(-1)
    losses = -(wanted_probabilities * logits.log_softmax(-1)).sum(-1)
    return losses, logits.detach().argmax(-1)


class _SoftHeadLoss(torch.autograd.Function):
    """Head and loss chunk by chunk, the gradient `(q - p) W` computed while the logits are there.

    A step's loss depends on its own hidden state alone, so the backward pass only scales it.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, wanted: Tensor, weight_VD: Tensor, chunk_blocks: int):
        losses = torch.empty(hidden.shape[:-1], device=hidden.device)
        predicted = torch.empty(hidden.shape[:-1], dtype=torch.long, device=hidden.device)
        unit = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        for start in range(0, hidden.shape[0], chunk_blocks):
            part = slice(start, start + chunk_blocks)
            shape = predicted[part].shape
            with torch.autocast(hidden.device.type, enabled=False):
                rows = (hidden[part], wanted[part])
                logits_TV, wanted_TV = (
                    linear(one.flatten(0, -2).to(weight_VD.dtype), weight_VD).float()
                    for one in rows
                )
                p_TV = wanted_TV.softmax(-1)
                predicted[part] = logits_TV.argmax(-1).view(shape)
                norm_T1 = logits_TV.logsumexp(-1, keepdim=True)
                losses[part] = (norm_T1.squeeze(-1) - (p_TV * logits_TV).sum(-1)).view(shape)
                if unit is not None:
                    difference_TV = logits_TV.sub_(norm_T1).exp_().sub_(p_TV)
                    product_TD = difference_TV.to(weight_VD.dtype) @ weight_VD
                    unit[part] = product_TD.view_as(unit[part])
        ctx.save_for_backward(unit)
        ctx.mark_non_differentiable(predicted)
        return losses, predicted

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor):
        (unit,) = ctx.saved_tensors
        return (unit * gradients[0].unsqueeze(-1)).to(unit.dtype), None, None, None
