"""Checks that print one line each: those of `validate-export` and of `doctor`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from dflow_lightning.errors import InputError

Status = Literal["ok", "warn", "FAIL", "skip"]
Found = tuple[str, dict[str, Any]]  # what an ok line says, and its numbers


@dataclass(frozen=True)
class Check:
    """One line; `values` are its numbers. A line that is not ok ends with the fix."""

    name: str
    status: Status
    detail: str
    values: dict[str, Any] = field(default_factory=dict)


class SkippedError(Exception):
    """There is nothing to check or to compare with; the message says what is missing."""


class DoubtError(Exception):
    """All works, but a person should know this."""


class FailedError(Exception):
    """A check found something; `values` are its numbers."""

    def __init__(self, message: str, values: dict[str, Any] | None = None) -> None:
        super().__init__(message)
        self.values = values or {}


def outcome(name: str, check: Callable[[Any], Found | str], subject: Any) -> Check:
    """The line of one check; a fault that it does not know is raised."""
    try:
        found = check(subject)
    except SkippedError as reason:
        return Check(name, "skip", str(reason))
    except DoubtError as doubt:
        return Check(name, "warn", str(doubt))
    except FailedError as failed:
        return Check(name, "FAIL", str(failed), failed.values)
    except InputError as error:
        return Check(name, "FAIL", str(error))
    detail, values = (found, {}) if isinstance(found, str) else found
    return Check(name, "ok", detail, values)


@dataclass(frozen=True)
class Step:
    """A check, and the names of the checks that have to pass before it can run."""

    run: Callable[[Any], str]
    needs: tuple[str, ...] = ()


def run_checks(steps: Mapping[str, Step], subject: Any) -> Iterator[Check]:
    """Run all steps in order; a failed one skips those that need it, and no others."""
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
    """Run one check; whatever it raises is its result."""
    try:
        return outcome(name, step.run, subject)
    except Exception as error:  # a damaged setup may raise anything, and the others still run
        message = " ".join(str(error).split())[:200]
        return Check(name, "FAIL", f"{type(error).__name__}: {message}; fix what it names")
