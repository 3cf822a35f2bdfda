"""The exceptions that a user is meant to read."""


class InputError(Exception):
    """A user's mistake: one sentence that names the field, its value and the fix.

    The command line prints it as `error: ...` and exits with status 2, without a traceback.
    """


class RunError(Exception):
    """A run that cannot continue: one sentence that says where, and how to look at it.

    The command line prints it as `error: ...` and exits with status 1, without a traceback.
    """
