"""The one thread that talks to a tracking store.

MLflow's own asynchronous logging keeps metrics, parameters and tags in memory, drops what failed,
and waits for the store without limit when the process ends; runs, artifacts and statuses are sent
at once. So its client is used here in the plain way, behind a journal.
"""

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from itertools import groupby

from dflow_lightning.tracking.journal import Entry, Journal
from dflow_lightning.tracking.store import RunStore, refused

COLLECT = 2.0  # seconds in which records come together before they are sent
LONGEST_PAUSE = 60.0  # seconds between two tries of a store that is away
EXIT_WITHIN = 10.0  # seconds that the end of a run waits for the store
EXIT_WITHIN_FAILING = 3.0  # the same for a store that did not answer before
EXIT_WITHIN_LOCAL = 30.0  # the same for a file, which takes seconds to make
POINTS_AT_ONCE = 30  # records of metrics in one call
CLIENT_DEFAULTS = {
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",  # seconds; a call must not hang for minutes
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",  # tries again are made here
    "MLFLOW_LOGGING_LEVEL": "ERROR",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",  # the terminal is not this thread's
}


class Sender:
    """Moves a journal's records into the store, in a thread of its own.

    Args:
        then: called once, with the run's key, when the store has taken the first records.

    Attributes:
        news: sentences that a user should read, for the main thread to print.
        failing: whether the store did not answer the last time.
    """

    def __init__(self, journal: Journal, then: Callable[[str], None] | None = None) -> None:
        self.journal, self._then = journal, then
        self.store = RunStore(journal.destination)
        self.news: deque[str] = deque()
        self.failures = 0
        self.trouble = ""  # what the store said, or did not, when it last failed
        self.refusals = 0
        self._told = False  # a store that comes and goes is spoken of once
        self._wake = threading.Event()
        self._settled = threading.Event()
        self._ending = False
        self._thread: threading.Thread | None = None

    @property
    def failing(self) -> bool:
        return self.failures > 0

    def start(self) -> None:
        """Starts the thread; it ends with `finish` or with the process."""
        prepare_client()
        self._thread = threading.Thread(target=self._work, name="tracking", daemon=True)
        self._thread.start()

    def finish(self, within: float | None = None) -> bool:
        """Sends what is left and stops; gives up after `within` seconds.

        Returns:
            Whether all has arrived.
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
        """Sends until nothing is left or the store fails; whether all has arrived."""
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
        self.journal.refuse(entry.record, reason(error))
        if self.refusals == 1:
            self.news.append(
                f"tracking: {self.store.destination.uri} refused a record ({reason(error)}); it is "
                f"kept in {self.journal.folder / 'refused.jsonl'}"
            )

    def _failed(self, error: Exception) -> None:
        self.failures += 1
        self.trouble = reason(error)
        if not self._told:
            self._told = True
            self.news.append(
                f"tracking: {self.store.destination.uri} does not answer ({self.trouble}); "
                "training goes on, and the record waits in "
                f"{self.journal.folder} until it does"
            )


def prepare_client() -> None:
    """Sets what MLflow's client reads from the environment; what a user has set stays."""
    for name, value in CLIENT_DEFAULTS.items():
        os.environ.setdefault(name, value)


def together(entries: list[Entry]) -> Iterator[list[Entry]]:
    """Entries in order, with neighbouring records of metrics in groups."""
    for metrics, run in groupby(entries, key=lambda entry: entry.record["do"] == "metrics"):
        rows, size = list(run), POINTS_AT_ONCE if metrics else 1
        for start in range(0, len(rows), size):
            yield rows[start : start + size]


def reason(error: Exception) -> str:
    """An exception in a few words."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:150]}{'...' if len(text) > 150 else ''}"


def now() -> int:
    """The time as MLflow has it, in milliseconds."""
    return time.time_ns() // 1_000_000
