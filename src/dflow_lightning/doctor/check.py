"""One line of `dflow-train doctor`, and how its checks are run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from dflow_lightning.checks import Check, outcome


@dataclass(frozen=True)
class Step:
    """A check: a function that says what is well, and the checks without which it has no sense."""

    run: Callable[[Any], str]
    needs: tuple[str, ...] = ()


def run_checks(steps: Mapping[str, Step], subject: Any) -> Iterator[Check]:
    """Run all steps in their order; none keeps those that do not need it from running."""
    missing: set[str] = set()
    for name, step in steps.items():
        if lacking := [need for need in step.needs if need in missing]:
            check = Check(name, "skip", f"needs: {lacking[0]}")
        else:
            check = run_one(name, step, subject)
        if check.status in ("FAIL", "skip"):
            missing.add(name)
        yield check


def run_one(name: str, step: Step, subject: Any) -> Check:
    """One check; whatever it raises is its result."""
    try:
        return outcome(name, step.run, subject)
    except Exception as error:  # what a damaged setup raises is not known, and others go on
        said = " ".join(str(error).split())[:200]
        return Check(name, "FAIL", f"{type(error).__name__}: {said}; mend what it names")
