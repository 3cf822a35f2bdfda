"""How far `prepare` is: a bar on a terminal, a plain line now and then elsewhere."""

from __future__ import annotations

import sys
import time
from collections import deque
from types import TracebackType

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from dflow_lightning.terminal import bar, is_live

_REFRESH_SECONDS = 0.5
_LINE_SECONDS = 10.0
_RECENT = 10_000  # rows that an estimate looks back on


class PrepareProgress:
    """Rows per second, tokens per second and the time left, on standard error.

    The time left follows from the rows of the later half of the time so far: at first a target is
    loaded or a server warms up, and no answer of the many in flight has ended yet.

    Args:
        what: what is being done, as `answers`.
        total: rows there are.
        done: rows that an earlier run did; they do not count as speed.
    """

    def __init__(self, what: str, total: int, done: int = 0) -> None:
        self.what, self.total, self.done, self._before = what, total, done, done
        self.tokens = self.failed = self.retries = 0
        self._start = time.perf_counter()
        self._latest: deque[float] = deque(maxlen=_RECENT)  # when rows were done
        self._shown = 0.0 if is_live(sys.stderr) else self._start
        self._bar: Progress | None = None

    def __enter__(self) -> PrepareProgress:
        self._start = time.perf_counter()
        if is_live(sys.stderr):
            self._bar = bar(
                TextColumn(self.what),
                MofNCompleteColumn(),
                BarColumn(bar_width=None),
                TextColumn("{task.fields[text]}"),
                stream=sys.stderr,
            )
            self._bar.add_task(self.what, total=self.total, completed=self.done, text="")
            self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.show()
        if self._bar:
            self._bar.stop()

    def count(self, tokens: int, *, failed: bool = False) -> None:
        """One more row."""
        now = time.perf_counter()
        self.done += 1
        self._latest.append(now)
        self.tokens += tokens
        self.failed += failed
        wait = _REFRESH_SECONDS if self._bar else _LINE_SECONDS
        if now - self._shown > wait:
            self.show()

    def show(self) -> None:
        """Refresh the bar, or print a line."""
        self._shown = time.perf_counter()
        text = self.text(self._shown - self._start)
        if self._bar:
            self._bar.update(self._bar.task_ids[0], completed=self.done, text=text)
        else:
            print(f"{self.what} {self.done:,}/{self.total:,}  {text}", file=sys.stderr, flush=True)

    def text(self, seconds: float) -> str:
        """Speed since the start, and what went wrong."""
        rows = (self.done - self._before) / max(seconds, 1e-9)
        parts = [f"{rows:,.1f} rows/s", f"{self.tokens / max(seconds, 1e-9):,.0f} tokens/s"]
        if (seconds_left := self.remaining(self._start + seconds)) is not None:
            left = round(seconds_left)
            parts.append(f"eta {left // 3600}:{left // 60 % 60:02}:{left % 60:02}")
        for name in ("failed", "retries"):
            if count := getattr(self, name):
                parts.append(f"{count:,} {name}")
        return "  ".join(parts)

    def remaining(self, now: float) -> float | None:
        """Seconds until all rows are done; None as long as nothing is known."""
        since = (self._start + now) / 2
        if len(self._latest) == _RECENT:
            since = max(since, self._latest[0])
        rows = sum(moment > since for moment in self._latest)
        return (self.total - self.done) * (now - since) / rows if rows else None
