"""`dflow-train plan --measure`: two steps of a recipe's shapes, measured beside the prediction.

One process on one device: the prediction printed beside it is for that, without sharding. Rows are
random ids of `max_length`, all supervised. Memory is what the device's allocator holds; on a CPU
what is resident, which counts the libraries as well.
"""

import inspect
import time
from collections.abc import Callable
from dataclasses import is_dataclass, replace
from pathlib import Path
from typing import Any, get_type_hints

import torch

from dflow_lightning.data.datamodule import Batch
from dflow_lightning.models.device import run_on
from dflow_lightning.plan.memory import GIB, Plan, Sharding, amount
from dflow_lightning.plan.work import Work
from dflow_lightning.training.base import TrainingModule
from dflow_lightning.training.eagle3_module import Eagle3Module
from dflow_lightning.training.module import DrafterModule
from dflow_lightning.training.precision import ComputePrecision
from dflow_lightning.training.step_inputs import RolloutConfig

TIMED_STEPS = 2


def measured_lines(plan: Plan) -> list[str]:
    """Run the steps; returns the lines of the table."""
    alone = replace(plan, gpus=1, sharding=Sharding(), shard_target=False)
    gpu = torch.cuda.is_available() and plan.recipe.trainer.accelerator != "cpu"
    device = torch.device("cuda" if gpu else "cpu")
    start = held(device)
    with run_on(device):
        module = build_module(plan.recipe.model, init_from=None).train()  # a step of any weights
    module.target.to(device)
    loaded = held(device)
    module.to(device)
    weights = held(device)
    step = training_step(plan, module, device)
    seconds = []
    for _ in range(TIMED_STEPS):
        reset_peak(device)
        began = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - began)
    memory, peak = alone.memory(), held(device, peak=True) - start
    kept = list(memory.values())
    rows = {
        "target and drafter weights": (sum(kept[:2]), weights - start),
        "peak of a step": (sum(kept), peak),
    }
    if gpu:
        rows = {"target weights": (kept[0], loaded - start)} | rows
    predicted_seconds = alone.rows * Work(alone).row / (plan.recipe.gpu_tflops * 1e12)
    rate = alone.rows * Work(alone).row / seconds[-1] / 1e12
    title = f"two steps of {alone.rows} rows on one {device.type}"
    return [
        f"{title:<52}{'predicted':>13}{'measured':>12}",
        *(
            f"  {name + ', GiB':<50}{amount(a / GIB):>13}{amount(b / GIB):>12}"
            for name, (a, b) in rows.items()
        ),
        f"  {'seconds of the second step':<50}{predicted_seconds:>13.3f}{seconds[-1]:>12.3f}",
        f"  {'TFLOP/s, for --gpu_tflops':<50}{plan.recipe.gpu_tflops:>13.1f}{rate:>12.4f}",
    ]


def build_module(model: Any, **changes: Any) -> TrainingModule:
    """The module of a recipe, with the sections that `fit` gives it; its target is loaded.

    Args:
        model: the recipe's `model`, as `plan.command.parse` reads it.
        changes: arguments that differ from the recipe's.
    """
    kind = Eagle3Module if "ttt_steps" in model else DrafterModule
    types = get_type_hints(kind.__init__)
    given = {
        name: types[name](**model[name].as_dict()) if is_dataclass(types[name]) else model[name]
        for name in inspect.signature(kind).parameters
    }
    return kind(**given | changes)


def training_step(plan: Plan, module: TrainingModule, device: torch.device) -> Callable[[], None]:
    """A whole step: clean forward, rollout, drafter, backward and optimizer."""
    recipe = plan.recipe
    shape = (plan.rows, recipe.data.max_length)
    ids = torch.randint(0, module.target.vocab_size, shape, device=device)
    batch = Batch(ids, torch.ones_like(ids, dtype=torch.bool), torch.arange(plan.rows))
    optimizer = torch.optim.AdamW(module.parameters(), lr=recipe.model.optimizer.lr)
    rollout = RolloutConfig.of(recipe.rollout)
    precision = ComputePrecision.named(recipe.trainer.precision)
    module.to(precision.parameters)

    def step() -> None:
        with precision.autocast(device):
            loss, _ = module.objective(module.step_inputs(batch, rollout))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if device.type == "cuda":
            torch.cuda.synchronize()

    return step


def held(device: torch.device, *, peak: bool = False) -> int:
    """Bytes in use now, or the peak since the last reset; 0 where it is not reported."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated() if peak else torch.cuda.memory_allocated()
    status, field = Path("/proc/self/status"), "VmHWM" if peak else "VmRSS"
    if not status.is_file():
        return 0
    line = next(line for line in status.read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) * 1024


def reset_peak(device: torch.device) -> None:
    """Let the peak start again from what is held now."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    elif Path("/proc/self/clear_refs").exists():
        Path("/proc/self/clear_refs").write_text("5")
