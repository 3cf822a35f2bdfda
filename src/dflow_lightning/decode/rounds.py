"""One round of speculative decoding: draft, verify, commit; each a function of tensors.

The steps have static shapes, write in place and never wait for the device, so that a whole round
compiles into one graph: that saves the guards before each call and the tensors between the steps.
One small report per round goes back to the host. Relay and carryover change drafts only, and never
the target's input, cache or logits: decoding stays lossless.

Shapes: R requests, T token slots, K slots of a block, J = K-1 drafts, D hidden, C tapped width, V
vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from types import FunctionType
from typing import Any, Literal

import torch
from torch import Tensor

from dflow_lightning.decode import eagle3, tree
from dflow_lightning.decode.state import NO_TOKEN, NOT_FINITE, DecodeState, Models
from dflow_lightning.errors import InputError
from dflow_lightning.models.drafter import draft_hidden, embed_blocks, embedding, relay_correction
from dflow_lightning.models.eagle3 import Eagle3Drafter
from dflow_lightning.models.relay import align
from dflow_lightning.stopwatch import RoundTimer
from dflow_lightning.tensors.acceptance import (
    TokenSampling,
    accept,
    accept_or_resample,
    choose,
    draw,
    probabilities,
    rejected_token,
)
from dflow_lightning.tensors.blocks import slot_positions

Backend = Literal["eager", "compiled", "package"]
LENGTH_STEP = 64  # of cache slots, for eager attention
SHORTEST_GRAPH = 128  # cache slots of the smallest compiled round


@dataclass(frozen=True)
class RoundMode:
    """What the requests in flight need, so that a step does no more than that.

    Args:
        sampled: some request has a temperature above zero.
        filtered: some request uses top-k or top-p.
        rejection: accept by rejection sampling, with drafts drawn from the drafter.
    """

    sampled: bool = False
    filtered: bool = False
    rejection: bool = False


@dataclass(frozen=True)
class Drafts:
    """Draft tokens, `[R, J]`, and for rejection sampling their distribution, `[R, J, V]`.

    Args:
        tree: if the drafts form a tree; `tokens_RJ` then holds its J nodes below the anchor.
    """

    tokens_RJ: Tensor
    probabilities_RJV: Tensor | None = None
    tree: tree.Tree | None = None


@dataclass(frozen=True)
class VerifiedBlock:
    """The result of verifying a block.

    Args:
        committed_RK: accepted drafts and the bonus token, arbitrary afterwards.
        num_accepted_R: accepted drafts.
        taps_RKC: the tapped states of every row.
        drafts_RJ: the drafts that rows 1 and up read.
        finite_R: whether the target's logits are numbers wherever a token is committed.
        num_rows_R: valid rows, if a path of a tree has fewer than K.
    """

    committed_RK: Tensor
    num_accepted_R: Tensor
    taps_RKC: Tensor
    drafts_RJ: Tensor
    finite_R: Tensor
    num_rows_R: Tensor | None = None


DraftStep = Callable[[Models, DecodeState, RoundMode], Drafts]


def run_round(
    models: Models,
    state: DecodeState,
    mode: RoundMode,
    measure: Callable[[str], AbstractContextManager[None]],
    draft_step: DraftStep | None = None,
) -> Tensor:
    """One round over all requests of the state; returns the report of `commit`.

    Args:
        measure: context manager around each part of the round, called with its name.
        draft_step: replaces relay and drafter.
    """
    if draft_step is None:
        with measure("relay"):
            correction_RNKD = correct(models, state)
        with measure("draft"):
            drafts = draft(models, state, mode, correction_RNKD)
    else:
        with measure("draft"):
            drafts = draft_step(models, state, mode)
    with measure("verify"):
        verified = verify(models, state, mode, drafts)
    with measure("commit"):
        report_RK, h_RKD = commit_round(models, state, verified)
    with measure("relay"):
        keep_rejected(models, state, verified, h_RKD)
    return report_RK


def correct(models: Models, state: DecodeState) -> Tensor | None:
    """The relay's correction of the next block, `[R, 1, K, D]`."""
    if models.relay is None or state.rejected is None:
        return None
    return relay_correction(models.target, models.relay, state.rejected)


def draft(
    models: Models, state: DecodeState, mode: RoundMode, correction_RNKD: Tensor | None
) -> Drafts:
    """Draft slots 1..K-1 in one drafter forward (N = 1 block a request).

    A causal head then chooses them one after the other; a tree takes several per slot.
    """
    if models.drafter is None:  # plain decoding is a round without drafts, verified alike
        return Drafts(state.tokens_RT[:, :0])
    if isinstance(models.drafter, Eagle3Drafter):
        return one_by_one(state, mode, partial(eagle3.draft_steps, models, state))
    anchor_R1 = state.anchor_R.unsqueeze(1)
    anchor_ids_R1 = state.tokens_RT.gather(1, anchor_R1)
    x_RNKD = embed_blocks(models.target, models.drafter, anchor_ids_R1, correction_RNKD)
    carried = models.drafter.carry(state.rejected) if models.use_carryover else None
    hidden_RNJD = draft_hidden(models.drafter, x_RNKD, state.context, anchor_R1, carried=carried)
    logits_RJV = models.target.head(hidden_RNJD.squeeze(1).to(models.target.dtype))
    if models.tree_nodes is not None:
        grown = tree.grow(
            logits_RJV, anchor_ids_R1.squeeze(1), models.tree_nodes, models.tree_pairs
        )
        return Drafts(grown.tokens_RN[:, 1:], tree=grown)
    if models.drafter.causal_head is None:
        return pick(state, mode, logits_RJV)
    unroll = partial(
        models.drafter.causal_head.unroll,
        logits_RJV, hidden_RNJD.squeeze(1), embedding(models.target, hidden_RNJD.dtype),
        anchor_ids_R=anchor_ids_R1.squeeze(1),
    )  # fmt: skip
    return one_by_one(state, mode, unroll)


def one_by_one(
    state: DecodeState, mode: RoundMode, unroll: Callable[[Callable[[Tensor, int], Tensor]], Tensor]
) -> Drafts:
    """Drafts of a drafter that reads each draft before it makes the next.

    Args:
        unroll: takes a function from a slot's logits, `[R, V]`, and its number (from 0) to its
            token; returns the tokens, `[R, J]`.
    """
    picked: list[Drafts] = []

    def choose_one(logits_RV: Tensor, slot: int) -> Tensor:
        picked.append(pick(state, mode, logits_RV.unsqueeze(1), slot))
        return picked[-1].tokens_RJ.squeeze(1)

    tokens_RJ = unroll(choose_one)
    # Each distribution is conditional on the drafts before it, which rejection sampling requires.
    held = [one.probabilities_RJV for one in picked if one.probabilities_RJV is not None]
    return Drafts(tokens_RJ, torch.cat(held, dim=1) if held else None)


def pick(state: DecodeState, mode: RoundMode, logits_RQV: Tensor, first: int = 0) -> Drafts:
    """The drafts of some slots from their logits: the best, or drawn for rejection sampling.

    Args:
        first: number of the first of these drafts in its block, from 0.
    """
    if not mode.rejection:
        return Drafts(logits_RQV.argmax(-1))
    draft_RQV = probabilities(logits_RQV, state.sampling, filtered=mode.filtered)
    # Draft noise is keyed by the block's anchor, not by position: the relay carries what the target
    # saw of a rejected draft into the next block, so a draft that reused the noise of that rejected
    # one would no longer be a draw from q.
    index_R1C = state.anchor_R[:, None, None].expand(-1, 1, state.noise_RTC.shape[-1])
    noise_RJ = state.noise_RTC.gather(1, index_R1C)[:, 0, 2:]
    return Drafts(draw(draft_RQV, noise_RJ[:, first : first + logits_RQV.shape[1]]), draft_RQV)


def verify(models: Models, state: DecodeState, mode: RoundMode, drafts: Drafts) -> VerifiedBlock:
    """One target forward over the anchor and its drafts, and how many drafts it accepts."""
    anchor_R1 = state.anchor_R.unsqueeze(1)
    ids_RK = torch.cat([state.tokens_RT.gather(1, anchor_R1), drafts.tokens_RJ], dim=1)
    slots_RK = slot_positions(state.anchor_R, ids_RK.shape[1])
    if drafts.tree is None:
        positions_RK, visible_RKT = slots_RK, causal(slots_RK, state.target_cache.length)
    else:
        positions_RK = anchor_R1 + drafts.tree.depth_RN
        visible_RKT = tree.tree_visible(drafts.tree, state.anchor_R, state.target_cache.length)
    layer_ids = models.drafter.dims.target_layer_ids if models.drafter is not None else []
    output = models.target.forward(
        ids_RK, positions_RK, state.target_cache, slots_RK, visible_RKT, layer_ids
    )
    logits_RKV = models.target.head(output.hidden_BQD)
    # Keyed by position: plain decoding, a chain and a tree choose alike from equal logits.
    noise_RKC = _noise_after(state, positions_RK)
    if mode.rejection and drafts.probabilities_RJV is not None:
        num_accepted_R, committed_RK = accept_or_resample(
            drafts.tokens_RJ,
            drafts.probabilities_RJV,
            probabilities(logits_RKV, state.sampling, filtered=mode.filtered),
            noise_RKC[:, :-1, 1],
            noise_RKC[..., 0],
        )
        finite_R = finite_to(num_accepted_R, finite(logits_RKV))
        return VerifiedBlock(
            committed_RK, num_accepted_R, output.taps_BQC, drafts.tokens_RJ, finite_R
        )
    chosen_RK = chosen_tokens(logits_RKV, state.sampling, noise_RKC[..., 0], mode)
    if drafts.tree is not None:
        return along_path(
            models, state, drafts.tree, chosen_RK, output.taps_BQC, finite(logits_RKV)
        )
    num_accepted_R = accept(drafts.tokens_RJ, chosen_RK[:, :-1])
    finite_R = finite_to(num_accepted_R, finite(logits_RKV))
    return VerifiedBlock(chosen_RK, num_accepted_R, output.taps_BQC, drafts.tokens_RJ, finite_R)


def finite(logits_RQV: Tensor) -> Tensor:
    """`[R, Q]`: whether a token can be chosen; tokens of minus infinity are only never chosen."""
    return logits_RQV.amax(-1).isfinite()  # NaN is larger than any number here


def finite_to(num_accepted_R: Tensor, finite_RK: Tensor) -> Tensor:
    """`[R]`: whether all rows that a committed token comes from are finite; others may overflow."""
    slots_K = torch.arange(finite_RK.shape[1], device=finite_RK.device)
    return (finite_RK | (slots_K > num_accepted_R.unsqueeze(1))).all(1)


def along_path(
    models: Models, state: DecodeState, grown: tree.Tree, chosen_RN: Tensor, taps_RNC: Tensor,
    finite_RN: Tensor,
) -> VerifiedBlock:  # fmt: skip
    """Bring the accepted path of a tree into the shape of a chain, also in the target's cache.

    So context, relay, carryover and commit need not know of trees. The rejected suffix is the most
    probable path below the last accepted node: as in a chain, its rows read the accepted text and
    then rejected drafts. Rows of other branches read tokens that are not in the text at positions
    before the bonus token, which training never showed.
    """
    path = tree.follow(grown, chosen_RN, models.block_size)
    tree.compact(state.target_cache, state.anchor_R, path.nodes_RK)
    return VerifiedBlock(
        chosen_RN.gather(1, path.nodes_RK),
        path.num_accepted_R,
        taps_RNC.gather(1, path.nodes_RK.unsqueeze(-1).expand(-1, -1, taps_RNC.shape[-1])),
        grown.tokens_RN.gather(1, path.nodes_RK[:, 1:]),
        finite_to(path.num_accepted_R, finite_RN.gather(1, path.nodes_RK)),
        path.length_R,
    )


def chosen_tokens(
    logits_RQV: Tensor, sampling: TokenSampling, noise_RQ: Tensor, mode: RoundMode
) -> Tensor:
    """The target's token for each row; no sort or softmax unless a request needs it."""
    if not mode.sampled:
        return logits_RQV.argmax(-1)
    return choose(logits_RQV, sampling, noise_RQ, filtered=mode.filtered)


def _noise_after(state: DecodeState, positions_RQ: Tensor) -> Tensor:
    """The noise of the position that each row predicts, `[R, Q, C]`."""
    index_RQC = (positions_RQ + 1).unsqueeze(-1).expand(-1, -1, state.noise_RTC.shape[-1])
    return state.noise_RTC.gather(1, index_RQC)


def causal(positions_RQ: Tensor, length: int) -> Tensor:
    """`[R, Q, T]`: a token sees every cache slot up to its own."""
    return torch.arange(length, device=positions_RQ.device) <= positions_RQ.unsqueeze(-1)


def extend_context(
    models: Models, state: DecodeState, rows_R: Tensor, taps_RKC: Tensor, positions_RK: Tensor,
    next_ids_RK: Tensor, last_R: Tensor,
) -> Tensor | None:  # fmt: skip
    """Write the drafter's context of requests `rows_R`; returns the features `h`, `[R, K, D]`.

    All rows are projected once, for context and relay. Rows on the rejected branch are written too:
    they are at or after the next anchor, so the mask hides them until they are overwritten.

    Args:
        next_ids_RK, last_R: the token after each row, and the last row before the next anchor;
            a block drafter needs neither.
    """
    if models.drafter is None:
        return None
    if isinstance(models.drafter, Eagle3Drafter):
        eagle3.extend_pairs(models, state, rows_R, taps_RKC, positions_RK, next_ids_RK, last_R)
        return None
    h_RKD = models.drafter.project(taps_RKC)
    index = (rows_R.unsqueeze(1), slice(None), positions_RK)
    new = models.drafter.context_kv(h_RKD, positions_RK)
    for layer, fresh in zip(state.context, new, strict=True):
        layer.keys[index] = fresh.keys.transpose(1, 2)
        layer.values[index] = fresh.values.transpose(1, 2)
    return h_RKD


def commit(state: DecodeState, committed_RK: Tensor, num_accepted_R: Tensor) -> Tensor:
    """Append the accepted drafts and the bonus token to each request.

    A request ends at its first stop token or when it is full.

    Returns:
        `[R, K+1]`: the tokens gained, `NO_TOKEN` where there is none, and in the last column
        whether the request has ended.
    """
    slots_K = torch.arange(committed_RK.shape[1], device=committed_RK.device)
    positions_RK = state.length_R.unsqueeze(1) + slots_K
    kept_RK = (slots_K <= num_accepted_R.unsqueeze(1)) & (positions_RK < state.end_R.unsqueeze(1))
    stops_RK = (committed_RK.unsqueeze(-1) == state.stop_ids_RM.unsqueeze(1)).any(-1) & kept_RK
    # Stops strictly before a token: the stop token itself still belongs to the answer.
    before_stop_RK = (stops_RK.long().cumsum(1) - stops_RK.long()) == 0
    kept_RK = kept_RK & before_stop_RK & ~state.idle_R.unsqueeze(1)
    # Shapes are static, so all K slots are written; those not kept get back what they held.
    old_RK = state.tokens_RT.gather(1, positions_RK)
    state.tokens_RT.scatter_(1, positions_RK, torch.where(kept_RK, committed_RK, old_RK))
    state.length_R.add_(kept_RK.sum(1))
    state.idle_R.logical_or_((stops_RK & kept_RK).any(1) | (state.length_R >= state.end_R))
    gained_RK = committed_RK.masked_fill(~kept_RK, NO_TOKEN)
    return torch.cat([gained_RK, state.idle_R.long().unsqueeze(1)], dim=1)


def commit_round(
    models: Models, state: DecodeState, verified: VerifiedBlock
) -> tuple[Tensor, Tensor | None]:
    """Extend the drafter's context and commit; returns the report of `commit` and `h`.

    The report's last column is `NOT_FINITE` where the target's logits are no numbers: it goes to
    the host anyway, so that the check waits for nothing.
    """
    positions_RK = slot_positions(state.anchor_R, verified.committed_RK.shape[1])
    rows_R = torch.arange(positions_RK.shape[0], device=positions_RK.device)
    h_RKD = extend_context(
        models, state, rows_R, verified.taps_RKC, positions_RK, verified.committed_RK,
        verified.num_accepted_R,
    )  # fmt: skip
    report_RK = commit(state, verified.committed_RK, verified.num_accepted_R)
    report_RK[:, -1].masked_fill_(~verified.finite_R, NOT_FINITE)
    return report_RK, h_RKD


def keep_rejected(
    models: Models, state: DecodeState, verified: VerifiedBlock, h_RKD: Tensor | None
) -> None:
    """Keep the rows of the rejected suffix, aligned to the next block, and the boundary tokens.

    A slot that does not decode (free, or reading a prompt) computes on stale data: it keeps no row.
    """
    if state.rejected is None or h_RKD is None:
        return
    num_accepted_R = verified.num_accepted_R
    aligned_RKD, valid_RK = align(
        h_RKD, num_accepted_R, h_RKD.shape[1], first_rejected=models.first_rejected
    )
    if verified.num_rows_R is not None:  # a tree's path may end before the block does
        row_RK = num_accepted_R.unsqueeze(1) + torch.arange(h_RKD.shape[1], device=h_RKD.device)
        valid_RK = valid_RK & (row_RK < verified.num_rows_R.unsqueeze(1))
    bonus_R1 = verified.committed_RK.gather(1, num_accepted_R.unsqueeze(1))
    # In place: a round gets views of the engine's state, and the next round has to find this there.
    state.rejected.h_BNKD.copy_(aligned_RKD.unsqueeze(1))
    state.rejected.valid_BNK.copy_((valid_RK & ~state.idle_R.unsqueeze(1)).unsqueeze(1))
    state.rejected.bonus_BN.copy_(bonus_R1)
    state.rejected.rejected_BN.copy_(
        rejected_token(verified.drafts_RJ, num_accepted_R).unsqueeze(1)
    )


class RoundBackend:
    """How the rounds of one engine run: eagerly, as compiled graphs, or with a packaged draft step.

    Attributes:
        static: every round computes the whole state, so that shapes never change.
    """

    def __init__(self, backend: Backend, draft_step: DraftStep | None = None) -> None:
        """
        Args:
            draft_step: for `package`, the packaged draft step, which includes the relay.

        Raises:
            InputError: the backend is unknown.
        """
        if backend not in ("eager", "compiled") and draft_step is None:
            raise InputError(f"backend is {backend}; give eager, compiled or package")
        self.backend, self.static = backend, backend == "package"
        self._draft_step = draft_step
        self._graphs: dict[tuple[int, int, RoundMode], Callable[..., Tensor]] = {}

    def rows(self, count: int, num_slots: int) -> int:
        """Requests that a round computes when the first `count` slots are in use."""
        if self.static:
            return num_slots
        if self.backend == "compiled":  # powers of two: few graphs, at most twice the work
            return min(_power_of_two(count), num_slots)
        return count

    def length(self, needed: int, capacity: int) -> int:
        """Cache slots that a round reads when `needed` are in use."""
        if self.static:
            return capacity
        if self.backend == "compiled":
            return min(max(_power_of_two(needed), SHORTEST_GRAPH), capacity)
        return rounded_length(needed, capacity)

    def shapes(self, num_slots: int, capacity: int) -> list[tuple[int, int]]:
        """Rows and length of every possible compiled round; empty for other backends."""
        if self.backend != "compiled":
            return []
        rows = {self.rows(count, num_slots) for count in range(1, num_slots + 1)}
        lengths = {self.length(1 << bit, capacity) for bit in range(capacity.bit_length() + 1)}
        return [(count, length) for count in sorted(rows) for length in sorted(lengths)]

    def round(
        self, models: Models, state: DecodeState, mode: RoundMode, timer: RoundTimer
    ) -> Tensor:
        """One round over all requests of the state; returns the report of `commit`."""
        with timer.measure("whole"):
            if self.backend != "compiled":
                return run_round(models, state, mode, timer.measure, self._draft_step)
            shape = (state.length_R.shape[0], state.target_cache.length, mode)
            if shape not in self._graphs:
                self._graphs[shape] = _compiled(run_round)
            return self._graphs[shape](models, state, mode, _unmeasured)


def rounded_length(needed: int, capacity: int) -> int:
    """Cache slots that eager attention reads, in rounds and for prompts: `needed`, rounded up."""
    return min(-(-needed // LENGTH_STEP) * LENGTH_STEP, capacity)


def _power_of_two(number: int) -> int:
    """The smallest power of two that is at least `number`."""
    return 1 << (number - 1).bit_length()


def _unmeasured(part: str) -> AbstractContextManager[None]:
    return nullcontext()


def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """A compiled copy with its own graph.

    The compiler keeps graphs per code object and tries them in turn; a copy of the code has one.
    Weights stay inputs of the graph (no Inductor `freezing`): a graph with packed weights would go
    on with the old ones after a training step, without an error.
    """
    code = function.__code__.replace()
    own = FunctionType(
        code, function.__globals__, function.__name__, function.__defaults__, function.__closure__
    )
    return torch.compile(own, fullgraph=True, dynamic=False)
