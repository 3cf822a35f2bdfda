"""The LightningModule: frozen target, trainable drafter and relay, and one loss over all rounds.

DFlash, DFlash with self-conditioning and DFlow are settings of the same module: no relay and no
rollout, rollout without relay, relay and rollout.

Shapes: B batch, S sequence, N blocks per sequence, K block size, R rounds.
"""

from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from dflow_lightning.acceptance import leading_run
from dflow_lightning.attention import Backend
from dflow_lightning.blocks import draw_anchors, slot_labels
from dflow_lightning.data.datamodule import Batch
from dflow_lightning.decode import SpeculativeDecoder
from dflow_lightning.dims import DrafterConfig, DrafterDims
from dflow_lightning.drafter import Drafter, start_from_target
from dflow_lightning.drafter_folder import load_export
from dflow_lightning.errors import InputError
from dflow_lightning.loss import LossConfig, LossWindow, slot_weights, token_losses
from dflow_lightning.optimizer import OptimizerConfig
from dflow_lightning.relay import Relay, RelayConfig
from dflow_lightning.rollout import Round, StepInputs, clean_forward
from dflow_lightning.training_module import CHECKPOINT_KEY, TargetConfig, TrainingModule


class DrafterModule(TrainingModule):
    """Trains a block drafter against a frozen target."""

    _slot_weights_K: Tensor

    def __init__(
        self,
        *,
        target: TargetConfig,
        drafter: DrafterConfig = DrafterConfig(),  # noqa: B008
        relay: RelayConfig = RelayConfig(),  # noqa: B008
        loss: LossConfig = LossConfig(),  # noqa: B008
        optimizer: OptimizerConfig = OptimizerConfig(),  # noqa: B008
        num_anchors: int = 512,
        gradient_checkpointing: bool = False,
        attention: Backend = "auto",
        seed: int = 0,
        init: Literal["target", "random"] = "target",
        init_from: str | None = None,
    ) -> None:
        """
        Args:
            target: the frozen target.
            drafter: shape of the drafter.
            relay: the relay; off is DFlash.
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
        dims = DrafterDims.resolve(drafter, self.target)
        self.drafter = Drafter(dims)
        self.drafter.gradient_checkpointing = gradient_checkpointing
        self.drafter.attention = attention
        if init == "target":
            start_from_target(self.drafter, self.target)
        self.relay: Relay | None = None
        if relay.enabled:
            self.relay = relay.build(dims.hidden_size, dims.rms_norm_eps)
        if init_from is not None:
            self._warm_start(Path(init_from))
        self.prepared: StepInputs | None = None  # the next step's inputs, if a rollout made them
        weights_K = slot_weights(dims.block_size, loss.decay(dims.block_size))
        self.register_buffer("_slot_weights_K", weights_K, persistent=False)

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
        inputs = clean_forward(self.target, batch, layer_ids, extra_slots, up_to_head=up_to_head)
        if step is None:
            step = self.global_step if self.training else 0
        anchors = draw_anchors(
            batch.loss_mask_BS, batch.sample_ids_B, self.num_anchors,
            seed=self.seed, step=step, documents=batch.documents,
        )  # fmt: skip
        inputs.rounds.append(Round(anchors))
        return inputs

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """The loss over the mask round and the rounds a rollout has made."""
        inputs = self.prepared or self.begin_step(batch)
        self.prepared = None
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
        loss = window.add(sums_R4, totals_R4, sums_R4.new_tensor(shares))
        if self.relay is not None and all(current.relay is None for current in inputs.rounds):
            loss = loss + 0.0 * self._idle_relay(loss.dtype)
        # Data-parallel strategies average gradients, but the denominators are sums already.
        return (loss * self.trainer.world_size if self._trainer is not None else loss), totals_R4

    def _idle_relay(self, dtype: torch.dtype) -> Tensor:
        """The relay on one empty row: every process touches every parameter in every step."""
        assert self.relay is not None
        row_D = torch.zeros(self.drafter.dims.hidden_size, dtype=dtype, device=self.device)
        valid = torch.ones(1, dtype=torch.bool, device=self.device)
        return self.relay(row_D.unsqueeze(0), row_D, row_D, valid).sum()

    def _forward_blocks(self, inputs: StepInputs) -> Tensor:
        """Hidden states of the blocks of all rounds, one after the other, `[B, N, K, D]`."""
        context = self.drafter.context_kv(
            self.drafter.project(inputs.taps_BSC), inputs.positions_BS
        )
        all_anchors = [r.anchors for r in inputs.rounds]
        anchors_BN = torch.cat([a.positions_BN for a in all_anchors], dim=1)
        starts = [a.starts_BN for a in all_anchors if a.starts_BN is not None]  # of packed rows
        starts_BN = torch.cat(starts, dim=1) if starts else None
        x_BNKD = torch.cat([self.round_inputs(inputs.batch, r) for r in inputs.rounds], dim=1)
        return self.drafter(x_BNKD, context, anchors_BN, starts_BN=starts_BN)

    def _round_sums(self, inputs: StepInputs, hidden_BNKD: Tensor) -> Tensor:
        """Per round: weighted loss, weight, accepted drafts and valid blocks, `[R, 4]`."""
        batch, K = inputs.batch, self.drafter.dims.block_size
        all_anchors = [r.anchors for r in inputs.rounds]
        targets = [slot_labels(batch.input_ids_BS, batch.loss_mask_BS, a, K) for a in all_anchors]
        labels_BNK = torch.cat([labels for labels, _ in targets], dim=1)
        supervised_BNK = torch.cat([supervised for _, supervised in targets], dim=1)
        losses_BNK, predicted_BNK = token_losses(
            hidden_BNKD[..., 1:, :], labels_BNK, self._head,
            self.loss_config.blocks_at_once(K, self.target.vocab_size), self.target.head_weight,
        )  # fmt: skip
        weights_BNK = supervised_BNK * self._slot_weights_K
        accepted_BN = leading_run((predicted_BNK == labels_BNK) & supervised_BNK)
        valid_BN = torch.cat([a.valid_BN for a in all_anchors], dim=1)
        columns_BN4 = torch.stack(
            [(losses_BNK * weights_BNK).sum(-1), weights_BNK.sum(-1), accepted_BN, valid_BN], dim=-1
        )
        sizes = [a.positions_BN.shape[1] for a in all_anchors]
        return torch.stack([part.sum(dim=(0, 1)) for part in columns_BN4.split(sizes, dim=1)])

    def round_inputs(self, batch: Batch, current: Round) -> Tensor:
        """Slot inputs of one round, with gradient through the relay."""
        detach = self.relay_config.detach_features
        return current.embed(batch, self.target, self.drafter, self.relay, detach=detach)

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
            "drafter": asdict(self.drafter.dims),
            "relay": asdict(self.relay_config),
        }

    @classmethod
    def from_checkpoint(cls, path: str | Path, *, target: str | None = None) -> "DrafterModule":
        """Rebuild a module from a checkpoint, on the target it was trained with or a given one."""
        checkpoint = torch.load(path, map_location="cpu", weights_only=True)
        saved = checkpoint.get(CHECKPOINT_KEY)
        if saved is None:
            raise InputError(
                f"checkpoint: {path} was not written by dflow-train; give a .ckpt file of a run"
            )
        config = TargetConfig(**saved["target_config"] | ({"path": target} if target else {}))
        dims = saved["drafter"]
        shape = {name: dims[name] for name in DrafterConfig.__dataclass_fields__}
        module = cls(
            target=config, drafter=DrafterConfig(**shape), relay=RelayConfig(**saved["relay"])
        )
        module.on_load_checkpoint(checkpoint)
        module.load_state_dict(checkpoint["state_dict"])
        return module.eval()

    def _warm_start(self, folder: Path) -> None:
        loaded = load_export(folder, self.target)
        if not isinstance(loaded.drafter, Drafter):
            raise InputError(
                f"model.init_from {folder} is an EAGLE-3 drafter; give a block drafter's folder"
            )
        ours, theirs = self.drafter.dims, loaded.drafter.dims
        names = [*(f.name for f in fields(DrafterConfig)), "rope_parameters"]
        pairs = {f"drafter.{name}": (getattr(ours, name), getattr(theirs, name)) for name in names}
        if self.relay is not None and loaded.relay is not None:
            for name in ("hidden_size", "normalize_boundary"):
                pairs[f"relay.{name}"] = (getattr(self.relay, name), getattr(loaded.relay, name))
            rejected = (self.relay_config.first_rejected, loaded.first_rejected)
            pairs["relay.first_rejected"] = rejected
        for name, (here, there) in pairs.items():
            if here != there:
                raise InputError(
                    f"{name} is {here} but model.init_from {folder} has {there}; "
                    "set the recipe to the checkpoint's value or start from another drafter"
                )
        self.drafter.load_state_dict(loaded.drafter.state_dict())
        if self.relay is not None and loaded.relay is not None:
            self.relay.load_state_dict(loaded.relay.state_dict())

    # ---------------------------------------------------------------- use

    @property
    def first_rejected(self) -> bool:
        """Whether the relay uses the row of the first rejected token."""
        return self.relay_config.first_rejected

    def decoder(self) -> SpeculativeDecoder:
        """Real speculative decoding with the current weights."""
        drafter, relay = self.drafting_models()
        return SpeculativeDecoder(
            self.target, drafter, relay, first_rejected=self.relay_config.first_rejected
        )

    def drafting_models(self) -> tuple[Drafter, Relay | None]:
        """Drafter and relay for work without gradient: no use of them waits for other processes.

        Where a strategy shards the weights these are copies; see `whole`.
        """
        return self.whole(self.drafter), None if self.relay is None else self.whole(self.relay)
