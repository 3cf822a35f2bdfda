"""One line of `dflow-train doctor`, and how its checks are run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from dflow_lightning.errors import InputError

Status = Literal["ok", "warn", "FAIL", "skip"]


@dataclass(frozen=True)
class Check:
    """One line; the detail of a warning or a failure ends with its mend."""

    name: str
    status: Status
    detail: str


class DoubtError(Exception):
    """The setup works, but a person should know this."""


class FoundError(Exception):
    """A fault, and its mend."""


class SkippedError(Exception):
    """There is nothing to check; the message says why."""


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
        return Check(name, "ok", step.run(subject))
    except DoubtError as doubt:
        return Check(name, "warn", str(doubt))
    except SkippedError as reason:
        return Check(name, "skip", str(reason))
    except (FoundError, InputError) as found:
        return Check(name, "FAIL", str(found))
    except Exception as error:  # what a damaged setup raises is not known, and others go on
        said = " ".join(str(error).split())[:200]
        return Check(name, "FAIL", f"{type(error).__name__}: {said}; mend what it names")
