"""The table at the end of a sweep: tau of each recipe, over its seeds."""

from collections.abc import Sequence

from rich.console import Console

from dflow_lightning.report_page import with_spread
from dflow_lightning.terminal import print_table, screen, table


def show(finished: Sequence[tuple[str, int, list[dict]]], console: Console | None = None) -> None:
    """A line for each recipe and relay setting; columns: pooled tau by temperature.

    Args:
        finished: name of the recipe, seed, and rows of the bench.
    """
    if not finished:
        return
    taus: dict[tuple[str, str], dict[float, list[float]]] = {}
    for name, _, rows in finished:
        for row in rows:
            if row["family"] == "pooled":
                cells = taus.setdefault((name, row["relay"]), {})
                cells.setdefault(row["temperature"], []).append(row["tau"])
    console = console or screen()
    temperatures = sorted({t for cells in taus.values() for t in cells})
    lines = table(console)
    lines.add_column("recipe", overflow="fold")
    lines.add_column("relay")
    lines.add_column("seeds", justify="right")
    for temperature in temperatures:
        lines.add_column(f"tau, T={temperature:g}", justify="right", no_wrap=True)
    for (name, relay), cells in taus.items():
        seeds = max(len(values) for values in cells.values())
        lines.add_row(
            name, relay, str(seeds), *(with_spread(cells.get(t, []), "+-") for t in temperatures)
        )
    console.print("mean over seeds +- (largest - smallest), all families", highlight=False)
    print_table(console, lines)
