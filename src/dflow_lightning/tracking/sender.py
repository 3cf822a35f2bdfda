"""From the journal to the store: in a thread beside a training, or later by `sync` and `ui`.

MLflow's own asynchronous logging keeps metrics, parameters and tags in memory, drops them after a
failure, and waits for the store without limit when the process ends; runs, artifacts and statuses
are synchronous anyway. So its synchronous client is used here, behind a journal.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from itertools import groupby
from pathlib import Path
from shlex import quote

from dflow_lightning.errors import InputError
from dflow_lightning.tracking.journal import Entry, Journal, journals, read_state
from dflow_lightning.tracking.store import RunStore, refused

COLLECT = 2.0  # seconds in which records come together before they are sent
LONGEST_PAUSE = 60.0  # seconds between two tries of a store that is away
EXIT_WITHIN = 10.0  # seconds that the end of a run waits for the store
EXIT_WITHIN_FAILING = 3.0  # seconds, if the store failed the last time
EXIT_WITHIN_LOCAL = 30.0  # seconds, for a local file: making its tables takes some
POINTS_AT_ONCE = 30  # metric records in one call


class Sender:
    """Sends a journal's records to the store, in a thread of its own.

    Args:
        then: called once, with the run's key, after the first records were sent.

    Attributes:
        news: warnings for the user. The main thread prints them: this one does not know whether a
            progress bar is on the terminal.
        failing: whether the last attempt failed.
    """

    def __init__(self, journal: Journal, then: Callable[[str], None] | None = None) -> None:
        self.journal, self._then = journal, then
        self.store = RunStore(journal.destination)
        self.news: deque[str] = deque()
        self.failures = 0
        self.trouble = ""  # why the last attempt failed
        self.refusals = 0
        self._warned = False  # one warning for a store that comes and goes
        self._wake = threading.Event()
        self._settled = threading.Event()
        self._ending = False
        self._thread: threading.Thread | None = None

    @property
    def failing(self) -> bool:
        return self.failures > 0

    def start(self) -> None:
        """Start the thread; it ends with `finish` or with the process."""
        self._thread = threading.Thread(target=self._work, name="tracking", daemon=True)
        self._thread.start()

    def finish(self, within: float | None = None) -> bool:
        """Send what is left and stop; give up after `within` seconds.

        Returns:
            Whether everything was sent.
        """
        if within is None:
            local = self.journal.destination.uri.startswith("sqlite:")
            within = EXIT_WITHIN_LOCAL if local else EXIT_WITHIN
            within = EXIT_WITHIN_FAILING if self.failing else within
        self._ending = True
        self._wake.set()
        if self._thread is not None:
            self._settled.wait(within)
        return not self.journal.waiting

    def _work(self) -> None:
        while not self._settled.is_set():
            pause = min(LONGEST_PAUSE, 2.0**self.failures) if self.failures else COLLECT
            self._wake.wait(pause)
            self._wake.clear()
            ending = self._ending
            sent = self.send_all()
            if ending:
                self._settled.set()
            elif sent and self._then is not None:
                self._then(self.journal.destination.key)
                self._then = None

    def send_all(self) -> bool:
        """Send until nothing is left or the store fails; whether everything was sent."""
        try:
            while entries := self.journal.entries():
                for group in together(entries):
                    self._send(group)
                self.journal.save()
        except Exception as error:
            self._failed(error)
            self.journal.save()
            return False
        self.failures = 0
        return True

    def _send(self, group: list[Entry]) -> None:
        try:
            self.store.send([entry.record for entry in group])
        except Exception as error:
            if not refused(error):
                raise
            if len(group) > 1:
                for entry in group:
                    self._send([entry])
                return
            self._refused(group[0], error)
        for entry in group:
            self.journal.arrived(entry)

    def _refused(self, entry: Entry, error: Exception) -> None:
        self.refusals += 1
        uri = self.store.destination.uri
        why = reason(error, uri)
        self.journal.refuse(entry.record, why)
        if self.refusals == 1:
            self.news.append(
                f"tracking: {uri} refused a record ({why}); it is "
                f"kept in {self.journal.folder / 'refused.jsonl'}"
            )

    def _failed(self, error: Exception) -> None:
        self.failures += 1
        uri = self.store.destination.uri
        self.trouble = reason(error, uri)
        if not self._warned:
            self._warned = True
            self.news.append(
                f"tracking: cannot record to {uri} ({self.trouble}); training goes on, and the "
                f"record waits in {self.journal.folder} until it can be sent"
            )


def together(entries: list[Entry]) -> Iterator[list[Entry]]:
    """Entries in order, neighbouring metric records grouped into one call."""
    for metrics, run in groupby(entries, key=lambda entry: entry.record["do"] == "metrics"):
        rows, size = list(run), POINTS_AT_ONCE if metrics else 1
        for start in range(0, len(rows), size):
            yield rows[start : start + size]


def reason(error: Exception, uri: str) -> str:
    """An exception of the store at `uri` in a few words; for an old database, the whole command.

    MLflow's own sentence about an old database is long, and leaves the address to the reader.
    """
    text = " ".join(str(error).split())
    if "mlflow db upgrade" in text:
        return f"made by another MLflow; back it up, then run: mlflow db upgrade {quote(uri)}"
    return f"{type(error).__name__}: {text[:150]}{'...' if len(text) > 150 else ''}"


def now() -> int:
    """Milliseconds since the epoch, MLflow's unit of time."""
    return time.time_ns() // 1_000_000


def open_journal(path: Path) -> Journal:
    """The journal in a file.

    Raises:
        InputError: its `.json` file, which names the store, cannot be read.
    """
    state = read_state(path)
    if state is None:
        raise InputError(
            f"run: {path.with_suffix('.json')} is missing or damaged, so the store is unknown"
        )
    return Journal(path.parent.parent, state[0])


def counted(journal: Journal) -> str:
    """How much is left to send, in words."""
    return ", ".join(f"{count} {kind}" for kind, count in journal.left().items()) or "nothing"


def queue_state(path: Path) -> tuple[str, bool]:
    """Describe what a journal has left to send; the flag is False because nothing is sent."""
    journal = open_journal(path)
    where = f"{journal.destination.run_name} -> {journal.destination.uri}"
    summary = f"{where}: {counted(journal)}" if journal.mine else f"{where}: the run is in progress"
    journal.close()
    return summary, False


def deliver(path: Path) -> tuple[str, bool]:
    """Send a journal; returns the outcome in words and whether everything was sent."""
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
    """Send what earlier runs in a folder left, without messages: it stays there if that fails."""
    for path in journals(run_dir):
        if path.stem != key:
            try:
                deliver(path)
            except (InputError, OSError):
                continue
