"""What a run that ends too early leaves behind, and that the same command goes on (`make crashes`).

For each way to end: exit status, last words, status and reason in MLflow; then the same command
with `--ckpt_path auto`, which must finish in the same MLflow run without a gap in its metrics.
"""

import shutil
import signal
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlflow import MlflowClient
from processes import Plant, Server
from resume_table import STEPS, Case, last_line, write_data
from targets import random_target

from dflow_lightning.tracking.journal import journals
from dflow_lightning.tracking.sender import deliver
from dflow_lightning.tracking.store import make_database

ONE = Case("1 process", 0, 1)
AT = 2  # the step that does not end


@dataclass(frozen=True)
class Crash:
    """A way to end, and what is expected of it."""

    name: str
    plant: Plant
    code: int
    said: str  # in the last line on the terminal
    status: str  # in MLflow, after `dflow-train sync` where that is asked for
    reason: str  # in MLflow
    sync: bool = False


def signalled(signum: signal.Signals) -> Plant:
    return Plant("signal_at", {"signum": int(signum), "step": AT})


def exhausted(kind: str) -> Plant:
    return Plant("out_of_memory", {"step": AT, "kind": kind})


TERM = "stopped by SIGTERM at step 3; continue with --ckpt_path last"
INT = TERM.replace("TERM", "INT")
SILENT = "ended without a word"
MEMORY = "error: out of memory at step 2"
NO_MEMORY = "Error at step 2"
DEFECT = Plant("fail_at", {"step": AT})
TERMINATED, INTERRUPTED, KILLED = map(signalled, (signal.SIGTERM, signal.SIGINT, signal.SIGKILL))
CRASHES = [
    Crash("exception at step 2", DEFECT, 1, "Error: planted", "FAILED", f"{NO_MEMORY}: planted"),
    Crash("SIGTERM", TERMINATED, 143, TERM, "KILLED", TERM),
    Crash("ctrl-C", INTERRUPTED, 130, INT, "KILLED", INT),
    Crash("kill -9", KILLED, 137, "", "RUNNING", ""),
    Crash("kill -9, then sync", KILLED, 137, "", "FAILED", SILENT, sync=True),
    Crash("out of GPU memory", exhausted("gpu"), 1, f"{MEMORY} (CUDA", "FAILED", NO_MEMORY),
    Crash("out of memory", exhausted("host"), 1, f"{MEMORY}; set", "FAILED", "MemoryError at"),
    Crash("out of memory in torch", exhausted("cpu"), 1, MEMORY, "FAILED", NO_MEMORY),
]


def the_run(folder: Path) -> Any:
    """The one run of a folder's store, None where there is none yet."""
    client = MlflowClient(f"sqlite:///{folder / 'run/mlflow.db'}")
    ids = [experiment.experiment_id for experiment in client.search_experiments()]
    runs = client.search_runs(ids)
    assert len(runs) <= 1, f"{len(runs)} runs"
    return runs[0] if runs else None


def losses(folder: Path, run_id: str) -> dict[int, float]:
    """train/loss of the run by step."""
    client = MlflowClient(f"sqlite:///{folder / 'run/mlflow.db'}")
    return {p.step: p.value for p in client.get_metric_history(run_id, "train/loss")}


def crash_once(
    server: Server, shared: Path, folder: Path, crash: Crash
) -> tuple[list[str], list[str]]:
    """The cells of a row, and what of it was not as expected."""
    options = {"tracking.enabled": "true", "checkpoint.every_n_steps": 1, "ckpt_path": "auto"}
    options |= {"trainer.val_check_interval": STEPS}
    args = ONE.options(shared, run_dir="run", **options)
    (code,), run = server(args, folder, plants=(Plant("slow", {"seconds": 0.02}), crash.plant))
    said = last_line(run)
    if crash.sync:
        for path in journals(folder / "run"):
            deliver(path)
    before = the_run(folder)
    status = before.info.status if before else "RUNNING"  # it had no time to reach the store
    tags = before.data.tags if before else {}
    reason = tags.get("failure") or tags.get("stopped") or ""
    (again,), more = server(args, folder)
    after = the_run(folder)
    steps = sorted(losses(folder, after.info.run_id))
    kept = after.data.tags.get("resume_1.after", "")
    wrong = []
    for name, found, expected in (
        ("exit", code, crash.code),
        ("status", status, crash.status),
        ("resumed exit", again, 0),
        ("resumed status", after.info.status, "FINISHED"),
        ("run id", after.info.run_id, before.info.run_id if before else after.info.run_id),
        ("steps", steps, list(range(1, STEPS + 1))),
        ("failure of the finished run", after.data.tags.get("failure"), None),
        ("left behind", journals(folder / "run"), []),
    ):
        if found != expected:
            wrong.append(f"{name} is {found}, not {expected}")
    for name, found, expected in (
        ("message", said, crash.said),
        ("reason", reason, crash.reason),
        ("reason after the resume", kept, crash.reason or SILENT),
    ):
        if expected not in found:
            wrong.append(f"{name} is {found!r}, without {expected!r}")
    if again:
        wrong.append(last_line(more))
    return [
        crash.name,
        str(code),
        status,
        reason or "-",
        f"{after.info.status}, exit {again}",
    ], wrong


def main() -> int:
    scratch = Path(tempfile.mkdtemp(prefix="crashes-"))
    started, good = time.monotonic(), True
    row = "{:<24}{:>5}  {:<10}{:<62}{:<20}"
    print(row.format("how it ends", "exit", "MLflow", "reason in MLflow", "the same command again"))
    try:
        random_target(scratch / "target")
        write_data(scratch)
        make_database(f"sqlite:///{scratch / 'mlflow.db'}")
        server = Server()
        for number, crash in enumerate(CRASHES):
            folder = scratch / f"crash{number}"
            (folder / "run").mkdir(parents=True)
            shutil.copy(scratch / "mlflow.db", folder / "run")  # making one takes seconds
            cells, wrong = crash_once(server, scratch, folder, crash)
            print(row.format(*(cell[:60] for cell in cells)) + "; ".join(wrong), flush=True)
            good = good and not wrong
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    print(f"\n{'all as expected' if good else 'FAILED'}, {time.monotonic() - started:.0f} s")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
