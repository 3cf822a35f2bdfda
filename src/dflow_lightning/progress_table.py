"""The table of a validation: tau of each family of prompts, relay on and off, the best so far."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from rich.console import Console

from dflow_lightning.terminal import print_table, table

TOGETHER = "all"  # what the row of all families is called


class Best(NamedTuple):
    """The largest tau so far, and the step it was measured at; None for before this process."""

    tau: float
    step: int | None


class Decoded(NamedTuple):
    """Tau of one family, with the relay (or of a drafter without one) and without it."""

    tau: float
    relay_off: float | None


def decoded(metrics: Mapping[str, Any], prefix: str) -> dict[str, Decoded]:
    """What a pass of `ValidationDecoding` logged, by family, all together last."""
    found = {}
    for name in sorted(metrics):
        parts = name.split("/")
        if parts[0] == prefix and parts[2:] == ["tau"]:
            found[parts[1]] = _read(metrics, name)
    if f"{prefix}/tau" in metrics:
        found[TOGETHER] = _read(metrics, f"{prefix}/tau")
    return found


def _read(metrics: Mapping[str, Any], name: str) -> Decoded:
    off = metrics.get(f"{name}_relay_off")
    return Decoded(float(metrics[name]), None if off is None else float(off))


class BestSoFar:
    """The best tau of every family; the last one alone is of the checkpoint that is kept."""

    def __init__(self) -> None:
        self._best: dict[str, Best] = {}

    def start(self, tau: float | None) -> None:
        """What a resumed run had reached, of all families together."""
        if tau is not None and TOGETHER not in self._best:
            self._best[TOGETHER] = Best(tau, None)

    def update(self, found: Mapping[str, Decoded], step: int) -> dict[str, Best]:
        """Take in a validation; returns the best of every family."""
        for family, now in found.items():
            if family not in self._best or now.tau > self._best[family].tau:
                self._best[family] = Best(now.tau, step)
        return dict(self._best)


def print_decoded(
    console: Console,
    title: str,
    found: Mapping[str, Decoded],
    best: Mapping[str, Best] | None = None,
    step: int | None = None,
) -> None:
    """Print the table of a validation.

    Args:
        best: of every family; None leaves the column out.
        step: that the validation was at.
    """
    console.print(title, highlight=False, markup=False, soft_wrap=True)
    rows = table(console)
    rows.add_column("family", overflow="fold")
    has_relay = any(one.relay_off is not None for one in found.values())
    for name in ["tau", "relay off", "gain"] if has_relay else ["tau"]:
        rows.add_column(name, justify="right", no_wrap=True)
    if best is not None:
        rows.add_column("best so far", no_wrap=True)
    for family, now in found.items():
        cells = [family, f"{now.tau:.3f}"]
        if has_relay:
            off = now.relay_off
            cells += ["-", "-"] if not off else [f"{off:.3f}", f"{100 * (now.tau / off - 1):+.1f}%"]
        if best is not None:
            cells.append(_said(best[family], step))
        rows.add_row(*cells, style="bold" if family == TOGETHER else None)
    print_table(console, rows)


def _said(best: Best, step: int | None) -> str:
    if best.step is None:
        return f"{best.tau:.3f} before the resume"
    return f"{best.tau:.3f} " + ("now" if best.step == step else f"at step {best.step:,}")
