"""Attention of draft blocks: every block sees the context before its anchor and its own slots.

Scores against other blocks are never part of the result. Two formulations give the same numbers:
`dense` puts context and blocks behind one boolean mask; `split` attends to the context and to the
own block apart and merges the two by their log-sum-exp, so that no work is spent on other blocks.

Shapes: B batch, N blocks per sequence, K block size, L context length, H heads, E head size; keys
and values have one head per query head already.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

Backend = Literal["auto", "dense", "split"]

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def block_attention(
    q: Tensor, k_block: Tensor, v_block: Tensor, k_context: Tensor, v_context: Tensor,
    anchors_BN: Tensor, backend: Backend = "auto",
) -> Tensor:  # fmt: skip
    """Attend from each block to `context < anchor` and to the block itself, non-causally.

    Args:
        q, k_block, v_block: `[B, H, N, K, E]`.
        k_context, v_context: `[B, H, L, E]`; column l holds absolute position l.
        anchors_BN: context length of each block: position l is visible when l < anchor, strictly,
            because the feature at the anchor does not exist yet when the block is drafted.

    Returns:
        `[B, H, N, K, E]`.
    """
    if backend == "auto":
        # One block has no neighbours to waste work on; elsewhere the split needs the CPU kernel.
        backend = (
            "split"
            if q.device.type == "cpu" and q.shape[2] > 1 and q.dtype != torch.float64
            else "dense"
        )
    attend = _split if backend == "split" else _dense
    return attend(q, k_block, v_block, k_context, v_context, anchors_BN)


def context_visible(anchors_BN: Tensor, length: int) -> Tensor:
    """`[B, N, L]`: whether a block sees a context position."""
    return torch.arange(length, device=anchors_BN.device) < anchors_BN.unsqueeze(-1)


def _dense(q, k_block, v_block, k_context, v_context, anchors_BN) -> Tensor:
    B, _, N, K, _ = q.shape
    context_BNL = context_visible(anchors_BN, k_context.shape[2])
    own_NM = torch.eye(N, dtype=torch.bool, device=q.device).repeat_interleave(K, dim=1)
    visible = torch.cat([context_BNL, own_NM.expand(B, N, N * K)], dim=-1)
    mask = visible.repeat_interleave(K, dim=1).unsqueeze(1)
    keys = torch.cat([k_context, k_block.flatten(2, 3)], dim=2)
    values = torch.cat([v_context, v_block.flatten(2, 3)], dim=2)
    return scaled_dot_product_attention(q.flatten(2, 3), keys, values, attn_mask=mask).view_as(q)


def _split(q, k_block, v_block, k_context, v_context, anchors_BN) -> Tensor:
    return _SplitAttention.apply(q, k_block, v_block, k_context, v_context, anchors_BN)


class _SplitAttention(torch.autograd.Function):
    """Two flash attentions under one softmax.

    Forward: `out = out_c * exp(lse_c - lse) + out_b * exp(lse_b - lse)` with the joint
    `lse = logaddexp(lse_c, lse_b)`. Backward: flash attention's gradient needs only the joint
    output and log-sum-exp, so each part's own backward is called with those (the identity ring
    attention rests on).
    """

    @staticmethod
    def forward(ctx: Any, q, k_block, v_block, k_context, v_context, anchors_BN):
        B, H, N, K, E = q.shape
        visible_BNL = context_visible(anchors_BN, k_context.shape[2])
        mask = torch.zeros(visible_BNL.shape, dtype=q.dtype).masked_fill_(
            ~visible_BNL, float("-inf")
        )
        mask = mask.repeat_interleave(K, dim=1).unsqueeze(1)
        # A block without context would be a row without keys: let it see all, then weigh it zero.
        empty_BN = ~visible_BNL.any(-1)
        empty = empty_BN.repeat_interleave(K, dim=1)[:, None, :]
        forward_mask = mask.masked_fill(empty.unsqueeze(-1), 0.0) if empty_BN.any() else mask
        q_rows = q.reshape(B, H, N * K, E)
        out_c, lse_c = _flash(q_rows, k_context, v_context, attn_mask=forward_mask)
        own = [t.transpose(1, 2).reshape(B * N, H, K, E) for t in (q, k_block, v_block)]
        out_b, lse_b = _flash(*own)
        lse_c = lse_c.masked_fill(empty, float("-inf")).unsqueeze(-1)
        out_b = out_b.view(B, N, H, K, E).transpose(1, 2).reshape(B, H, N * K, E)
        lse_b = lse_b.view(B, N, H, K).transpose(1, 2).reshape(B, H, N * K, 1)
        lse = torch.logaddexp(lse_c, lse_b)
        # The log-sum-exps are float32, whatever the inputs are.
        out = (out_c * (lse_c - lse).exp() + out_b * (lse_b - lse).exp()).to(q.dtype)
        ctx.save_for_backward(q, k_block, v_block, k_context, v_context, mask, out, lse.squeeze(-1))
        return out.view(B, H, N, K, E)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor):
        q, k_block, v_block, k_context, v_context, mask, out, lse = ctx.saved_tensors
        B, H, N, K, E = q.shape
        grad_rows = gradients[0].reshape(B, H, N * K, E)
        q_rows = q.reshape(B, H, N * K, E)
        dq_c, dk_c, dv_c = _flash_backward(
            grad_rows, q_rows, k_context, v_context, out, lse, 0.0, False, attn_mask=mask
        )

        def own(rows: Tensor) -> Tensor:
            blocks = rows.reshape(B, H, N, K, *rows.shape[3:]).transpose(1, 2)
            return blocks.reshape(B * N, H, K, *rows.shape[3:])

        keys, values = (t.transpose(1, 2).reshape(B * N, H, K, E) for t in (k_block, v_block))
        parts = _flash_backward(
            own(grad_rows), own(q_rows), keys, values, own(out), own(lse), 0.0, False
        )
        dq_b, dk_b, dv_b = (t.view(B, N, H, K, E).transpose(1, 2) for t in parts)
        return dq_c.view_as(q) + dq_b, dk_b, dv_b, dk_c, dv_c, None
