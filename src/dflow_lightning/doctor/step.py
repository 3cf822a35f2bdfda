"""What `dflow-train doctor --config` trains: one step, as `fit` would run it with one device.

Lightning's trainer is built with the recipe's strategy, precision and rollouts, since these decide
in which type a drafter computes. A strategy that leaves the rollouts without autocast raises no
error: they draft by other arithmetic than the drafter is trained and used in.
"""

from __future__ import annotations

import atexit
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.cli import instantiate_class
from lightning.pytorch.plugins.environments import LightningEnvironment
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn

from dflow_lightning.checks import FailedError, SkippedError
from dflow_lightning.data.token_rows import Batch
from dflow_lightning.doctor.models import NUM_BLOCKS, Loaded
from dflow_lightning.run.fit import wrong_setting
from dflow_lightning.run.strategy import check_precision
from dflow_lightning.training.precision import ComputePrecision
from dflow_lightning.training.rollout import OnlineRollout

Types = dict[str, set[torch.dtype]]  # of matrix products, by the part of the step
SWITCH = "set trainer.strategy to ddp, and install the tested packages (see packages)"


class One:
    """A loader of one batch; Lightning would take a list for one of loaders."""

    def __init__(self, batch: Batch) -> None:
        self.batch = batch

    def __len__(self) -> int:
        return 1

    def __iter__(self) -> Iterator[Batch]:
        yield self.batch


class Outcome(Callback):
    """The weights that the step began and ended with, and its loss."""

    def __init__(self) -> None:
        self.before: dict[str, Tensor] = {}
        self.after: dict[str, Tensor] = {}
        self.loss = float("nan")

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.before = self._weights(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.after = self._weights(trainer)
        self.loss = float(trainer.callback_metrics["train/loss"])

    @staticmethod
    def _weights(trainer: Trainer) -> dict[str, Tensor]:
        """As a checkpoint has them: whole, however the strategy keeps them."""
        state = trainer.strategy.lightning_module_state_dict()
        return {name: weight.detach().cpu().clone() for name, weight in state.items()}

    @property
    def moved(self) -> int:
        """How many tensors the step has changed."""
        return sum(not torch.equal(self.before[name], self.after[name]) for name in self.before)


def check_step(here: Loaded) -> str:
    """A step and a validation batch, both of the row; the loaded drafter stays as it is."""
    trainer = here.recipe.trainer
    check_precision(trainer.strategy, trainer.precision)
    compute = ComputePrecision.named(trainer.precision).compute
    module = deepcopy(here.module, {id(here.target): here.target})
    module.num_anchors = NUM_BLOCKS
    types, found = watched(module), Outcome()
    on_cpu = here.device.type == "cpu"
    if on_cpu and compute == torch.float16:
        raise SkippedError(f"trainer.precision {trainer.precision} needs a GPU, and here is none")
    with one_process():
        try:
            alone = one_step_trainer(here, found)
        except MisconfigurationException as error:
            if on_cpu and trainer.accelerator != "cpu":
                raise SkippedError(f"not without a GPU: {wrong_setting(error)}") from error
            raise FailedError(f"trainer: {wrong_setting(error)}; fix what it names") from error
        alone.fit(module, One(here.row), One(here.row))
    name = strategy_of(here)
    about = f"{name if isinstance(name, str) else type(name).__name__} on one {here.device.type}"
    for part, used in types.items():
        if used - {compute}:
            raise FailedError(
                f"{about}: {part} in {short(*used)}, not in {short(compute)} alone as "
                f"trainer.precision {trainer.precision} says; {SWITCH}"
            )
    if not (found.moved and torch.tensor(found.loss).isfinite()):
        raise FailedError(
            f"{about}: {found.moved} of {len(found.before)} tensors moved, at a loss of "
            f"{found.loss:.2f}; {SWITCH}"
        )
    return f"{about}: {', '.join(types)} in {short(compute)}, loss {found.loss:.2f}"


def watched(module: Any) -> Types:
    """What the drafter's matrix products compute in from now on, whoever runs them.

    A copy of the drafter, which ZeRO-3 drafts with, has the same hooks.
    """
    types: Types = {}

    def note(layer: nn.Module, _: Any, output: Tensor) -> None:
        trained = "loss" if torch.is_grad_enabled() else "rollouts"
        types.setdefault(trained if layer.training else "validation", set()).add(output.dtype)

    for layer in module.drafter.modules():
        if isinstance(layer, nn.Linear):
            layer.register_forward_hook(note)
    return types


def strategy_of(here: Loaded) -> Any:
    """`trainer.strategy`; the `auto` of several devices is DDP, as Lightning chooses."""
    chosen = here.recipe.trainer.strategy
    if not isinstance(chosen, str):
        return instantiate_class((), chosen.as_dict())
    plan = here.environment.plan
    return "ddp" if chosen == "auto" and plan is not None and plan.gpus > 1 else chosen


def one_step_trainer(here: Loaded, outcome: Outcome) -> Trainer:
    """The recipe's trainer for one step, on the device at hand and without files."""
    given = here.recipe.trainer
    rollouts: list[Callback] = []
    if not here.eagle3:
        section = here.recipe.rollout.as_dict() | {"start": 0.0}
        section["num_anchors"] = min(section["num_anchors"], NUM_BLOCKS)
        rollouts = [OnlineRollout(**section)]
    return Trainer(
        strategy=strategy_of(here), accelerator="gpu" if here.device.type == "cuda" else "cpu",
        devices=1, precision=given.precision, deterministic=given.deterministic,
        gradient_clip_val=given.gradient_clip_val, callbacks=[*rollouts, outcome], max_steps=1,
        plugins=[LightningEnvironment()], num_sanity_val_steps=0, use_distributed_sampler=False,
        logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, log_every_n_steps=1,
    )  # fmt: skip


@contextmanager
def one_process() -> Iterator[None]:
    """Takes back what a strategy sets for the whole process.

    All but its process group, which stays until the process ends: DeepSpeed remembers the first one
    and could not run again with another. Of one process alone, it changes no sum.
    """
    before, kept = torch.are_deterministic_algorithms_enabled(), dict(os.environ)
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "NODE_RANK"):
        os.environ.pop(name, None)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of Lightning, on loaders and idle devices
            yield
    finally:
        torch.use_deterministic_algorithms(before)
        os.environ.clear()
        os.environ.update(kept)
        atexit.register(end_group)


def end_group() -> None:
    """NCCL complains where nobody ends its group."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def short(*dtypes: torch.dtype) -> str:
    return " and ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))
