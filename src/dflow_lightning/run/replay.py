"""`dflow-train replay`: rerun a non-finite step, module by module."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dflow_lightning.data.token_rows import Batch
from dflow_lightning.errors import InputError
from dflow_lightning.models.device import choose_device
from dflow_lightning.tensors.loss import LossConfig
from dflow_lightning.training.base import TrainingModule
from dflow_lightning.training.module import DrafterModule
from dflow_lightning.training.precision import ComputePrecision
from dflow_lightning.training.saved import load_trained, open_checkpoint, read_torch_file
from dflow_lightning.training.step_inputs import RolloutConfig, StepInputs

# Of a recipe's `model`: what a step depends on and a checkpoint does not hold.
STEP_KEYS = ("loss", "num_anchors", "seed", "ttt_steps", "step_decay")


def replay_command(*, file: Path, target: str | None = None, device: str = "cpu") -> None:
    """Rerun the batches that a guard saved and report the first non-finite tensor.

    Args:
        file: `nonfinite/step<N>-rank<R>.pt` of a run, with the weights file beside it.
        target: path of the target, if it has moved.
        device: `cpu`, `cuda`, or one GPU such as `cuda:1`; auto is the GPU where there is one.
    """
    chosen = choose_device(device)
    content, module, recipe = load(file, target, chosen)
    module.train()
    print(f"step {content['step']} of rank {content['rank']} of {content['world_size']}")
    print(f"not finite then: {listed_tensors(content['tensors'])}")
    precision = ComputePrecision.named(recipe["trainer"]["precision"])
    module.to(precision.parameters)
    for number, tensors in enumerate(content["batches"]):
        batch = Batch.from_tensors({name: tensor.to(chosen) for name, tensor in tensors.items()})
        with precision.autocast(chosen):
            lines = replay_batch(module, batch, content, recipe.get("rollout", {}))
        samples = ", ".join(content["samples"][number])
        print("\n".join([f"batch {number}: samples {samples}", *lines]))


def load(
    file: Path, target: str | None, device: torch.device
) -> tuple[dict[str, Any], TrainingModule, dict[str, Any]]:
    """The guard's record, the module as it was, and its recipe.

    Raises:
        InputError: the file or the weights beside it are missing.
    """
    weights = file.with_name(f"{file.stem.split('-')[0]}-weights.pt")
    advice = "give a file nonfinite/step<N>-rank<R>.pt of a run, with the weights beside it"
    content = read_torch_file(file, "file", advice=advice)
    if "batches" not in content:
        raise InputError(f"file: {file} holds no batches; give the file of a rank beside it")
    saved = open_checkpoint(weights, "file")
    recipe = saved.content["recipe"]
    settings = {name: recipe["model"][name] for name in STEP_KEYS if name in recipe["model"]}
    if "loss" in settings:
        settings["loss"] = LossConfig(**settings["loss"])
    return content, load_trained(saved, target=target, device=device, **settings), recipe


def replay_batch(
    module: TrainingModule, batch: Batch, content: dict[str, Any], rollout: dict[str, Any]
) -> list[str]:
    """One batch forward and backward; what is not finite, in the order of computing."""
    if isinstance(module, DrafterModule):
        module.base_share = content.get("base_share", 0.0)
    inputs = begin(module, batch, content, rollout)
    module.zero_grad()
    with FirstBad(module) as bad:
        loss, sums_R4 = module.objective(inputs)
        loss.backward()
    gradients = {n: p.grad for n, p in module.named_parameters() if p.grad is not None}
    broken = [name for name, gradient in gradients.items() if not is_finite(gradient)]
    weights = [name for name, p in module.named_parameters() if not is_finite(p)]
    losses = (sums_R4[:, 0] / sums_R4[:, 1].clamp(min=1e-6)).tolist()
    return [
        f"  weights        {listed(weights, len(list(module.parameters())))}",
        f"  target taps    {'finite' if is_finite(inputs.taps_BSC) else 'NOT finite'}, "
        f"largest {largest_value(inputs.taps_BSC):.3g}",
        f"  first output   {bad.found or 'all finite'}",
        f"  loss           {loss.item():.4g}; by round {', '.join(f'{x:.4g}' for x in losses)}",
        f"  gradients      {listed(broken, len(gradients))}",
    ]


def begin(
    module: TrainingModule, batch: Batch, content: dict[str, Any], rollout: dict[str, Any]
) -> StepInputs:
    """What the step fed the drafter, rounds of its rollout included."""
    step, rounds = content["step"], content["rounds"]
    if not rounds:  # of EAGLE-3, of DFlash, or before the first rollout
        return module.step_inputs(batch, step=step)
    config = RolloutConfig.of(rollout | {"num_rounds": rounds})
    return module.step_inputs(batch, config, step=step)


class FirstBad:
    """Watches the output of every part of a module for the first that is not finite."""

    def __init__(self, module: nn.Module) -> None:
        self.found = ""
        self._module = module
        self._handles: list[Any] = []

    def __enter__(self) -> "FirstBad":
        for name, part in self._module.named_modules():
            if name:
                self._handles.append(part.register_forward_hook(self._hook(name)))
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()

    def _hook(self, name: str) -> Any:
        def hook(_: nn.Module, inputs: Any, output: Any) -> None:
            if not self.found and not all(is_finite(one) for one in tensors_in(output)):
                sizes = [largest_value(one) for one in tensors_in(inputs)]
                self.found = f"{name} is NOT finite; its largest input {max(sizes, default=0):.3g}"

        return hook


def tensors_in(value: Any) -> list[Tensor]:
    """The floating-point tensors of an output or of arguments."""
    if isinstance(value, Tensor):
        return [value.detach()] if value.is_floating_point() else []
    return [t for one in value for t in tensors_in(one)] if isinstance(value, list | tuple) else []


def is_finite(tensor: Tensor) -> bool:
    return bool(torch.isfinite(tensor).all())


def largest_value(tensor: Tensor) -> float:
    return float(tensor.abs().max()) if tensor.numel() else 0.0


def listed_tensors(names: list[str]) -> str:
    """The first few in words."""
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def listed(names: list[str], total: int) -> str:
    """`all finite`, or how many are not and the first of them."""
    return f"{len(names)} of {total} NOT finite, first {names[0]}" if names else "all finite"
