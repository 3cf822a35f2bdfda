"""`dflow-train sync`: sends what of a run's record has not reached its tracking store."""

from pathlib import Path

from dflow_lightning.errors import InputError, RunError
from dflow_lightning.tracking.delivery import deliver, show
from dflow_lightning.tracking.journal import FOLDER, journals


def sync_command(*, run: Path, list: bool = False) -> None:
    """Send what of a run's record has not reached its tracking store.

    A run that was killed is closed as FAILED. One that is still training sends its record itself.

    Args:
        run: the run folder, for example `runs/tiny-dflow`.
        list: only say what has not arrived.
    """
    if not run.is_dir():
        raise InputError(f"run: {run} is not a folder; name one that `dflow-train fit` wrote")
    failed = []
    paths = journals(run)
    for path in paths:
        said, arrived = show(path) if list else deliver(path)
        print(said)
        if not arrived:
            failed.append(said)
    if not paths:
        print(f"everything of {run} has arrived")
    if failed and not list:
        raise RunError(
            f"run: {len(failed)} of {len(paths)} records could not be sent; they stay in "
            f"{run / FOLDER}, try again when the store answers"
        )
