"""The table at the end of a sweep: tau of each recipe, over its seeds."""

from collections.abc import Sequence
from statistics import mean

from rich import box
from rich.console import Console
from rich.table import Table

PLAIN_WIDTH = 80


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
    console = console or Console()
    if not console.is_terminal:
        console = Console(file=console.file, width=PLAIN_WIDTH, no_color=True)
    temperatures = sorted({t for cells in taus.values() for t in cells})
    table = Table(box=box.SIMPLE_HEAD if console.is_terminal else None)
    table.add_column("recipe", overflow="fold")
    table.add_column("relay")
    table.add_column("seeds", justify="right")
    for temperature in temperatures:
        table.add_column(f"tau, T={temperature:g}", justify="right", no_wrap=True)
    for (name, relay), cells in taus.items():
        seeds = max(len(values) for values in cells.values())
        table.add_row(
            name, relay, str(seeds), *(with_spread(cells.get(t, [])) for t in temperatures)
        )
    console.print("mean over seeds +- (largest - smallest), all families", highlight=False)
    console.print(table)


def with_spread(values: Sequence[float]) -> str:
    """A mean, with its spread where there is one."""
    if not values:
        return "-"
    if len(values) == 1:
        return f"{values[0]:.3f}"
    return f"{mean(values):.3f} +- {max(values) - min(values):.3f}"
