"""`dflow-train sync`: sends what a run has recorded and its tracking store does not have yet."""

from pathlib import Path

from dflow_lightning.errors import InputError, RunError
from dflow_lightning.tracking.journal import TRACKING_FOLDER, journals
from dflow_lightning.tracking.sender import deliver, queue_state


def sync_command(*, run: Path, list: bool = False) -> None:
    """Send what a run has recorded and its tracking store does not have yet.

    A run that was killed is closed as FAILED. A run in progress sends its record itself.

    Args:
        run: the run folder, for example `runs/tiny-dflow`.
        list: only list what was not sent.
    """
    if not run.is_dir():
        raise InputError(f"run: {run} is not a folder; name one that `dflow-train fit` wrote")
    failed = []
    paths = journals(run)
    for path in paths:
        outcome, sent = queue_state(path) if list else deliver(path)
        print(outcome)
        if not sent:
            failed.append(path)
    if not paths:
        print(f"{run}: nothing left to send")
    if failed and not list:
        raise RunError(
            f"run: {len(failed)} of {len(paths)} records could not be sent; they stay in "
            f"{run / TRACKING_FOLDER}; run the same command again when the store is back"
        )
