"""Sending what earlier processes have left in a run folder."""

from pathlib import Path

from dflow_lightning.errors import InputError
from dflow_lightning.tracking.journal import Journal, journals, read_state
from dflow_lightning.tracking.sender import Sender, prepare_client


def open_journal(path: Path) -> Journal:
    """The journal in a file.

    Raises:
        InputError: nothing says where it goes.
    """
    state = read_state(path)
    if state is None:
        raise InputError(f"run: {path.with_suffix('.json')} is missing, or not as it was written")
    return Journal(path.parent.parent, state[0])


def counted(journal: Journal) -> str:
    """How much of a journal is left, in words."""
    return ", ".join(f"{count} {kind}" for kind, count in journal.left().items()) or "nothing"


def show(path: Path) -> tuple[str, bool]:
    """What of a journal has not arrived."""
    journal = open_journal(path)
    where = f"{journal.destination.run_name} -> {journal.destination.uri}"
    said = f"{where}: {counted(journal)}" if journal.mine else f"{where}: the run is in progress"
    journal.close()
    return said, False


def deliver(path: Path) -> tuple[str, bool]:
    """Sends a journal; what happened in words, and whether all of it has arrived."""
    prepare_client()
    journal = open_journal(path)
    where = f"{journal.destination.run_name} -> {journal.destination.uri}"
    if not journal.mine:
        journal.close()
        return f"{where}: the run is in progress and sends its record itself", True
    journal.close_dead_run()
    sender, amount = Sender(journal), counted(journal)
    if sender.send_all():
        journal.remove()
        return f"{where}: sent {amount}", True
    journal.close()
    return f"{where}: {amount} not sent ({sender.trouble})", False


def deliver_others(run_dir: Path, key: str) -> None:
    """Sends what earlier runs of a folder left behind, quietly."""
    for path in journals(run_dir):
        if path.stem != key:
            try:
                deliver(path)
            except (InputError, OSError):
                continue
