"""The steps of a round, eager or compiled."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import FunctionType
from typing import Any, Literal

import torch
from torch import Tensor

from dflow_lightning.decode import rounds
from dflow_lightning.decode.rounds import Mode, RoundTimer
from dflow_lightning.decode.state import DecodeState, Models
from dflow_lightning.errors import InputError

Backend = Literal["eager", "compiled", "package"]


STEPS = ("correct", "draft", "verify", "commit_round", "keep_relay")


@dataclass(frozen=True)
class Steps:
    """How each step runs: functions of `rounds`, or their compiled twins.

    Args:
        static: the steps take the whole state, so that shapes never change.
    """

    static: bool
    correct: Callable[..., Any]
    draft: Callable[..., Any]
    verify: Callable[..., Any]
    commit_round: Callable[..., Any]
    keep_relay: Callable[..., Any]

    @classmethod
    def make(cls, backend: Backend, draft: Callable[..., Any] | None = None) -> Steps:
        """The steps of a backend.

        Args:
            draft: for `package`, the packaged draft step, which corrects by itself.

        Raises:
            InputError: the backend is not known.
        """
        eager = {name: getattr(rounds, name) for name in STEPS}
        if backend == "eager":
            return cls(static=False, **eager)
        if backend == "compiled":
            return cls(static=True, **{name: _compiled(step) for name, step in eager.items()})
        if backend == "package" and draft is not None:
            own = {"correct": lambda models, state: None, "draft": draft}
            return cls(static=True, **eager | own)
        raise InputError(f"backend is {backend}; give eager, compiled or package")

    def round(self, models: Models, state: DecodeState, mode: Mode, timer: RoundTimer) -> Tensor:
        """One round over all requests of the state; returns the report of `rounds.commit`."""
        with timer.measure("relay"):
            correction_RNKD = self.correct(models, state)
        with timer.measure("draft"):
            drafts = self.draft(models, state, mode, correction_RNKD)
        with timer.measure("verify"):
            verified = self.verify(models, state, mode, drafts)
        with timer.measure("commit"):
            report_RK, h_RKD = self.commit_round(models, state, verified)
        with timer.measure("relay"):
            self.keep_relay(models, state, drafts, verified, h_RKD)
        return report_RK


def _compiled(step: Callable[..., Any]) -> Callable[..., Any]:
    """A compiled twin with a graph cache of its own.

    Graphs are kept by code object, and only so many of each; a copy of the code keeps engines of
    other shapes out of the count.
    """
    code = step.__code__.replace()
    own = FunctionType(code, step.__globals__, step.__name__, step.__defaults__, step.__closure__)
    own.__kwdefaults__ = step.__kwdefaults__
    return torch.compile(own, fullgraph=True, dynamic=False)
