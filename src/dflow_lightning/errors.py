"""The one exception type a user is meant to read."""


class InputError(Exception):
    """A user's mistake: one sentence that names the field, its value and the mend.

    The command line prints it as `error: ...` and exits with status 2, without a traceback.
    """
