"""Inputs of a training step: clean target features, and rounds of blocks.

The first round is the mask round: blocks at random anchors. Rollout rounds reproduce in training
what the drafter meets at inference: each drafts with the current weights, verifies the drafts in
one forward of the frozen target on top of the clean sequence, finds the first rejected token, and
moves the target's states of the rejected suffix to the next block. Drafts are accepted against the
data's tokens, since those are the target's own answers. Shapes never depend on the data: blocks
that end become invalid, so that all processes run the same collectives.

Shapes: B batch, S sequence, N blocks per sequence, K block size, J = K-1 drafts, L cache slots, C
tapped width, Q tokens of all blocks.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal

import torch
from torch import Tensor

from dflow_lightning.data.token_rows import Batch
from dflow_lightning.errors import InputError
from dflow_lightning.models.carryover import Carryover
from dflow_lightning.models.drafter import (
    KV,
    Drafter,
    draft_tokens,
    embed_blocks,
    greedy_tokens,
    relay_correction,
)
from dflow_lightning.models.relay import ProjectedRows, Relay, align
from dflow_lightning.models.slot_cache import SlotCache
from dflow_lightning.models.target import FrozenTarget
from dflow_lightning.tensors.acceptance import accept, rejected_token
from dflow_lightning.tensors.blocks import (
    Anchors,
    next_anchors,
    rows_at,
    slot_labels,
    slot_positions,
)

RolloutMode = Literal["online", "teacher_forced", "clean_features", "off"]
Reference = Literal["data", "target"]


@dataclass(frozen=True)
class RejectedRows:
    """Rows of the rejected suffixes, aligned to the slots of the next blocks, before projection.

    Taps and not features: the step projects them again with the weights that it trains, so that
    the relay's gradient reaches `fc` and `hidden_norm`.
    """

    taps_BNKC: Tensor
    valid_BNK: Tensor
    bonus_BN: Tensor
    rejected_BN: Tensor

    def project(self, drafter: Drafter, *, detach: bool = False) -> ProjectedRows:
        """The rows under the drafter's current projection; `detach` cuts the gradient to it."""
        h_BNKD = drafter.project(self.taps_BNKC)
        return ProjectedRows(
            h_BNKD.detach() if detach else h_BNKD, self.valid_BNK, self.bonus_BN, self.rejected_BN
        )


@dataclass(frozen=True)
class Round:
    """One set of blocks: the mask round, or a rollout round with the rows rejected before it."""

    anchors: Anchors
    rejected: RejectedRows | None = None

    def project(self, drafter: Drafter) -> ProjectedRows | None:
        """The rejected rows under the drafter's current projection, if the round has any."""
        return None if self.rejected is None else self.rejected.project(drafter)

    def embed(
        self,
        batch: Batch,
        target: FrozenTarget,
        drafter: Drafter,
        relay: Relay | None,
        *,
        detach: bool = False,
        rows: ProjectedRows | None = None,
    ) -> Tensor:
        """Slot inputs of the round's blocks, `[B, N, K, D]`.

        Args:
            rows: from `project`, if the caller has them already.
        """
        anchor_ids_BN = batch.input_ids_BS.gather(1, self.anchors.positions_BN)
        correction = None
        if relay is not None and self.rejected is not None:
            if rows is None:
                rows = self.rejected.project(drafter, detach=detach)
            elif detach:
                rows = replace(rows, h_BNKD=rows.h_BNKD.detach())
            correction = relay_correction(target, relay, rows)
        return embed_blocks(target, drafter, anchor_ids_BN, correction)


@dataclass
class StepInputs:
    """All inputs of a training step: clean target features and the blocks of all rounds.

    Attributes:
        cache: the target's keys and values, while rounds can be added; None in a finished step,
            since nothing behind reads them and they are gigabytes.
        hidden_BSD: input of the target's head at the clean tokens; None if it was not computed.
    """

    batch: Batch
    taps_BSC: Tensor
    cache: SlotCache | None
    rounds: list[Round] = field(default_factory=list)
    hidden_BSD: Tensor | None = None

    @property
    def positions_BS(self) -> Tensor:
        """Positions of the clean tokens in their documents."""
        return clean_positions(self.batch)


def clean_positions(batch: Batch) -> Tensor:
    """Position of each token in its document, `[B, S]`."""
    ids_BS = batch.input_ids_BS
    index_BS = torch.arange(ids_BS.shape[1], device=ids_BS.device).expand_as(ids_BS)
    return index_BS if batch.documents is None else index_BS - batch.documents.starts_BS


@torch.no_grad()
def clean_forward(
    target: FrozenTarget,
    batch: Batch,
    target_layer_ids: list[int],
    extra_slots: int,
    *,
    up_to_head: bool = False,
) -> StepInputs:
    """Features of the data's own tokens; the cache keeps room for `extra_slots` block tokens.

    Args:
        up_to_head: also run the layers above the taps, which a block's logits will need.
    """
    ids_BS = batch.input_ids_BS
    B, S = ids_BS.shape
    cache = target.new_cache(S + extra_slots)
    cache.length = S  # the block slots are not written yet
    slots_S = torch.arange(S, device=ids_BS.device)
    slots_BS = slots_S.expand(B, S)
    visible_BQL = slots_S <= slots_BS.unsqueeze(-1)
    if batch.documents is not None:
        visible_BQL = visible_BQL & (slots_S >= batch.documents.starts_BS.unsqueeze(-1))
    arguments = (
        ids_BS, clean_positions(batch), cache, slots_BS, visible_BQL, target_layer_ids
    )  # fmt: skip
    hidden_BSD = None
    if up_to_head:
        output = target.forward(*arguments)
        taps_BSC, hidden_BSD = output.taps_BQC, output.hidden_BQD
    else:
        taps_BSC = target.features(*arguments)
    cache.length = cache.capacity
    return StepInputs(batch, taps_BSC, cache, hidden_BSD=hidden_BSD)


@dataclass(frozen=True)
class BlockLayout:
    """Positions, cache slots and visibility of a rollout's blocks in the target's forward.

    All blocks share one forward, written after the clean sequence in the cache. A block sees its
    document's clean tokens before the anchor, and its own tokens causally: row 0 repeats the clean
    forward at the anchor, and rows 1..K-1 are on the drafted branch.
    """

    positions_BQ: Tensor
    slots_BQ: Tensor
    visible_BQL: Tensor

    @classmethod
    def behind(
        cls,
        clean_length: int,
        capacity: int,
        anchors_BN: Tensor,
        block_size: int,
        starts_BN: Tensor | None = None,
    ) -> BlockLayout:
        """Blocks at `anchors_BN`, written after `clean_length` slots of a cache of `capacity`.

        Args:
            starts_BN: where each block's document begins in a packed row.
        """
        B, N = anchors_BN.shape
        slots_L = torch.arange(capacity, device=anchors_BN.device)
        own_NK = clean_length + torch.arange(N * block_size, device=anchors_BN.device).view(N, -1)
        own_NKL = (slots_L >= own_NK[:, :1, None]) & (slots_L <= own_NK.unsqueeze(-1))
        context_BNL = slots_L < anchors_BN.unsqueeze(-1)
        first_BN = anchors_BN
        if starts_BN is not None:
            context_BNL &= slots_L >= starts_BN.unsqueeze(-1)
            first_BN = anchors_BN - starts_BN
        return cls(
            slot_positions(first_BN, block_size).flatten(1),
            own_NK.flatten().expand(B, -1),
            (context_BNL.unsqueeze(2) | own_NKL).flatten(1, 2),
        )


@dataclass(frozen=True, kw_only=True)
class RolloutConfig:
    """Which rounds follow the mask round; the arguments of `OnlineRollout` that shape a step."""

    num_rounds: int = 2
    num_anchors: int = 64
    mode: RolloutMode = "online"
    reference: Reference = "data"

    def __post_init__(self) -> None:
        if self.num_rounds < 0:
            raise InputError(f"rollout.num_rounds is {self.num_rounds}; give 0 or more")
        if self.num_rounds and self.num_anchors < 1:
            raise InputError(
                f"rollout.num_anchors is {self.num_anchors}; give 1 or more, "
                "or set rollout.num_rounds to 0"
            )

    @classmethod
    def of(cls, section: Any) -> RolloutConfig:
        """From the section `rollout` of a recipe, parsed or as a dictionary."""
        return cls(**{each.name: section[each.name] for each in fields(cls)})

    def slots(self, block_size: int) -> int:
        """Cache slots that the verification of a round needs after the clean sequence."""
        return self.num_anchors * block_size if self.num_rounds else 0

    @property
    def up_to_head(self) -> bool:
        """Whether acceptance needs the target's logits, and therefore the layers above the taps."""
        return bool(self.num_rounds) and self.reference == "target"


@dataclass(frozen=True, kw_only=True)
class Rollout:
    """Makes the rounds of a step with a module's current weights."""

    target: FrozenTarget
    drafter: Drafter
    relay: Relay | None
    config: RolloutConfig

    @property
    def keeps_rejected(self) -> bool:
        """Whether rejected rows go to the next round, by relay or carryover."""
        return self._reader is not None

    @property
    def _reader(self) -> Relay | Carryover | None:
        return self.drafter.carryover if self.relay is None else self.relay

    @torch.no_grad()
    def extend(self, inputs: StepInputs) -> None:
        """Append the rounds to the step, starting from a subset of the mask round."""
        h_BSD = self.drafter.project(inputs.taps_BSC)
        context = self.drafter.context_kv(h_BSD, inputs.positions_BS)
        latest = Round(inputs.rounds[0].anchors.take(self.config.num_anchors))
        for _ in range(self.config.num_rounds):
            latest = self.next_round(inputs, context, latest)
            inputs.rounds.append(latest)

    def next_round(self, inputs: StepInputs, context: list[KV], current: Round) -> Round:
        """Draft, verify, accept, align: the blocks that follow `current`."""
        batch, anchors = inputs.batch, current.anchors
        anchor_ids_BN = batch.input_ids_BS.gather(1, anchors.positions_BN)
        rows = current.project(self.drafter)
        x_BNKD = current.embed(batch, self.target, self.drafter, self.relay, rows=rows)
        gold_BNJ = None
        if self.config.mode == "teacher_forced":
            K = self.drafter.dims.block_size
            gold_BNJ, _ = slot_labels(batch.input_ids_BS, batch.loss_mask_BS, anchors, K)
        drafts_BNJ = draft_tokens(
            self.target, self.drafter, x_BNKD, context, anchors, anchor_ids_BN, gold_BNJ,
            self.drafter.carry(rows),
        )  # fmt: skip
        return self.follow(inputs, anchors, drafts_BNJ)

    def follow(self, inputs: StepInputs, anchors: Anchors, drafts_BNJ: Tensor) -> Round:
        """Verify, accept, align: the blocks that follow those at `anchors` with their drafts."""
        batch, K = inputs.batch, self.drafter.dims.block_size
        anchor_ids_BN = batch.input_ids_BS.gather(1, anchors.positions_BN)
        labels_BNJ, supervised_BNJ = slot_labels(batch.input_ids_BS, batch.loss_mask_BS, anchors, K)
        # A draft beyond the supervised text must never be accepted: no token has the id -1.
        chosen_BNJ = labels_BNJ.masked_fill(~supervised_BNJ, -1)
        taps_BNKC = None
        if self.config.reference == "target" or (
            self.keeps_rejected and self.config.mode in ("online", "teacher_forced")
        ):
            ids_BNK = torch.cat([anchor_ids_BN.unsqueeze(-1), drafts_BNJ], dim=-1)
            # Rows of the drafted tokens, not of the data's: in use the rejected rows have read the
            # wrong token, and a relay trained on clean rows would not know that.
            taps_BNKC, argmax_BNK = self.verify(inputs, ids_BNK, anchors)
            chosen_BNJ = chosen_BNJ if argmax_BNK is None else argmax_BNK[..., :-1]
        num_accepted_BN = accept(drafts_BNJ, chosen_BNJ)
        following = next_anchors(anchors, num_accepted_BN, batch.loss_mask_BS, K)
        reader = self._reader
        if reader is None or self.config.mode == "off":
            return Round(following)

        if taps_BNKC is None:
            taps_BNKC = self._clean_rows(inputs.taps_BSC, anchors, K)
        aligned_BNKC, valid_BNK = align(
            taps_BNKC, num_accepted_BN, K, first_rejected=reader.first_rejected
        )
        rejected_BN = rejected_token(drafts_BNJ, num_accepted_BN)
        bonus_BN = batch.input_ids_BS.gather(1, following.positions_BN)
        valid_BNK = valid_BNK & following.valid_BN.unsqueeze(-1)
        return Round(following, RejectedRows(aligned_BNKC, valid_BNK, bonus_BN, rejected_BN))

    @torch.no_grad()
    def verify(
        self, inputs: StepInputs, ids_BNK: Tensor, anchors: Anchors
    ) -> tuple[Tensor, Tensor | None]:
        """One target forward over all drafted blocks: taps, and argmax if that is the reference."""
        K, layer_ids = ids_BNK.shape[-1], self.drafter.dims.target_layer_ids
        length, cache = inputs.batch.input_ids_BS.shape[1], inputs.cache
        assert cache is not None, "the step is finished"
        layout = BlockLayout.behind(
            length, cache.capacity, anchors.positions_BN, K, anchors.starts_BN
        )
        arguments = (
            ids_BNK.flatten(1),
            layout.positions_BQ,
            cache,
            layout.slots_BQ,
            layout.visible_BQL,
            layer_ids,
        )
        shape = ids_BNK.shape[1:]
        if self.config.reference == "data":
            return self.target.features(*arguments).unflatten(1, shape), None
        assert getattr(cache.layers[-1], "is_initialized", False), (
            "the clean forward stopped at the taps"
        )
        output = self.target.forward(*arguments)
        chosen_BNJ = greedy_tokens(self.target, output.hidden_BQD.unflatten(1, shape))
        return output.taps_BQC.unflatten(1, shape), chosen_BNJ

    @staticmethod
    def _clean_rows(taps_BSC: Tensor, anchors: Anchors, block_size: int) -> Tensor:
        """Rows of the clean forward at the blocks' positions: a path that inference never sees."""
        index_BNK = slot_positions(anchors.positions_BN, block_size)
        index_BNK = index_BNK.clamp(max=taps_BSC.shape[1] - 1)
        if anchors.ends_BN is not None:  # later rows belong to other documents
            index_BNK = index_BNK.minimum((anchors.ends_BN - 1).clamp(min=0).unsqueeze(-1))
        return rows_at(taps_BSC, index_BNK)
