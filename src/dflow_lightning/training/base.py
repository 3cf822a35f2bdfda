"""What the training of every drafter shares: target, optimizer, checkpoints and logging.

Shapes: R rounds.
"""

from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from dflow_lightning.data.datamodule import Batch, ChatDataModule
from dflow_lightning.errors import InputError
from dflow_lightning.models.device import choose_dtype, run_device
from dflow_lightning.models.target import FrozenTarget
from dflow_lightning.tensors.blocks import Anchors, draw_anchors
from dflow_lightning.tensors.loss import LossWindow
from dflow_lightning.training.optimizer import OptimizerConfig
from dflow_lightning.training.step_inputs import RolloutConfig, StepInputs

CHECKPOINT_KEY = "dflow"
Method = Literal["block", "eagle3"]  # what `dflow-train fit --method` names
BLOCK: Method = "block"


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


class TrainingModule(LightningModule):
    """A frozen target, a drafter to be trained, and whatever is the same for all drafters.

    Attributes:
        drafter: set by the module of each method, which also knows the step's inputs and loss.
    """

    drafter: Any

    def __init__(
        self, target: TargetConfig, optimizer: OptimizerConfig, *, num_anchors: int, seed: int
    ) -> None:
        super().__init__()
        if num_anchors < 1:
            raise InputError(f"model.num_anchors is {num_anchors}; give 1 or more")
        self.target_config, self.optimizer_config = target, optimizer
        self.num_anchors, self.seed = num_anchors, seed
        # FrozenTarget is no nn.Module: it never enters checkpoints, optimizers or reducers.
        dtype = choose_dtype(target.dtype, run_device())
        self.target = FrozenTarget.load(
            target.path,
            dtype=str(dtype).removeprefix("torch."),
            attn_implementation=target.attn_implementation,
        )
        self._window = LossWindow()  # the micro-batches of the coming optimizer step
        self._held_out = LossWindow()  # those of a validation or a test

    def begin_step(self, batch: Batch, *, step: int | None = None) -> StepInputs:
        """Clean features and the mask round; anchors are those of the given step."""
        raise NotImplementedError

    def step_inputs(
        self, batch: Batch, rollout: RolloutConfig | None = None, *, step: int | None = None
    ) -> StepInputs:
        """All that a step feeds the drafter: the one construction of a training step.

        Training, `plan --measure`, `replay` and `doctor` use it, so that they run the same step.

        Args:
            rollout: the rounds after the mask round, where the method has any.
            step: whose anchors to draw; by default the trainer's, and 0 outside training.
        """
        return self.begin_step(batch, step=step)

    def draw(self, batch: Batch, step: int | None = None) -> Anchors:
        """The anchors of a step; by default the trainer's, and 0 outside training."""
        if step is None:
            step = self.global_step if self.training else 0
        return draw_anchors(
            batch.loss_mask_BS, batch.sample_ids_B, self.num_anchors,
            seed=self.seed, step=step, documents=batch.documents,
            host_documents=batch.host_documents,
        )  # fmt: skip

    def objective(
        self, inputs: StepInputs, window: LossWindow | None = None
    ) -> tuple[Tensor, Tensor]:
        """The loss, and its sums per round over all processes, `[R, 4]`."""
        raise NotImplementedError

    def identity(self) -> dict[str, Any]:
        """What a checkpoint must agree with: plain values only."""
        raise NotImplementedError

    # ---------------------------------------------------------------- steps

    def log_step(self, batch: Batch) -> None:
        """What every training step logs."""
        self._log_rounds("train", self._window, on_step=True)
        tokens = torch.full((), float(batch.loss_mask_BS.numel()), device=self.device)
        self.log("train/tokens", self._all_reduce(tokens))
        self.log("train/lr", self.lr_schedulers().get_last_lr()[0])  # type: ignore[union-attr]

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
        method = saved.get("method", BLOCK)
        if method != here.get("method", BLOCK):
            raise InputError(
                f"checkpoint: it is of a run with method {method}, not "
                f"{here.get('method', BLOCK)}; resume with the recipe the run was started with"
            )
        for section in (name for name, values in here.items() if isinstance(values, dict)):
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

    # ---------------------------------------------------------------- use

    def whole(self, part: nn.Module) -> Any:
        """A part for work without gradient: no use of it waits for other processes.

        Where a strategy shards the weights this is a copy, gathered by all processes together.
        """
        gather = getattr(self.trainer.strategy, "whole", None) if self._trainer else None
        return part if gather is None else gather(part)
