"""From a block's start to its draft tokens: the steps that training and decoding share.

Shapes: B batch, N blocks per sequence, K block size, J = K-1 drafts, D hidden, V vocabulary; R
blocks of a chunk.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from dflow_lightning.models.carryover import CarriedRows
from dflow_lightning.models.causal_head import CausalHead
from dflow_lightning.models.drafter import ContextKV, Drafter
from dflow_lightning.models.relay import Relay, RelayInput
from dflow_lightning.models.target import FrozenTarget
from dflow_lightning.tensors.blocks import Anchors, slot_inputs
from dflow_lightning.tensors.loss import CHUNK_BYTES, blocks_within


def relay_correction(target: FrozenTarget, relay: Relay, rows: RelayInput) -> Tensor:
    """What the relay adds to the mask slots, `[B, N, K, D]`."""
    bonus = target.embed(rows.bonus_BN).to(rows.h_BNKD.dtype)
    rejected = target.embed(rows.rejected_BN).to(rows.h_BNKD.dtype)
    return relay(rows.h_BNKD, bonus, rejected, rows.valid_BNK)


def embed_blocks(
    target: FrozenTarget, drafter: Drafter, anchor_ids_BN: Tensor, correction_BNKD: Tensor | None
) -> Tensor:
    """Slot inputs, `[B, N, K, D]`: the anchor's embedding, then masks corrected by the relay."""
    dtype = drafter.fc.weight.dtype
    mask_id = anchor_ids_BN.new_tensor(drafter.dims.mask_token_id)
    return slot_inputs(
        target.embed(anchor_ids_BN).to(dtype),
        target.embed(mask_id).to(dtype),
        drafter.dims.block_size,
        correction_BNKD,
    )


def draft_hidden(
    drafter: Drafter,
    x_BNKD: Tensor,
    context: list[ContextKV],
    anchors_BN: Tensor,
    starts_BN: Tensor | None = None,
    carried: CarriedRows | None = None,
) -> Tensor:
    """Hidden states of slots 1..K-1, `[B, N, J, D]`, ready for the target's head."""
    hidden_BNKD = drafter(x_BNKD, context, anchors_BN, starts_BN=starts_BN, carried=carried)
    return hidden_BNKD[..., 1:, :]


def draft_tokens(
    target: FrozenTarget,
    drafter: Drafter,
    x_BNKD: Tensor,
    context: list[ContextKV],
    anchors: Anchors,
    anchor_ids_BN: Tensor,
    gold_BNJ: Tensor | None = None,
    carried: CarriedRows | None = None,
) -> Tensor:
    """Greedy drafts of slots 1..K-1, `[B, N, J]`, from one drafter forward.

    Args:
        gold_BNJ: tokens that a causal head reads in place of its own drafts.
    """
    hidden_BNJD = draft_hidden(
        drafter, x_BNKD, context, anchors.positions_BN, anchors.starts_BN, carried
    )
    if drafter.causal_head is None:
        return greedy_tokens(target, hidden_BNJD)
    return chained_tokens(target, drafter.causal_head, hidden_BNJD, anchor_ids_BN, gold_BNJ)


def chained_tokens(
    target: FrozenTarget,
    causal_head: CausalHead,
    hidden_BNJD: Tensor,
    anchor_ids_BN: Tensor,
    gold_BNJ: Tensor | None = None,
) -> Tensor:
    """Greedy drafts of a causal head, `[B, N, J]`: each reads those before it, or `gold_BNJ`."""
    rows = [hidden_BNJD.flatten(0, 1), anchor_ids_BN.flatten()]
    if gold_BNJ is not None:
        rows.append(gold_BNJ.flatten(0, 1))
    size = blocks_within(CHUNK_BYTES, hidden_BNJD.shape[2], target.vocab_size)
    drafts = []
    for hidden_RJD, *others in zip(*(part.split(size) for part in rows), strict=True):
        logits_RJV = target.head(hidden_RJD.to(target.dtype))
        embed = embedding(target, hidden_RJD.dtype)
        drafts.append(causal_head.unroll(logits_RJV, hidden_RJD, embed, best, *others))
    return torch.cat(drafts).view(hidden_BNJD.shape[:-1])


def embedding(target: FrozenTarget, dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    """The target's embedding of token ids, in the type of a drafter."""
    return lambda ids: target.embed(ids).to(dtype)


def best(logits_RV: Tensor, slot: int) -> Tensor:
    """The most likely token of a slot."""
    return logits_RV.argmax(-1)


def greedy_tokens(target: FrozenTarget, hidden_BNJD: Tensor) -> Tensor:
    """The target's greedy choice for each hidden state, `[B, N, J]`, never holding all logits."""
    hidden = hidden_BNJD.flatten(0, 1)
    size = blocks_within(CHUNK_BYTES, hidden.shape[1], target.vocab_size)
    chosen = [target.head(part.to(target.dtype)).argmax(-1) for part in hidden.split(size)]
    return torch.cat(chosen).view(hidden_BNJD.shape[:-1])
