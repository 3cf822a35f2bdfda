"""A report of whole runs: a page of tables, with pictures in a folder beside it.

A run folder holds what `dflow-train sweep` and `scripts/compare.py` leave there: `bench.json`,
`seconds.json` and, here or one level above, the MLflow store of the training.
"""

import json
import re
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from dflow_lightning import atomic
from dflow_lightning.errors import InputError
from dflow_lightning.overlap_record import Overlap
from dflow_lightning.report import SAME_CONDITIONS, check_same_conditions
from dflow_lightning.report_overlap import added, paired_tables, read_overlaps, unpaired_table
from dflow_lightning.report_page import number, page, table, with_spread

BENCH, RECORD = "bench.json", "sweep.json"
NEEDED = ("relay", "temperature", "family", "tau", "position_acceptance", "histogram")
INTRODUCTION = (
    "<p>tau is the acceptance length: accepted drafts + 1 bonus token per round, pooled over all "
    "rounds; the mean over seeds ± (largest - smallest). With the relay off a drafter is the same "
    "checkpoint, its relay switched off. Only runs that were measured alike stand in one page.</p>"
)
Arm = tuple[str, str]  # name of a run without its seed, relay on or off
Curves = dict[str, list[tuple[int, float]]]


@dataclass(frozen=True)
class Run:
    """What one run folder holds.

    Args:
        curves: step and tau of each rollout round of the training, by its name.
        seconds, steps: of processor time of the training, and its optimizer steps, if known.
    """

    name: str
    seed: int
    folder: Path
    rows: list[dict]
    overlaps: list[Overlap]
    environment: dict[str, Any]
    curves: Curves
    seconds: float | None
    steps: int | None


def report_runs(runs: list[Path], sweep: Path | None, out: Path) -> None:
    """Write the page and its pictures.

    Raises:
        InputError: a folder holds no finished run, or runs were not measured alike.
    """
    from dflow_lightning.report_plots import Pictures

    if sweep is not None and not (sweep / RECORD).is_file():
        raise InputError(f"sweep: {sweep} has no {RECORD}; name the --out of a dflow-train sweep")
    beside = picture_folder(out)
    folders = find_runs(runs if sweep is None else [sweep])
    found = [read_run(folder) for folder in folders]
    check_same_conditions(
        [str(run.folder) for run in found],
        [{"environment": run.environment} for run in found],
        field="runs" if sweep is None else "sweep",
    )
    with atomic.staged_folder(beside) as staged:
        text = render(found, Pictures(staged, beside.name))
    atomic.write_text(out, text)
    print(f"report of {len(found)} runs written to {out}, pictures to {beside}")


def picture_folder(out: Path) -> Path:
    """Where the pictures of a page go: a folder that holds nothing else.

    Raises:
        InputError: it does, and would be lost.
    """
    folder = out.with_name(f"{out.stem}_files")
    if folder.exists() and (
        not folder.is_dir() or any(one.suffix != ".png" for one in folder.iterdir())
    ):
        raise InputError(
            f"out: {folder}, where the pictures go, holds something else; name another page"
        )
    return folder


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


def read_run(folder: Path) -> Run:
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
    overlaps = content.get("overlap") or []
    beside = folder / "overlap.json"  # of a bench that was run for this alone
    if not overlaps and beside.is_file():
        overlaps = json.loads(beside.read_text(encoding="utf-8")).get("overlap") or []
    name, seed = folder.name, 0
    if numbered := re.fullmatch(r"(.+)-(\d+)", folder.name):
        name, seed = numbered[1], int(numbered[2])
    spent = folder / "seconds.json"
    training = json.loads(spent.read_text(encoding="utf-8")) if spent.is_file() else {}
    return Run(
        name, seed, folder, rows, read_overlaps(overlaps), environment, read_curves(folder),
        training.get("seconds"), training.get("steps"),
    )  # fmt: skip


def read_curves(folder: Path) -> Curves:
    """`train/tau_round0..k` of the run's training; nothing where no local store holds it."""
    stores = [path / "mlflow.db" for path in (folder, folder.parent)]
    store = next((path for path in stores if path.is_file()), None)
    if store is None:
        return {}
    from mlflow import MlflowClient

    from dflow_lightning.tracking_store import calmly

    calmly()
    client = MlflowClient(f"sqlite:///{store.resolve()}")
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


def arms(runs: list[Run]) -> list[Arm]:
    """Every drafter with every relay setting, in the order of the folders, on before off."""
    found = dict.fromkeys((run.name, row["relay"]) for run in runs for row in run.rows)
    names = list(dict.fromkeys(name for name, _ in found))
    return [(n, relay) for n in names for relay in ("on", "off") if (n, relay) in found]


def label(arm: Arm, every: list[Arm]) -> str:
    """Its name, and the relay where there are two settings."""
    return f"{arm[0]}, relay {arm[1]}" if (arm[0], "on") in every else arm[0]


def taus(runs: list[Run], arm: Arm, temperature: float, family: str) -> list[float]:
    """One number a seed."""
    return [
        row["tau"]
        for run in runs
        if run.name == arm[0]
        for row in run.rows
        if (row["relay"], row["temperature"], row["family"]) == (arm[1], temperature, family)
    ]


def render(runs: list[Run], pictures: Any) -> str:
    """The page; `pictures` draws what it shows and says where."""
    every = arms(runs)
    temperatures = sorted({row["temperature"] for run in runs for row in run.rows})
    families = list(dict.fromkeys(row["family"] for run in runs for row in run.rows))
    families = [one for one in families if one != "pooled"] + ["pooled"]
    parts = ["<h1>Runs side by side</h1>", INTRODUCTION]
    parts += [tau_table(runs, every, t, families) for t in temperatures]
    parts.append(pictures.taus(runs, every, temperatures))
    parts += ["<h2>Acceptance by position, and accepted drafts</h2>"]
    parts += [pictures.positions(runs, every, t) for t in temperatures]
    parts += [pictures.histograms(runs, every, t) for t in temperatures]
    parts += overlap_parts(runs, temperatures, pictures)
    curves = pictures.curves(runs)
    if curves:
        parts += ["<h2>Training, by rollout round</h2>", curves]
    parts += ["<h2>Cost</h2>", cost_table(runs, every, temperatures[0])]
    sources = "".join(f"<li>{escape(str(run.folder))}</li>" for run in runs)
    parts += ["<h2>Runs</h2>", f"<ul>{sources}</ul>", conditions(runs[0].environment)]
    return page("dflow-lightning runs", parts)


def tau_table(runs: list[Run], every: list[Arm], temperature: float, families: list[str]) -> str:
    """A line an arm; the last column compares the pooled mean to the first line's."""
    lines, reference = [], None
    for arm in every:
        cells = [taus(runs, arm, temperature, family) for family in families]
        pooled = sum(cells[-1]) / len(cells[-1]) if cells[-1] else None
        reference = reference or pooled
        ratio = pooled / reference if pooled and reference else None
        lines.append(
            [label(arm, every), str(len(cells[-1])), *map(with_spread, cells), number(ratio)]
        )
    header = ["drafter", "seeds", *families, "pooled / first row"]
    return table(f"Acceptance length tau, T={temperature:g}", header, lines)


def overlap_parts(runs: list[Run], temperatures: list[float], pictures: Any) -> list[str]:
    """Where the relay helps: of paired rounds where the bench has them, and of all rounds."""
    parts = ["<h2>Where the relay helps</h2>"]
    for name in dict.fromkeys(run.name for run in runs):
        mine = [run for run in runs if run.name == name]
        kinds: dict[tuple[float, str], list[Overlap]] = {}
        for one in [record for run in mine for record in run.overlaps]:
            kinds.setdefault((one.temperature, one.family), []).append(one)
        records = [added(same) for same in kinds.values()]
        if records:
            parts += [pictures.gains(name, records), *paired_tables(records, name)]
        for temperature in temperatures:
            rows = [r for run in mine for r in run.rows if r["temperature"] == temperature]
            if any(row["relay"] == "on" for row in rows):
                parts += unpaired_table(rows, f"{name}, T={temperature:g}")
    if len(parts) == 1:
        parts.append(
            "<p>Not measured: none of these runs was benched with its relay by a version that "
            "counts rounds by the round before. dflow-train bench --overlap does, and more.</p>"
        )
    return parts


def cost_table(runs: list[Run], every: list[Arm], temperature: float) -> str:
    """Processor time of a training step, and what the bench has timed; means over seeds."""
    lines = []
    for arm in every:
        mine = [run for run in runs if run.name == arm[0]]
        rows = [
            row
            for run in mine
            for row in run.rows
            if (row["relay"], row["temperature"], row["family"]) == (arm[1], temperature, "pooled")
        ]
        steps = [1000 * run.seconds / run.steps for run in mine if run.seconds and run.steps]
        parts = [row.get("round_milliseconds") or {} for row in rows]
        split = [mean([one[part] for one in parts if part in one]) for part in PARTS]
        lines.append(
            [
                label(arm, every),
                number(mean(steps), 0),
                *(number(value, 2) for value in split),
                number(mean([r["tokens_per_second"] for r in rows if r["tokens_per_second"]]), 0),
                number(mean([r["speedup"] for r in rows if r["speedup"]]), 3, "x"),
            ]
        )
    header = [
        "drafter", "training step, processor ms", *(f"{part}, ms" for part in PARTS), "tokens/s",
        "over plain",
    ]  # fmt: skip
    caption = (
        f"Means over seeds; the step with data, validation and start-up shared out; rounds at "
        f"T={temperature:g}, as the bench ran them"
    )
    return table(caption, header, lines)


PARTS = ("whole", "draft", "verify", "relay", "commit")


def mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None


def conditions(environment: dict[str, Any]) -> str:
    """What all runs have in common."""
    keys = (*SAME_CONDITIONS, "suite", "concurrency", "versions", "dtype")
    lines = [[key, json.dumps(environment[key])] for key in keys if key in environment]
    return table("Measured alike", ["what", "value"], lines)
