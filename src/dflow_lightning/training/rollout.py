"""Reject-conditioned rollouts: what the drafter will meet at inference, made during training.

Each round drafts with the current drafter, verifies the drafts in one forward of the frozen target
on top of the clean sequence, finds the first rejected token, and moves the target's states on the
rejected suffix to the next block. Shapes never depend on the data: blocks that end become invalid.

Shapes: B batch, S sequence, N blocks per sequence, K block size, J = K-1 drafts, L cache slots, C
tapped width.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from lightning.pytorch import Callback, Trainer
from torch import Tensor

from dflow_lightning.errors import InputError
from dflow_lightning.models.draft import draft_tokens, greedy_tokens
from dflow_lightning.models.drafter import ContextKV, Drafter
from dflow_lightning.models.relay import Relay, align
from dflow_lightning.models.target import FrozenTarget
from dflow_lightning.stopwatch import Stopwatch
from dflow_lightning.tensors.acceptance import accept, rejected_token
from dflow_lightning.tensors.blocks import (
    Anchors,
    next_anchors,
    rows_at,
    slot_labels,
    slot_positions,
)
from dflow_lightning.training.step_inputs import RelayRows, Round, StepInputs

if TYPE_CHECKING:
    from dflow_lightning.training.module import DrafterModule

Mode = Literal["online", "teacher_forced", "clean_features", "off"]


@dataclass(frozen=True)
class BlockLayout:
    """How the blocks of a rollout stand in the target: positions, cache slots and visibility.

    All blocks go through in one forward, each behind the clean sequence in the cache. A block sees
    the clean sequence before its anchor, as far as it is of its document, and itself up to each
    token, so row 0 repeats the clean forward at the anchor and rows 1..K-1 stand on the drafted
    branch.
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
    ) -> "BlockLayout":
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


@dataclass(frozen=True)
class Rollout:
    """How rounds are made; the pieces are the module's own."""

    target: FrozenTarget
    drafter: Drafter
    relay: Relay | None
    first_rejected: bool
    mode: Mode
    reference: Literal["data", "target"]

    @property
    def keeps_rejected(self) -> bool:
        """Whether rejected rows go to the next round, by relay or carryover."""
        return self.relay is not None or self.drafter.carryover is not None

    @torch.no_grad()
    def extend(self, inputs: StepInputs, num_rounds: int, num_anchors: int) -> None:
        """Append `num_rounds` rounds to the step, starting from a subset of the mask round."""
        h_BSD = self.drafter.project(inputs.taps_BSC)
        context = self.drafter.context_kv(h_BSD, inputs.positions_BS)
        latest = Round(inputs.rounds[0].anchors.take(num_anchors))
        for _ in range(num_rounds):
            latest = self.next_round(inputs, context, latest)
            inputs.rounds.append(latest)

    def next_round(self, inputs: StepInputs, context: list[ContextKV], current: Round) -> Round:
        """Draft, verify, accept, align: the blocks that follow `current`."""
        batch, dims = inputs.batch, self.drafter.dims
        K, anchors = dims.block_size, current.anchors
        anchor_ids_BN = batch.input_ids_BS.gather(1, anchors.positions_BN)
        rows = current.project(self.drafter)
        x_BNKD = current.embed(batch, self.target, self.drafter, self.relay, rows=rows)
        labels_BNJ, supervised_BNJ = slot_labels(batch.input_ids_BS, batch.loss_mask_BS, anchors, K)
        gold_BNJ = labels_BNJ if self.mode == "teacher_forced" else None
        drafts_BNJ = draft_tokens(
            self.target, self.drafter, x_BNKD, context, anchors, anchor_ids_BN, gold_BNJ,
            self.drafter.carry(rows),
        )  # fmt: skip

        chosen_BNJ = labels_BNJ.masked_fill(~supervised_BNJ, -1)
        taps_BNKC = None
        if self.reference == "target" or (
            self.keeps_rejected and self.mode in ("online", "teacher_forced")
        ):
            ids_BNK = torch.cat([anchor_ids_BN.unsqueeze(-1), drafts_BNJ], dim=-1)
            taps_BNKC, argmax_BNK = self.verify(inputs, ids_BNK, anchors)
            chosen_BNJ = chosen_BNJ if argmax_BNK is None else argmax_BNK[..., :-1]
        num_accepted_BN = accept(drafts_BNJ, chosen_BNJ)
        following = next_anchors(anchors, num_accepted_BN, batch.loss_mask_BS, K)
        if not self.keeps_rejected or self.mode == "off":
            return Round(following)

        if taps_BNKC is None:
            taps_BNKC = self._clean_rows(inputs.taps_BSC, anchors, K)
        aligned_BNKC, valid_BNK = align(
            taps_BNKC, num_accepted_BN, K, first_rejected=self.first_rejected
        )
        rejected_BN = rejected_token(drafts_BNJ, num_accepted_BN)
        bonus_BN = batch.input_ids_BS.gather(1, following.positions_BN)
        valid_BNK = valid_BNK & following.valid_BN.unsqueeze(-1)
        return Round(following, RelayRows(aligned_BNKC, valid_BNK, bonus_BN, rejected_BN))

    @torch.no_grad()
    def verify(
        self, inputs: StepInputs, ids_BNK: Tensor, anchors: Anchors
    ) -> tuple[Tensor, Tensor | None]:
        """One target forward over all drafted blocks: taps, and argmax if that is the reference."""
        K, layer_ids = ids_BNK.shape[-1], self.drafter.dims.target_layer_ids
        length = inputs.batch.input_ids_BS.shape[1]
        layout = BlockLayout.behind(
            length, inputs.cache.capacity, anchors.positions_BN, K, anchors.starts_BN
        )
        arguments = (
            ids_BNK.flatten(1),
            layout.positions_BQ,
            inputs.cache,
            layout.slots_BQ,
            layout.visible_BQL,
            layer_ids,
        )
        shape = ids_BNK.shape[1:]
        if self.reference == "data":
            return self.target.features(*arguments).unflatten(1, shape), None
        assert getattr(inputs.cache.layers[-1], "is_initialized", False), (
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
        if anchors.ends_BN is not None:  # what stands behind is another document's
            index_BNK = index_BNK.minimum((anchors.ends_BN - 1).clamp(min=0).unsqueeze(-1))
        return rows_at(taps_BSC, index_BNK)


class OnlineRollout(Callback):
    """Makes the rollout rounds of each training step, before the step."""

    def __init__(
        self,
        *,
        num_rounds: int = 2,
        num_anchors: int = 64,
        mode: Mode = "online",
        reference: Literal["data", "target"] = "data",
        start: float = 0.0,
    ) -> None:
        """
        Args:
            num_rounds: reject-conditioned rounds after the mask round; 0 switches rollouts off.
            num_anchors: blocks per sequence to roll out, a random subset of model.num_anchors; the
                relay learns from these alone, and gains with their number.
            mode: `online` is for use; `teacher_forced` and `clean_features` take the relay from
                paths that inference never sees and `off` makes rounds without relay, all three for
                comparison.
            reference: whether drafts are accepted against the `data`'s tokens or the `target`'s
                argmax (for diagnosis).
            start: share of the run's steps that pass before the first rollout. A drafter that has
                not learned the text yet has little to learn from its rejected drafts, and a step
                with rollouts costs more.
        """
        if not 0 <= start < 1:
            raise InputError(f"rollout.start is {start}; give a share from 0 to below 1")
        if num_rounds < 0:
            raise InputError(f"rollout.num_rounds is {num_rounds}; give 0 or more")
        if num_rounds and num_anchors < 1:
            raise InputError(
                f"rollout.num_anchors is {num_anchors}; give 1 or more, "
                "or set rollout.num_rounds to 0"
            )
        self.num_rounds = num_rounds
        self.num_anchors = num_anchors
        self.mode: Mode = mode
        self.reference: Literal["data", "target"] = reference
        self.start = start
        self.watch = Stopwatch()

    def setup(  # type: ignore[override]
        self, trainer: Trainer, pl_module: "DrafterModule", stage: str
    ) -> None:
        """Check the rounds against the module before training starts."""
        if stage == "fit":
            carryover = pl_module.drafter.carryover is not None
            if (pl_module.relay is not None or carryover) and (
                not self.num_rounds or self.mode == "off"
            ):
                named = f"mode is {self.mode}" if self.num_rounds else "num_rounds is 0"
                part = "relay.enabled" if pl_module.relay is not None else "drafter.carryover"
                kind = "a relay" if pl_module.relay is not None else "carryover"
                raise InputError(
                    f"rollout.{named} but {part} is true, and {kind} learns in rollout "
                    "rounds alone; set rollout.num_rounds to 1 or more and mode to online, or "
                    f"{part} to false"
                )
            if self.num_rounds and self.num_anchors > pl_module.num_anchors:
                raise InputError(
                    f"rollout.num_anchors is {self.num_anchors} but model.num_anchors is "
                    f"{pl_module.num_anchors}; rolled-out blocks are a subset, give at most as many"
                )
            pl_module.check_round_weights(
                [pl_module.num_anchors] + [self.num_anchors] * self.num_rounds
            )

    def waits(self, trainer: Trainer) -> bool:
        """Whether the first rollout is still to come."""
        if not self.start:
            return False
        return trainer.global_step < round(self.start * trainer.estimated_stepping_batches)

    @torch.no_grad()
    def on_train_batch_start(  # type: ignore[override]
        self, trainer: Trainer, pl_module: "DrafterModule", batch: Any, batch_idx: int
    ) -> None:
        """Begin the module's step and append the rollout rounds to it."""
        if not self.num_rounds or self.waits(trainer):
            return
        extra = self.num_anchors * pl_module.drafter.dims.block_size
        with self.watch.lap(pl_module.device), trainer.precision_plugin.forward_context():
            inputs = pl_module.begin_step(
                batch, extra_slots=extra, up_to_head=self.reference == "target"
            )
            rollout = Rollout(
                pl_module.target,
                *pl_module.drafting_models(),
                pl_module.relay_config.first_rejected,
                self.mode,
                self.reference,
            )
            rollout.extend(inputs, self.num_rounds, self.num_anchors)
        pl_module.prepared = inputs
