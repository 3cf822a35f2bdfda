"""One round of speculative decoding: `relay_input`, `draft`, `verify`, `commit`.

Requests of different length share a batch. Nothing is ever cut from a cache: the target's and the
drafter's buffers are written at each request's own positions, a request sees what lies before its
length, and rejected rows are written over by the next block.

Shapes: R requests, T token slots, K block size, D hidden, C tapped width, V vocabulary, G key/value
heads, E head size.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from dflow_lightning.acceptance import accept, choose, rejected_token
from dflow_lightning.draft import draft_tokens, embed_blocks, relay_correction
from dflow_lightning.drafter import ContextKV, Drafter
from dflow_lightning.relay import Relay, RelayInput, align
from dflow_lightning.target import FrozenTarget, SlotCache


@dataclass
class RoundTimer:
    """Wall seconds of each part of each round."""

    draft: list[float] = field(default_factory=list)
    verify: list[float] = field(default_factory=list)
    relay: list[float] = field(default_factory=list)
    commit: list[float] = field(default_factory=list)

    @contextmanager
    def measure(self, part: str) -> Iterator[None]:
        """Append the seconds spent inside to `draft`, `verify`, `relay` or `commit`."""
        start = time.perf_counter()
        yield
        getattr(self, part).append(time.perf_counter() - start)


@dataclass
class DecodeState:
    """Everything a batch of requests carries from round to round."""

    tokens_RT: Tensor
    length_R: Tensor  # committed tokens; the last one's keys and values are not computed yet
    end_R: Tensor  # the length at which a request is full
    done_R: Tensor
    temperature_R: Tensor
    uniforms_RT: Tensor  # one uniform per absolute position
    stop_ids: Tensor
    target_cache: SlotCache
    context: list[ContextKV]  # drafter keys and values, [R, G, T, E] a layer
    relay: RelayInput | None = None

    @property
    def anchor_R(self) -> Tensor:
        """Position of the last committed token: slot 0 of the next block."""
        return self.length_R - 1


@dataclass(frozen=True)
class Models:
    """The parts that a round runs."""

    target: FrozenTarget
    drafter: Drafter
    relay: Relay | None
    first_rejected: bool


@dataclass(frozen=True)
class Verified:
    """The target's choice after each row of a block, `[R, K]`, and its taps, `[R, K, C]`."""

    chosen_RK: Tensor
    taps_RKC: Tensor


def round_step(models: Models, state: DecodeState, timer: RoundTimer) -> Tensor:
    """Run one round for every request; returns the number of tokens each one gained, `[R]`."""
    correction = None
    if models.relay is not None:
        with timer.measure("relay"):
            if state.relay is not None:
                correction = relay_correction(models.target, models.relay, state.relay)
    with timer.measure("draft"):
        drafts_RK = draft(models, state, correction)
    with timer.measure("verify"):
        verified = verify(models, state, drafts_RK)
    with timer.measure("commit"):
        num_accepted_R = accept(drafts_RK, verified.chosen_RK[:, :-1])
        h_RKD = extend_context(models, state, verified.taps_RKC)
        gained_R = commit(state, verified.chosen_RK, num_accepted_R)
    if models.relay is not None:
        with timer.measure("relay"):
            state.relay = relay_input(models, h_RKD, drafts_RK, verified.chosen_RK, num_accepted_R)
    return gained_R


def draft(models: Models, state: DecodeState, correction_RNKD: Tensor | None) -> Tensor:
    """Draft tokens of slots 1..K-1, `[R, K-1]`, in one drafter forward (N = 1 block a request)."""
    anchor_R1 = state.anchor_R.unsqueeze(1)
    anchor_ids_R1 = state.tokens_RT.gather(1, anchor_R1)
    x_RNKD = embed_blocks(models.target, models.drafter, anchor_ids_R1, correction_RNKD)
    return draft_tokens(models.target, models.drafter, x_RNKD, state.context, anchor_R1).squeeze(1)


def verify(models: Models, state: DecodeState, drafts_RK: Tensor) -> Verified:
    """One target forward over the anchor and its drafts."""
    anchor_R1 = state.anchor_R.unsqueeze(1)
    ids_RK = torch.cat([state.tokens_RT.gather(1, anchor_R1), drafts_RK], dim=1)
    positions_RK = anchor_R1 + torch.arange(ids_RK.shape[1], device=ids_RK.device)
    output = models.target.forward(
        ids_RK,
        positions_RK,
        state.target_cache,
        positions_RK,
        causal(positions_RK, state.target_cache.capacity),
        models.drafter.dims.target_layer_ids,
    )
    logits_RKV = models.target.head(output.hidden_BQD)
    uniforms_RK = state.uniforms_RT.gather(1, positions_RK + 1)
    return Verified(choose(logits_RKV, state.temperature_R, uniforms_RK), output.taps_BQC)


def causal(positions_RQ: Tensor, capacity: int) -> Tensor:
    """`[R, Q, T]`: a token sees every cache slot up to its own."""
    return torch.arange(capacity, device=positions_RQ.device) <= positions_RQ.unsqueeze(-1)


def extend_context(
    models: Models, state: DecodeState, taps_RKC: Tensor, positions_RK: Tensor | None = None
) -> Tensor:
    """Write the drafter's context for all rows of a block; returns their features `h`, `[R, K, D]`.

    All rows are projected once, for context and relay alike. Rows on the rejected branch are
    written too: the next block's anchor lies before them, so they are never seen.
    """
    if positions_RK is None:
        slots_K = torch.arange(taps_RKC.shape[1], device=taps_RKC.device)
        positions_RK = state.anchor_R.unsqueeze(1) + slots_K
    h_RKD = models.drafter.project(taps_RKC.to(models.drafter.fc.weight.dtype))
    rows_R1 = torch.arange(taps_RKC.shape[0], device=taps_RKC.device).unsqueeze(1)
    new = models.drafter.context_kv(h_RKD, positions_RK)
    for layer, fresh in zip(state.context, new, strict=True):
        layer.keys[rows_R1, :, positions_RK] = fresh.keys.transpose(1, 2)
        layer.values[rows_R1, :, positions_RK] = fresh.values.transpose(1, 2)
    return h_RKD


def relay_input(
    models: Models, h_RKD: Tensor, drafts_RK: Tensor, chosen_RK: Tensor, num_accepted_R: Tensor
) -> RelayInput:
    """Rows of the rejected suffix, aligned to the next block, with bonus and rejected token."""
    K = h_RKD.shape[1]
    aligned_RKD, valid_RK = align(h_RKD, num_accepted_R, K, first_rejected=models.first_rejected)
    bonus_R1 = chosen_RK.gather(1, num_accepted_R.unsqueeze(1))
    rejected_R1 = rejected_token(drafts_RK, num_accepted_R).unsqueeze(1)
    return RelayInput(aligned_RKD.unsqueeze(1), valid_RK.unsqueeze(1), bonus_R1, rejected_R1)


def commit(state: DecodeState, chosen_RK: Tensor, num_accepted_R: Tensor) -> Tensor:
    """Append the accepted drafts and the bonus token; returns the tokens gained, `[R]`.

    The accepted drafts equal the target's choices, so the choices are what is written. A request
    ends at its first stop token or when it is full.
    """
    slots_K = torch.arange(chosen_RK.shape[1], device=chosen_RK.device)
    positions_RK = state.length_R.unsqueeze(1) + slots_K
    kept_RK = (slots_K <= num_accepted_R.unsqueeze(1)) & (positions_RK < state.end_R.unsqueeze(1))
    stops_RK = torch.isin(chosen_RK, state.stop_ids) & kept_RK
    before_stop_RK = (stops_RK.long().cumsum(1) - stops_RK.long()) == 0
    kept_RK = kept_RK & before_stop_RK & ~state.done_R.unsqueeze(1)
    old_RK = state.tokens_RT.gather(1, positions_RK)
    state.tokens_RT.scatter_(1, positions_RK, torch.where(kept_RK, chosen_RK, old_RK))
    gained_R = kept_RK.sum(1)
    state.length_R = state.length_R + gained_R
    state.done_R = state.done_R | (stops_RK & kept_RK).any(1) | (state.length_R >= state.end_R)
    return gained_R
