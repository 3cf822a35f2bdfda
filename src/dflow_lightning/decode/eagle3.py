"""Drafting with an EAGLE-3 drafter: block_size - 1 steps, each on the token of the one before.

A context column holds the pair of its row: the feature there and the token after it. The token
is committed one round later than the feature, so the state carries one row more than for other
drafters: the feature before the anchor, where the first step starts. A round writes the columns of
what it commits, except the last; the next draft writes that one, because it has both halves, also
right after a prompt.

Shapes: R requests, K slots of a block, J = K-1 drafts, D hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from dflow_lightning.decode.state import DecodeState, Models
from dflow_lightning.models.eagle3 import Eagle3Drafter, Unroll
from dflow_lightning.tensors.blocks import KV


def draft_steps(
    models: Models, state: DecodeState, choose: Callable[[Tensor, int], Tensor]
) -> Tensor:
    """Draft J tokens, `[R, J]`.

    Args:
        choose: maps a step's logits, `[R, V]`, and its number (from 0) to its token.
    """
    target, drafter = models.target, models.drafter
    assert isinstance(drafter, Eagle3Drafter)
    assert state.feature_RD is not None
    anchor_R1 = state.anchor_R.unsqueeze(1)
    first_R1 = (anchor_R1 - 1).clamp(min=0)  # a free slot has no row before its anchor
    (context,) = state.context
    steps = Unroll(drafter, state.feature_RD.unsqueeze(1), first_R1, context)
    token_R1 = state.tokens_RT.gather(1, anchor_R1)
    tokens = []
    for number in range(models.block_size - 1):
        hidden_R1D = steps.advance(target.embed(token_R1).to(drafter.fc.weight.dtype))
        logits_RV = target.head(hidden_R1D.to(target.dtype)).squeeze(1)
        token_R1 = choose(logits_RV, number).unsqueeze(1)
        tokens.append(token_R1)
    _keep_first(state, first_R1, steps.own[0], context)
    return torch.cat(tokens, dim=1)


def _keep_first(state: DecodeState, first_R1: Tensor, pair: KV, context: KV) -> None:
    """Write the first step's pair into its context column, for later rounds.

    A slot that is reading its prompt is left out: it steps on stale data and would overwrite a
    column that is already final.
    """
    rows_R1 = torch.arange(first_R1.shape[0], device=first_R1.device).unsqueeze(1)
    index = (rows_R1, slice(None), first_R1)
    reading_R111 = state.idle_R[:, None, None, None]
    for buffer, fresh in ((context.keys, pair.keys), (context.values, pair.values)):
        buffer[index] = torch.where(reading_R111, buffer[index], fresh.transpose(1, 2))


def extend_pairs(
    models: Models, state: DecodeState, rows_R: Tensor, taps_RKC: Tensor, positions_RK: Tensor,
    next_ids_RK: Tensor, last_R: Tensor,
) -> None:  # fmt: skip
    """Write the context of requests `rows_R` and keep the feature of their last clean row.

    Rows after it are written too: later rounds overwrite them before they become visible.

    Args:
        next_ids_RK: the token after each row.
        last_R: index of the last row before the anchor; past the end while a prompt is being read.
    """
    drafter = models.drafter
    assert isinstance(drafter, Eagle3Drafter)
    assert state.feature_RD is not None
    dtype = drafter.fc.weight.dtype
    h_RKD = drafter.project(taps_RKC)
    embeds_RKD = models.target.embed(next_ids_RK).to(dtype)
    fresh = drafter.context_kv(h_RKD, embeds_RKD, positions_RK)
    (context,) = state.context
    index = (rows_R.unsqueeze(1), slice(None), positions_RK)
    context.keys[index] = fresh.keys.transpose(1, 2)
    context.values[index] = fresh.values.transpose(1, 2)
    last_R11 = last_R.clamp(max=h_RKD.shape[1] - 1)[:, None, None]
    state.feature_RD[rows_R] = h_RKD.take_along_dim(last_R11, dim=1).squeeze(1)
