"""What a run prints: a plan, a progress bar or plain lines, and a summary."""

import sys
import time
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ProgressBar
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

REFRESH_SECONDS = 0.5  # reading a metric waits for the GPU: not at every step


def clock(seconds: float) -> str:
    """Seconds as `1:02:03` or `2:03`."""
    hours, rest = divmod(round(seconds), 3600)
    return f"{hours}:{rest // 60:02}:{rest % 60:02}" if hours else f"{rest // 60}:{rest % 60:02}"


def taus(metrics: dict[str, Any], prefix: str) -> list[float]:
    """The estimated tau of each rollout round, in order."""
    names = sorted(name for name in metrics if name.startswith(f"{prefix}/tau_round"))
    return [float(metrics[name]) for name in names]


class Speed:
    """Tokens and steps since the training started, validation time left out."""

    def __init__(self) -> None:
        self.tokens = 0
        self.steps = 0
        self.seconds = 0.0
        self._since = time.perf_counter()

    def resume(self) -> None:
        """Starts the clock after a pause."""
        self._since = time.perf_counter()

    def count(self, tokens: int) -> None:
        """Adds one batch."""
        now = time.perf_counter()
        self.tokens, self.steps = self.tokens + tokens, self.steps + 1
        self.seconds, self._since = self.seconds + now - self._since, now

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / max(self.seconds, 1e-9)

    def remaining(self, steps: int) -> float:
        """Seconds that so many more batches take."""
        return steps * self.seconds / max(self.steps, 1)


class RunProgress(ProgressBar):
    """Loss, tau of every rollout round, tokens per second and the time left.

    A bar on a terminal; elsewhere one plain line every `log_every_n_steps` steps.
    """

    def __init__(self) -> None:
        super().__init__()
        self._enabled = True
        self._bar: Progress | None = None
        self._speed = Speed()
        self._shown = 0.0
        self._total: int | None = None

    def disable(self) -> None:
        """Prints nothing; Lightning calls this on every process but the first."""
        self._enabled = False

    def enable(self) -> None:
        """Prints again."""
        self._enabled = True

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Prints above the bar."""
        if self._enabled:
            text = " ".join(str(arg) for arg in args)
            if self._bar:
                self._bar.console.print(text, highlight=False, markup=False, soft_wrap=True)
            else:
                print(text, flush=True)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Prints the plan."""
        steps = trainer.estimated_stepping_batches
        self._total = None if steps == float("inf") else int(steps)
        self.print(plan(trainer, pl_module, self._total))

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Starts the clock and, on a terminal, the bar."""
        self._speed = Speed()
        if self._enabled and sys.stdout.isatty():
            self._bar = Progress(
                TextColumn("step"),
                MofNCompleteColumn(),
                BarColumn(bar_width=None),
                TextColumn("{task.fields[text]}"),
                TimeRemainingColumn(elapsed_when_finished=True),
                console=Console(file=sys.stdout),
                expand=True,
            )
            self._bar.add_task("train", total=self._total, completed=trainer.global_step, text="")
            self._bar.start()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Counts the batch; shows the state now and then."""
        self._speed.count(batch.input_ids_BS.numel() * trainer.world_size)
        step, total = trainer.global_step, self._total
        if self._bar:
            due = time.perf_counter() - self._shown > REFRESH_SECONDS or step == total
        else:
            due = step % trainer.log_every_n_steps == 0 or step == total  # type: ignore[attr-defined]
        if self._enabled and due:
            self._show(trainer, step, total)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Prints the decoded tau."""
        if not trainer.sanity_checking and trainer.state.fn == "fit":
            line = decoded_line(trainer.callback_metrics, "val")
            if line:
                self.print(f"step {trainer.global_step} decoded: {line}")
        self._speed.resume()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Leaves the finished bar behind."""
        self._stop()

    def on_exception(self, *_: Any) -> None:
        """Gives the terminal back before a traceback is printed."""
        self._stop()

    def _stop(self) -> None:
        if self._bar:
            self._bar.stop()
            self._bar = None

    def _show(self, trainer: Trainer, step: int, total: int | None) -> None:
        metrics = trainer.callback_metrics
        parts = [f"loss {float(metrics['train/loss']):.3f}"] if "train/loss" in metrics else []
        if rounds := taus(metrics, "train"):
            parts.append("tau " + " ".join(f"{tau:.2f}" for tau in rounds))
        parts.append(f"{self._speed.tokens_per_second:,.0f} tokens/s")
        if self._bar:
            self._bar.update(self._bar.task_ids[0], completed=step, text="  ".join(parts))
            self._shown = time.perf_counter()
        elif total:
            left = self._speed.remaining((total - step) * trainer.accumulate_grad_batches)
            self.print(f"step {step}/{total}  {'  '.join(parts)}  eta {clock(left)}")
        else:
            self.print(f"step {step}  {'  '.join(parts)}")


def plan(trainer: Trainer, module: Any, steps: int | None) -> str:
    """Three lines that say what is about to happen."""
    relay = sum(p.numel() for p in module.relay.parameters()) if module.relay is not None else 0
    drafter = sum(p.numel() for p in module.drafter.parameters())
    data = trainer.datamodule  # type: ignore[attr-defined]
    world = trainer.world_size
    return (
        f"target {module.target_config.path}, drafter {drafter / 1e6:.2f} M parameters "
        f"(block size {module.drafter.dims.block_size}), relay "
        + (f"{relay / 1e6:.2f} M" if relay else "off")
        + f"\ndata {', '.join(map(str, data.paths['train']))}, "
        f"{len(data.train_dataloader()):,} batches of {data.batch_size} rows an epoch; "
        f"{steps or 'endless'} steps; {world} process{'es' if world > 1 else ''}\n"
        f"run folder {shown(trainer.default_root_dir)}"
    )


def shown(path: str | Path) -> str:
    """A path as the user would type it."""
    path = Path(path).resolve()
    return str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)


def decoded_line(metrics: Any, prefix: str) -> str:
    """`tau 3.21 (relay off 2.98); chat 2.90, code 3.10, math 3.40` from logged metrics."""
    if f"{prefix}/tau" not in metrics:
        return ""
    line = f"tau {float(metrics[f'{prefix}/tau']):.3f}"
    if f"{prefix}/tau_relay_off" in metrics:
        line += f" (relay off {float(metrics[f'{prefix}/tau_relay_off']):.3f})"
    parts = {name: name.split("/") for name in sorted(metrics)}
    families = [(n, p[1]) for n, p in parts.items() if p[0] == prefix and p[2:] == ["tau"]]
    return "; ".join([line, ", ".join(f"{f} {float(metrics[n]):.3f}" for n, f in families)])
