"""Draft blocks: anchors, positions, labels and slot inputs.

A block is one anchor (slot 0: a committed, clean token) and K-1 mask slots; slot k predicts the
token at its own position, `anchor + k`. All positions are absolute in the row. In a row packed from
several documents a block belongs to one of them and carries its span, so that no step can forget
it: nothing outside is visible, a label or counted, and rotary positions count from its start.

Shapes never depend on the data: a block that is fully accepted or leaves the supervised text
becomes invalid and keeps its place. With several processes a data-dependent shape is a hang.

Shapes: B batch, S sequence, N blocks per sequence, K block size, J = K-1 drafts, D hidden,
L context length, G key/value heads, E head size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor


class Documents(NamedTuple):
    """The documents of packed rows: per token the first position and the sample id of its document.

    Padding is a separate document with the id -1.
    """

    starts_BS: Tensor
    sample_ids_BS: Tensor

    @property
    def ends_BS(self) -> Tensor:
        """The end (exclusive) of each token's document."""
        length = self.starts_BS.shape[1]
        index_S = torch.arange(length, device=self.starts_BS.device)
        later_BS = torch.where(self.starts_BS == index_S, index_S, length)[:, 1:]
        later_BS = torch.nn.functional.pad(later_BS, (0, 1), value=length)
        return later_BS.flip(-1).cummin(-1).values.flip(-1)


@dataclass(frozen=True)
class Anchors:
    """Where the blocks of a sequence start; invalid ones keep their place, so shapes are fixed.

    `starts_BN` and `ends_BN` span each block's document in a packed row; None where a row is one
    document.
    """

    positions_BN: Tensor
    valid_BN: Tensor
    starts_BN: Tensor | None = None
    ends_BN: Tensor | None = None

    def take(self, count: int) -> Anchors:
        """The first `count` blocks. Anchors are in random order, so this is a random subset."""
        parts = (self.positions_BN, self.valid_BN, self.starts_BN, self.ends_BN)
        return Anchors(*(None if part is None else part[:, :count] for part in parts))  # type: ignore[arg-type]


@dataclass(frozen=True)
class KV:
    """Keys and values of one layer: of context rows, `[B, G, L, E]`, or of blocks' own."""

    keys: Tensor
    values: Tensor

    def for_all_heads(self, group: int) -> KV:
        """Keys and values repeated for each of the `group` query heads that share them."""
        return KV(*(t.repeat_interleave(group, dim=1) for t in (self.keys, self.values)))


@dataclass(frozen=True)
class BlockView:
    """What each block sees besides its own slots.

    Args:
        anchors_BN: context position l is visible when l < anchor, strictly, because the feature at
            the anchor does not exist yet when the block is drafted.
        starts_BN: first visible position of each block, where a row holds several documents.
        carried_BNJ: which of its carried rows a block sees; no other block sees them.
    """

    anchors_BN: Tensor
    starts_BN: Tensor | None = None
    carried_BNJ: Tensor | None = None


def draw_anchors(
    loss_mask_BS: Tensor,
    sample_ids_B: Tensor,
    num_anchors: int,
    *,
    seed: int,
    step: int,
    documents: Documents | None = None,
    host_documents: Documents | None = None,
) -> Anchors:
    """Draw anchors uniformly without replacement among the eligible positions.

    A position can be an anchor when it and the next one are supervised, so that the first draft of
    every block has a label. The order is random and depends on (seed, step, sample id) only: not on
    the global random state, the batch's composition or the number of processes, so a restarted run
    draws the same anchors. The anchors of a packed document come in the order they have when it is
    alone; documents compete for the row's anchors at random, so that every supervised token has the
    same chance.

    Args:
        sample_ids_B: on the host, like `host_documents`: the random numbers are drawn there, and
            reading what they depend on from a device would wait for all that it has to do.
        host_documents: a copy of `documents`, which by default is read back.
    """
    eligible_BS = loss_mask_BS.clone()
    eligible_BS[:, :-1] &= loss_mask_BS[:, 1:]
    eligible_BS[:, -1] = False
    width = loss_mask_BS.shape[1]
    if documents is None:
        rows = [_keys(seed, step, sample_id, width) for sample_id in sample_ids_B.tolist()]
    else:
        starts_BS = documents.starts_BS
        eligible_BS[:, :-1] &= starts_BS[:, :-1] == starts_BS[:, 1:]
        rows = _document_keys(host_documents or documents, seed, step)
    keys_BS = _sent(torch.stack(rows), loss_mask_BS.device).masked_fill(~eligible_BS, 2.0)
    keys_BN, positions_BN = keys_BS.sort(dim=-1)
    valid_BN = keys_BN < 2.0
    missing = num_anchors - width
    if missing > 0:
        positions_BN = torch.nn.functional.pad(positions_BN, (0, missing))
        valid_BN = torch.nn.functional.pad(valid_BN, (0, missing))
    valid_BN = valid_BN[:, :num_anchors]
    positions_BN = positions_BN[:, :num_anchors].masked_fill(~valid_BN, 0)
    if documents is None:
        return Anchors(positions_BN, valid_BN)
    spans = (each.gather(1, positions_BN) for each in (documents.starts_BS, documents.ends_BS))
    return Anchors(positions_BN, valid_BN, *spans)


def _keys(seed: int, step: int, sample_id: int, length: int) -> Tensor:
    """Random sort keys of a document's positions; a longer document begins with the same keys."""
    return torch.rand(length, generator=_generator(seed, step, sample_id), dtype=torch.float64)


def _sent(keys_BS: Tensor, device: torch.device) -> Tensor:
    """The one copy to the device that a training step makes, which waits for nothing.

    A device's own generator would draw other anchors than a CPU's. From pageable memory the host
    would wait until the device takes the copy, behind all the work in its queue.
    """
    if device.type == "cuda":
        keys_BS = keys_BS.pin_memory()
    return keys_BS.to(device, non_blocking=True)


def _document_keys(documents: Documents, seed: int, step: int) -> list[Tensor]:
    """`_keys` of the documents of each packed row, concatenated."""
    rows = []
    for starts_S, ids_S in zip(*(each.cpu() for each in documents), strict=True):
        starts, lengths = torch.unique_consecutive(starts_S, return_counts=True)
        spans = zip(ids_S[starts].tolist(), lengths.tolist(), strict=True)
        rows.append(torch.cat([_keys(seed, step, sample_id, n) for sample_id, n in spans]))
    return rows


def _generator(seed: int, step: int, sample_id: int) -> torch.Generator:
    # SplitMix64's odd multipliers spread the three numbers over the 64-bit seed.
    mixed = seed * 0x9E3779B97F4A7C15 + step * 0xBF58476D1CE4E5B9 + sample_id * 0x94D049BB133111EB
    return torch.Generator().manual_seed(mixed % 2**63)


def slot_positions(anchors_BN: Tensor, block_size: int) -> Tensor:
    """Absolute position of each slot, `[B, N, K]`: the anchor's plus 0..K-1."""
    return anchors_BN.unsqueeze(-1) + torch.arange(block_size, device=anchors_BN.device)


def rows_at(x: Tensor, index: Tensor) -> Tensor:
    """`x[b, index[b, ...]]`: the rows of dimension 1 that an index `[B, N]` or `[B, N, K]` names.

    For its backward pass it keeps the index alone, where `take_along_dim` keeps one of 8 bytes for
    each number of its result.
    """
    batch = torch.arange(x.shape[0], device=x.device)
    return x[batch.view(-1, *[1] * (index.ndim - 1)), index]


def gather_slots(
    values_BS: Tensor, anchors_BN: Tensor, block_size: int, ends_BN: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """`values` at each slot's position, `[B, N, K]`, and whether that position exists.

    Args:
        ends_BN: where each block's document ends; by default with the row.
    """
    positions_BNK = slot_positions(anchors_BN, block_size)
    length = values_BS.shape[1]
    index = positions_BNK.clamp(max=length - 1).flatten(1)
    end = length if ends_BN is None else ends_BN.unsqueeze(-1)
    return values_BS.gather(1, index).view_as(positions_BNK), positions_BNK < end


def slot_labels(
    input_ids_BS: Tensor, loss_mask_BS: Tensor, anchors: Anchors, block_size: int
) -> tuple[Tensor, Tensor]:
    """Labels of slots 1..K-1 and whether each is supervised, both `[B, N, J]`.

    A slot counts when its block is valid and its position is supervised and inside the document.
    """
    labels_BNK, inside_BNK = gather_slots(
        input_ids_BS, anchors.positions_BN, block_size, anchors.ends_BN
    )
    mask_BNK, _ = gather_slots(loss_mask_BS, anchors.positions_BN, block_size)
    supervised_BNK = mask_BNK & inside_BNK & anchors.valid_BN.unsqueeze(-1)
    return labels_BNK[..., 1:], supervised_BNK[..., 1:]


def next_anchors(
    anchors: Anchors, num_accepted_BN: Tensor, loss_mask_BS: Tensor, block_size: int
) -> Anchors:
    """Anchors of the next rollout round: `A' = A + a + 1`, the position of the bonus token.

    A block ends its rollout (becomes invalid) when every draft was accepted, since nothing is left
    to relay, and when A' or the position after it is unsupervised or outside the document.
    """
    moved_BN = anchors.positions_BN + num_accepted_BN + 1
    pair_BN2, inside_BN2 = gather_slots(loss_mask_BS, moved_BN, 2, anchors.ends_BN)
    rejected_BN = num_accepted_BN < block_size - 1
    valid_BN = anchors.valid_BN & rejected_BN & (pair_BN2 & inside_BN2).all(-1)
    spans = (
        None if each is None else each.masked_fill(~valid_BN, 0)
        for each in (anchors.starts_BN, anchors.ends_BN)
    )
    return Anchors(moved_BN.masked_fill(~valid_BN, 0), valid_BN, *spans)


def slot_inputs(
    anchor_embeds_BND: Tensor,
    mask_embed_D: Tensor,
    block_size: int,
    relay_BNKD: Tensor | None = None,
) -> Tensor:
    """Input embeddings, `[B, N, K, D]`: the anchor's token, then the mask slots (plus relay)."""
    masks = mask_embed_D.expand(*anchor_embeds_BND.shape[:-1], block_size - 1, -1)
    if relay_BNKD is not None:
        masks = masks + relay_BNKD[..., 1:, :]
    return torch.cat([anchor_embeds_BND.unsqueeze(-2), masks], dim=-2)
