"""A report of whole runs: a page of tables, with pictures in a folder beside it.

A run folder holds what `dflow-train sweep` and `scripts/compare.py` leave there: `bench.json`,
`seconds.json` and, here or one level above, the MLflow store of the training.
"""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflow_lightning.errors import InputError

BENCH, RECORD = "bench.json", "sweep.json"
NEEDED = ("relay", "temperature", "family", "tau", "position_acceptance", "histogram")
RunArm = tuple[str, str]  # name of a run without its seed, relay on or off
Curves = dict[str, list[tuple[int, float]]]


@dataclass(frozen=True)
class MeasuredRun:
    """What one run folder holds.

    Args:
        curves: step and tau of each rollout round of the training, by its name.
        seconds, steps: of processor time of the training, and its optimizer steps, if known.
    """

    name: str
    seed: int
    folder: Path
    rows: list[dict]
    environment: dict[str, Any]
    curves: Curves
    seconds: float | None
    steps: int | None


def find_runs(paths: list[Path]) -> list[Path]:
    """Run folders among the paths, and inside those that are none themselves."""
    found: list[Path] = []
    for path in paths:
        if (path / BENCH).is_file():
            found.append(path)
            continue
        inside = sorted(one.parent for one in path.glob(f"*/{BENCH}"))
        if not inside:
            raise InputError(
                f"runs: {path} holds no {BENCH}, nor does a folder in it; name a run that was "
                "measured with dflow-train bench --json, or a sweep"
            )
        found += inside
    doubled = [path for path in found if found.count(path) > 1]
    if doubled:
        raise InputError(f"runs: {doubled[0]} is given twice; name it once")
    return found


def read_run(folder: Path) -> MeasuredRun:
    """A run folder, checked for what the page shows."""
    path = folder / BENCH
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        rows, environment = content["rows"], content["environment"]
        missing = sorted({key for row in rows for key in NEEDED if key not in row})
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(
            f"runs: {path} is no result of dflow-train bench ({error}); measure again"
        ) from None
    if missing or not rows:
        raise InputError(f"runs: {path} lacks {', '.join(missing) or 'rows'}; measure again")
    name, seed = folder.name, 0
    if numbered := re.fullmatch(r"(.+)-(\d+)", folder.name):
        name, seed = numbered[1], int(numbered[2])
    spent = folder / "seconds.json"
    training = json.loads(spent.read_text(encoding="utf-8")) if spent.is_file() else {}
    return MeasuredRun(
        name, seed, folder, rows, environment, read_curves(folder),
        training.get("seconds"), training.get("steps"),
    )  # fmt: skip


def read_curves(folder: Path) -> Curves:
    """`train/tau_round0..k` of the run's training; nothing where no local store holds it."""
    stores = [path / "mlflow.db" for path in (folder, folder.parent)]
    store = next((path for path in stores if path.is_file()), None)
    if store is None:
        return {}
    from dflow_lightning.tracking.address import sqlite_uri
    from dflow_lightning.tracking.store import open_client

    client = open_client(sqlite_uri(store))
    experiments = [one.experiment_id for one in client.search_experiments()]
    chosen = f"attributes.run_name = '{folder.name}'"
    newest = ["attributes.start_time DESC"]
    for run in client.search_runs(experiments, chosen, order_by=newest, max_results=1):
        names = [key for key in run.data.metrics if re.fullmatch(r"train/tau_round\d+", key)]
        return {
            key: sorted(
                (one.step, one.value) for one in client.get_metric_history(run.info.run_id, key)
            )
            for key in sorted(names)
        }
    return {}


def run_arms(runs: list[MeasuredRun]) -> list[RunArm]:
    """Every drafter with every relay setting, in the order of the folders, on before off."""
    found = dict.fromkeys((run.name, row["relay"]) for run in runs for row in run.rows)
    names = list(dict.fromkeys(name for name, _ in found))
    return [(n, relay) for n in names for relay in ("on", "off") if (n, relay) in found]


def arm_label(arm: RunArm, every: list[RunArm]) -> str:
    """Its name, and the relay where there are two settings."""
    return f"{arm[0]}, relay {arm[1]}" if (arm[0], "on") in every else arm[0]


def taus(runs: list[MeasuredRun], arm: RunArm, temperature: float, family: str) -> list[float]:
    """One number a seed."""
    return [
        row["tau"]
        for run in runs
        if run.name == arm[0]
        for row in run.rows
        if (row["relay"], row["temperature"], row["family"]) == (arm[1], temperature, family)
    ]
