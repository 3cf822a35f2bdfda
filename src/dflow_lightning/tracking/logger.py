"""The Lightning logger of a run.

Records go to a journal in the run folder (`journal.py`), and from there, in a thread (`sender.py`),
to the MLflow store (`store.py`). Training never waits for the store.
"""

import base64
import math
import os
import secrets
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from shlex import quote
from typing import Any

import yaml
from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities.rank_zero import rank_zero_only

from dflow_lightning.tracking.address import sqlite_uri
from dflow_lightning.tracking.journal import Destination, Journal
from dflow_lightning.tracking.sender import Sender, counted, deliver_others, now
from dflow_lightning.tracking.store import clean_name

PARAM_LIMIT = 250  # characters; a longer value stays in the recipe artifact alone
URI_VARIABLE = "MLFLOW_TRACKING_URI"


def flatten(recipe: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Dotted keys and text values of a nested recipe; unset values are left out."""
    flat: dict[str, str] = {}
    for key, value in recipe.items():
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{prefix}{key}.")
        elif value is not None:
            flat[f"{prefix}{key}"] = str(value)
    return flat


def store_address(run_dir: Path, uri: str | None) -> str:
    """The store of a run: the recipe's, the environment's, or the file in the run folder."""
    return uri or os.environ.get(URI_VARIABLE) or sqlite_uri(run_dir / "mlflow.db")


class RunLogger(Logger):
    """Puts everything that Lightning logs into the run's journal.

    Metrics are recorded at the number of completed optimizer steps, as in checkpoints and on the
    terminal; Lightning counts one less, which `shift` corrects.
    """

    def __init__(self, run_dir: Path, destination: Destination, *, resumed: bool) -> None:
        super().__init__()
        self.shift = 0
        self.resumed = resumed
        self.destination = destination
        self.journal: Journal | None = None
        self.sender: Sender | None = None
        self._run_dir = run_dir
        self._began = now()
        self._end: dict[str, Any] | None = None
        self._nonfinite = 0
        self._first = rank_zero_only.rank == 0  # type: ignore[attr-defined]

    @property
    def name(self) -> str:
        """The experiment's name."""
        return self.destination.experiment

    @property
    def version(self) -> str:
        """The key of the run."""
        return self.key

    @property
    def key(self) -> str:
        """Identifies the run, also while its id in the store is not known."""
        return self.destination.key

    @property
    def run_id(self) -> str | None:
        """The run's id in the store; None until the store has answered."""
        return self.destination.run_id

    @property
    def save_dir(self) -> str:
        """The run folder, whatever the address of the store."""
        return str(self._run_dir)

    def record(self, do: str, **content: Any) -> None:
        """Append to the journal; the first record opens the run."""
        if not self._first:
            return
        if self.journal is None:
            self.journal = self._open()
        self.journal.append({"do": do, **content})
        self.print_news()

    def _open(self) -> Journal:
        """Made with the first record, so that a run that never begins leaves no files."""
        journal = Journal(self._run_dir, self.destination)
        if not journal.mine:  # the same run was resumed in another process as well
            self.destination = replace(self.destination, key=new_key(), run_id=None)
            journal = Journal(self._run_dir, self.destination)
        self.destination = journal.destination
        journal.close_dead_run()
        journal.append({"do": "open", "time": self._began, "resumed": self.resumed})
        self.sender = Sender(journal, then=partial(deliver_others, self._run_dir))
        self.sender.start()
        return journal

    def print_news(self) -> None:
        """Print the sender's warnings, from the main thread."""
        if self.sender is not None:
            print_news(self.sender)

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Record numbers at a step as Lightning counts it."""
        self.record_metrics(metrics, (step or 0) + self.shift)

    @rank_zero_only
    def record_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        """Record numbers after `step` optimizer steps; non-finite ones are counted instead."""
        values = {clean_name(name): float(value) for name, value in metrics.items()}
        epoch = values.pop("epoch", None)  # Lightning adds it to everything
        if epoch is not None and "train/loss" in values:
            values["train/epoch"] = epoch
        finite = {name: value for name, value in values.items() if math.isfinite(value)}
        if len(finite) < len(values):
            self._nonfinite += len(values) - len(finite)
            finite["train/nonfinite_count"] = self._nonfinite
        if finite:
            self.record("metrics", time=now(), step=step, values=finite)

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        """Does nothing: `log_recipe` records the module's arguments with the whole recipe."""

    @rank_zero_only
    def log_recipe(self, recipe: dict[str, Any]) -> None:
        """Record the recipe as an artifact, and its short values as parameters."""
        self.record("text", path="config.yaml", content=yaml.safe_dump(recipe, sort_keys=False))
        params = {
            clean_name(name): value
            for name, value in flatten(recipe).items()
            if value and len(value) <= PARAM_LIMIT
        }
        self.record("recipe", time=self._began, params=params, resumed=self.resumed)

    def artifact(self, path: str, content: str | bytes) -> None:
        """Record a file of text or bytes."""
        if isinstance(content, str):
            self.record("text", path=path, content=content)
        else:
            self.record("bytes", path=path, content=base64.b64encode(content).decode())

    def ends(self, status: str, tags: dict[str, str]) -> None:
        """Set how the run ends, where Lightning would only say "failed"."""
        self._end = {"status": status, "tags": tags}

    @rank_zero_only
    def finalize(self, status: str = "success") -> None:
        """End the run as FINISHED, FAILED or KILLED, and wait a few seconds for the store."""
        journal, sender = self.journal, self.sender
        if journal is None or sender is None:
            return
        self.journal = self.sender = None
        end = self._end or {"status": "FAILED" if status == "failed" else "FINISHED", "tags": {}}
        journal.append({"do": "end", "time": now(), **end})
        arrived = sender.finish()
        print_news(sender)
        if arrived:
            journal.remove()
        else:
            print(undelivered(journal, self._run_dir), file=sys.stderr, flush=True)


def print_news(sender: Sender) -> None:
    """Print a sender's warnings to standard error, each once."""
    while sender.news:
        print(sender.news.popleft(), file=sys.stderr, flush=True)


def undelivered(journal: Journal, run_dir: Path) -> str:
    """What was not sent when a run ends, and how to send it."""
    message = (
        f"tracking: not sent to {journal.destination.uri} yet: {counted(journal)}; kept in "
        f"{journal.folder}; send it with dflow-train sync --run {quote(str(run_dir))}, or resume "
        "the run"
    )
    if journal.lost:
        names = ", ".join(f"{name} (to step {step})" for name, step in journal.lost.items())
        message += f"\ntracking: disk and memory were full; some records were lost: {names}"
    return message


def new_key() -> str:
    """A unique key; it begins with the date, so that journals sort by age in a folder."""
    return f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(3)}"
