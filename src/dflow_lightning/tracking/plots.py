"""Charts of a validation as PNG, for those who look at artifacts."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

from dflow_lightning.training.validation import Measured

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MODES = {"": "relay on", "_relay_off": "relay off"}
STYLES = {"": ("#1b6e1b", "o", "-"), "_relay_off": ("#444444", "s", "--")}
_HATCHES = {"": "", "_relay_off": "///"}


def acceptance_plot(measured: Measured) -> bytes:
    """Share of rounds that accepted each draft position, relay on and off."""
    figure = new_figure()
    axes = figure.add_subplot()
    for suffix in measured.passes:
        head = f"/position_acceptance{suffix}/"
        shares = {
            int(name.rpartition("/")[2]): value
            for name, value in measured.metrics.items()
            if head in name
        }
        color, marker, line = STYLES[suffix]
        places = sorted(shares)
        axes.set_xticks(places)
        axes.plot(
            places, [100 * shares[p] for p in places],
            color=color, marker=marker, linestyle=line, label=curve_label(measured, suffix),
        )  # fmt: skip
    axes.set_xlabel("draft position")
    axes.set_ylabel("accepted at least so far, % of rounds")
    axes.set_ylim(0, 100)
    axes.set_title(f"Acceptance of each position at step {measured.step}")
    return finished(figure, axes)


def tau_plot(measured: Measured) -> bytes:
    """tau of every task family and over all prompts, relay on and off."""
    figure = new_figure()
    axes = figure.add_subplot()
    suffixes = list(measured.passes)
    width = 0.8 / max(1, len(suffixes))
    for index, suffix in enumerate(suffixes):
        taus = taus_of(measured, suffix)
        places = [i + (index - (len(suffixes) - 1) / 2) * width for i in range(len(taus))]
        bars = axes.bar(
            places, list(taus.values()), width, label=curve_label(measured, suffix),
            color=STYLES[suffix][0] if not suffix else "#dddddd",
            hatch=_HATCHES[suffix], edgecolor="black",
        )  # fmt: skip
        axes.bar_label(bars, fmt="%.2f", padding=2, fontsize=9)
        axes.set_xticks(range(len(taus)), list(taus))
    axes.set_ylabel("tau, tokens a round")
    axes.margins(y=0.15)
    axes.set_title(f"Acceptance length by real decoding at step {measured.step}")
    return finished(figure, axes)


def taus_of(measured: Measured, suffix: str) -> dict[str, float]:
    """tau over all prompts and of each family of one pass."""
    return {
        "/".join(name.split("/")[1:-1]) or "all": value
        for name, value in measured.metrics.items()
        if name.rpartition("/")[2] == f"tau{suffix}"
    }


def curve_label(measured: Measured, suffix: str) -> str:
    """What a pass is called in a legend."""
    return MODES[suffix] if len(measured.passes) > 1 else "no relay"


def new_figure() -> Figure:
    """A figure without any window system."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def finished(figure: Figure, axes: Any) -> bytes:
    """The PNG file of a figure."""
    axes.grid(axis="y", alpha=0.4)
    axes.set_axisbelow(True)
    axes.legend()
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()
