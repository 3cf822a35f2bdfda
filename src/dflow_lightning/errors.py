"""The exceptions that a user is meant to read, and the check that most settings share."""


class InputError(Exception):
    """A user's mistake: one sentence that names the field, its value and the fix.

    The command line prints it as `error: ...` and exits with status 2, without a traceback.
    """


class RunError(Exception):
    """A run that cannot continue: one sentence that says where, and how to look at it.

    The command line prints it as `error: ...` and exits with status 1, without a traceback.
    """


def check_counts(section: str = "", /, **counts: int | None) -> None:
    """Raise `InputError` for the first count below 1; None is a count that was left out.

    Args:
        section: what a recipe calls the owner of the counts, with its dot: `loss.`.
    """
    for name, count in counts.items():
        if count is not None and count < 1:
            raise InputError(f"{section}{name} is {count}; give 1 or more")
