"""The state of an unfinished `prepare`: a database beside the output folder.

    meta       one JSON text a name; `settings` is what the answers depend on
    rejects    lines of the source that give no row, and why; `late` ones were found in the answers
    answers    one row per conversation and sample, with all its answers; failures have an error

Rows are committed every `COMMIT_SECONDS`. A process that is killed loses what came after the last
commit, and the next one asks for it again; the key allows no row twice.
"""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from dflow_lightning.data.conversations import Reject
from dflow_lightning.data.turns import TargetAnswer
from dflow_lightning.errors import InputError
from dflow_lightning.files import refusal

COMMIT_SECONDS = 1.0
TABLES = """
CREATE TABLE IF NOT EXISTS meta (name TEXT PRIMARY KEY, value TEXT);
CREATE TABLE IF NOT EXISTS rejects (
    line INTEGER, sample INTEGER, late INTEGER, reason TEXT, detail TEXT, counted INTEGER,
    PRIMARY KEY (line, sample)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS answers (
    line INTEGER, sample INTEGER, ids BLOB, ends TEXT, error TEXT, PRIMARY KEY (line, sample)
) WITHOUT ROWID;
"""


class OtherSettingsError(InputError):
    """What is there was made with other settings."""


def difference(known: Mapping[str, Any], asked: Mapping[str, Any], where: str = "") -> str:
    """The first setting that differs, as `sampling.seed 0 and is now asked for 1`, or nothing."""
    for key in sorted({*known, *asked}):
        earlier, now = known.get(key), asked.get(key)
        if isinstance(earlier, dict) and isinstance(now, dict):
            if inside := difference(earlier, now, f"{where}{key}."):
                return inside
        elif earlier != now:
            return f"{where}{key} {earlier} and is now asked for {now}"
    return ""


class AnswerJournal:
    """The database of one unfinished folder; only one process may hold it.

    Raises:
        InputError: another process has it, or it has answers that were asked with other settings.
    """

    def __init__(self, path: Path, settings: Mapping[str, Any]) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self._database = sqlite3.connect(path, timeout=1.0, isolation_level=None)
        try:
            self._database.execute("PRAGMA locking_mode = EXCLUSIVE")
            self._database.execute("PRAGMA journal_mode = WAL")
            self._database.execute("PRAGMA synchronous = NORMAL")
            self._database.executescript(TABLES)
            self._database.execute("BEGIN IMMEDIATE")
        except sqlite3.OperationalError as error:
            self._database.close()
            if said := refusal(error):
                raise InputError(f"out: {path}: {said}") from error
            raise InputError(
                f"out: {path} is in use by another process ({error}); wait for it or stop it"
            ) from error
        except sqlite3.DatabaseError as error:
            self._database.close()
            raise InputError(
                f"out: {path} is damaged ({error}); remove it and start again"
            ) from error
        self._committed = time.monotonic()
        known = self.meta("settings")
        changed = difference(known or {}, settings)
        if not changed:
            return
        if not self.count_answers()[0]:  # nothing is lost
            for table in ("meta", "rejects", "answers"):
                self._execute(f"DELETE FROM {table}")
            self.set_meta("settings", dict(settings))
        else:
            self.close()
            raise OtherSettingsError(
                f"out: {path.parent} was begun with {changed}; give the earlier value, another "
                "--out, or --overwrite to start again"
            )

    def meta(self, name: str) -> Any:
        """A value that was set; None if none was."""
        found = self._one("SELECT value FROM meta WHERE name = ?", name)
        return None if found is None else json.loads(found[0])

    def set_meta(self, name: str, value: Any) -> None:
        """Keep a value of JSON."""
        self._execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", name, json.dumps(value))

    def reject(self, line: int, reject: Reject, *, counted: bool = True) -> None:
        """A line of the source is not asked; `counted` ones add to the share of rejects."""
        self._reject(line, 0, False, reject.reason, reject.detail, counted)

    def reject_late(self, line: int, sample: int, reject: Reject, *, counted: bool = True) -> None:
        """The answers to a line give no row."""
        self._reject(line, sample, True, reject.reason, reject.detail, counted)

    def forget_late(self) -> None:
        """Drop the rejects of an earlier pass over the answers."""
        self._execute("DELETE FROM rejects WHERE late")

    def is_rejected(self, line: int) -> bool:
        """Whether a line is not asked."""
        return self._one("SELECT 1 FROM rejects WHERE line = ? AND NOT late", line) is not None

    def rejects(self) -> Iterator[dict[str, Any]]:
        """All of them with their lines, in the order of these."""
        query = "SELECT line, sample, reason, detail FROM rejects ORDER BY line, sample"
        for line, sample, reason, detail in self._database.execute(query):
            number = {"sample": sample} if sample else {}
            yield {"line": line, **number, "reason": reason, "detail": detail}

    def count_rejects(self) -> dict[str, int]:
        """Rejects by reason, the most frequent first."""
        query = "SELECT reason, COUNT(*) FROM rejects GROUP BY reason ORDER BY 2 DESC, 1"
        return dict(self._database.execute(query))

    def num_asked(self, num_rows: int) -> int:
        """Source lines to send to the target."""
        return num_rows - self._one("SELECT COUNT(*) FROM rejects WHERE NOT late")[0]

    def worst(self) -> tuple[int, str, str]:
        """Number of rejects that are mistakes, their most frequent reason, its first case."""
        count = self._one("SELECT COUNT(*) FROM rejects WHERE counted")[0]
        query = (
            "SELECT reason, MIN(line), detail FROM rejects WHERE counted GROUP BY reason "
            "ORDER BY COUNT(*) DESC LIMIT 1"
        )
        reason, line, detail = self._one(query) or ("", 0, "")
        return count, reason, f"line {line}: {detail}"

    def add(self, line: int, sample: int, answers: list[TargetAnswer]) -> None:
        """Write the answers of one dialogue down."""
        ids = np.concatenate(
            [np.array(one.token_ids, np.int32) for one in answers] or [np.array([], np.int32)]
        )
        ends = [[len(one.token_ids), one.finished, one.from_text] for one in answers]
        self._answer(line, sample, ids.tobytes(), json.dumps(ends), None)

    def fail(self, line: int, sample: int, error: str) -> None:
        """Keep why a dialogue has no answers; the next run asks again."""
        self._answer(line, sample, None, None, error)

    def is_answered(self, line: int, sample: int) -> bool:
        """Whether there are answers; a failure does not count."""
        query = "SELECT 1 FROM answers WHERE line = ? AND sample = ? AND error IS NULL"
        return self._one(query, line, sample) is not None

    def answers(self, line: int, sample: int) -> list[TargetAnswer] | str | None:
        """The answers of a dialogue in their order, its error, or None if it was never asked."""
        query = "SELECT ids, ends, error FROM answers WHERE line = ? AND sample = ?"
        found = self._one(query, line, sample)
        if found is None or found[2] is not None:
            return None if found is None else found[2]
        ids, start, answers = np.frombuffer(found[0], np.int32).tolist(), 0, []
        for count, finished, from_text in json.loads(found[1]):
            answers.append(TargetAnswer(ids[start : start + count], finished, from_text))
            start += count
        return answers

    def count_answers(self) -> tuple[int, int]:
        """Dialogues that are answered, and those that failed."""
        query = "SELECT COUNT(*) - COUNT(error), COUNT(error) FROM answers"
        return self._one(query) or (0, 0)

    def commit(self) -> None:
        """Make everything safe that was written so far."""
        self._database.execute("COMMIT")
        self._database.execute("BEGIN IMMEDIATE")
        self._committed = time.monotonic()

    def close(self) -> None:
        """Commit, and release the database."""
        self._database.execute("COMMIT")
        self._database.close()

    def _reject(self, *values: Any) -> None:
        self._execute("INSERT OR REPLACE INTO rejects VALUES (?, ?, ?, ?, ?, ?)", *values)

    def _answer(self, *values: Any) -> None:
        self._execute("INSERT OR REPLACE INTO answers VALUES (?, ?, ?, ?, ?)", *values)

    def _execute(self, query: str, *values: Any) -> None:
        self._database.execute(query, values)
        if time.monotonic() - self._committed > COMMIT_SECONDS:
            self.commit()

    def _one(self, query: str, *values: Any) -> Any:
        return self._database.execute(query, values).fetchone()
