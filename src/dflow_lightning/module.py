"""The LightningModule: frozen target, trainable drafter and relay, and one loss over all rounds.

DFlash, DFlash with self-conditioning and DFlow are settings of the same module: no relay and no
rollout, rollout without relay, relay and rollout.

Shapes: B batch, S sequence, N blocks per sequence, K block size, R rounds.
"""

from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal

import torch
from lightning.pytorch import LightningModule
from torch import Tensor

from dflow_lightning.acceptance import leading_run
from dflow_lightning.attention import Backend
from dflow_lightning.blocks import draw_anchors, slot_labels
from dflow_lightning.causal_head import CausalHeadConfig, corrected_losses
from dflow_lightning.data.datamodule import Batch, ChatDataModule
from dflow_lightning.decode import SpeculativeDecoder
from dflow_lightning.dims import HEAD, DrafterConfig, DrafterDims
from dflow_lightning.drafter import Drafter, start_from_target
from dflow_lightning.drafter_folder import HEAD_PREFIX, load_export
from dflow_lightning.errors import InputError
from dflow_lightning.loss import LossConfig, LossWindow, slot_weights, token_losses
from dflow_lightning.optimizer import OptimizerConfig
from dflow_lightning.relay import Relay, RelayConfig
from dflow_lightning.rollout import Round, StepInputs, clean_forward
from dflow_lightning.target import FrozenTarget

CHECKPOINT_KEY = "dflow"


@dataclass(kw_only=True)
class TargetConfig:
    """The frozen target.

    Args:
        path: hub id or folder of a Hugging Face causal language model.
        dtype: `auto` is float32 on a CPU and bfloat16 elsewhere.
        attn_implementation: the target's own attention backend.
        shard: keep one share of its layers on each process, for a target that is too large for one
            GPU; slower, since every layer is gathered in every forward.
    """

    path: str
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    attn_implementation: str = "sdpa"
    shard: bool = False


class DrafterModule(LightningModule):
    """Trains a block drafter against a frozen target."""

    _slot_weights_K: Tensor

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
        super().__init__()
        if num_anchors < 1:
            raise InputError(f"model.num_anchors is {num_anchors}; give 1 or more")
        self.target_config, self.relay_config = target, relay
        self.causal_head_config = causal_head
        self.loss_config, self.optimizer_config = loss, optimizer
        self.num_anchors, self.seed = num_anchors, seed
        # FrozenTarget is no nn.Module: it never enters checkpoints, optimizers or reducers.
        self.target = FrozenTarget.load(
            target.path, dtype=_dtype(target.dtype), attn_implementation=target.attn_implementation
        )
        dims = DrafterDims.resolve(drafter, self.target, causal_head)
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
        self._window = LossWindow()  # the micro-batches of the coming optimizer step
        self._held_out = LossWindow()  # those of a validation or a test
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
        self._log_rounds("train", self._window, on_step=True)
        tokens = torch.tensor(float(batch.loss_mask_BS.numel()), device=self.device)
        self.log("train/tokens", self._all_reduce(tokens))
        if self.drafter.causal_head is not None:
            self.log("train/base_share", self.base_share)
        self.log("train/lr", self.lr_schedulers().get_last_lr()[0])  # type: ignore[union-attr]
        return loss

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        """Divide the gradients of an accumulated step by the weight of all its micro-batches."""
        accumulated = self.trainer.accumulate_grad_batches
        window, self._window = self._window, LossWindow()
        if accumulated == 1:
            return  # one micro-batch has divided by its own weight already
        factor = window.correction() * accumulated  # by whose number Lightning has divided
        if (scale := getattr(self.trainer.strategy, "scale_gradients", None)) is not None:
            scale(factor.item())
        else:
            torch._foreach_mul_([p.grad for p in self.parameters() if p.grad is not None], factor)

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        """Add up the mask round's loss and tau on the data's tokens."""
        self.objective(self.begin_step(batch), self._held_out)  # at step 0's anchors

    def test_step(self, batch: Batch, batch_idx: int) -> None:
        """The same as validation, on the test split."""
        self.objective(self.begin_step(batch), self._held_out)

    def on_validation_epoch_end(self) -> None:
        """Log the sums over all batches and processes."""
        self._log_rounds("val", self._held_out, on_step=False)
        self._held_out = LossWindow()

    def on_test_epoch_end(self) -> None:
        """The same as validation, on the test split."""
        self._log_rounds("test", self._held_out, on_step=False)
        self._held_out = LossWindow()

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
        losses_BNK, predicted_BNK = self._token_losses(inputs, hidden_BNKD[..., 1:, :], labels_BNK)
        weights_BNK = supervised_BNK * self._slot_weights_K
        accepted_BN = leading_run((predicted_BNK == labels_BNK) & supervised_BNK)
        valid_BN = torch.cat([a.valid_BN for a in all_anchors], dim=1)
        columns_BN4 = torch.stack(
            [(losses_BNK * weights_BNK).sum(-1), weights_BNK.sum(-1), accepted_BN, valid_BN], dim=-1
        )
        sizes = [a.positions_BN.shape[1] for a in all_anchors]
        return torch.stack([part.sum(dim=(0, 1)) for part in columns_BN4.split(sizes, dim=1)])

    def _token_losses(
        self, inputs: StepInputs, hidden_BNJD: Tensor, labels_BNJ: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Loss and prediction of each predicted slot, a causal head fed with the data's tokens."""
        size = self.loss_config.blocks_at_once(self.drafter.dims.block_size, self.target.vocab_size)
        causal_head = self.drafter.causal_head
        if causal_head is None:
            return token_losses(hidden_BNJD, labels_BNJ, self._head, size, self.target.head_weight)
        anchors_BN = torch.cat([r.anchors.positions_BN for r in inputs.rounds], dim=1)
        anchor_ids_BN1 = inputs.batch.input_ids_BS.gather(1, anchors_BN).unsqueeze(-1)
        before_BNJ = torch.cat([anchor_ids_BN1, labels_BNJ[..., :-1]], dim=-1)
        before_BNJD = self.target.embed(before_BNJ).to(hidden_BNJD.dtype)
        return corrected_losses(
            causal_head, hidden_BNJD, before_BNJD, labels_BNJ, self._head, size, self.base_share
        )

    @property
    def base_share(self) -> float:
        """Weight of the loss of a causal head's body in this step, 0 outside of training."""
        if self._trainer is None or not self.training:
            return 0.0
        total = int(self.trainer.estimated_stepping_batches)
        return self.causal_head_config.base_share(self.global_step, total)

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

    def _all_reduce(self, sums: Tensor) -> Tensor:
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            torch.distributed.all_reduce(sums)
        return sums

    # ---------------------------------------------------------------- logging

    def _log_rounds(self, prefix: str, window: LossWindow, *, on_step: bool) -> None:
        """Means of the sums, which are the same on every process already."""
        values = {"loss": window.loss(), "blocks": window.totals_R4[:, 3].sum()}
        for index, (_, _, accepted, blocks) in enumerate(window.totals_R4):
            values[f"accepted_round{index}"] = accepted / blocks.clamp(min=1)
            values[f"tau_round{index}"] = accepted / blocks.clamp(min=1) + 1
        named = {f"{prefix}/{name}": value for name, value in values.items()}
        self.log_dict(
            named, on_step=on_step, on_epoch=not on_step, batch_size=1, sync_dist=not on_step
        )

    # ---------------------------------------------------------------- optimizer and checkpoints

    def configure_optimizers(self) -> Any:
        """AdamW, with its schedule stepped once per optimizer step."""
        config = self.optimizer_config
        optimizer = torch.optim.AdamW(
            self.parameters(), lr=config.lr, betas=config.betas, weight_decay=config.weight_decay
        )
        total = int(self.trainer.estimated_stepping_batches)
        schedule = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: config.factor(step, total)
        )
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def setup(self, stage: str) -> None:
        """Bring the target to the module's device, and check that the data fit its context."""
        # Lightning does not know about it, and moves the module itself after this.
        device = self.trainer.strategy.root_device
        if self.target_config.shard and self.trainer.world_size > 1 and not self.target.sharded:
            self.target.shard(device)
        else:
            self.target.to(device)
        data = getattr(self.trainer, "datamodule", None)
        limit = self.target.config.max_position_embeddings
        if isinstance(data, ChatDataModule) and data.longest_row > limit:
            raise InputError(
                f"data: the longest row has {data.longest_row} tokens, but the context of "
                f"{self.target.name} ends at {limit}; set data.max_length to {limit} and shorten "
                "the rows that this names"
            )

    def identity(self) -> dict[str, Any]:
        """What a checkpoint must agree with: plain values only."""
        return {
            "target": self.target.name,
            "target_fingerprint": self.target.fingerprint,
            "drafter": asdict(self.drafter.dims),
            "relay": asdict(self.relay_config),
            "causal_head": asdict(self.causal_head_config),
        }

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add what the module was built from."""
        checkpoint[CHECKPOINT_KEY] = self.identity() | {"target_config": asdict(self.target_config)}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Raise `InputError` when the checkpoint is of another drafter, relay or target."""
        if CHECKPOINT_KEY not in checkpoint:
            raise InputError(
                "checkpoint: it was not written by dflow-train; give a .ckpt file of a run"
            )
        saved, here = checkpoint[CHECKPOINT_KEY], self.identity()
        saved = {"causal_head": {"enabled": False}} | saved  # of versions that had none
        for section in ("causal_head", "relay", "drafter"):
            for name, value in here[section].items():
                if saved.get(section, {}).get(name, value) != value:
                    raise InputError(
                        f"{section}.{name} is {value} but the checkpoint has "
                        f"{saved[section][name]}; resume with the recipe the run was started with"
                    )
        ours = here["target_fingerprint"]
        theirs = saved.get("target_fingerprint", ours)
        if theirs != ours:
            raise InputError(
                f"model.target.path {self.target.name} is not the target of the checkpoint "
                f"({saved['target']}, fingerprint {theirs[:12]} against {ours[:12]}); "
                "resume with the same target"
            )

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
            target=config, drafter=DrafterConfig(**shape), relay=RelayConfig(**saved["relay"]),
            causal_head=CausalHeadConfig(**saved.get("causal_head", {})),
        )  # fmt: skip
        module.on_load_checkpoint(checkpoint)
        module.load_state_dict(checkpoint["state_dict"])
        return module.eval()

    def _warm_start(self, folder: Path) -> None:
        loaded = load_export(folder, self.target)
        ours, theirs = self.drafter.dims, loaded.drafter.dims
        names = [*(f.name for f in fields(DrafterConfig)), "rope_parameters"]
        pairs = {f"drafter.{name}": (getattr(ours, name), getattr(theirs, name)) for name in names}
        if self.relay is not None and loaded.relay is not None:
            for name in ("hidden_size", "normalize_boundary"):
                pairs[f"relay.{name}"] = (getattr(self.relay, name), getattr(loaded.relay, name))
            rejected = (self.relay_config.first_rejected, loaded.first_rejected)
            pairs["relay.first_rejected"] = rejected
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
        # A head that the folder lacks begins untrained: it corrects nothing at first.
        begun = {k: v for k, v in self.drafter.state_dict().items() if k.startswith(HEAD_PREFIX)}
        self.drafter.load_state_dict(begun | loaded.drafter.state_dict())
        if self.relay is not None and loaded.relay is not None:
            self.relay.load_state_dict(loaded.relay.state_dict())

    # ---------------------------------------------------------------- use

    def decoder(self) -> SpeculativeDecoder:
        """Real speculative decoding with the current weights."""
        drafter, relay = self.drafting_models()
        return SpeculativeDecoder(
            self.target, drafter, relay, first_rejected=self.relay_config.first_rejected
        )

    def drafting_models(self) -> tuple[Drafter, Relay | None]:
        """Drafter and relay for work without gradient: no use of them waits for other processes.

        Where a strategy shards the weights these are copies, gathered by all processes together.
        """
        whole = getattr(self.trainer.strategy, "whole", None) if self._trainer else None
        if whole is None:
            return self.drafter, self.relay
        return whole(self.drafter), None if self.relay is None else whole(self.relay)


def _dtype(name: str) -> str:
    """`auto` resolved before a device is known: bfloat16 where there is a GPU to run on."""
    return ("bfloat16" if torch.cuda.is_available() else "float32") if name == "auto" else name
