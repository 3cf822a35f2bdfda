"""The exceptions that a user is meant to read, and the check that most settings share."""

from numbers import Integral, Real
from typing import Any


class InputError(Exception):
    """A user's mistake: one sentence that names the field, its value and the fix.

    The command line prints it as `error: ...` and exits with status 2, without a traceback.
    """


class RunError(Exception):
    """A run that cannot continue: one sentence that says where, and how to look at it.

    The command line prints it as `error: ...` and exits with status 1, without a traceback.
    """


def is_whole(value: Any) -> bool:
    """Whether a value is an integer, also one of NumPy's."""
    return isinstance(value, Integral)


def is_number(value: Any) -> bool:
    """Whether a value is a real number, also one of NumPy's."""
    return isinstance(value, Real)


def check_counts(section: str = "", /, **counts: int | None) -> None:
    """Raise `InputError` for the first value that is no whole number from 1; None was left out.

    Args:
        section: what a recipe calls the owner of the counts, with its dot: `loss.`.
    """
    for name, count in counts.items():
        if count is not None and (not is_whole(count) or count < 1):
            raise InputError(f"{section}{name} is {count!r}; give 1 or more")
