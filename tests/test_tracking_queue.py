"""The way from a training to its store: journal, sender, names, and stores that fail."""

import errno
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from processes import free_port
from tracking_server import failing_server

from dflow_lightning.tracking import journal as tracking_journal
from dflow_lightning.tracking import sender as tracking_sender
from dflow_lightning.tracking import store as tracking_store
from dflow_lightning.tracking.callback import Tracking
from dflow_lightning.tracking.journal import Destination, Journal
from dflow_lightning.tracking.sender import Sender


class RefusalError(Exception):
    error_code = "INVALID_PARAMETER_VALUE"


class FakeStore:
    """Takes records, unless told to fail, to hang or to refuse a name."""

    def __init__(self) -> None:
        self.taken: list[dict[str, Any]] = []
        self.down = False
        self.hang: threading.Event | None = None
        self.destination = Destination("key", "fake", "e", "r")

    def send(self, records: list[dict[str, Any]]) -> None:
        if self.hang is not None:
            self.hang.wait()
        if self.down:
            raise ConnectionError("no route")
        if any("bad" in record.get("values", {}) for record in records):
            raise RefusalError("no such name")
        self.taken += records


def journal_in(folder: Path) -> Journal:
    return Journal(folder, Destination("key", "fake", "e", "r"))


def point(step: int, name: str = "a") -> dict[str, Any]:
    return {"do": "metrics", "time": step, "step": step, "values": {name: 1.0}}


def sender_of(journal: Journal) -> tuple[Sender, FakeStore]:
    sender, store = Sender(journal), FakeStore()
    sender.store = store  # type: ignore[assignment]
    return sender, store


# ---------------------------------------------------------------- the journal


def test_a_journal_goes_on_where_the_store_had_come(tmp_path: Path) -> None:
    journal = journal_in(tmp_path)
    for step in range(3):
        journal.append(point(step))
    first, *_ = journal.entries()
    journal.arrived(first)
    journal.save()
    journal.close()  # a kill -9 does no more
    journal.path.write_bytes(journal.path.read_bytes() + b'{"do": "metr')

    again = journal_in(tmp_path)
    assert again.died
    again.append(point(9))
    records = [entry.record for entry in again.entries()]
    assert [r.get("step") for r in records] == [1, 2, None, 9]
    assert records[2] == {"do": "nothing"}
    assert again.left() == {"metric points": 3}
    again.close_dead_run()
    assert again.entries()[-1].record["status"] == "FAILED"
    again.remove()
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_holds_records_in_memory_and_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal, write, full = journal_in(tmp_path), os.write, True

    def limited(file: int, data: bytes) -> int:
        if not full:
            return write(file, data)
        write(file, data[:5])  # half a line, as disks do
        raise OSError(errno.ENOSPC, "No space left on device")

    journal.append(point(0))
    monkeypatch.setattr(tracking_journal.os, "write", limited)
    monkeypatch.setattr(tracking_journal, "HELD", 3)
    for step in range(1, 6):
        journal.append(point(step, f"m{step}"))
    assert journal.lost == {"m4": 4, "m5": 5}  # listed when the run ends
    full = False
    journal.append(point(6))
    assert [entry.record["step"] for entry in journal.entries()] == [0, 1, 2, 3, 6]
    assert not any(entry.end is None for entry in journal.entries())


def test_a_disk_that_stays_full_costs_nothing_while_the_store_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(file: int, data: bytes) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(tracking_journal.os, "write", full)
    journal = journal_in(tmp_path)
    for step in range(250):
        journal.append(point(step))
    sender, store = sender_of(journal)
    assert sender.send_all()
    assert [record["step"] for record in store.taken] == list(range(250))
    assert not journal.waiting


def test_a_folder_that_cannot_be_written_is_no_reason_to_stop(tmp_path: Path) -> None:
    (tmp_path / "tracking").write_text("a file")
    journal = journal_in(tmp_path)
    journal.append(point(1))
    assert [entry.record["step"] for entry in journal.entries()] == [1]


def test_another_process_has_the_journal(tmp_path: Path) -> None:
    code = (
        "import sys, pathlib, dflow_lightning.tracking.journal as t;"
        "j = t.Journal(pathlib.Path(sys.argv[1]), t.Destination('key', 'fake', 'e', 'r'));"
        "print(j.mine, flush=True); sys.stdin.read()"
    )
    other = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert other.stdout is not None
    assert other.stdout.readline() == b"True\n"
    assert not journal_in(tmp_path).mine
    said, ok = tracking_sender.deliver(tmp_path / "tracking/key.jsonl")
    assert ok
    assert "in progress" in said
    other.communicate(b"")
    assert journal_in(tmp_path).mine


# ---------------------------------------------------------------- the sender


def test_a_store_that_comes_back_gets_everything_and_is_spoken_of_once(tmp_path: Path) -> None:
    journal = journal_in(tmp_path)
    sender, store = sender_of(journal)
    for step in range(5):
        store.down = step % 2 == 0  # it comes and goes
        journal.append(point(step))
        sender.send_all()
    assert len(sender.news) == 1
    assert "training goes on" in sender.news[0]
    store.down = False
    assert sender.send_all()
    assert [record["step"] for record in store.taken] == list(range(5))


def test_one_refused_record_does_not_hold_up_the_others(tmp_path: Path) -> None:
    journal = journal_in(tmp_path)
    sender, store = sender_of(journal)
    for step, name in enumerate(["a", "bad", "b"]):
        journal.append(point(step, name))
    assert sender.send_all()
    assert [list(record["values"]) for record in store.taken] == [["a"], ["b"]]
    (line,) = (tmp_path / "tracking/refused.jsonl").read_text().splitlines()
    assert json.loads(line)["reason"] == "RefusalError: no such name"


def test_a_hanging_store_holds_up_neither_training_nor_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracking_sender, "COLLECT", 0.01)
    monkeypatch.setattr(tracking_sender, "EXIT_WITHIN", 0.3)
    journal = journal_in(tmp_path)
    sender, store = sender_of(journal)
    store.hang = threading.Event()
    sender.start()
    start = time.monotonic()
    for step in range(1000):
        journal.append(point(step))
    assert not sender.finish()
    assert time.monotonic() - start < 10
    assert journal.left() == {"metric points": 1000}
    store.hang.set()


def test_an_answer_of_500_is_asked_for_ever_more_rarely(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    port = free_port()
    monkeypatch.setattr(tracking_sender, "COLLECT", 0.01)
    monkeypatch.setattr(tracking_sender, "EXIT_WITHIN_FAILING", 0.5)
    with failing_server(port) as requests:
        logger = Tracking(uri=f"http://127.0.0.1:{port}").open(tmp_path)
        until = time.monotonic() + 1.0
        step = 0
        while time.monotonic() < until:
            step += 1
            logger.log_metrics({"a": 1.0}, step=step)
            time.sleep(0.001)
        logger.finalize()
    assert 1 <= len(requests) <= 5


# ---------------------------------------------------------------- names, numbers, database


@given(st.text(max_size=300))
def test_clean_names_are_names(name: str) -> None:
    from mlflow.utils.validation import _validate_metric_name

    clean = tracking_store.clean_name(name)
    _validate_metric_name(clean)
    assert len(clean) <= tracking_store.NAME_LIMIT
    assert tracking_store.clean_name(clean) == clean


def test_clean_names_do_not_collide() -> None:
    assert tracking_store.clean_name("val/数学/tau") == "val/数学/tau"
    names = ["c#", "c@", "c$", "a//b", "a/_/b", "", "_", ".", "..", "x" * 300, "x" * 301]
    assert len({tracking_store.clean_name(name) for name in names}) == len(names)


def test_resumes_are_numbered_once() -> None:
    tags = {"resume_1": "100", "resume_1.after": "x", "resume_2": "200"}
    assert tracking_store.resume_number({}, 5) == 1
    assert tracking_store.resume_number(tags, 300) == 3
    assert tracking_store.resume_number(tags, 200) == 2  # the same record sent again


def test_a_database_appears_whole_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mlflow.store.tracking import sqlalchemy_store

    class Killed(BaseException):
        pass

    def dies(uri: str, artifacts: str) -> None:
        Path(uri.removeprefix("sqlite:///")).write_bytes(b"half")
        raise Killed

    monkeypatch.setattr(sqlalchemy_store, "SqlAlchemyStore", dies)
    (tmp_path / ".mlflow.db.4194304.partial").touch()  # of a process that was killed
    with pytest.raises(Killed):
        tracking_store.make_database(f"sqlite:///{tmp_path}/mlflow.db")
    assert list(tmp_path.iterdir()) == []
