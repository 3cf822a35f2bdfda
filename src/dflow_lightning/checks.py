"""Checks that print one line each: those of `validate-export` and of `doctor`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from dflow_lightning.errors import InputError

Status = Literal["ok", "warn", "FAIL", "skip"]
Found = tuple[str, dict[str, Any]]  # what an ok line says, and its numbers


@dataclass(frozen=True)
class Check:
    """One line; `values` are its numbers. What is not ok ends with its mend, if there is one."""

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
