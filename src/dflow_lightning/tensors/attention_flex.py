"""Block attention by flex_attention: tiles of scores that no block may see are never computed.

Keys are the context, padded to whole tiles, and then the blocks' own slots. Which tiles a tile of
queries reads follows from the anchors by arithmetic, so no mask of queries by keys is ever made.
One kernel is compiled for all lengths of a variant. torch runs flex_attention's backward pass on a
GPU only.

Shapes: B batch, N blocks per sequence, K block size, L context length, H/G query/key heads, E head
size, Q queries (N*K), T tile, U/W tiles of queries/keys.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from types import FunctionType
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from torch.nn.functional import pad

from dflow_lightning.tensors.blocks import KV, BlockView

TILE = 128


class Variant(NamedTuple):
    """What a kernel is compiled for; lengths and numbers of blocks are free."""

    batch: int
    heads: int
    groups: int
    block_size: int
    head_dim: int
    dtype: torch.dtype
    gradient: bool
    carried: bool


def variant_of(q: Tensor, own: KV, view: BlockView) -> Variant:
    """The variant that these tensors need."""
    B, H, _, K, E = q.shape
    gradient = torch.is_grad_enabled() and q.requires_grad
    carried = view.carried_BNJ is not None
    return Variant(B, H, own.keys.shape[1], K, E, q.dtype, gradient, carried)


def flex_blocks(
    q: Tensor, own: KV, context: KV, view: BlockView, attend: Callable[..., Tensor] | None = None
) -> Tensor:
    """As `attention.block_attention`; grouped heads stay grouped.

    Args:
        attend: the kernel; by default flex_attention, compiled.
    """
    B, H, N, K, E = q.shape
    length = _whole_tiles(context.keys.shape[2])
    queries = _whole_tiles(N * K)
    mask = tile_mask(view, K, length)
    owned = mask.seq_lengths[1] - length
    keys, values = (
        torch.cat([_padded(of_context, length), _padded(of_blocks.flatten(2, 3), owned)], dim=2)
        for of_context, of_blocks in ((context.keys, own.keys), (context.values, own.values))
    )
    out = (attend or compiled_attention(variant_of(q, own, view)))(
        _padded(q.flatten(2, 3), queries), keys, values, block_mask=mask, enable_gqa=True
    )
    return out[:, :, : N * K].reshape(B, H, N, K, E)


@cache
def compiled_attention(variant: Variant) -> Callable[..., Tensor]:
    """flex_attention compiled for a variant, once for all lengths.

    The compiler counts recompilations by code object, and gives up at the ninth. A copy of the code
    has a count of its own, so that a process may train as many variants as it likes.
    """
    own = FunctionType(_attend.__code__.replace(), _attend.__globals__, _attend.__name__)
    return torch.compile(own, dynamic=True, fullgraph=True)


def _attend(q, keys, values, block_mask, enable_gqa):
    return flex_attention(q, keys, values, block_mask=block_mask, enable_gqa=enable_gqa)


def tile_mask(view: BlockView, block_size: int, context: int) -> BlockMask:
    """Which tiles are read whole, in part or not at all, and who sees what inside a tile.

    Args:
        context: context length in whole tiles; a block's own slots stand behind it, and carried
            rows behind those.
    """
    anchors_BN, starts_BN, carried_BNJ = view.anchors_BN, view.starts_BN, view.carried_BNJ
    N = anchors_BN.shape[1]
    own = block_size + (0 if carried_BNJ is None else carried_BNJ.shape[2])  # keys of a block
    Q = _whole_tiles(N * block_size)
    # Rows that fill the last tile see nothing of the context, and themselves.
    stops_BQ = pad(anchors_BN.repeat_interleave(block_size, dim=1), (0, Q - N * block_size))
    starts_BQ = torch.zeros_like(stops_BQ)
    if starts_BN is not None:
        first_BQ = starts_BN.repeat_interleave(block_size, dim=1)
        starts_BQ = pad(first_BQ, (0, Q - N * block_size))

    def sees(b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        of_context = (key < stops_BQ[b, query]) & (key >= starts_BQ[b, query])
        of_block = (key - context) // own == query // block_size
        return torch.where(key < context, of_context, of_block)

    seen_BM = None
    # The rows that fill the last tile are blocks too, and see themselves.
    M = Q if carried_BNJ is None else _whole_tiles(-(-Q // block_size) * own)
    if carried_BNJ is not None:
        slots = carried_BNJ.new_ones(*carried_BNJ.shape[:2], block_size)
        seen_BM = torch.cat([slots, carried_BNJ], dim=-1).flatten(1)
        seen_BM = pad(seen_BM, (0, M - N * own), value=True)

    def sees_carried(b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        assert seen_BM is not None
        there = (key < context) | seen_BM[b, (key - context).clamp(min=0)]
        return sees(b, h, query, key) & there

    part_BUW, whole_BUW = _tiles(stops_BQ, starts_BQ, block_size, own, context, context + M)
    return BlockMask.from_kv_blocks(
        *_listed(part_BUW.unsqueeze(1)), *_listed(whole_BUW.unsqueeze(1)),
        BLOCK_SIZE=TILE, mask_mod=sees if carried_BNJ is None else sees_carried,
        seq_lengths=(Q, context + M),
    )  # fmt: skip


def _tiles(
    stops_BQ: Tensor, starts_BQ: Tensor, block_size: int, own: int, context: int, keys: int
) -> tuple[Tensor, Tensor]:
    """Tiles read in part and whole, both `[B, U, W]`.

    Args:
        own: keys of a block's own, its slots or more.
        keys: all of them, in whole tiles.
    """
    B, Q = stops_BQ.shape
    stops_BUT, starts_BUT = (t.view(B, -1, TILE) for t in (stops_BQ, starts_BQ))
    device = stops_BQ.device
    left_W = torch.arange(0, keys, TILE, device=device)
    right_W = left_W + TILE
    in_context_W = right_W <= context
    # Some row sees some key of the tile (an outer bound), and every row sees every key.
    some_BUW = (left_W < stops_BUT.amax(-1, keepdim=True)) & (
        right_W > starts_BUT.amin(-1, keepdim=True)
    )
    all_BUW = (right_W <= stops_BUT.amin(-1, keepdim=True)) & (
        left_W >= starts_BUT.amax(-1, keepdim=True)
    )
    # A tile of queries holds rows of the blocks that begin before its end and end after its start.
    rows_U = torch.arange(0, Q, TILE, device=device).unsqueeze(-1)
    first_U = context + rows_U // block_size * own
    last_U = context + ((rows_U + TILE - 1) // block_size + 1) * own
    own_UW = (left_W < last_U) & (right_W > first_U) & ~in_context_W
    return (some_BUW & ~all_BUW & in_context_W) | own_UW, all_BUW & in_context_W


def _listed(tiles: Tensor) -> tuple[Tensor, Tensor]:
    """How many tiles each tile of queries reads, and which; the rest of the list is not read."""
    order = tiles.int().argsort(dim=-1, descending=True, stable=True)
    return tiles.sum(-1).int(), order.int()


def _whole_tiles(length: int) -> int:
    # Two at least: a kernel for one tile would be compiled apart.
    return max(2, -(-length // TILE)) * TILE


def _padded(x: Tensor, length: int) -> Tensor:
    return pad(x, (0, 0, 0, length - x.shape[2]))
