"""Attention of draft blocks: every block sees the context before its anchor and its own slots.

A block never sees another block. Three formulations give the same numbers. `dense` is the
reference: context and blocks behind one boolean mask. The other two skip the keys of other blocks:
`split` (CPU) attends to the context and to the block separately and merges both by their
log-sum-exp; `flex` (GPU) skips whole tiles of scores. The tiles follow from the anchors by
arithmetic, so no mask of slots by keys is ever built.

Shapes: B batch, N blocks per sequence, K block size, L context length, H/G query/key-value heads, E
head size.
"""

from __future__ import annotations

import warnings
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from dflow_lightning.errors import InputError
from dflow_lightning.tensors.attention_flex import Variant, flex_blocks, variant_of
from dflow_lightning.tensors.blocks import KV, BlockView

AttentionBackend = Literal["auto", "dense", "split", "flex"]
Formulation = Literal["dense", "split", "flex"]
DENSE_MASK_LIMIT = 2**30  # bytes

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def block_attention(
    q: Tensor, own: KV, context: KV, view: BlockView, formulation: Formulation
) -> Tensor:
    """Attend from each block to `context < anchor` and to the block itself, non-causally.

    Args:
        q: `[B, H, N, K, E]`.
        own: keys and values of each block, `[B, G, N, K, E]`; K+J of them with carried rows.
        context: `[B, G, L, E]`; column l holds absolute position l.
        formulation: from `formulation_for`.

    Returns:
        `[B, H, N, K, E]`.

    Raises:
        InputError: `dense` would need a mask above 1 GiB.
    """
    if formulation == "flex":
        attended = FLEX(q, own, context, view)
        if attended is not None:
            return attended
    group = q.shape[1] // own.keys.shape[1]
    own, context = own.for_all_heads(group), context.for_all_heads(group)
    return (_split if formulation == "split" else _dense)(q, own, context, view)


def own_visible(carried_BNJ: Tensor, block_size: int) -> Tensor:
    """`[B, N, K+J]`: which of its own keys a block sees: all slots, and valid carried rows."""
    slots_BNK = carried_BNJ.new_ones(*carried_BNJ.shape[:2], block_size)
    return torch.cat([slots_BNK, carried_BNJ], dim=-1)


def formulation_for(
    backend: AttentionBackend, num_blocks: int, device: torch.device, dtype: torch.dtype
) -> Formulation:
    """Resolve `auto`: `flex` on a GPU, `split` on a CPU, `dense` for a single block.

    Raises:
        InputError: `split` was requested on a device or dtype without its kernel.
    """
    # A single block has no neighbours to waste work on.
    splits = device.type == "cpu" and dtype != torch.float64
    if backend == "auto":
        if num_blocks == 1:
            return "dense"
        return "split" if splits else "flex" if device.type == "cuda" else "dense"
    if backend == "split" and not splits:
        raise InputError(
            f"model.attention is split, which runs on a CPU in float32 and less, not on "
            f"{device.type} in {dtype}; set it to auto"
        )
    return backend


class FlexAttention:
    """flex_attention, remembering the variants that do not compile on this GPU.

    A kernel that needs more shared memory than the GPU has, or a recompilation over the limit, must
    not end a training run that can continue with a dense mask.
    """

    def __init__(self) -> None:
        self._refused: set[Variant] = set()

    def __call__(self, q: Tensor, own: KV, context: KV, view: BlockView) -> Tensor | None:
        """As `block_attention`; None, with one warning, if this variant does not run."""
        variant = variant_of(q, own, view)
        if variant in self._refused:
            return None
        try:
            return flex_blocks(q, own, context, view)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            from torch._dynamo.exc import FailOnRecompileLimitHit  # slow import

            limit = isinstance(error, FailOnRecompileLimitHit)
            if not limit and "out of resource" not in str(error).lower():
                raise
            self._refused.add(variant)
            warnings.warn(
                f"flex_attention does not run on this GPU ({str(error).splitlines()[0][:120]}); "
                "attention goes on with a dense mask",
                stacklevel=2,
            )
            return None


FLEX = FlexAttention()  # one per process, like the compiler's cache


def context_visible(anchors_BN: Tensor, length: int, starts_BN: Tensor | None = None) -> Tensor:
    """`[B, N, L]`: whether a block sees a context position, `start <= l < anchor`."""
    positions_L = torch.arange(length, device=anchors_BN.device)
    visible_BNL = positions_L < anchors_BN.unsqueeze(-1)
    return visible_BNL if starts_BN is None else visible_BNL & (positions_L >= starts_BN[..., None])


def _dense(q: Tensor, own: KV, context: KV, view: BlockView) -> Tensor:
    B, _, N, K, _ = q.shape
    M = own.keys.shape[3]  # a block's own keys
    if N > 1:
        size = B * N * K * (context.keys.shape[2] + N * M) * q.element_size()
        if size > DENSE_MASK_LIMIT:
            raise InputError(
                f"model.attention is dense, and a mask of {B} x {N} blocks takes "
                f"{size / 2**30:.1f} GiB; set it to auto, or lower model.num_anchors or "
                "data.batch_size"
            )
    context_BNL = context_visible(view.anchors_BN, context.keys.shape[2], view.starts_BN)
    own_NM = torch.eye(N, dtype=torch.bool, device=q.device).repeat_interleave(M, dim=1)
    own_BNM = own_NM.expand(B, N, N * M)
    if view.carried_BNJ is not None:
        own_BNM = own_BNM & own_visible(view.carried_BNJ, K).flatten(1).unsqueeze(1)
    visible = torch.cat([context_BNL, own_BNM], dim=-1)
    mask = visible.repeat_interleave(K, dim=1).unsqueeze(1)
    keys = torch.cat([context.keys, own.keys.flatten(2, 3)], dim=2)
    values = torch.cat([context.values, own.values.flatten(2, 3)], dim=2)
    return scaled_dot_product_attention(q.flatten(2, 3), keys, values, attn_mask=mask).view_as(q)


def _split(q: Tensor, own: KV, context: KV, view: BlockView) -> Tensor:
    return _SplitAttention.apply(  # an autograd function tracks tensors, not dataclasses
        q, own.keys, own.values, context.keys, context.values,
        view.anchors_BN, view.starts_BN, view.carried_BNJ,
    )  # fmt: skip


class _SplitAttention(torch.autograd.Function):
    """Two flash attentions under one softmax.

    Forward: `out = out_c * exp(lse_c - lse) + out_b * exp(lse_b - lse)` with the joint
    `lse = logaddexp(lse_c, lse_b)`. Backward: flash attention's gradient needs only the joint
    output and log-sum-exp, so the backward of each part is called with those (the identity behind
    ring attention). The blocks arrive sorted by anchor and attend to the context in a few groups,
    each only up to its last anchor: that skips about half of the context on average.
    """

    @staticmethod
    def forward(
        ctx: Any, q, k_block, v_block, k_context, v_context, anchors_BN, starts_BN, carried_BNJ
    ):
        B, H, N, K, E = q.shape
        q_rows = q.reshape(B, H, N * K, E)
        parts = []
        for blocks, rows, length in _groups(anchors_BN, K):
            mask, empty = _additive_mask(q, length, anchors_BN, starts_BN, blocks)
            # A softmax over no keys is NaN: a block without context sees all of it, with weight 0.
            visible = mask.masked_fill(empty.unsqueeze(-1), 0.0) if empty.any() else mask
            keys, values = k_context[:, :, :length], v_context[:, :, :length]
            out, lse = _flash(q_rows[:, :, rows], keys, values, attn_mask=visible)
            parts.append((out, lse.masked_fill(empty, float("-inf")).unsqueeze(-1)))
        out_c, lse_c = (torch.cat(one, dim=2) for one in zip(*parts, strict=True))
        own = [t.transpose(1, 2).flatten(0, 1) for t in (q, k_block, v_block)]
        out_b, lse_b = _flash(*own, attn_mask=_own_mask(q, carried_BNJ))
        out_b = out_b.view(B, N, H, K, E).transpose(1, 2).reshape(B, H, N * K, E)
        lse_b = lse_b.view(B, N, H, K).transpose(1, 2).reshape(B, H, N * K, 1)
        lse = torch.logaddexp(lse_c, lse_b)
        # The log-sum-exps are float32 for every input dtype, so cast the result back.
        out = (out_c * (lse_c - lse).exp() + out_b * (lse_b - lse).exp()).to(q.dtype)
        inputs = (q, k_block, v_block, k_context, v_context, anchors_BN, starts_BN, carried_BNJ)
        ctx.save_for_backward(*inputs, out, lse.squeeze(-1))
        return out.view(B, H, N, K, E)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor):
        q, k_block, v_block, k_context, v_context, anchors_BN, starts_BN, carried_BNJ, out, lse = (
            ctx.saved_tensors
        )
        B, H, N, K, E = q.shape
        grad_rows = gradients[0].reshape(B, H, N * K, E)
        q_rows = q.reshape(B, H, N * K, E)
        dq_parts = []
        dk_c, dv_c = torch.zeros_like(k_context), torch.zeros_like(v_context)
        for blocks, rows, length in _groups(anchors_BN, K):
            # Rows without context weigh 0 here, since the joint log-sum-exp is finite.
            mask, _ = _additive_mask(q, length, anchors_BN, starts_BN, blocks)
            dq, dk, dv = _flash_backward(
                grad_rows[:, :, rows], q_rows[:, :, rows],
                k_context[:, :, :length], v_context[:, :, :length],
                out[:, :, rows], lse[:, :, rows], 0.0, False, attn_mask=mask,
            )  # fmt: skip
            dq_parts.append(dq)
            dk_c[:, :, :length] += dk  # every group reads the context from its start
            dv_c[:, :, :length] += dv

        def own(rows: Tensor) -> Tensor:  # each block a batch entry, as in the forward pass
            blocks = rows.reshape(B, H, N, K, *rows.shape[3:]).transpose(1, 2)
            return blocks.reshape(B * N, H, K, *rows.shape[3:])

        keys, values = (t.transpose(1, 2).flatten(0, 1) for t in (k_block, v_block))
        parts = _flash_backward(
            own(grad_rows), own(q_rows), keys, values, own(out), own(lse), 0.0, False,
            attn_mask=_own_mask(q, carried_BNJ),
        )  # fmt: skip
        dq_b, dk_b, dv_b = (t.unflatten(0, (B, N)).transpose(1, 2) for t in parts)
        dq = torch.cat(dq_parts, dim=2).view_as(q) + dq_b
        return dq, dk_b, dv_b, dk_c, dv_c, None, None, None


def _own_mask(q: Tensor, carried_BNJ: Tensor | None) -> Tensor | None:
    """Additive mask, `[B*N, 1, K, K+J]`; None if blocks carry no rows and see all their slots."""
    if carried_BNJ is None:
        return None
    K = q.shape[3]
    visible_BNM = own_visible(carried_BNJ, K).flatten(0, 1)[:, None, None]
    mask = q.new_zeros(visible_BNM.shape).masked_fill_(~visible_BNM, float("-inf"))
    return mask.expand(-1, -1, K, -1).contiguous()


def _groups(anchors_BN: Tensor, block_size: int) -> list[tuple[slice, slice, int]]:
    """At most four groups of blocks: the blocks, their rows, and the length of context they see."""
    N = anchors_BN.shape[1]
    size = max(8, -(-N // 4))
    found = []
    for start in range(0, N, size):
        blocks = slice(start, min(start + size, N))
        rows = slice(blocks.start * block_size, blocks.stop * block_size)
        found.append((blocks, rows, max(1, int(anchors_BN[:, blocks].max()))))
    return found


def _additive_mask(
    q: Tensor, length: int, anchors_BN: Tensor, starts_BN: Tensor | None, blocks: slice
) -> tuple[Tensor, Tensor]:
    """Additive mask, `[B, 1, rows, L]`, and which rows see no context, `[B, 1, rows]`."""
    starts = None if starts_BN is None else starts_BN[:, blocks]
    visible_BNL = context_visible(anchors_BN[:, blocks], length, starts)
    mask = q.new_zeros(visible_BNL.shape).masked_fill_(~visible_BNL, float("-inf"))
    empty_BN = ~visible_BNL.any(-1)
    K = q.shape[3]
    return (
        mask.repeat_interleave(K, dim=1).unsqueeze(1),
        empty_BN.repeat_interleave(K, dim=1).unsqueeze(1),
    )
