"""The tables of `compare.py`, and their places in docs/results.md."""

import itertools
import shlex
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from compare_rows import BASE, GOALS, ORDER, PAPER, PAPER_SOURCE

from dflow_lightning.html import with_spread

RESULTS = Path("docs/results.md")
POOLED = {0: "0/pooled", 1: "1/pooled"}  # cells of the table, by temperature
Table = dict[str, dict[str, dict[str, Any]]]


def collect(rows: dict[tuple[str, int], list[dict]]) -> Table:
    """Tau of each seed by row name and `temperature/family`; relay-off rows have their own names.

    Args:
        rows: the bench rows of each row name and seed.
    """
    table: Table = {}
    for (name, seed), found in sorted(rows.items()):
        has_relay = any(row["relay"] == "on" for row in found)
        for row in found:
            title = f"{name}, relay {row['relay']}" if has_relay else name
            cell = f"{row['temperature']:g}/{row['family']}"
            entry = table.setdefault(title, {}).setdefault(
                cell, {"seeds": [], "tau": [], "lossless": True}
            )
            entry["seeds"].append(seed)
            entry["tau"].append(row["tau"])
            entry["lossless"] &= row["lossless"] is not False
    known = [title for title in ORDER if title in table]
    return {title: table[title] for title in [*known, *(t for t in table if t not in known)]}


def tau_table(table: Table, per_family: int) -> list[str]:
    """A line a drafter, a column a temperature and family."""
    first = next(iter(table.values()))
    families = [cell.partition("/")[2] for cell in first if cell.startswith("0/")]
    cells = [f"{t}/{family}" for t in (0, 1) for family in families]
    lines = [
        "tau (accepted drafts + 1), mean of the seeds ± (largest - smallest); "
        f"{per_family} prompts a family",
        "",
        *header(["drafter", "seeds", *(f"T={c.replace('/', ' ')}" for c in cells), "lossless"]),
    ]
    for title, row in table.items():
        lossless = all(entry["lossless"] for entry in row.values())
        values = [with_spread(row[c]["tau"]) for c in cells]
        seeds = len(row[cells[0]]["tau"])
        lines.append(line([title, seeds, *values, "yes" if lossless else "NO"]))
    return lines


def paper_table(table: Table) -> list[str]:
    """Pooled tau and its ratio to DFlash, here and in the paper; then where the order differs."""
    lines = [
        f"Beside the paper ({PAPER_SOURCE}). The paper's tau counts accepted drafts, ours the "
        f"bonus token as well. Ratios are to the row {BASE}, seed by seed",
        "",
        *header(
            ["drafter", "T=0", "ratio", "paper T=0", "ratio", "T=1", "ratio", "paper T=1", "ratio"]
        ),
    ]
    for title in table:
        cells: list[str] = []
        for temperature, cell in POOLED.items():
            published = PAPER.get(title, (None, None))[temperature]
            base = PAPER[BASE][temperature]
            ours = [with_spread(table[title][cell]["tau"]), "-"]
            if BASE in table:
                values = ratios(table, title, BASE, cell)
                ours[1] = f"{statistics.mean(values):.3f}" if values else "-"
            paper = ["-", "-"]
            if published is not None and base is not None:
                paper = [f"{published:.2f}", f"{published / base:.3f}"]
            cells += [*ours, *paper]
        lines.append(line([title, *cells]))
    return [*lines, "", *order_differences(table)]


def order_differences(table: Table) -> list[str]:
    """Pairs of rows that stand the other way round in the paper, at T=0."""
    means = {title: statistics.mean(table[title][POOLED[0]]["tau"]) for title in table}
    published = {title: values[0] for title, values in PAPER.items() if title in table}
    found = [
        f"- order: {a} ({means[a]:.3f}) is {'above' if means[a] > means[b] else 'below'} {b} "
        f"({means[b]:.3f}) here, in the paper the other way round ({pa:.2f}, {pb:.2f})"
        for (a, pa), (b, pb) in itertools.combinations(published.items(), 2)
        if pa is not None and pb is not None and (means[a] - means[b]) * (pa - pb) < 0
    ]
    return found or ["All rows that the paper has stand in the paper's order at T=0."]


def ratios(table: Table, one: str, other: str, cell: str) -> list[float]:
    """One row over another, for the seeds that both have."""
    mine, theirs = table[one][cell], table[other][cell]
    others = dict(zip(theirs["seeds"], theirs["tau"], strict=True))
    return [
        tau / others[seed]
        for seed, tau in zip(mine["seeds"], mine["tau"], strict=True)
        if seed in others
    ]


def goals_table(table: Table) -> list[str]:
    """Pooled tau of one row over another, and whether it is high enough."""
    lines = header(["pooled tau of", "over", "T", "ratio (mean)", "each seed", "goal", "met"])
    for one, other, temperature, goal in GOALS:
        if not {one, other} <= table.keys():
            continue  # left out, or not there yet
        cell = POOLED[temperature]
        values = ratios(table, one, other, cell)
        if not values:
            continue
        mean = statistics.mean(values)
        each = ", ".join(f"{value:.3f}" for value in values)
        if goal is None:
            mine, theirs = table[one][cell]["tau"], table[other][cell]["tau"]
            above = statistics.mean(mine) - statistics.mean(theirs)
            met, said = above > max(spread(mine), spread(theirs)), "more than the spread above"
        else:
            # Nothing is above itself: of two equal rows neither is better.
            met, said = mean >= goal and mean > 1.0, f"{goal:.3f}" if goal > 1 else "above 1"
        lines.append(
            line([one, other, temperature, f"{mean:.3f}", each, said, "yes" if met else "no"])
        )
    return lines


def header(names: Sequence[str]) -> list[str]:
    return [line(names), "|" + "---|" * len(names)]


def line(cells: Sequence[object]) -> str:
    return f"| {' | '.join(map(str, cells))} |"


def spread(values: Sequence[float]) -> float:
    """Largest minus smallest."""
    return max(values) - min(values)


def publish(mark: str, lines: Sequence[str]) -> None:
    """Put lines between the marks `mark` in docs/results.md, with where they come from."""
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    ).stdout.strip()
    command = shlex.join(["python", *sys.argv])
    start, end = f"<!-- {mark} -->", f"<!-- /{mark} -->"
    page = RESULTS.read_text()
    if start not in page or end not in page:
        raise SystemExit(f"{RESULTS} has no place for this: add the lines {start} and {end}")
    before, _, rest = page.partition(start)
    _, _, after = rest.partition(end)
    origin = f"Made by `{command}` at commit `{commit}`."
    text = "\n".join([start, origin, "", *lines, end])
    RESULTS.write_text(f"{before}{text}{after}")
