"""Seconds that a part of each training step takes, or of each round of decoding."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch


class Stopwatch:
    """Adds up laps; on a GPU between two events, so that measuring waits for nothing."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._laps = 0
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    @contextmanager
    def lap(self, device: torch.device) -> Iterator[None]:
        """Counts the time spent inside, queued work on the device included."""
        self._laps += 1
        if device.type == "cuda":
            pair = (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
            pair[0].record()
            yield
            pair[1].record()
            self._events.append(pair)
        else:
            start = time.perf_counter()
            yield
            self._seconds += time.perf_counter() - start

    def take(self) -> float | None:
        """Mean seconds of a lap since the last call, None without one; waits for its events."""
        for start, end in self._events:
            end.synchronize()
            self._seconds += start.elapsed_time(end) / 1000
        mean = self._seconds / self._laps if self._laps else None
        self._seconds, self._laps, self._events = 0.0, 0, []
        return mean


@dataclass
class RoundTimer:
    """Wall seconds of each round, and of its parts where they run one after the other.

    A compiled round is one graph, in which the parts cannot be told apart.
    """

    whole: list[float] = field(default_factory=list)
    draft: list[float] = field(default_factory=list)
    verify: list[float] = field(default_factory=list)
    relay: list[float] = field(default_factory=list)
    commit: list[float] = field(default_factory=list)

    @contextmanager
    def measure(self, part: str) -> Iterator[None]:
        """Append the seconds spent inside to `whole`, `draft`, `verify`, `relay` or `commit`."""
        start = time.perf_counter()
        yield
        getattr(self, part).append(time.perf_counter() - start)
