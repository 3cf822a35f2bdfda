"""Stops a run at the first number that is not finite, and keeps what is needed to see why.

A loss or gradient that is not finite stops the run before the optimizer has used it, on all
processes together. The process that met it writes its batches, the first process the weights;
`dflow-train replay` runs them again.
"""

from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from dflow_lightning.data.datamodule import ChatDataModule
from dflow_lightning.data.token_rows import Batch
from dflow_lightning.errors import InputError, RunError
from dflow_lightning.files import staged_file
from dflow_lightning.run.ranks import Ranks
from dflow_lightning.tracking.callback import RecipeRecord
from dflow_lightning.training.rollout import OnlineRollout

NONFINITE_FOLDER = "nonfinite"
NAMED_SAMPLES = 8  # in the sentence; the file has them all


class Culprit(NamedTuple):
    """The first non-finite tensor of a process, in words, and the samples of its batches."""

    rank: int
    tensor: str
    samples: list[str]
    file: str


class Guards(Callback):
    """Stops the run at a non-finite loss, gradient or weight.

    Args:
        enabled: False disables all checks.
        parameters_every_n_steps: Check all weights every N steps, and before each checkpoint so
            that no unusable one is saved. Loss and gradients are checked at every step.
    """

    def __init__(self, *, enabled: bool = True, parameters_every_n_steps: int = 100):
        if parameters_every_n_steps < 1:
            raise InputError(
                f"guards.parameters_every_n_steps is {parameters_every_n_steps}; give 1 or more"
            )
        self.enabled = enabled
        self.parameters_every_n_steps = parameters_every_n_steps
        self._ranks = Ranks()
        self._names: list[str] = []
        self._sizes: dict[int, Tensor] = {}  # of each gradient, summed over the step's batches
        self._losses: list[Tensor] = []
        self._batches: list[Batch] = []
        self._stepped = False  # the batches are those of the step before
        self._checked_step = 0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Watch every gradient as this process computes it: after the average over processes no
        one could tell which of them it came from.
        """
        self._checked_step = trainer.global_step
        if not self.enabled:
            return
        trained = [(n, p) for n, p in pl_module.named_parameters() if p.requires_grad]
        self._names = [name for name, _ in trained]
        for index, (_, parameter) in enumerate(trained):
            parameter.register_hook(partial(self._see, index))

    def _see(self, index: int, gradient: Tensor) -> None:
        size = largest(gradient.detach())
        self._sizes[index] = self._sizes[index] + size if index in self._sizes else size

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Keep the batches of the coming optimizer step."""
        if self._stepped:
            self._forget()
        self._batches.append(batch)

    def on_before_backward(
        self, trainer: Trainer, pl_module: LightningModule, loss: Tensor
    ) -> None:
        """Keep the loss; reading it here would wait for the device in every batch."""
        self._losses.append(loss.detach().float())

    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: Any
    ) -> None:
        """Check the losses and gradients of the step.

        Raises:
            RunError: one of them is not finite, on any process.
        """
        if not self.enabled:
            return
        losses = {f"the loss of batch {i}": loss for i, loss in enumerate(self._losses)}
        gradients = {f"the gradient of {self._names[i]}": n for i, n in self._sizes.items()}
        self._stop_if_any(trainer, pl_module, losses | gradients)
        self._stepped = True

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, *args: Any, **kwargs: Any
    ) -> None:
        """Check the weights every `parameters_every_n_steps` steps."""
        step = trainer.global_step
        if step != self._checked_step and step % self.parameters_every_n_steps == 0:
            self.check_parameters(trainer, pl_module)

    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Check the weights on all processes before they are written."""
        if trainer.global_step != self._checked_step:
            self.check_parameters(trainer, pl_module)

    def check_parameters(self, trainer: Trainer, module: LightningModule) -> None:
        """Raise `RunError` if a weight is not finite on any process."""
        self._checked_step = trainer.global_step
        if self.enabled:
            # Under ZeRO-3 a process looks at its own shard.
            weights = {
                name: getattr(p, "ds_tensor", p).detach()
                for name, p in module.named_parameters()
                if p.requires_grad
            }
            sizes = {f"the weight {name}": largest(weight) for name, weight in weights.items()}
            self._stop_if_any(trainer, module, sizes)

    def _forget(self) -> None:
        self._stepped = False
        self._sizes.clear()
        self._losses.clear()
        self._batches.clear()

    # ---------------------------------------------------------------- what stops a run

    def _stop_if_any(
        self, trainer: Trainer, module: LightningModule, numbers: dict[str, Tensor]
    ) -> None:
        finite = torch.isfinite(torch.stack(list(numbers.values()))) if numbers else torch.ones(1)
        good = bool(finite.all())  # the only wait for the device
        if not self._ranks.largest(trainer, int(not good)):
            return
        found = []
        if not good:
            names = [n for n, ok in zip(numbers, finite.tolist(), strict=True) if not ok]
            tensor = names[0] + (f" (and {len(names) - 1} more)" if len(names) > 1 else "")
            found = [self._write(trainer, tensor, names)]
        self._write_weights(trainer, module)
        culprits = self._ranks.gather(trainer, found)
        raise RunError(sentence(trainer.global_step, sorted(culprits)))

    def _write(self, trainer: Trainer, tensor: str, names: list[str]) -> Culprit:
        """Write the batches of this process, and name the tensor."""
        rollout = next((c for c in trainer.callbacks if isinstance(c, OnlineRollout)), None)  # type: ignore[attr-defined]
        rounds = 0 if rollout is None or rollout.waits(trainer) else rollout.config.num_rounds
        samples = [sample_names(trainer, batch.sample_ids) for batch in self._batches]
        content = {
            "step": trainer.global_step,
            "rank": trainer.global_rank,
            "world_size": trainer.world_size,
            "tensors": names,
            "samples": samples,
            "rounds": rounds,
            "base_share": getattr(trainer.lightning_module, "base_share", 0.0),
            "batches": [{k: v.cpu() for k, v in b.tensors().items()} for b in self._batches],
        }
        path = self._path(trainer, f"rank{trainer.global_rank}")
        save(content, path)
        return Culprit(trainer.global_rank, tensor, [*chain.from_iterable(samples)], str(path))

    def _write_weights(self, trainer: Trainer, module: LightningModule) -> None:
        """Write the weights at this step, as a checkpoint without optimizer state."""
        content = {"state_dict": trainer.strategy.lightning_module_state_dict()}
        module.on_save_checkpoint(content)
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(callback, RecipeRecord):
                content["recipe"] = callback.recipe
        if trainer.is_global_zero:
            save(content, self._path(trainer, "weights"))

    def _path(self, trainer: Trainer, name: str) -> Path:
        return (
            Path(trainer.default_root_dir)
            / NONFINITE_FOLDER
            / f"step{trainer.global_step}-{name}.pt"
        )


def largest(tensor: Tensor) -> Tensor:
    """Largest absolute value: one reduction that is non-finite if any entry is."""
    if not tensor.numel():  # a shard may be empty
        return tensor.new_zeros((), dtype=torch.float32)
    wide = torch.promote_types(tensor.dtype, torch.float32)  # float64 it refuses to narrow
    return torch.linalg.vector_norm(tensor, torch.inf, dtype=wide).float()


def sentence(step: int, culprits: list[Culprit]) -> str:
    """Step, tensor, rank and samples of the first process concerned, and the command to replay."""
    first, rest = culprits[0], culprits[1:]
    samples = ", ".join(first.samples[:NAMED_SAMPLES])
    samples += ", ..." if len(first.samples) > NAMED_SAMPLES else ""
    also = f" and on rank {', '.join(str(c.rank) for c in rest)}" if rest else ""
    return (
        f"step {step}: {first.tensor} is not finite on rank {first.rank}{also}, samples {samples}; "
        f"see where it begins with dflow-train replay --file {first.file}"
    )


def out_of_memory(error: BaseException, step: int | None) -> str | None:
    """A sentence for an out-of-memory error of a GPU or of this machine; None for other errors."""
    cpu = "DefaultCPUAllocator" in str(error) and "memory" in str(error)
    if not (cpu or isinstance(error, torch.OutOfMemoryError | MemoryError)):
        return None
    where = "before the first step" if step is None else f"at step {step}"
    message = " ".join(str(error).split()).partition(". ")[0]
    why = f" ({message})" if message else ""
    return (
        f"out of memory {where}{why}; set model.gradient_checkpointing "
        "and continue with --ckpt_path auto, or start again with a lower data.batch_size, "
        "model.num_anchors or rollout.num_anchors (dflow-train plan says what fits)"
    )


def sample_names(trainer: Trainer, ids: list[int]) -> list[str]:
    """The ids of the data's rows; their numbers where there is no data module to ask."""
    data = getattr(trainer, "datamodule", None)
    return data.row_names(ids) if isinstance(data, ChatDataModule) else [str(one) for one in ids]


def save(content: dict[str, Any], path: Path) -> None:
    """Write a file of tensors and plain values; it appears complete or not at all."""
    with staged_file(path) as staged:
        torch.save(content, staged)
