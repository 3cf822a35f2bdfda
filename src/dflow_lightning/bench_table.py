"""The tables that `dflow-train bench` prints: within 80 columns, and plain text in a pipe."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import PurePath
from typing import TYPE_CHECKING

from rich import box
from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from dflow_lightning.bench import Row

PLAIN_WIDTH = 80
LISTED = 10


def show(rows: Sequence["Row"], console: Console | None = None) -> None:
    """Speed, acceptance per position, then every answer that was not the plain one."""
    console = console or Console()
    if not console.is_terminal:
        console = Console(file=console.file, width=PLAIN_WIDTH, no_color=True)
    names = short_names([row.drafter for row in rows])
    print_text = partial(console.print, highlight=False, markup=False)
    print_text("tau = accepted drafts + 1; speed against plain decoding in this run")
    console.print(speed_table(rows, names, console.is_terminal))
    print_text("\nshare of rounds that accept draft 1, 2, ... in %")
    console.print(position_table(rows, names, console.is_terminal))
    for row in rows:
        if row.family == "pooled":
            _list_differences(row, names, print_text)


def short_names(drafters: Sequence[str]) -> dict[str, str]:
    """The end of each path, as long as it takes to tell them apart."""
    parts = {drafter: PurePath(drafter).parts or (drafter,) for drafter in drafters}
    depth = 1
    while depth < max(map(len, parts.values()), default=1):
        if len({one[-depth:] for one in parts.values()}) == len(parts):
            break
        depth += 1
    return {drafter: str(PurePath(*one[-depth:])) for drafter, one in parts.items()}


def _table(is_terminal: bool) -> Table:
    return Table(
        box=box.SIMPLE_HEAD if is_terminal else None,
        padding=(0, 1) if is_terminal else (0, 1, 0, 0),
    )


def _add_names(table: Table) -> None:
    table.add_column("drafter", overflow="fold", min_width=6)
    table.add_column("relay")
    table.add_column("T", justify="right")
    table.add_column("family", overflow="fold")


def _named(row: "Row", names: dict[str, str]) -> list[str]:
    return [names[row.drafter], row.relay, f"{row.temperature:g}", row.family]


def speed_table(rows: Sequence["Row"], names: dict[str, str], is_terminal: bool) -> Table:
    table = _table(is_terminal)
    _add_names(table)
    for name in ("tau", "drafts", "tok/s", "speed", "relay%", "lossless"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        lossless = {True: "yes", False: "NO", None: "n/a"}[row.lossless]
        ties = f" ({row.excused_ties})" if row.excused_ties else ""
        share = "-" if row.relay_share is None else f"{100 * row.relay_share:.1f}"
        table.add_row(
            *_named(row, names),
            f"{row.tau:.2f}",
            f"{row.accepted_drafts:.2f}",
            f"{row.tokens_per_second:.0f}",
            f"{row.speedup:.2f}x",
            share,
            lossless + ties,
            style="bold" if row.family == "pooled" else None,
        )
    return table


def position_table(rows: Sequence["Row"], names: dict[str, str], is_terminal: bool) -> Table:
    table = _table(is_terminal)
    _add_names(table)
    table.add_column("per position")
    for row in rows:
        shares = " ".join(f"{100 * share:.0f}" for share in row.position_acceptance)
        table.add_row(*_named(row, names), shares)
    return table


def _list_differences(row: "Row", names: dict[str, str], print_text: Callable) -> None:
    what = f"{names[row.drafter]}, relay {row.relay}, T={row.temperature:g}"
    for one in row.differences[:LISTED]:
        margin = "no tie" if one.margin is None else f"margin {one.margin:.1e}"
        verdict = "excused tie" if one.excused else "DIFFERENT"
        print_text(
            f"{verdict}: {what}, prompt {one.prompt}, token {one.position}: {one.token} against "
            f"{one.plain_token} plain, {margin}"
        )
    if len(row.differences) > LISTED:
        print_text(f"... and {len(row.differences) - LISTED} more of {what}")
