"""The tables that `dflow-train bench` prints: within 80 columns, and plain text in a pipe.

Tables of tau are also built in `report`, `sweep` and `tracking.registry`, each in a dozen lines.
They differ in rows, columns, ratios and output, so one pivot for all of them would need about as
many switches as it saves lines.
"""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import PurePath
from typing import TYPE_CHECKING

from rich import box
from rich.console import Console
from rich.table import Table

from dflow_lightning.terminal import print_table, screen

if TYPE_CHECKING:
    from dflow_lightning.bench.row import Row

LISTED = 10
_COLUMNS = 6  # concurrencies that fit beside each other


def show_rows(rows: Sequence["Row"], console: Console | None = None) -> None:
    """Speed, acceptance per position, then every answer that was not the plain one.

    Several concurrencies get a table of throughput; all else is of the smallest one.
    """
    console = console or screen()
    if not console.is_terminal:
        console = screen(console.file)
    names = short_names([row.drafter for row in rows])
    print_text = partial(console.print, highlight=False, markup=False)
    levels = sorted({row.concurrency for row in rows})
    if len(levels) > 1:
        print_text("tokens/s of all requests together and speed-up over plain, by concurrency")
        for start in range(0, len(levels), _COLUMNS):
            some = levels[start : start + _COLUMNS]
            print_table(console, _throughput_table(rows, some, names, console.is_terminal))
            print_text("")
    one = [row for row in rows if row.concurrency == levels[0]]
    print_text(
        f"concurrency {levels[0]}: tau = accepted drafts + 1; speed against plain in this run"
    )
    print_table(console, _speed_table(one, names, console.is_terminal))
    print_text("\nshare of rounds that accept draft 1, 2, ... in %")
    print_table(console, position_table(one, names, console.is_terminal))
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
    # Ten columns of numbers and a name that folds only where it is long: 80 are not many.
    return Table(box=box.SIMPLE_HEAD if is_terminal else None, padding=(0, 1, 0, 0))


def _add_names(table: Table) -> None:
    table.add_column("drafter", overflow="fold", min_width=6)
    table.add_column("relay")
    table.add_column("T", justify="right")


def _named(row: "Row", names: dict[str, str]) -> list[str]:
    return [names[row.drafter], row.relay, f"{row.temperature:g}", row.family]


def _throughput_table(
    rows: Sequence["Row"], levels: Sequence[int], names: dict[str, str], is_terminal: bool
) -> Table:
    """A line for plain decoding and for each drafter, over all families; columns: concurrency."""
    table = _table(is_terminal)
    _add_names(table)
    table.add_column("")
    for level in levels:
        table.add_column(str(level), justify="right", no_wrap=True)
    pooled = [row for row in rows if row.family == "pooled"]
    for temperature in dict.fromkeys(row.temperature for row in pooled):
        arms: dict[tuple[str, str], dict[int, Row]] = {}
        for row in pooled:
            if row.temperature == temperature:
                arms.setdefault((row.drafter, row.relay), {})[row.concurrency] = row
        plain = next(iter(arms.values()))
        rates = [_or_dash(plain[level].plain_tokens_per_second, ".0f") for level in levels]
        table.add_row("plain", "", f"{temperature:g}", "tok/s", *rates)
        for (drafter, relay), cells in arms.items():
            rates = [_or_dash(cells[level].tokens_per_second, ".0f") for level in levels]
            ratios = [_or_dash(cells[level].speedup, ".2f", "x") for level in levels]
            both = [f"{rate}\n{ratio}" for rate, ratio in zip(rates, ratios, strict=True)]
            table.add_row(names[drafter], relay, f"{temperature:g}", "tok/s\nspeed", *both)
    return table


def _or_dash(value: float | None, form: str, unit: str = "") -> str:
    """A number, or a dash where nothing was measured."""
    return "-" if value is None else f"{value:{form}}{unit}"


def _speed_table(rows: Sequence["Row"], names: dict[str, str], is_terminal: bool) -> Table:
    table = _table(is_terminal)
    _add_names(table)
    table.add_column("family", overflow="fold")
    for name in ("tau", "drafts", "tok/s", "speed", "relay%", "lossless"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        lossless = {True: "yes", False: "NO", None: "n/a"}[row.lossless]
        ties = f" ({row.excused_ties})" if row.excused_ties else ""
        share = None if row.relay_share is None else 100 * row.relay_share
        table.add_row(
            *_named(row, names),
            f"{row.tau:.2f}",
            f"{row.accepted_drafts:.2f}",
            _or_dash(row.tokens_per_second, ".0f"),
            _or_dash(row.speedup, ".2f", "x"),
            _or_dash(share, ".1f"),
            lossless + ties,
            style="bold" if row.family == "pooled" else None,
        )
    return table


def position_table(rows: Sequence["Row"], names: dict[str, str], is_terminal: bool) -> Table:
    table = _table(is_terminal)
    _add_names(table)
    table.add_column("family", overflow="fold")
    table.add_column("per position")
    for row in rows:
        shares = " ".join(f"{100 * share:.0f}" for share in row.position_acceptance)
        table.add_row(*_named(row, names), shares)
    return table


def _list_differences(row: "Row", names: dict[str, str], print_text: Callable) -> None:
    what = (
        f"{names[row.drafter]}, relay {row.relay}, T={row.temperature:g}, "
        f"concurrency {row.concurrency}"
    )
    for one in row.differences[:LISTED]:
        margin = ", no tie" if one.margin is None else f", margin {one.margin:.1e}"
        verdict = "excused tie" if one.excused else "DIFFERENT"
        if row.lossless is None:  # half precision: nobody knows whether it is a tie
            verdict, margin = "different, not asserted", ""
        print_text(
            f"{verdict}: {what}, prompt {one.prompt}, token {one.position}: {one.token} against "
            f"{one.plain_token} plain{margin}"
        )
    if len(row.differences) > LISTED:
        print_text(f"... and {len(row.differences) - LISTED} more of {what}")
