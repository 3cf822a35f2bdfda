"""What a tracking store that fails costs a training (`make faults`).

Every fault against a run whose store is well: the same losses bit for bit, how long the training's
own thread was held up by the record and by its end, wall time as a ratio, and whether every metric
point is in the store once it is well again and `dflow-train sync` was called.

Wall times of a busy machine say little; the seconds that the training was held up say the same
without the noise, and the exit status goes by those.
"""

import argparse
import contextlib
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mlflow import MlflowClient
from processes import Plant, Run, Server, free_port, steps_of, wait_until
from resume_table import Case, last_line, record_of, write_data
from targets import random_target
from tracking_server import RealServer, failing_server, forwarded

from dflow_lightning.tracking.journal import journals
from dflow_lightning.tracking.sender import deliver
from dflow_lightning.tracking.store import make_database

ONE = Case("1 process", 0, 1)
STEPS = 60
HELD_SHARE = 0.05  # of the wall time, by the record
END_SECONDS = 12.0  # held up at the end, at most
Points = dict[str, list[int]]


@dataclass
class Bench:
    """What all runs share."""

    scratch: Path
    server: Server
    real: RealServer
    expected: dict[int, float] = field(default_factory=dict)  # losses of the well run
    points: Points = field(default_factory=dict)  # steps of each metric of the well run
    number: int = 0

    def start(self, name: str, uri: str | None, run_dir: str = "run") -> tuple[Path, Run]:
        """Begins a training in a new folder."""
        self.number += 1
        folder = self.scratch / f"{self.number}-{name.split(',')[0].replace(' ', '-')}"
        folder.mkdir()
        return folder, self.start_in(folder, folder.name, uri, run_dir)

    def start_in(self, folder: Path, name: str, uri: str | None, run_dir: str) -> Run:
        options: dict[str, Any] = {"trainer.max_steps": STEPS, "trainer.val_check_interval": 30}
        if uri is not None:
            options |= {"tracking.enabled": "true", "tracking.uri": uri, "tracking.run_name": name}
        args = ONE.options(self.scratch, run_dir=run_dir, **options)
        plants = (
            Plant("record", {"path": str(folder / run_dir)}),
            Plant("tracking_seconds", {"path": str(folder / f"{run_dir}-held.json")}),
        )
        return self.server.start(args, folder, plants=plants)


@dataclass
class Outcome:
    """One run of a row."""

    seconds: float
    held: float
    end: float
    wrong: list[str]
    note: str = ""


Fault = Callable[[Bench, str], Outcome]


def losses_of(folder: Path, run_dir: str = "run") -> dict[int, float]:
    """The loss of every step that the training made, counted from 1."""
    (steps,) = steps_of(record_of(folder / run_dir, 0))
    return {step + 1: float.fromhex(seen[0]["loss"]) for step, seen in steps.items()}


def points_of(uri: str, name: str) -> tuple[Points, dict[int, float]]:
    """Steps of every metric that the store holds of a run, and its losses."""
    client = MlflowClient(uri)
    ids = [experiment.experiment_id for experiment in client.search_experiments()]
    (run,) = client.search_runs(ids, f"attributes.run_name = '{name}'")
    steps, losses = Points(), dict[int, float]()
    for key in run.data.metrics:
        history = client.get_metric_history(run.info.run_id, key)
        steps[key] = sorted(point.step for point in history)
        if key == "train/loss":
            losses = {point.step: point.value for point in history}
    steps["status " + run.info.status] = []
    return steps, losses


def finished(
    bench: Bench, folder: Path, run: Run, began: float, *, timeout: float = 400
) -> Outcome:
    """Waits for a training and compares it with the well one."""
    (code,) = run.wait(400)
    seconds = time.monotonic() - began
    held_file = folder / "run-held.json"
    held = json.loads(held_file.read_text()) if held_file.exists() else {"record": 0.0, "end": 0.0}
    wrong = [f"exit {code}: {last_line(run)}"] if code else []
    losses = losses_of(folder)
    if bench.expected and losses != bench.expected:
        wrong.append("other losses")
    said = [line for line in run.output().splitlines() if line.startswith("tracking:")]
    if len(said) > 2:
        wrong.append(f"{len(said)} lines of warning")
    return Outcome(seconds, held["record"], held["end"], wrong, f"{len(said)} lines")


def arrived(bench: Bench, outcome: Outcome, folder: Path, uri: str, name: str) -> Outcome:
    """After the store is well again: all of it must be there."""
    kept = 0
    for path in journals(folder / "run"):
        kept += path.read_bytes().count(b"\n")
        said, ok = deliver(path)
        if not ok:
            outcome.wrong.append(said)
    try:
        points, losses = points_of(uri, name)
    except ValueError:
        outcome.wrong.append("no run in the store")
        return outcome
    if bench.points and points != bench.points:
        outcome.wrong.append(f"{sum(map(len, points.values()))} points in the store")
    if losses != losses_of(folder):
        outcome.wrong.append("other losses in the store")
    total = sum(map(len, points.values()))
    outcome.note += f", {kept} records kept, {total} points arrived"
    return outcome


# ---------------------------------------------------------------- the faults


def well(bench: Bench, name: str) -> Outcome:
    began = time.monotonic()
    folder, run = bench.start(name, bench.real.uri)
    outcome = finished(bench, folder, run, began)
    if not bench.expected:
        bench.expected = losses_of(folder)
        bench.points, _ = points_of(bench.real.uri, folder.name)
    return arrived(bench, outcome, folder, bench.real.uri, folder.name)


def no_record(bench: Bench, name: str) -> Outcome:
    began = time.monotonic()
    folder, run = bench.start(name, None)
    return finished(bench, folder, run, began)


def killed(bench: Bench, name: str) -> Outcome:
    """A real server, dead after a third of the steps, back when the training is over."""
    began = time.monotonic()
    folder, run = bench.start(name, bench.real.uri)
    seen = record_of(folder / "run", 0)
    wait_until(lambda: seen.exists() and seen.read_text().count("\n") > STEPS // 3, 300)
    bench.real.kill()
    outcome = finished(bench, folder, run, began)
    bench.real.start()
    return arrived(bench, outcome, folder, bench.real.uri, folder.name)


def away(bench: Bench, name: str, failing: Any = None) -> Outcome:
    """Nobody or a sick server at a port; later a real one."""
    port = free_port()
    uri = f"http://127.0.0.1:{port}"
    began = time.monotonic()
    with contextlib.nullcontext() if failing is None else failing_server(port, **failing):
        folder, run = bench.start(name, uri)
        outcome = finished(bench, folder, run, began)
    with forwarded(port, bench.real.port):
        return arrived(bench, outcome, folder, uri, folder.name)


@contextlib.contextmanager
def small_disk(folder: Path) -> Iterator[Callable[[], None]]:
    """A disk of 2 MB; what it yields makes it large."""
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o"]
    subprocess.run([*mount, "size=2m", "small", str(folder)], check=True, capture_output=True)
    try:
        yield lambda: subprocess.run(
            [*mount, "remount,size=64m", str(folder)], check=True, capture_output=True
        )
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=False)


def disk_full(bench: Bench, name: str) -> Outcome:
    """The store's own disk has room for its tables and little more."""
    bench.number += 1
    disk = bench.scratch / f"disk{bench.number}"
    with small_disk(disk) as enlarge:
        uri = f"sqlite:///{disk}/mlflow.db"
        shutil.copy(bench.scratch / "mlflow.db", disk)
        free = shutil.disk_usage(disk).free
        (disk / "other").write_bytes(bytes(max(0, free - 60_000)))
        began = time.monotonic()
        folder, run = bench.start(name, uri)
        outcome = finished(bench, folder, run, began)
        if not journals(folder / "run"):
            outcome.wrong.append("the disk was not full")
        enlarge()
        return arrived(bench, outcome, folder, uri, folder.name)


def same_folder(bench: Bench, name: str) -> Outcome:
    """A second training in a folder in which one is going on."""
    began = time.monotonic()
    folder, run = bench.start(name, bench.real.uri)
    wait_until(lambda: (folder / "run/.lock").exists(), 300)
    second = folder / "second"
    second.mkdir()
    other = bench.start_in(second, "second", bench.real.uri, str(folder / "run"))
    (code,) = other.wait(300)
    outcome = finished(bench, folder, run, began)
    if code != 2 or "another process trains in" not in last_line(other):
        outcome.wrong.append(f"the second ended with {code}: {last_line(other)}")
    outcome = arrived(bench, outcome, folder, bench.real.uri, folder.name)
    outcome.note += ", the second was refused"
    return outcome


def same_store(bench: Bench, name: str) -> Outcome:
    """Two trainings at once, whose record goes to one sqlite file."""
    bench.number += 1
    file = bench.scratch / f"shared{bench.number}.db"
    shutil.copy(bench.scratch / "mlflow.db", file)
    uri, began = f"sqlite:///{file}", time.monotonic()
    runs = [bench.start(name, uri) for _ in range(2)]
    outcomes = [finished(bench, folder, run, began) for folder, run in runs]
    for (folder, _), outcome in zip(runs, outcomes, strict=True):
        arrived(bench, outcome, folder, uri, folder.name)
    outcomes[0].wrong += outcomes[1].wrong
    return outcomes[0]


FAULTS: dict[str, Fault] = {
    "server well": well,
    "no record at all": no_record,
    "server killed mid-run, back later": killed,
    "connections refused": away,
    "server answers 500": lambda bench, name: away(bench, name, {"status": 500}),
    "server hangs 60 s": lambda bench, name: away(bench, name, {"hang": 60.0}),
    "disk of sqlite full": disk_full,
    "two trainings in one folder": same_folder,
    "two trainings, one sqlite file": same_store,
}
ALONE = [name for name in FAULTS if not name.startswith("two")]


def table(bench: Bench, names: list[str], rounds: int) -> bool:
    """Prints a row for each fault; whether all was as it should be."""
    outcomes: dict[str, list[Outcome]] = {name: [] for name in names}
    for number in range(rounds):  # in turn, since the machine is not always equally busy
        for name in names:
            outcomes[name].append(FAULTS[name](bench, name))
            last = outcomes[name][-1]
            print(f"round {number + 1}: {name}, {last.seconds:.1f} s, {last.note}", flush=True)
    row = "{:<36}{:>8}{:>8}{:>11}{:>9}  {}"
    print("\n" + row.format("fault", "wall s", "ratio", "held up", "end s", "losses and points"))
    good, base = True, [one.seconds for one in outcomes["server well"]]
    for name, runs in outcomes.items():
        ratios = [run.seconds / well for run, well in zip(runs, base, strict=True)]
        seconds = statistics.median(run.seconds for run in runs)
        share = max(run.held / run.seconds for run in runs)
        end = max(run.end for run in runs)
        wrong = sorted({text for run in runs for text in run.wrong})
        if share > HELD_SHARE or end > END_SECONDS:
            wrong.append("held up too long")
        ratio = f"{statistics.median(ratios):.2f}" if name in ALONE else "-"
        told = "; ".join(wrong) or f"all equal ({runs[-1].note})"
        print(row.format(name, f"{seconds:.1f}", ratio, f"{100 * share:.2f} %", f"{end:.1f}", told))
        good = good and not wrong
    return good


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", help="words of the faults to show, separated by commas")
    args = parser.parse_args()
    words = args.only.split(",") if args.only else [""]
    names = [n for n in FAULTS if n == "server well" or any(word in n for word in words)]
    scratch = Path(tempfile.mkdtemp(prefix="faults-"))
    real = RealServer(scratch)
    started = time.monotonic()
    try:
        random_target(scratch / "target")
        write_data(scratch)
        make_database(f"sqlite:///{scratch / 'mlflow.db'}")
        (scratch / "real").mkdir()
        shutil.copy(scratch / "mlflow.db", scratch / "real")
        real.folder = scratch / "real"
        real.start()
        server = Server()
        server(["--help"], scratch, timeout=400)  # imports everything before a run is timed
        good = table(Bench(scratch, server, real), names, args.rounds)
    finally:
        real.kill()
        shutil.rmtree(scratch, ignore_errors=True)
    print(f"\n{'all as expected' if good else 'FAILED'}, {time.monotonic() - started:.0f} s")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
