"""The LightningModule: frozen target, trainable drafter and relay, and one loss over all rounds.

DFlash, DFlash with self-conditioning and DFlow are settings of the same module: no relay and no
rollout, rollout without relay, relay and rollout.

Shapes: B batch, S sequence, N blocks per sequence, K block size, J = K-1 drafts, D hidden, R
rounds.
"""

from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from dflow_lightning.data.datamodule import Batch
from dflow_lightning.decode import SpeculativeDecoder
from dflow_lightning.errors import InputError
from dflow_lightning.formats.drafter_folder import load_export
from dflow_lightning.models.carryover import side_by_side
from dflow_lightning.models.causal_head import CausalHeadConfig, corrected_losses
from dflow_lightning.models.dims import HEAD, DrafterConfig, DrafterDims
from dflow_lightning.models.drafter import Drafter, start_from_target
from dflow_lightning.models.relay import ProjectedRows, Relay, RelayConfig
from dflow_lightning.tensors.acceptance import leading_run
from dflow_lightning.tensors.attention import AttentionBackend
from dflow_lightning.tensors.blocks import slot_labels, slot_positions
from dflow_lightning.tensors.loss import (
    LossConfig,
    LossWindow,
    slot_weights,
    soft_losses,
    token_losses,
)
from dflow_lightning.training.base import CHECKPOINT_KEY, TargetConfig, TrainingModule
from dflow_lightning.training.optimizer import OptimizerConfig
from dflow_lightning.training.step_inputs import (
    Rollout,
    RolloutConfig,
    Round,
    StepInputs,
    clean_forward,
)


class DrafterModule(TrainingModule):
    """Trains a block drafter against a frozen target."""

    _slot_weights_J: Tensor

    def __init__(
        self,
        *,
        target: TargetConfig,
        drafter: DrafterConfig = DrafterConfig(),  # noqa: B008
        relay: RelayConfig = RelayConfig(),  # noqa: B008
        causal_head: CausalHeadConfig = CausalHeadConfig(),  # noqa: B008
        loss: LossConfig = LossConfig(),  # noqa: B008
        optimizer: OptimizerConfig = OptimizerConfig(),  # noqa: B008
        num_anchors: int = 512,
        gradient_checkpointing: bool = False,
        attention: AttentionBackend = "auto",
        seed: int = 0,
        init: Literal["target", "random"] = "target",
        init_from: str | None = None,
    ) -> None:
        """
        Args:
            target: the frozen target.
            drafter: shape of the drafter.
            relay: the relay; off is DFlash.
            causal_head: Domino's causal head; off is DFlash or DFlow.
            loss: the objective.
            optimizer: optimizer and learning-rate schedule.
            num_anchors: mask-round blocks per sequence.
            gradient_checkpointing: run the drafter's layers again in the backward pass instead of
                keeping what they computed; less memory, about a third more work in the drafter.
            attention: how blocks attend: `flex` on a GPU, `split` on a CPU; `dense` needs a mask of
                all slots by all keys.
            seed: seeds the anchors, together with step and sample id.
            init: start the drafter from copies of target layers, or from random weights.
            init_from: start from an exported drafter or a published DFlash folder.
        """
        super().__init__(target, optimizer, num_anchors=num_anchors, seed=seed)
        self.relay_config, self.loss_config = relay, loss
        self.causal_head_config = causal_head
        dims = DrafterDims.resolve(drafter, self.target, causal_head)
        self.drafter = Drafter(dims)
        self.drafter.gradient_checkpointing = gradient_checkpointing
        self.drafter.attention = attention
        if init == "target":
            start_from_target(self.drafter, self.target)
        self.relay: Relay | None = None
        if relay.enabled:
            self.relay = relay.build(dims.hidden_size, dims.rms_norm_eps)
        if causal_head.enabled and loss.kind == "kl":
            raise InputError(
                "loss.kind is kl but causal_head.enabled is true, whose loss is a cross-entropy; "
                "set loss.kind to cross_entropy or dpace, or causal_head.enabled to false"
            )
        if self.drafter.carryover is not None:
            self.drafter.carryover.first_rejected = relay.first_rejected
        if init_from is not None:
            self._warm_start(Path(init_from))
        self.prepared: StepInputs | None = None  # the next step's inputs, if a rollout made them
        self.base_share = 0.0  # weight of the loss of a causal head's body, new in each step
        weights_J = slot_weights(dims.block_size, loss.decay(dims.block_size))
        self.register_buffer("_slot_weights_J", weights_J, persistent=False)

    # ---------------------------------------------------------------- training

    def begin_step(
        self,
        batch: Batch,
        *,
        extra_slots: int = 0,
        up_to_head: bool = False,
        step: int | None = None,
    ) -> StepInputs:
        """Clean target features and the mask round; rollouts append their rounds to the result.

        Args:
            step: whose anchors to draw; by default the trainer's, and 0 outside training.
        """
        layer_ids = self.drafter.dims.target_layer_ids
        up_to_head = up_to_head or self.loss_config.kind == "kl"
        inputs = clean_forward(self.target, batch, layer_ids, extra_slots, up_to_head=up_to_head)
        inputs.rounds.append(Round(self.draw(batch, step)))
        return inputs

    def step_inputs(
        self, batch: Batch, rollout: RolloutConfig | None = None, *, step: int | None = None
    ) -> StepInputs:
        """All that a step feeds the drafter: clean features, mask round and rollout rounds."""
        if rollout is None or not rollout.num_rounds:
            inputs = self.begin_step(batch, step=step)
        else:
            inputs = self.begin_step(
                batch,
                extra_slots=rollout.slots(self.drafter.dims.block_size),
                up_to_head=rollout.up_to_head,
                step=step,
            )
            self.rollout(rollout).extend(inputs)
        inputs.cache = None
        return inputs

    def rollout(self, config: RolloutConfig) -> Rollout:
        """What makes rollout rounds with the current weights."""
        drafter, relay = self.drafting_models()
        return Rollout(target=self.target, drafter=drafter, relay=relay, config=config)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """The loss over the mask round and the rounds a rollout has made."""
        inputs = self.prepared or self.step_inputs(batch)
        self.prepared = None
        if self.drafter.causal_head is not None:
            total = int(self.trainer.estimated_stepping_batches)
            self.base_share = self.causal_head_config.base_share(self.global_step, total)
            self.log("train/base_share", self.base_share)
        loss, _ = self.objective(inputs, self._window)
        self.log_step(batch)
        return loss

    def objective(
        self, inputs: StepInputs, window: LossWindow | None = None
    ) -> tuple[Tensor, Tensor]:
        """Loss over all rounds from one drafter forward, and detached sums per round.

        A weighted mean over the supervised slots of all rounds, numerator and denominator summed
        over all processes. A block of round r counts `round_weights[r]` over the round's number of
        blocks; by default every block counts alike. See `LossWindow` for accumulated steps.

        Returns:
            the scalar loss and `[R, 4]`: weighted loss, weight, accepted drafts and blocks.
        """
        sums_R4 = self._round_sums(inputs, self._forward_blocks(inputs))
        totals_R4 = self._all_reduce(sums_R4.detach().clone())
        blocks = [current.anchors.positions_BN.shape[1] for current in inputs.rounds]
        # Before the first rollout the mask round stands alone.
        round_weights = self.check_round_weights(blocks) if len(blocks) > 1 else [1.0]
        shares = [weight / n for weight, n in zip(round_weights, blocks, strict=True)]
        window = LossWindow() if window is None else window
        # Filled on the device: a tensor of the list would be a copy from the host in every step.
        shares_R = torch.stack([sums_R4.new_full((), share) for share in shares])
        loss = window.add(sums_R4, totals_R4, shares_R)
        if all(current.rejected is None for current in inputs.rounds):
            loss = loss + 0.0 * self._idle()
        # Data-parallel strategies average gradients, but the denominators are sums already.
        return (loss * self.trainer.world_size if self._trainer is not None else loss), totals_R4

    def _idle(self) -> Tensor:
        """Relay and carryover on empty rows: every process touches every parameter in each step."""
        dtype = self.drafter.fc.weight.dtype  # a causal head's loss is of another
        row_D = torch.zeros(self.drafter.dims.hidden_size, dtype=dtype, device=self.device)
        valid = torch.ones(1, dtype=torch.bool, device=self.device)
        found = row_D.sum()
        if self.relay is not None:
            found = found + self.relay(row_D.unsqueeze(0), row_D, row_D, valid).sum()
        empty = ProjectedRows(row_D.expand(2, -1), valid.expand(2), row_D, row_D)
        if (carried := self.drafter.carry(empty)) is not None:
            found = found + carried.h_BNJD.sum()
        return found

    def _forward_blocks(self, inputs: StepInputs) -> Tensor:
        """Hidden states of the blocks of all rounds, one after the other, `[B, N, K, D]`."""
        context = self.drafter.context_kv(
            self.drafter.project(inputs.taps_BSC), inputs.positions_BS
        )
        all_anchors = [r.anchors for r in inputs.rounds]
        anchors_BN = torch.cat([a.positions_BN for a in all_anchors], dim=1)
        starts = [a.starts_BN for a in all_anchors if a.starts_BN is not None]  # of packed rows
        starts_BN = torch.cat(starts, dim=1) if starts else None
        if self.drafter.carryover is None:
            parts, carried = [self.round_inputs(inputs.batch, r) for r in inputs.rounds], None
        else:
            rows = [r.project(self.drafter) for r in inputs.rounds]
            given = zip(inputs.rounds, rows, strict=True)
            parts = [self.round_inputs(inputs.batch, r, known) for r, known in given]
            carried = side_by_side(
                [self.drafter.carry(each) for each in rows], [part.shape[1] for part in parts]
            )
        x_BNKD = torch.cat(parts, dim=1)
        return self.drafter(x_BNKD, context, anchors_BN, starts_BN=starts_BN, carried=carried)

    def _round_sums(self, inputs: StepInputs, hidden_BNKD: Tensor) -> Tensor:
        """Per round: weighted loss, weight, accepted drafts and valid blocks, `[R, 4]`."""
        batch, K = inputs.batch, self.drafter.dims.block_size
        all_anchors = [r.anchors for r in inputs.rounds]
        targets = [slot_labels(batch.input_ids_BS, batch.loss_mask_BS, a, K) for a in all_anchors]
        labels_BNJ = torch.cat([labels for labels, _ in targets], dim=1)
        supervised_BNJ = torch.cat([supervised for _, supervised in targets], dim=1)
        losses_BNJ, predicted_BNJ = self._token_losses(inputs, hidden_BNKD[..., 1:, :], labels_BNJ)
        weights_BNJ, counted_BNJ = self.loss_config.weigh(
            losses_BNJ, supervised_BNJ, self._slot_weights_J
        )
        accepted_BN = leading_run((predicted_BNJ == labels_BNJ) & supervised_BNJ)
        valid_BN = torch.cat([a.valid_BN for a in all_anchors], dim=1)
        columns_BN4 = torch.stack(
            [(losses_BNJ * weights_BNJ).sum(-1), counted_BNJ.sum(-1), accepted_BN, valid_BN], dim=-1
        )
        sizes = [a.positions_BN.shape[1] for a in all_anchors]
        return torch.stack([part.sum(dim=(0, 1)) for part in columns_BN4.split(sizes, dim=1)])

    def _token_losses(
        self, inputs: StepInputs, hidden_BNJD: Tensor, labels_BNJ: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Loss and prediction of each predicted slot, a causal head fed with the data's tokens."""
        size = self.loss_config.blocks_at_once(self.drafter.dims.block_size, self.target.vocab_size)
        anchors_BN = torch.cat([r.anchors.positions_BN for r in inputs.rounds], dim=1)
        causal_head = self.drafter.causal_head
        if causal_head is None and self.loss_config.kind == "kl":
            rows_BNJ = slot_positions(anchors_BN, labels_BNJ.shape[-1])
            return soft_losses(
                hidden_BNJD, inputs.hidden_BSD, rows_BNJ, self._head, size, self.target.head_weight
            )
        if causal_head is None:
            return token_losses(hidden_BNJD, labels_BNJ, self._head, size, self.target.head_weight)
        anchor_ids_BN1 = inputs.batch.input_ids_BS.gather(1, anchors_BN).unsqueeze(-1)
        before_BNJ = torch.cat([anchor_ids_BN1, labels_BNJ[..., :-1]], dim=-1)
        before_BNJD = self.target.embed(before_BNJ).to(hidden_BNJD.dtype)
        share = self.base_share if self.training else 0.0  # held-out losses are of the drafts alone
        return corrected_losses(
            causal_head, hidden_BNJD, before_BNJD, labels_BNJ, self._head, size, share
        )

    def round_inputs(
        self, batch: Batch, current: Round, rows: ProjectedRows | None = None
    ) -> Tensor:
        """Slot inputs of one round, with gradient through the relay."""
        detach = self.relay_config.detach_features
        return current.embed(batch, self.target, self.drafter, self.relay, detach=detach, rows=rows)

    def _head(self, hidden: Tensor) -> Tensor:
        return self.target.head(hidden.to(self.target.dtype))

    def check_round_weights(self, blocks: list[int]) -> list[float]:
        """The loss weight of the mask round and each rollout round, of so many blocks each."""
        weights = self.loss_config.round_weights
        if weights is None or not self.training:  # held-out losses are of the mask round alone
            return [float(number) for number in blocks]
        if len(weights) != len(blocks):
            raise InputError(
                f"loss.round_weights has {len(weights)} numbers for {len(blocks)} rounds "
                f"(the mask round and {len(blocks) - 1} rollout rounds); give one number a round"
            )
        return weights

    def identity(self) -> dict[str, Any]:
        """What a checkpoint must agree with: plain values only."""
        return {
            "target": self.target.name,
            "target_fingerprint": self.target.fingerprint,
            "causal_head": asdict(self.causal_head_config),
            "relay": asdict(self.relay_config),
            "drafter": asdict(self.drafter.dims),
        }

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Raise `InputError` when the checkpoint is of another drafter, relay or target."""
        if CHECKPOINT_KEY in checkpoint:  # versions before the causal head had none
            checkpoint[CHECKPOINT_KEY].setdefault("causal_head", {"enabled": False})
        super().on_load_checkpoint(checkpoint)

    @classmethod
    def from_checkpoint(
        cls, content: dict[str, Any], target: TargetConfig, **training: Any
    ) -> "DrafterModule":
        """Rebuild a module from the content of an opened checkpoint (`saved.load_trained`).

        Args:
            training: further arguments, such as `loss`, that no checkpoint holds.
        """
        saved = content[CHECKPOINT_KEY]
        dims = saved["drafter"]
        shape = {name: dims[name] for name in DrafterConfig.__dataclass_fields__ if name in dims}
        module = cls(
            target=target, drafter=DrafterConfig(**shape), relay=RelayConfig(**saved["relay"]),
            causal_head=CausalHeadConfig(**saved.get("causal_head", {})), **training,
        )  # fmt: skip
        module.on_load_checkpoint(content)
        module.load_state_dict(content["state_dict"])
        return module.eval()

    def _warm_start(self, folder: Path) -> None:
        loaded = load_export(folder, self.target)
        if not isinstance(loaded.drafter, Drafter):
            raise InputError(
                f"model.init_from {folder} is an EAGLE-3 drafter; give a block drafter's folder"
            )
        ours, theirs = self.drafter.dims, loaded.drafter.dims
        shape = [f.name for f in fields(DrafterConfig) if f.name != "carryover"]
        names = [*shape, "rope_parameters"]
        pairs = {f"drafter.{name}": (getattr(ours, name), getattr(theirs, name)) for name in names}
        if self.relay is not None and loaded.relay is not None:
            for name in ("hidden_size", "normalize_boundary", "terms", "first_rejected"):
                pairs[f"relay.{name}"] = (getattr(self.relay, name), getattr(loaded.relay, name))
        if theirs.gru_hidden_dim is not None:  # its body alone has not learned to draft
            pairs["causal_head.enabled"] = (self.drafter.causal_head is not None, True)
            pairs |= {f"causal_head.{name}": (getattr(ours, name), getattr(theirs, name))
                      for name in HEAD}  # fmt: skip
        for name, (here, there) in pairs.items():
            if here != there:
                raise InputError(
                    f"{name} is {here} but model.init_from {folder} has {there}; "
                    "set the recipe to the checkpoint's value or start from another drafter"
                )
        state = self.drafter.state_dict()  # a head or carryover that the folder lacks: untrained
        state |= {n: t for n, t in loaded.drafter.state_dict().items() if n in state}
        self.drafter.load_state_dict(state)
        if self.relay is not None and loaded.relay is not None:
            self.relay.load_state_dict(loaded.relay.state_dict())

    # ---------------------------------------------------------------- use

    def decoder(self) -> SpeculativeDecoder:
        """Real speculative decoding with the current weights."""
        drafter, relay = self.drafting_models()
        return SpeculativeDecoder(self.target, drafter, relay)

    def drafting_models(self) -> tuple[Drafter, Relay | None]:
        """Drafter and relay for work without gradient: no use of them waits for other processes.

        Where a strategy shards the weights these are copies; see `whole`.
        """
        return self.whole(self.drafter), None if self.relay is None else self.whole(self.relay)
