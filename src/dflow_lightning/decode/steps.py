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


@dataclass(frozen=True)
class Steps:
    """How each step runs.

    Args:
        static: the steps take the whole state, so that shapes never change.
        correct, draft, verify, commit, keep_relay: functions of `rounds`, or their compiled twins.
    """

    models: Models
    static: bool = False
    correct: Callable[..., Any] | None = None
    draft: Callable[..., Any] | None = None
    verify: Callable[..., Any] | None = None
    commit: Callable[..., Any] | None = None
    keep_relay: Callable[..., Any] | None = None

    @classmethod
    def make(
        cls, backend: Backend, models: Models, draft: Callable[..., Any] | None = None
    ) -> Steps:
        """The steps of a backend.

        Args:
            draft: for `package`, the packaged draft step, which corrects by itself.

        Raises:
            InputError: the backend is not known.
        """
        if backend == "eager":
            return cls(models)
        if backend == "compiled":
            return cls(models, True, *(_compiled(one) for one in STEPS))
        if backend == "package" and draft is not None:
            return cls(models, True, lambda models, state: None, draft)
        raise InputError(f"backend is {backend}; give eager, compiled or package")

    def round(self, state: DecodeState, mode: Mode, timer: RoundTimer) -> Tensor:
        """One round over all requests of the state; returns the report of `rounds.commit`."""
        models = self.models
        # Looked up at each call, so that what a test puts in their place is what runs.
        correct = self.correct or rounds.correct
        draft = self.draft or rounds.draft
        verify = self.verify or rounds.verify
        commit = self.commit or rounds.commit_round
        keep_relay = self.keep_relay or rounds.keep_relay
        with timer.measure("relay"):
            correction_RNKD = correct(models, state)
        with timer.measure("draft"):
            drafts = draft(models, state, mode, correction_RNKD)
        with timer.measure("verify"):
            verified = verify(models, state, mode, drafts)
        with timer.measure("commit"):
            report_RK, h_RKD = commit(models, state, drafts, verified)
        with timer.measure("relay"):
            keep_relay(models, state, drafts, verified, h_RKD)
        return report_RK


STEPS = (rounds.correct, rounds.draft, rounds.verify, rounds.commit_round, rounds.keep_relay)


def _compiled(step: Callable[..., Any]) -> Callable[..., Any]:
    """A compiled twin with a graph cache of its own.

    Graphs are kept by code object, and only so many of each; a copy of the code keeps engines of
    other shapes out of the count.
    """
    code = step.__code__.replace()
    own = FunctionType(code, step.__globals__, step.__name__, step.__defaults__, step.__closure__)
    own.__kwdefaults__ = step.__kwdefaults__
    return torch.compile(own, fullgraph=True, dynamic=False)
