"""What a run prints: a summary, a progress bar or plain lines, a table at each validation."""

import re
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable
from datetime import datetime, timedelta
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ProgressBar
from rich.console import RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.text import Text

from dflow_lightning.run.summary import BestSoFar, decoded, peak_memory, plan, plural, print_decoded
from dflow_lightning.terminal import bar, is_live, labelled, screen, shielded

REFRESH_SECONDS = 0.5  # reading a metric waits for the GPU: not at every step
# In a log the interval between lines grows with the run: a day gives some three hundred lines.
LINE_SECONDS = (2.0, 300.0)
LINE_SHARE = 0.02  # of the time since the start
ESTIMATE_SECONDS = 10.0  # of training, before the first estimate is printed
RECENT = 1000  # batches that an estimate looks back on
SHORTEST_BAR = 20


def clock(seconds: float) -> str:
    """Seconds as `1:02:03` or `2:03`."""
    hours, rest = divmod(round(seconds), 3600)
    return f"{hours}:{rest // 60:02}:{rest % 60:02}" if hours else f"{rest // 60}:{rest % 60:02}"


def by_round(metrics: dict[str, Any], name: str) -> list[float]:
    """A metric of each rollout round, in order."""
    numbered = [(re.fullmatch(rf"train/{name}_round(\d+)", one), one) for one in metrics]
    found = sorted((int(match[1]), one) for match, one in numbered if match)
    return [float(metrics[one]) for _, one in found]


class Speed:
    """Tokens and batches since the training started; the time of validations is kept apart.

    The time left is estimated from the later half of the latest batches: the first ones compile,
    fill caches and start loaders, and their mean would promise twice the time.
    """

    def __init__(self) -> None:
        self._latest: deque[float] = deque(maxlen=RECENT)
        self.tokens = 0
        self.steps = 0
        self.seconds = 0.0
        self.paused = 0.0
        self._since = time.perf_counter()

    def resume(self) -> None:
        """Restart the clock after a pause."""
        now = time.perf_counter()
        self.paused, self._since = self.paused + now - self._since, now

    def count(self, tokens: int) -> None:
        """Add one batch."""
        now = time.perf_counter()
        self._latest.append(now - self._since)
        self.tokens, self.steps = self.tokens + tokens, self.steps + 1
        self.seconds, self._since = self.seconds + now - self._since, now

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / max(self.seconds, 1e-9)

    def remaining(self, steps: int) -> float:
        """Seconds that `steps` more batches take, with the share of pauses so far."""
        return steps * (self.batch_seconds + self.paused / max(self.steps, 1))

    @property
    def batch_seconds(self) -> float:
        """Mean seconds of the later half of the latest batches."""
        later = list(self._latest)[len(self._latest) // 2 :]
        return sum(later) / max(len(later), 1)


class RunBar(Progress):
    """A bar with what is measured beside it, or below it where there is no room."""

    def get_renderables(self) -> Iterable[RenderableType]:
        """One line, or two."""
        if not self.tasks:
            return
        fields, total = self.tasks[0].fields, self.tasks[0].total
        counter = len("step ") + 2 * len(f"{total or 0:.0f}") + len("/  ")
        whole = f"{fields['text']}  {fields['left']}".rstrip()
        beside = counter + SHORTEST_BAR + len("  ") + len(whole) <= self.console.width
        end = (
            "{task.fields[text]}  {task.fields[left]}"
            if beside
            else ("{task.percentage:.0f}%  {task.fields[left]}")
        )
        columns = (TextColumn("step"), MofNCompleteColumn(), BarColumn(bar_width=None))
        self.columns = (*columns, TextColumn(end))
        yield self.make_tasks_table(self.tasks)
        if fields["text"] and not beside:
            yield Text(fields["text"])


class RunProgress(ProgressBar):
    """A summary, then loss, tau of every rollout round, speed, memory and the time left.

    A bar on a terminal; elsewhere plain lines, at most one every `log_every_n_steps` steps. After a
    broken pipe the run goes on silently.
    """

    def __init__(self) -> None:
        super().__init__()
        self._enabled = True
        self._bar: Progress | None = None
        self._speed = Speed()
        self._best = BestSoFar()
        self._planned = False
        self._estimated = False
        self._began = self._shown = 0.0
        self._text = self._left = ""  # beside the bar
        self._total: int | None = None

    def disable(self) -> None:
        """Print nothing; Lightning calls this on every process but the first."""
        self._enabled = False

    def enable(self) -> None:
        """Print again."""
        self._enabled = True

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print above the bar."""
        text = " ".join(str(arg) for arg in args)
        self._write(
            lambda: self._console.print(text, highlight=False, markup=False, soft_wrap=True)
        )

    @property
    def _console(self) -> Any:
        return self._bar.console if self._bar else screen()

    def _write(self, write: Callable[[], Any]) -> None:
        """Call a function that prints; after the first failure print nothing more."""
        if self._enabled and not shielded(write):
            self._enabled, self._bar = False, None

    def on_sanity_check_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Print the summary, before anything takes time."""
        self._plan(trainer, pl_module)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start the clock and, on a terminal, the bar."""
        self._plan(trainer, pl_module)
        checkpoint: Any = trainer.checkpoint_callback
        if getattr(checkpoint, "monitor", None) == "val/tau":
            score = checkpoint.best_model_score
            self._best.start(None if score is None else float(score))
        self._speed = Speed()
        self._began = self._shown = time.perf_counter()
        if self._enabled and is_live(sys.stdout):
            self._bar = bar(stream=sys.stdout, kind=RunBar)
            self._bar.add_task(
                "train", total=self._total, completed=trainer.global_step, text="", left=""
            )
            self._write(self._bar.start)

    def _plan(self, trainer: Trainer, module: LightningModule) -> None:
        if self._planned or trainer.state.fn != "fit":
            return
        self._planned = True
        steps = trainer.estimated_stepping_batches
        self._total = None if steps == float("inf") else int(steps)
        lines = plan(trainer, module, self._total).items()
        self.print("\n".join(labelled(f"{subject:<12}", text) for subject, text in lines) + "\n")

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Count the batch; show the state now and then."""
        self._speed.count(batch.input_ids_BS.numel() * trainer.world_size)
        step, total = trainer.global_step, self._total
        if not self._enabled:
            return
        self._estimate(trainer, step, total)
        waited = time.perf_counter() - self._shown
        if self._bar:
            due = waited > REFRESH_SECONDS or step == total
        else:
            least, most = LINE_SECONDS
            wait = min(most, max(least, LINE_SHARE * (time.perf_counter() - self._began)))
            logged = step % trainer.log_every_n_steps == 0  # type: ignore[attr-defined]
            due = (logged and (waited > wait or self._speed.steps == 1)) or step == total
        if due and self._accumulated(trainer, batch_idx):
            self._show(trainer, pl_module, step, total)

    def _accumulated(self, trainer: Trainer, batch_idx: int) -> bool:
        """Whether an optimizer step was taken, and not only gradients accumulated."""
        return (batch_idx + 1) % trainer.accumulate_grad_batches == 0 or trainer.is_last_batch

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Show that training waits for a validation."""
        if self._bar and trainer.state.fn == "fit" and not trainer.sanity_checking:
            self._put(self._text, left="validation")

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Print the table of decoded tau, and the best so far."""
        if trainer.sanity_checking or trainer.state.fn != "fit":
            return
        step, metrics = trainer.global_step, trainer.callback_metrics
        self._speed.resume()
        if self._bar:
            self._put(self._text, left=self._left)
        found = decoded(metrics, "val")
        loss = f"loss {float(metrics['val/loss']):.3f}" if "val/loss" in metrics else "no loss"
        title = f"step {step:,} validation: {loss}"
        if not found:
            self.print(title)
            return
        best = self._best.update(found, step)
        self._write(
            lambda: print_decoded(
                self._console, f"{title}, tau of decoded prompts", found, best, step
            )
        )

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Stop the bar."""
        self._stop()

    def on_exception(self, *_: Any) -> None:
        """Restore the terminal before a traceback is printed."""
        self._stop()

    def _stop(self) -> None:
        if self._bar:
            shielded(self._bar.stop)
            self._bar = None

    def _estimate(self, trainer: Trainer, step: int, total: int | None) -> None:
        """Print once, after some steps, how long the run will take."""
        if self._estimated or total is None or self._speed.seconds < ESTIMATE_SECONDS:
            return
        self._estimated = True
        left = self._speed.remaining((total - step) * trainer.accumulate_grad_batches)
        each = self._speed.batch_seconds * trainer.accumulate_grad_batches
        end = datetime.now() + timedelta(seconds=left)
        when = f"{end:%H:%M}" if left < 86400 else f"{end:%a %d %b %H:%M}"
        self.print(
            f"estimate: {clock(left)} for {plural(total - step, 'more step')} of {each:.2f} s, "
            f"until {when}, validations come on top"
        )

    def _put(self, text: str, **fields: Any) -> None:
        """Draw the bar with another text."""
        running = self._bar
        if running:
            self._write(lambda: running.update(running.task_ids[0], text=text, **fields))

    def _show(self, trainer: Trainer, module: Any, step: int, total: int | None) -> None:
        parts = [*measured(trainer.callback_metrics, module)]
        parts.append(f"{self._speed.tokens_per_second:,.0f} tokens/s")
        parts.append(peak_memory(trainer))
        left = ""
        if total:
            seconds = self._speed.remaining((total - step) * trainer.accumulate_grad_batches)
            left = clock(seconds)
        text = "  ".join(parts)
        self._shown = time.perf_counter()
        if self._bar:
            self._text, self._left = text, left and f"{left} left"
            self._put(text, completed=step, left=self._left)
        elif left:
            self.print(f"step {step}/{total}  {text}  eta {left}")
        else:
            self.print(f"step {step}  {text}")


def measured(metrics: dict[str, Any], module: Any) -> list[str]:
    """Loss, tau of each round and the share of accepted drafts, as far as they exist."""
    parts = [f"loss {float(metrics['train/loss']):.3f}"] if "train/loss" in metrics else []
    if rounds := by_round(metrics, "tau"):
        parts.append("tau " + " ".join(f"{tau:.2f}" for tau in rounds))
    dims = getattr(getattr(module, "drafter", None), "dims", None)
    drafts = getattr(dims, "block_size", 1) - 1
    if (accepted := by_round(metrics, "accepted")) and drafts:
        parts.append(f"accepted {sum(accepted) / len(accepted) / drafts:.0%}")
    return parts
