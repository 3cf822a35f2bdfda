"""The pictures of a report of runs: PNG files that can be read in black and white."""

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from dflow_lightning.html import image
from dflow_lightning.report.charts import DASHES, GREYS, MARKERS
from dflow_lightning.report.runs import MeasuredRun, RunArm, arm_label, taus

ON: dict[str, Any] = {"color": "0.0", "linestyle": "-", "marker": "o"}
OFF: dict[str, Any] = {
    "color": "0.4", "linestyle": "--", "marker": "s", "markerfacecolor": "white",
}  # fmt: skip
POINTS = 20  # of a training curve: means of neighbours
_COLUMNS = 3


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

    def taus(
        self, runs: list[MeasuredRun], every: list[RunArm], temperatures: Sequence[float]
    ) -> str:
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
        axes[0].set_yticks(range(len(every)), [arm_label(arm, every) for arm in every])
        axes[0].invert_yaxis()
        return self._save(
            figure, "tau",
            "tau over all families: bars are means, points are seeds; the axis begins at 1, where "
            "no draft is accepted; grey with relay, hatched without",
        )  # fmt: skip

    def positions(self, runs: list[MeasuredRun], every: list[RunArm], temperature: float) -> str:
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

    def histograms(self, runs: list[MeasuredRun], every: list[RunArm], temperature: float) -> str:
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

    def curves(self, runs: list[MeasuredRun]) -> str:
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


def grid(every: Sequence[RunArm]) -> tuple[Figure, Iterator[tuple[Any, str]]]:
    """A figure with a panel for each name."""
    names = list(dict.fromkeys(name for name, _ in every))
    columns = min(_COLUMNS, len(names))
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


def averaged(runs: list[MeasuredRun], arm: RunArm, temperature: float, key: str) -> list[float]:
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
