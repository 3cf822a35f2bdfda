"""Seconds that a part of each training step takes, or of each round of decoding.

A GPU works behind the program that feeds it: between two readings of the clock lies the time to
launch kernels, not to run them. So on a GPU the times are those between two events that the device
itself records, and they are read later, when waiting for it costs nothing.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager

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
            start = _event_now(device)
            yield
            self._events.append((start, _event_now(device)))
        else:
            start_time = time.perf_counter()
            yield
            self._seconds += time.perf_counter() - start_time

    def take(self) -> float | None:
        """Mean seconds of a lap since the last call, None without one; waits for its events."""
        self._seconds += sum(_seconds_between(self._events))
        mean = self._seconds / self._laps if self._laps else None
        self._seconds, self._laps, self._events = 0.0, 0, []
        return mean


ROUND_PARTS = ("whole", "draft", "verify", "relay", "commit")  # of a round of decoding


class RoundTimer:
    """Seconds of each round of decoding, and of its parts where they run one after the other.

    A compiled round is one graph, whose parts cannot be timed separately: it has only `whole`.

    Args:
        device: where the rounds run; on a GPU the times are the device's own.
        seconds: times that are there already, by part.
    """

    def __init__(self, device: torch.device | None = None, **seconds: list[float]) -> None:
        self._device = device if device is not None and device.type == "cuda" else None
        self._seconds: dict[str, list[float]] = {part: [] for part in ROUND_PARTS} | seconds
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._parts: list[str] = []  # of each pair of events

    @contextmanager
    def measure(self, part: str) -> Iterator[None]:
        """Time the block and append it to the times of a part of `ROUND_PARTS`."""
        if self._device is None:
            start_time = time.perf_counter()
            yield
            self._seconds[part].append(time.perf_counter() - start_time)
        else:
            start = _event_now(self._device)
            yield
            self._events.append((start, _event_now(self._device)))
            self._parts.append(part)

    def seconds(self, part: str) -> list[float]:
        """All times of a part, in order; waits for a GPU that is still busy."""
        for measured, seconds in zip(self._parts, _seconds_between(self._events), strict=True):
            self._seconds[measured].append(seconds)
        self._events, self._parts = [], []
        return self._seconds[part]

    def extend(self, other: "RoundTimer") -> None:
        """Append all times of another timer."""
        for part in ROUND_PARTS:
            self.seconds(part).extend(other.seconds(part))


def _event_now(device: torch.device) -> torch.cuda.Event:
    """Record an event on a device, which need not be the current one."""
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event


def _seconds_between(events: list[tuple[torch.cuda.Event, torch.cuda.Event]]) -> list[float]:
    """Seconds from the first to the second of each pair; the last pair ends last."""
    if events:
        events[-1][1].synchronize()
    return [start.elapsed_time(end) / 1000 for start, end in events]
