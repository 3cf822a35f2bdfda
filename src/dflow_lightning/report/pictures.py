"""The pictures of a report of runs: PNG files that can be read in black and white."""

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from dflow_lightning.bench.overlap_record import Overlap
from dflow_lightning.errors import InputError
from dflow_lightning.html import image
from dflow_lightning.report.overlap_tables import entropy_bins, slot_gains
from dflow_lightning.report.runs import Arm, Run, label, taus

try:
    import matplotlib as mpl
except ImportError:
    raise InputError(
        "runs: pictures need matplotlib; install it with pip install 'dflow-lightning[plots]'"
    ) from None
mpl.use("Agg")
from matplotlib.figure import Figure

DASHES = ("-", "--", ":", "-.", (0, (5, 1, 1, 1, 1, 1)))
MARKERS = ("o", "s", "^", "D", "x", "v")
GREYS = ("0.0", "0.35", "0.55", "0.2", "0.7")
ON: dict[str, Any] = {"color": "0.0", "linestyle": "-", "marker": "o"}
OFF: dict[str, Any] = {
    "color": "0.4", "linestyle": "--", "marker": "s", "markerfacecolor": "white",
}  # fmt: skip
POINTS = 20  # of a training curve: means of neighbours
COLUMNS = 3


class Pictures:
    """Draws into a folder; every method returns the HTML that shows its picture.

    Args:
        folder: where the files go now.
        name: the folder's name beside the page.
    """

    def __init__(self, folder: Path, name: str) -> None:
        self._folder, self._name = folder, name

    def _save(self, figure: Figure, name: str, caption: str) -> str:
        figure.savefig(self._folder / f"{name}.png", dpi=110)
        return image(f"{self._name}/{name}.png", caption)

    def taus(self, runs: list[Run], every: list[Arm], temperatures: Sequence[float]) -> str:
        """Pooled tau: a point a seed, a bar for their mean."""
        figure = Figure(
            figsize=(4.2 * len(temperatures) + 2.2, 0.34 * len(every) + 1.3), layout="constrained"
        )
        axes = figure.subplots(1, len(temperatures), sharex=True, sharey=True, squeeze=False)[0]
        for axis, temperature in zip(axes, temperatures, strict=True):
            for y, arm in enumerate(every):
                values = taus(runs, arm, temperature, "pooled")
                if not values:
                    continue
                on = arm[1] == "on"
                axis.barh(
                    y, sum(values) / len(values), height=0.7, facecolor="0.8" if on else "1.0",
                    edgecolor="0.0", hatch="" if on else "//", linewidth=0.8,
                )  # fmt: skip
                axis.plot(
                    values, [y] * len(values), "o", color="0.0", markerfacecolor="1.0", markersize=5
                )
            axis.set_title(f"T={temperature:g}")
            axis.set_xlabel("tau: tokens per round")
            axis.set_xlim(left=1.0)  # no acceptance at all
            axis.grid(axis="x", color="0.85")
            axis.set_axisbelow(True)
        axes[0].set_yticks(range(len(every)), [label(arm, every) for arm in every])
        axes[0].invert_yaxis()
        return self._save(
            figure, "tau",
            "tau over all families: bars are means, points are seeds; the axis begins at 1, where "
            "no draft is accepted; grey with relay, hatched without",
        )  # fmt: skip

    def positions(self, runs: list[Run], every: list[Arm], temperature: float) -> str:
        """Share of rounds that accept at least j drafts: a panel a drafter."""
        figure, panels = grid(every)
        for axis, name in panels:
            for relay, style in (("on", ON), ("off", OFF)):
                shares = averaged(runs, (name, relay), temperature, "position_acceptance")
                if shares:
                    axis.plot(
                        range(1, len(shares) + 1), [100 * share for share in shares], markersize=5,
                        label=f"relay {relay}" if (name, "on") in every else "no relay", **style,
                    )  # fmt: skip
                    axis.set_xticks(range(1, len(shares) + 1))
            decorate(axis, name, "draft position j", "rounds that accept j, %")
            axis.set_ylim(0, 100)
        return self._save(
            figure, f"positions-T{temperature:g}",
            f"Rounds that accept at least j drafts, T={temperature:g}, all families, mean of seeds",
        )  # fmt: skip

    def histograms(self, runs: list[Run], every: list[Arm], temperature: float) -> str:
        """Rounds by accepted drafts: a panel a drafter."""
        figure, panels = grid(every)
        for axis, name in panels:
            both = (name, "on") in every
            for shift, relay in ((-0.2, "on"), (0.2, "off")):
                counts = averaged(runs, (name, relay), temperature, "histogram")
                if counts:
                    axis.bar(
                        [a + (shift if both else 0.0) for a in range(len(counts))],
                        [100 * n / max(1e-9, sum(counts)) for n in counts],
                        width=0.4 if both else 0.7, edgecolor="0.0", linewidth=0.8,
                        facecolor="0.3" if relay == "on" else "1.0",
                        hatch="" if relay == "on" else "///",
                        label=f"relay {relay}" if both else "no relay",
                    )  # fmt: skip
                    axis.set_xticks(range(len(counts)))
            decorate(axis, name, "accepted drafts a", "rounds, %")
        return self._save(
            figure, f"histogram-T{temperature:g}",
            f"Rounds by number of accepted drafts, T={temperature:g}, all families",
        )  # fmt: skip

    def gains(self, name: str, records: list[Overlap]) -> str:
        """Gain of the relay in equal states: by the round before, by slot and by entropy."""
        families = list(dict.fromkeys(one.family for one in records))
        temperatures = sorted({one.temperature for one in records})
        by = {(one.temperature, one.family): one for one in records}
        figure = Figure(figsize=(3.2 * len(families) + 0.6, 8.4), layout="constrained")
        rows = figure.subplots(3, len(families), sharey="row", squeeze=False)
        for column, family in enumerate(families):
            for index, temperature in enumerate(temperatures):
                one = by.get((temperature, family))
                if one is None:
                    continue
                style = {
                    "color": GREYS[index], "linestyle": DASHES[index], "marker": MARKERS[index],
                    "markersize": 5, "markerfacecolor": "0.0" if index == 0 else "1.0",
                }  # fmt: skip
                title = f"T={temperature:g}"
                gain_by_round(rows[0][column], one, title, style)
                gain_by_slot(rows[1][column], one, title, index)
                gain_by_entropy(rows[2][column], one, title, style)
            found = [by[t, family].entropy for t in temperatures if (t, family) in by]
            entropies = ", ".join(f"{entropy:.2f}" for entropy in found)
            rows[0][column].set_title(f"{family}: entropy {entropies} nats", fontsize=10)
        for row, y_label in zip(
            rows, ("gain, accepted drafts", "gain in hits, points", "gain in hits, points"),
            strict=True,
        ):  # fmt: skip
            row[0].set_ylabel(y_label)
            for axis in row:
                axis.axhline(0, color="0.0", linewidth=0.8)
                axis.grid(color="0.88")
                axis.set_axisbelow(True)
            # Beside the panels, so that it hides no point.
            handles = next((h for h in (a.get_legend_handles_labels() for a in row) if h[0]), None)
            if handles:
                row[-1].legend(*handles, fontsize=8, loc="upper left", bbox_to_anchor=(1.02, 1.0))
        return self._save(
            figure, f"overlap-{name}",
            f"{name}: what the relay gains, same rounds drafted with and without it; points of "
            f"fewer than {FEWEST} rounds or drafts are left out. Top: by accepted drafts of the "
            "round before, bars are standard errors. Middle: hits by slot; open and dotted where "
            "the slot had no relay row. Bottom: hits of slots with a row, by the target's entropy",
        )  # fmt: skip

    def curves(self, runs: list[Run]) -> str:
        """tau of each rollout round during training, a panel a drafter; nothing without records."""
        drawn = [run for run in runs if run.curves]
        if not drawn:
            return ""
        figure, panels = grid([(run.name, "on") for run in drawn])
        for axis, name in panels:
            mine = [run for run in drawn if run.name == name]
            for index, key in enumerate(sorted({key for run in mine for key in run.curves})):
                points = sorted(point for run in mine for point in run.curves.get(key, []))
                axis.plot(
                    *smoothed(points), color=GREYS[index % len(GREYS)], linewidth=1.3,
                    linestyle=DASHES[index % len(DASHES)], marker=MARKERS[index % len(MARKERS)],
                    markersize=4, markerfacecolor="0.0" if index == 0 else "1.0",
                    label=f"round {key.removeprefix('train/tau_round')}",
                )  # fmt: skip
            decorate(axis, name, "optimizer step", "tau of blocks in training")
        return self._save(
            figure, "curves",
            "tau of the mask round (0) and the rollout rounds in training, a point a mean of "
            "neighbouring steps of all seeds. Rounds differ in their blocks: only those that "
            "rejected a draft go on",
        )  # fmt: skip


FEWEST = 20  # rounds or drafts; a point of fewer says nothing
NOTHING = float("nan")  # leaves a gap in a line


def gain_by_round(axis: Any, one: Overlap, title: str, style: dict[str, Any]) -> None:
    """Gain in accepted drafts, with standard errors."""
    points = [
        gain if gain is not None and rounds >= FEWEST else (NOTHING, NOTHING)
        for gain, rounds in zip(one.gain(), one.rounds, strict=True)
    ]
    gains, errors = zip(*points, strict=True)
    axis.errorbar(range(len(points)), gains, yerr=errors, capsize=3, label=title, **style)
    axis.set_xlabel("accepted drafts a of the round before")
    axis.set_xticks(range(one.num_draft_tokens + 1))
    axis.set_xlim(-0.4, one.num_draft_tokens + 0.4)


def gain_by_slot(axis: Any, one: Overlap, title: str, index: int) -> None:
    """Gain in hits, of slots with and without a relay row."""
    for with_row in (True, False):
        gains = [
            100 * gain[0] if gain is not None and gain[1] >= FEWEST else NOTHING
            for gain in slot_gains(one, with_row=with_row)
        ]
        axis.plot(
            range(1, len(gains) + 1),
            gains,
            color=GREYS[index],
            linestyle=DASHES[index] if with_row else ":",
            marker=MARKERS[index],
            markerfacecolor=GREYS[index] if with_row else "1.0",
            markersize=5,
            label=f"{title}, {'relay row' if with_row else 'no row'}",
        )
    axis.set_xlabel("slot of the block")
    axis.set_xticks(range(1, one.num_draft_tokens + 1))


def gain_by_entropy(axis: Any, one: Overlap, title: str, style: dict[str, Any]) -> None:
    """Gain in hits of slots with a row, by how sure the target is."""
    gains = [
        100 * (on - off) / total if total >= FEWEST else NOTHING
        for total, on, off in zip(
            one.entropy_slots, one.entropy_hits_on, one.entropy_hits_off, strict=True
        )
    ]
    axis.plot(range(len(gains)), gains, label=title, **style)
    names = entropy_bins(one)
    axis.set_xticks(range(len(names)), names, rotation=35, ha="right", fontsize=8)
    axis.set_xlabel("entropy of the target, nats")


def grid(every: Sequence[Arm]) -> tuple[Figure, Iterator[tuple[Any, str]]]:
    """A figure with a panel for each name."""
    names = list(dict.fromkeys(name for name, _ in every))
    columns = min(COLUMNS, len(names))
    rows = -(-len(names) // columns)
    figure = Figure(figsize=(3.6 * columns, 2.7 * rows), layout="constrained")
    axes = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)
    flat = list(axes.flat)
    for spare in flat[len(names) :]:
        spare.set_visible(False)
    for axis in flat:
        axis.tick_params(labelbottom=True, labelleft=True)
    return figure, zip(flat, names, strict=False)


def decorate(axis: Any, title: str, x_label: str, y_label: str) -> None:
    """What every panel has."""
    axis.set_title(title, fontsize=10)
    axis.set_xlabel(x_label)
    axis.set_ylabel(y_label)
    axis.grid(color="0.88")
    axis.set_axisbelow(True)
    if axis.get_legend_handles_labels()[0]:
        axis.legend(fontsize=8)


def averaged(runs: list[Run], arm: Arm, temperature: float, key: str) -> list[float]:
    """A list of numbers of the pooled rows, mean over seeds."""
    found = [
        row[key]
        for run in runs
        if run.name == arm[0]
        for row in run.rows
        if (row["relay"], row["temperature"], row["family"]) == (arm[1], temperature, "pooled")
    ]
    return [sum(values) / len(values) for values in itertools.zip_longest(*found, fillvalue=0)]


def smoothed(points: Sequence[tuple[int, float]]) -> tuple[list[float], list[float]]:
    """At most `POINTS` points: means of neighbours."""
    size = max(1, -(-len(points) // POINTS))
    groups = [points[first : first + size] for first in range(0, len(points), size)]
    steps = [sum(step for step, _ in group) / len(group) for group in groups]
    return steps, [sum(value for _, value in group) / len(group) for group in groups]
