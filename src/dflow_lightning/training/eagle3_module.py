"""Training the EAGLE-3 drafter: the autoregressive baseline, on the same data, taps and budget.

*Training-time test*, as EAGLE-3 (arXiv 2503.01840) names it and SpecForge's `algorithms/eagle3`
trains it: the one layer is unrolled `ttt_steps` times. Step 0 runs on the target's features; step i
runs on the output of step i-1 in the feature's place and on the data's token i further, rotated i
positions further, and sees the context of step 0 and of its own block the steps before it. The loss
of a step is the divergence from the target's whole distribution, and steps weigh `0.8^i`.

What differs from SpecForge, so that all rows of a comparison have the same budget and parts:
positions are sampled (`num_anchors` a sequence, drawn as the anchors of block drafters are) in
place of all of them, the weighted loss is divided by the sum of the weights, and embedding and head
are the target's own, over its whole vocabulary.

A block is a sampled position: anchor A is the committed token, the first pair is (x_A, h_{A-1}),
and step i is asked for the token at A+1+i. So labels, masks, tau and logging are those of block
drafters: with the data's tokens as prefix, the leading right predictions are the accepted drafts.

Shapes: B batch, S sequence, N blocks per sequence, T steps, D hidden, R rounds (always 1).
"""

from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from dflow_lightning.data.datamodule import Batch
from dflow_lightning.decode import SpeculativeDecoder
from dflow_lightning.errors import InputError
from dflow_lightning.formats.drafter_folder import load_export
from dflow_lightning.models.eagle3 import (
    Eagle3Config,
    Eagle3Dims,
    Eagle3Drafter,
    Unroll,
    start_eagle3_from_target,
)
from dflow_lightning.tensors.acceptance import leading_run
from dflow_lightning.tensors.blocks import Anchors, gather_slots, rows_at, slot_labels
from dflow_lightning.tensors.loss import CHUNK_BYTES, LossWindow, blocks_within, soft_losses
from dflow_lightning.training.base import CHECKPOINT_KEY, TargetConfig, TrainingModule
from dflow_lightning.training.optimizer import OptimizerConfig
from dflow_lightning.training.step_inputs import Round, StepInputs, clean_forward


class Eagle3Module(TrainingModule):
    """Trains an EAGLE-3 drafter against a frozen target."""

    _step_weights_T: Tensor

    def __init__(
        self,
        *,
        target: TargetConfig,
        drafter: Eagle3Config = Eagle3Config(),  # noqa: B008
        optimizer: OptimizerConfig = OptimizerConfig(),  # noqa: B008
        ttt_steps: int = 7,
        step_decay: float = 0.8,
        num_anchors: int = 512,
        gradient_checkpointing: bool = False,
        seed: int = 0,
        init: Literal["target", "random"] = "target",
        init_from: str | None = None,
    ) -> None:
        """
        Args:
            target: the frozen target.
            drafter: shape of the drafter.
            optimizer: optimizer and learning-rate schedule.
            ttt_steps: steps the layer is unrolled for in training; decoding takes block_size - 1.
            step_decay: weight of a step's loss over that of the step before.
            num_anchors: positions per sequence from which the layer is unrolled.
            gradient_checkpointing: run each step again in the backward pass instead of keeping what
                it computed.
            seed: seeds the anchors, together with step and sample id.
            init: start from what fits of the target's last layer, or from random weights.
            init_from: start from an exported EAGLE-3 drafter.
        """
        if ttt_steps < 1:
            raise InputError(f"model.ttt_steps is {ttt_steps}; give 1 or more")
        if not 0 < step_decay <= 1:
            raise InputError(f"model.step_decay is {step_decay}; give a number above 0, up to 1")
        super().__init__(target, optimizer, num_anchors=num_anchors, seed=seed)
        self.ttt_steps, self.step_decay = ttt_steps, step_decay
        self.drafter = Eagle3Drafter(Eagle3Dims.resolve(drafter, self.target))
        self.drafter.gradient_checkpointing = gradient_checkpointing
        self.relay = None  # drafters of this kind have none
        if init == "target":
            start_eagle3_from_target(self.drafter, self.target)
        if init_from is not None:
            self._warm_start(Path(init_from))
        weights_T = step_decay ** torch.arange(ttt_steps, dtype=torch.float32)
        self.register_buffer("_step_weights_T", weights_T, persistent=False)

    # ---------------------------------------------------------------- training

    def begin_step(self, batch: Batch, *, step: int | None = None) -> StepInputs:
        """Clean features, the target's last hidden states, and one round of blocks.

        Args:
            step: whose anchors to draw; by default the trainer's, and 0 outside training.
        """
        layer_ids = self.drafter.dims.target_layer_ids
        inputs = clean_forward(self.target, batch, layer_ids, 0, up_to_head=True)
        inputs.cache = None
        inputs.rounds.append(Round(with_feature(self.draw(batch, step))))
        return inputs

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """The loss over all steps of the unroll."""
        loss, _ = self.objective(self.begin_step(batch), self._window)
        self.log_step(batch)
        return loss

    def objective(
        self, inputs: StepInputs, window: LossWindow | None = None
    ) -> tuple[Tensor, Tensor]:
        """Weighted mean over the supervised steps of all blocks and processes.

        Returns:
            the scalar loss and detached sums, `[1, 4]`: weighted loss, weight, accepted drafts and
            blocks.
        """
        sums_R4 = self._sums(inputs, self.unroll(inputs)).unsqueeze(0)
        totals_R4 = self._all_reduce(sums_R4.detach().clone())
        window = LossWindow() if window is None else window
        loss = window.add(sums_R4, totals_R4, sums_R4.new_ones(1))
        # Data-parallel strategies average gradients, but the denominators are sums already.
        return (loss * self.trainer.world_size if self._trainer is not None else loss), totals_R4

    def unroll(self, inputs: StepInputs) -> Tensor:
        """Hidden states of all steps of all blocks, ready for the target's head, `[B, N, T, D]`."""
        batch, anchors, dtype = inputs.batch, inputs.rounds[0].anchors, self.drafter.fc.weight.dtype
        h_BSD = self.drafter.project(inputs.taps_BSC)
        next_ids_BS = batch.input_ids_BS.roll(-1, dims=1)  # the last one's pair is never seen
        embeds_BSD = self.target.embed(next_ids_BS).to(dtype)
        context = self.drafter.context_kv(h_BSD, embeds_BSD, inputs.positions_BS)
        first_BN = (anchors.positions_BN - 1).clamp(min=0)
        h_BND = rows_at(h_BSD, first_BN)
        ids_BNT, _ = gather_slots(batch.input_ids_BS, anchors.positions_BN, self.ttt_steps)
        embeds_BNTD = self.target.embed(ids_BNT).to(dtype)
        steps = Unroll(self.drafter, h_BND, first_BN, context, anchors.starts_BN)
        outputs = [steps.advance(embeds_BND) for embeds_BND in embeds_BNTD.unbind(2)]
        return torch.stack(outputs, dim=2)

    def _sums(self, inputs: StepInputs, hidden_BNTD: Tensor) -> Tensor:
        """Weighted loss, weight, accepted drafts and valid blocks, `[4]`."""
        batch, anchors = inputs.batch, inputs.rounds[0].anchors
        assert inputs.hidden_BSD is not None
        labels_BNT, supervised_BNT = slot_labels(
            batch.input_ids_BS, batch.loss_mask_BS, anchors, self.ttt_steps + 1
        )
        offsets_T = torch.arange(self.ttt_steps, device=labels_BNT.device)
        index_BNT = anchors.positions_BN.unsqueeze(-1) + offsets_T  # A+i predicts A+1+i
        losses_BNT, predicted_BNT = soft_losses(
            hidden_BNTD,
            inputs.hidden_BSD,
            index_BNT,
            lambda hidden: self.target.head(hidden.to(self.target.dtype)),
            blocks_within(CHUNK_BYTES // 2, self.ttt_steps, self.target.vocab_size),
            self.target.head_weight,
        )
        weights_BNT = supervised_BNT * self._step_weights_T
        accepted_BN = leading_run((predicted_BNT == labels_BNT) & supervised_BNT)
        return torch.stack(
            [(losses_BNT * weights_BNT).sum(), weights_BNT.sum(), accepted_BN.sum().float(),
             anchors.valid_BN.sum().float()]
        )  # fmt: skip

    # ---------------------------------------------------------------- checkpoints and use

    def identity(self) -> dict[str, Any]:
        """What a checkpoint must agree with: plain values only."""
        return {
            "method": "eagle3",
            "target": self.target.name,
            "target_fingerprint": self.target.fingerprint,
            "drafter": asdict(self.drafter.dims),
        }

    @classmethod
    def from_checkpoint(
        cls, content: dict[str, Any], target: TargetConfig, **training: Any
    ) -> "Eagle3Module":
        """Rebuild a module from the content of an opened checkpoint (`saved.load_trained`).

        Args:
            training: further arguments that no checkpoint holds.
        """
        saved = content[CHECKPOINT_KEY]
        shape = {name: saved["drafter"][name] for name in Eagle3Config.__dataclass_fields__}
        module = cls(target=target, drafter=Eagle3Config(**shape), **training)
        module.on_load_checkpoint(content)
        module.load_state_dict(content["state_dict"])
        return module.eval()

    def _warm_start(self, folder: Path) -> None:
        loaded = load_export(folder, self.target).drafter
        if not isinstance(loaded, Eagle3Drafter):
            raise InputError(
                f"model.init_from {folder} is no EAGLE-3 drafter; give a folder exported from a "
                "run with method eagle3"
            )
        ours, theirs = asdict(self.drafter.dims), asdict(loaded.dims)
        for name in (*Eagle3Config.__dataclass_fields__, "rope_parameters"):
            if ours[name] != theirs[name]:
                raise InputError(
                    f"drafter.{name} is {ours[name]} but model.init_from {folder} has "
                    f"{theirs[name]}; set the recipe to its value or start from another drafter"
                )
        self.drafter.load_state_dict(loaded.state_dict())

    def decoder(self) -> SpeculativeDecoder:
        """Real speculative decoding with the current weights."""
        return SpeculativeDecoder(self.target, self.whole(self.drafter))


def with_feature(anchors: Anchors) -> Anchors:
    """Without the blocks whose anchor begins its document: no feature stands before it."""
    starts_BN = anchors.starts_BN
    begins_BN = anchors.positions_BN <= (0 if starts_BN is None else starts_BN)
    return Anchors(anchors.positions_BN, anchors.valid_BN & ~begins_BN, starts_BN, anchors.ends_BN)
