"""Charts as SVG inside a page that loads nothing; they can be read in black and white."""

import io
import re
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

# Every series has a grey, a dash, a marker and a hatch of its own.
GREYS = ("0.0", "0.35", "0.55", "0.2", "0.7")
DASHES = ("-", "--", ":", "-.", (0, (5, 1, 1, 1, 1, 1)))
MARKERS = ("o", "s", "^", "D", "x", "v")
_HATCHES = ("", "///", "...", "---", "xxx", "\\\\\\")
FILLS = ("0.0", "1.0", "0.75", "1.0", "1.0", "0.9")


@dataclass(frozen=True)
class Series:
    """One line of a chart: its name and its value at each x; None leaves a gap."""

    name: str
    values: Sequence[float | None]


def share_chart(title: str, x_label: str, series: Sequence[Series]) -> str:
    """Lines of shares between 0 and 1 over 1, 2, ..."""
    num_x = max(len(one.values) for one in series)
    figure, axes = _new(x_label, "share of rounds")
    _lines(axes, [str(x + 1) for x in range(num_x)], series)
    axes.set_ylim(0, 1)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    return _svg(figure, axes, title)


def rate_chart(
    title: str, x_label: str, x_names: Sequence[str], y_label: str, series: Sequence[Series]
) -> str:
    """Lines of positive numbers from 0; the named places of x are equally far apart."""
    figure, axes = _new(x_label, y_label)
    _lines(axes, x_names, series)
    axes.set_ylim(bottom=0)
    return _svg(figure, axes, title)


def bar_chart(title: str, x_label: str, series: Sequence[Series]) -> str:
    """Shares over 0, 1, ... as bars side by side."""
    figure, axes = _new(x_label, "share of rounds")
    width = 0.8 / len(series)
    for index, one in enumerate(series):
        shift = (index - (len(series) - 1) / 2) * width
        axes.bar(
            [x + shift for x in range(len(one.values))], [value or 0.0 for value in one.values],
            width, label=one.name, hatch=_HATCHES[index % len(_HATCHES)],
            facecolor=FILLS[index % len(FILLS)], edgecolor="0.0", linewidth=0.8,
        )  # fmt: skip
    axes.set_xticks(range(max(len(one.values) for one in series)))
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    return _svg(figure, axes, title)


def own_ids(html: str, number: int) -> str:
    """A chart whose ids no other chart of the page has: matplotlib numbers them from 1 in each."""
    if "<svg" not in html:
        return html
    return re.sub(r'(\bid="|href="#|url\(#)', rf"\1chart{number}-", html)


def _new(x_label: str, y_label: str) -> tuple[Figure, Any]:
    figure = Figure(figsize=(7, 3.6), layout="constrained")
    axes = figure.subplots()
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    axes.grid(axis="y", color="0.88")
    axes.set_axisbelow(True)
    return figure, axes


def _lines(axes: Any, x_names: Sequence[str], series: Sequence[Series]) -> None:
    for index, one in enumerate(series):
        axes.plot(
            range(len(one.values)),
            [float("nan") if value is None else value for value in one.values],
            color=GREYS[index % len(GREYS)], linestyle=DASHES[index % len(DASHES)],
            marker=MARKERS[index % len(MARKERS)], label=one.name, gid=f"series{index}",
        )  # fmt: skip
    axes.set_xticks(range(len(x_names)), x_names)


def _svg(figure: Figure, axes: Any, title: str) -> str:
    """The chart as part of a page; its texts stay text, so that they can be searched."""
    axes.legend(fontsize=9, loc="upper left", bbox_to_anchor=(0, -0.18), frameon=False)
    buffer = io.StringIO()
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": title}):
        figure.savefig(buffer, format="svg")
    text = buffer.getvalue()
    text = text[text.index("<svg") :]  # without the head of a file of its own
    # A page needs neither namespaces nor a description of the file, which both name addresses.
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r'\sxmlns(:\w+)?="[^"]*"', "", text).replace("xlink:href", "href")
    name = escape(title)
    svg = text.replace("<svg", f'<svg role="img" aria-label="{name}"', 1)
    return f"<figure><figcaption>{name}</figcaption>{svg}</figure>"
