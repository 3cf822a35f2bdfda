"""The page of whole runs: tables, with pictures in a folder beside it."""

import json
from html import escape
from pathlib import Path
from typing import Any

from dflow_lightning import files
from dflow_lightning.errors import InputError
from dflow_lightning.html import html_table, number, page, with_spread
from dflow_lightning.report.conditions import SAME_CONDITIONS, check_same_conditions
from dflow_lightning.report.relay_table import unpaired_table
from dflow_lightning.report.runs import (
    RECORD,
    MeasuredRun,
    RunArm,
    arm_label,
    find_runs,
    read_run,
    run_arms,
    taus,
)

_INTRODUCTION = (
    "<p>tau is the acceptance length: accepted drafts + 1 bonus token per round, pooled over all "
    "rounds; the mean over seeds ± (largest - smallest). With the relay off a drafter is the same "
    "checkpoint, its relay switched off. Only runs that were measured alike share a page.</p>"
)


def report_runs(runs: list[Path], sweep: Path | None, out: Path) -> None:
    """Write the page and its pictures.

    Raises:
        InputError: a folder holds no finished run, or runs were not measured alike.
    """
    from dflow_lightning.report.pictures import Pictures

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
    with files.staged_folder(beside) as staged:
        text = runs_page(found, Pictures(staged, beside.name))
    files.write_text(out, text)
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


def runs_page(runs: list[MeasuredRun], pictures: Any) -> str:
    """The page; `pictures` draws what it shows and says where."""
    every = run_arms(runs)
    temperatures = sorted({row["temperature"] for run in runs for row in run.rows})
    families = list(dict.fromkeys(row["family"] for run in runs for row in run.rows))
    families = [one for one in families if one != "pooled"] + ["pooled"]
    parts = ["<h1>Runs side by side</h1>", _INTRODUCTION]
    parts += [_tau_table(runs, every, t, families) for t in temperatures]
    parts.append(pictures.taus(runs, every, temperatures))
    parts += ["<h2>Acceptance by position, and accepted drafts</h2>"]
    parts += [pictures.positions(runs, every, t) for t in temperatures]
    parts += [pictures.histograms(runs, every, t) for t in temperatures]
    parts += relay_parts(runs, temperatures)
    curves = pictures.curves(runs)
    if curves:
        parts += ["<h2>Training, by rollout round</h2>", curves]
    parts += ["<h2>Cost</h2>", cost_table(runs, every, temperatures[0])]
    sources = "".join(f"<li>{escape(str(run.folder))}</li>" for run in runs)
    parts += ["<h2>Runs</h2>", f"<ul>{sources}</ul>", conditions(runs[0].environment)]
    return page("dflow-lightning runs", parts)


def _tau_table(
    runs: list[MeasuredRun], every: list[RunArm], temperature: float, families: list[str]
) -> str:
    """A line an arm; the last column compares the pooled mean to the first line's."""
    lines, reference = [], None
    for arm in every:
        cells = [taus(runs, arm, temperature, family) for family in families]
        pooled = sum(cells[-1]) / len(cells[-1]) if cells[-1] else None
        reference = reference or pooled
        ratio = pooled / reference if pooled and reference else None
        lines.append(
            [arm_label(arm, every), str(len(cells[-1])), *map(with_spread, cells), number(ratio)]
        )
    header = ["drafter", "seeds", *families, "pooled / first row"]
    return html_table(f"Acceptance length tau, T={temperature:g}", header, lines)


def relay_parts(runs: list[MeasuredRun], temperatures: list[float]) -> list[str]:
    """Where the relay helps; nothing where no run was measured with one."""
    parts = ["<h2>Where the relay helps</h2>"]
    for name in dict.fromkeys(run.name for run in runs):
        mine = [run for run in runs if run.name == name]
        for temperature in temperatures:
            rows = [r for run in mine for r in run.rows if r["temperature"] == temperature]
            if any(row["relay"] == "on" for row in rows):
                parts += unpaired_table(rows, f"{name}, T={temperature:g}")
    return parts if len(parts) > 1 else []


def cost_table(runs: list[MeasuredRun], every: list[RunArm], temperature: float) -> str:
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
        split = [mean([one[part] for one in parts if part in one]) for part in _ROUND_PARTS]
        lines.append(
            [
                arm_label(arm, every),
                number(mean(steps), 0),
                *(number(value, 2) for value in split),
                number(mean([r["tokens_per_second"] for r in rows if r["tokens_per_second"]]), 0),
                number(mean([r["speedup"] for r in rows if r["speedup"]]), 3, "x"),
            ]
        )
    header = [
        "drafter", "training step, processor ms", *(f"{part}, ms" for part in _ROUND_PARTS),
        "tokens/s", "over plain",
    ]  # fmt: skip
    caption = (
        f"Means over seeds; the step with data, validation and start-up shared out; rounds at "
        f"T={temperature:g}, as the bench ran them"
    )
    return html_table(caption, header, lines)


# `stopwatch.ROUND_PARTS`, without loading torch for a page of text. A test compares the two.
_ROUND_PARTS = ("whole", "draft", "verify", "relay", "commit")


def mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None


def conditions(environment: dict[str, Any]) -> str:
    """What all runs have in common."""
    keys = (*SAME_CONDITIONS, "suite", "concurrency", "versions", "dtype")
    lines = [[key, json.dumps(environment[key])] for key in keys if key in environment]
    return html_table("Measured alike", ["what", "value"], lines)
