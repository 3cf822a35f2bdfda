"""The callback that makes the rollout rounds of each training step; see `step_inputs.py`."""

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch import Callback, Trainer

from dflow_lightning.errors import InputError
from dflow_lightning.stopwatch import Stopwatch
from dflow_lightning.training.step_inputs import Reference, RolloutConfig, RolloutMode

if TYPE_CHECKING:
    from dflow_lightning.training.module import DrafterModule


class OnlineRollout(Callback):
    """Makes the rollout rounds of each training step, before the step."""

    def __init__(
        self,
        *,
        num_rounds: int = 2,
        num_anchors: int = 64,
        mode: RolloutMode = "online",
        reference: Reference = "data",
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
        self.config = RolloutConfig(
            num_rounds=num_rounds, num_anchors=num_anchors, mode=mode, reference=reference
        )
        self.start = start
        # Set by the callback that reads the laps: nobody else would clear the two events per step.
        self.watch: Stopwatch | None = None

    def setup(  # type: ignore[override]
        self, trainer: Trainer, pl_module: "DrafterModule", stage: str
    ) -> None:
        """Check the rounds against the module before training starts."""
        config = self.config
        if stage == "fit":
            relay, carryover = pl_module.relay is not None, pl_module.drafter.carryover is not None
            self.check(pl_module.num_anchors, relay, carryover)
            pl_module.check_round_weights(
                [pl_module.num_anchors] + [config.num_anchors] * config.num_rounds
            )

    def check(self, num_anchors: int, relay: bool, carryover: bool) -> None:
        """Check the rounds against the model's part of a recipe.

        Args:
            num_anchors: blocks of the mask round.
            relay, carryover: whether the drafter has them.

        Raises:
            InputError: there would be nothing to learn from, or more blocks than there are.
        """
        config = self.config
        if (relay or carryover) and (not config.num_rounds or config.mode == "off"):
            named = f"mode is {config.mode}" if config.num_rounds else "num_rounds is 0"
            part, kind = ("relay.enabled", "a relay") if relay else (
                "drafter.carryover", "carryover"
            )  # fmt: skip
            raise InputError(
                f"rollout.{named} but {part} is true, and {kind} learns in rollout "
                "rounds alone; set rollout.num_rounds to 1 or more and mode to online, or "
                f"{part} to false"
            )
        if config.num_rounds and config.num_anchors > num_anchors:
            raise InputError(
                f"rollout.num_anchors is {config.num_anchors} but model.num_anchors is "
                f"{num_anchors}; rolled-out blocks are a subset, give at most as many"
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
        """Prepare the step's inputs, rollout rounds included, for `training_step`.

        In a hook and not in `training_step`: DDP and DeepSpeed wrap that method, and a drafter
        forward inside it that does not contribute to the loss would confuse their gradient hooks.
        """
        if not self.config.num_rounds or self.waits(trainer):
            return
        lap = nullcontext() if self.watch is None else self.watch.lap(pl_module.device)
        with lap, trainer.precision_plugin.forward_context():
            pl_module.prepared = pl_module.step_inputs(batch, self.config)
