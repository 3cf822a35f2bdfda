"""How a round runs: eagerly, as one compiled graph, or with a packaged draft step."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from types import FunctionType
from typing import Any, Literal

import torch
from torch import Tensor

from dflow_lightning.decode.rounds import DraftStep, Mode, run_round
from dflow_lightning.decode.state import DecodeState, Models
from dflow_lightning.errors import InputError
from dflow_lightning.stopwatch import RoundTimer

Backend = Literal["eager", "compiled", "package"]
LENGTH_STEP = 64  # of cache slots, for eager attention
SHORTEST_GRAPH = 128  # cache slots of the smallest compiled round


class Steps:
    """The rounds of one engine.

    Attributes:
        static: every round takes the whole state, so that shapes never change.
    """

    def __init__(self, backend: Backend, draft_step: DraftStep | None = None) -> None:
        """
        Args:
            draft_step: for `package`, the packaged draft step, which corrects by itself.

        Raises:
            InputError: the backend is not known.
        """
        if backend not in ("eager", "compiled") and draft_step is None:
            raise InputError(f"backend is {backend}; give eager, compiled or package")
        self.backend, self.static = backend, backend == "package"
        self._draft_step = draft_step
        self._graphs: dict[tuple[int, int, Mode], Callable[..., Tensor]] = {}

    def rows(self, count: int, num_slots: int) -> int:
        """Requests that a round computes when the first `count` slots are in use."""
        if self.static:
            return num_slots
        if self.backend == "compiled":  # few graphs, at most twice the work
            return min(_power_of_two(count), num_slots)
        return count

    def length(self, needed: int, capacity: int) -> int:
        """Cache slots that a round reads when `needed` are in use."""
        if self.static:
            return capacity
        if self.backend == "compiled":
            return min(max(_power_of_two(needed), SHORTEST_GRAPH), capacity)
        return rounded_length(needed, capacity)

    def shapes(self, num_slots: int, capacity: int) -> list[tuple[int, int]]:
        """Rows and length of every round there can be, where rounds are compiled."""
        if self.backend != "compiled":
            return []
        rows = {self.rows(count, num_slots) for count in range(1, num_slots + 1)}
        lengths = {self.length(1 << bit, capacity) for bit in range(capacity.bit_length() + 1)}
        return [(count, length) for count in sorted(rows) for length in sorted(lengths)]

    def round(self, models: Models, state: DecodeState, mode: Mode, timer: RoundTimer) -> Tensor:
        """One round over all requests of the state; returns the report of `rounds.commit`."""
        with timer.measure("whole"):
            if self.backend != "compiled":
                return run_round(models, state, mode, timer.measure, self._draft_step)
            shape = (state.length_R.shape[0], state.target_cache.length, mode)
            if shape not in self._graphs:
                self._graphs[shape] = _compiled(run_round)
            return self._graphs[shape](models, state, mode, _unmeasured)


def rounded_length(needed: int, capacity: int) -> int:
    """Cache slots that eager attention reads, in rounds and for prompts: few more than needed."""
    return min(-(-needed // LENGTH_STEP) * LENGTH_STEP, capacity)


def _power_of_two(number: int) -> int:
    """The smallest power of two that is not below."""
    return 1 << (number - 1).bit_length()


def _unmeasured(part: str) -> AbstractContextManager[None]:
    return nullcontext()


def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """A compiled twin with a graph of its own.

    Graphs are kept by code object, and are tried one after the other; a copy of the code has one.
    """
    code = function.__code__.replace()
    own = FunctionType(
        code, function.__globals__, function.__name__, function.__defaults__, function.__closure__
    )
    return torch.compile(own, fullgraph=True, dynamic=False)
