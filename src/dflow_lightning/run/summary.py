"""What `dflow-train fit` prints of a run: its summary before the start, tau after each validation.

The summary is one screen, a line or two for each subject.
"""

import os
import resource
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from lightning.pytorch import Trainer
from rich.console import Console

from dflow_lightning.terminal import print_table, shown, table
from dflow_lightning.training.eagle3_module import Eagle3Module
from dflow_lightning.training.rollout import OnlineRollout
from dflow_lightning.training.validation import ValidationDecoding


def short_count(number: float) -> str:
    """A number of parameters or tokens: `1,234`, `5.67 M` or `8.90 B`."""
    for size, unit in ((1e9, " B"), (1e6, " M")):
        if number >= size:
            return f"{number / size:.2f}{unit}"
    return f"{number:,.0f}"


def plural(number: int, noun: str) -> str:
    """`1 step`, `2 steps`, `3 batches`."""
    ending = "es" if noun.endswith(("s", "ch")) else "s"
    return f"{number:,} {noun}" + (ending if number != 1 else "")


def plan(trainer: Trainer, module: Any, steps: int | None) -> dict[str, str]:
    """Summary of a run by subject: method, models, data, length, hardware and folder.

    Args:
        steps: optimizer steps of the whole run; None if it has no end.
    """
    texts = {
        "train": method(trainer, module),
        "target": target(module),
        "drafter": drafter(module),
        "rollout": rollout(trainer, module),
        "data": data(trainer),
        "validation": validation(trainer, module),
        "steps": length(trainer, steps),
        "hardware": processes(trainer),
        "folder": folder(trainer),
    }
    return {subject: text for subject, text in texts.items() if text}


def method(trainer: Trainer, module: Any) -> str:
    """The method's name, derived from the settings."""
    if isinstance(module, Eagle3Module):
        return "EAGLE-3: drafts one token after the other"
    if not hasattr(module, "relay"):  # a drafter of another kind
        return type(module).__name__.removesuffix("Module")
    parts, relay = getattr(module, "drafter", None), module.relay is not None
    name = "DFlow" if relay else "DFlash"
    if getattr(parts, "causal_head", None) is not None:
        name = "Domino with DFlow" if relay else "Domino"
    if getattr(parts, "carryover", None) is not None:
        return f"{name}, with carryover: rejected rows stay in the drafter's context for a round"
    if relay:
        return f"{name}: the drafter also reads the target's hidden states of rejected drafts"
    rolled = bool((callback := _callback(trainer, OnlineRollout)) and callback.config.num_rounds)
    return f"{name} with self-conditioning: rollout rounds, no relay" if rolled else name


def target(module: Any) -> str:
    """The target, its size and dtype."""
    frozen = getattr(module, "target", None)
    path = getattr(getattr(module, "target_config", None), "path", "")
    if frozen is None:
        return path
    weights = sum(getattr(p, "ds_numel", p.numel()) for p in frozen.model.parameters())
    kind = str(frozen.dtype).removeprefix("torch.")
    return f"{path}, {short_count(weights)} parameters, {frozen.num_layers} layers, {kind}, frozen"


def drafter(module: Any) -> str:
    """Trained parameters by part, and the drafter's shape."""
    parts = []
    for name, part in module.named_children():
        trained = [p for p in part.parameters() if p.requires_grad]
        if trained:
            size = sum(getattr(p, "ds_numel", p.numel()) for p in trained)
            parts.append(f"{name} {short_count(size)}")
    text = f"trained parameters: {', '.join(parts)}"
    dims = getattr(getattr(module, "drafter", None), "dims", None)
    if dims is not None:
        text += f"; {plural(dims.num_layers, 'layer')}"
        if hasattr(dims, "block_size"):
            text += f", block size {dims.block_size}"
        text += f", taps {' '.join(map(str, dims.target_layer_ids))}"
    return text


def rollout(trainer: Trainer, module: Any) -> str:
    """Blocks of a row and rollout rounds."""
    callback = _callback(trainer, OnlineRollout)
    anchors = getattr(module, "num_anchors", None)
    if anchors is None or callback is None:
        return ""
    blocks = f"{plural(anchors, 'block')} a row"
    config = callback.config
    if not config.num_rounds:
        return f"none; {blocks}"
    text = f"{plural(config.num_rounds, 'round')}, {config.mode}, of {config.num_anchors}"
    text += f" of the {blocks}"
    return text + (f", after {callback.start:.0%} of the run" if callback.start else "")


def data(trainer: Trainer) -> str:
    """Training sets, rows and tokens."""
    module: Any = trainer.datamodule  # type: ignore[attr-defined]
    sets = ", ".join(map(str, module.paths["train"]))
    rows, tokens = module.train_size
    packed = f", packed into rows of {module.max_length}" if module.pack else ""
    return f"{sets}: {plural(rows, 'row')}, {short_count(tokens)} tokens{packed}"


def validation(trainer: Trainer, module: Any) -> str:
    """When validation runs, and what it decodes."""
    if not trainer.limit_val_batches or not trainer.datamodule.paths["validation"]:  # type: ignore[attr-defined]
        return "none: data.validation is not set"
    every = trainer.val_check_interval
    epochs = trainer.check_val_every_n_epoch
    if isinstance(every, int) and epochs is None:
        when = f"every {plural(every // trainer.accumulate_grad_batches, 'step')}"
    elif every == 1.0:
        when = "every epoch" if epochs in (None, 1) else f"every {epochs} epochs"
    else:
        when = f"every {every} of an epoch"
    decoding = _callback(trainer, ValidationDecoding)
    if decoding is None or not decoding.prompts_per_family:
        return f"{when}: loss"
    relay = ", relay on and off" if getattr(module, "relay", None) is not None else ""
    return (
        f"{when}: loss, and {plural(decoding.prompts_per_family, 'prompt')} of each family "
        f"decoded{relay}"
    )


def length(trainer: Trainer, steps: int | None) -> str:
    """Steps, epochs and rows of a step."""
    rows = trainer.datamodule.batch_size  # type: ignore[attr-defined]
    batches = len(trainer.datamodule.train_dataloader())  # type: ignore[attr-defined]
    accumulated = trainer.accumulate_grad_batches
    factors = [(trainer.world_size, "processes"), (accumulated, "accumulated")]
    product = "".join(f" x {number} {noun}" for number, noun in factors if number > 1)
    each = f"{rows * trainer.world_size * accumulated} rows a step"
    if product:
        each += f" ({rows} of a batch{product})"
    if steps is None:
        return f"without end; {each}"
    epochs = steps * accumulated / max(batches, 1)
    return f"{steps:,} ({epochs:.1f} epochs); {each}"


def processes(trainer: Trainer) -> str:
    """Processes, device, strategy and precision."""
    device = trainer.strategy.root_device
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
    else:
        name = f"{device.type.upper()}, {plural(torch.get_num_threads(), 'thread')}"
    kind = type(trainer.strategy).__name__.removesuffix("Strategy")
    stage = getattr(trainer.strategy, "stage", "")
    strategy = "" if kind == "SingleDevice" else f", {kind} {stage}".rstrip()
    return f"{plural(trainer.world_size, 'process')} on {name}{strategy}, {trainer.precision}"


def folder(trainer: Trainer) -> str:
    """The run folder, and whether the run is new."""
    path = shown(trainer.default_root_dir)
    if trainer.ckpt_path:
        where = shown(str(trainer.ckpt_path))
        return f"{path}, resumed from {where} at step {trainer.global_step:,}"
    if any((Path(trainer.default_root_dir) / "checkpoints").glob("*.ckpt")):
        return (
            f"{path}, a new run; the checkpoints in it will be replaced "
            "(--ckpt_path last would continue from them)"
        )
    return f"{path}, a new run"


def _callback(trainer: Trainer, kind: type) -> Any:
    return next((one for one in trainer.callbacks if isinstance(one, kind)), None)  # type: ignore[attr-defined]


def peak_memory(trainer: Trainer) -> str:
    """Peak memory so far, of this process's GPU or of the process itself."""
    device = trainer.strategy.root_device
    if device.type == "cuda":
        return f"GPU {torch.cuda.max_memory_reserved(device) / 2**30:.1f} GiB"
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return f"mem {used * (1 if os.uname().sysname == 'Darwin' else 1024) / 2**30:.1f} GiB"


TOGETHER = "all"  # name of the row of all families


class Best(NamedTuple):
    """The largest tau so far and its step; None if it was measured before the resume."""

    tau: float
    step: int | None


class FamilyTau(NamedTuple):
    """Tau of one family, with the relay (or of a drafter that has none) and without it."""

    tau: float
    relay_off: float | None


def decoded(metrics: Mapping[str, Any], prefix: str) -> dict[str, FamilyTau]:
    """Results that `ValidationDecoding` logged, by family, all families together last."""
    found = {}
    for name in sorted(metrics):
        parts = name.split("/")
        if parts[0] == prefix and parts[2:] == ["tau"]:
            found[parts[1]] = _read(metrics, name)
    if f"{prefix}/tau" in metrics:
        found[TOGETHER] = _read(metrics, f"{prefix}/tau")
    return found


def _read(metrics: Mapping[str, Any], name: str) -> FamilyTau:
    off = metrics.get(f"{name}_relay_off")
    return FamilyTau(float(metrics[name]), None if off is None else float(off))


class BestSoFar:
    """The best tau of every family. Only that of all families decides which checkpoint is kept."""

    def __init__(self) -> None:
        self._best: dict[str, Best] = {}

    def start(self, tau: float | None) -> None:
        """Continue from the best tau, of all families together, before a resume."""
        if tau is not None and TOGETHER not in self._best:
            self._best[TOGETHER] = Best(tau, None)

    def update(self, found: Mapping[str, FamilyTau], step: int) -> dict[str, Best]:
        """Add a validation; returns the best of every family."""
        for family, now in found.items():
            if family not in self._best or now.tau > self._best[family].tau:
                self._best[family] = Best(now.tau, step)
        return dict(self._best)


def print_decoded(
    console: Console,
    title: str,
    found: Mapping[str, FamilyTau],
    best: Mapping[str, Best] | None = None,
    step: int | None = None,
) -> None:
    """Print the table of a validation.

    Args:
        best: of every family; None leaves the column out.
        step: that the validation was at.
    """
    console.print(title, highlight=False, markup=False, soft_wrap=True)
    rows = table(console)
    rows.add_column("family", overflow="fold")
    has_relay = any(one.relay_off is not None for one in found.values())
    for name in ["tau", "relay off", "gain"] if has_relay else ["tau"]:
        rows.add_column(name, justify="right", no_wrap=True)
    if best is not None:
        rows.add_column("best so far", no_wrap=True)
    for family, now in found.items():
        cells = [family, f"{now.tau:.3f}"]
        if has_relay:
            off = now.relay_off
            cells += ["-", "-"] if not off else [f"{off:.3f}", f"{100 * (now.tau / off - 1):+.1f}%"]
        if best is not None:
            cells.append(_best_cell(best[family], step))
        rows.add_row(*cells, style="bold" if family == TOGETHER else None)
    print_table(console, rows)


def _best_cell(best: Best, step: int | None) -> str:
    if best.step is None:
        return f"{best.tau:.3f} before the resume"
    return f"{best.tau:.3f} " + ("now" if best.step == step else f"at step {best.step:,}")
