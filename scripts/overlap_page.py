"""The page of paired rounds: tables and one picture a drafter.

Shapes: J drafts of a block.
"""

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from overlap_record import Overlap

from dflow_lightning import files
from dflow_lightning.html import html_table, image, number, page
from dflow_lightning.report.charts import DASHES, GREYS, MARKERS

PAIRED = (
    "<p>Every round of the relay-on decoding was drafted a second time, from the same state and "
    "without the relay; both drafts are scored against the target's own answer. So the gain is of "
    "equal states, while relay-on and relay-off decoding go through different rounds. Where all "
    "drafts were accepted there is no relay, and the gain is zero. ± is the standard error over "
    "rounds.</p>"
)
FEWEST = 20  # rounds or drafts; a point of fewer says nothing
NOTHING = float("nan")  # leaves a gap in a line


def write_page(out: Path, records: Sequence[Overlap], names: dict[str, str]) -> None:
    """Write the page, and its pictures to the folder `<name>_files` beside it."""
    parts = ["<h1>Where the relay helps</h1>", PAIRED]
    with files.staged_folder(out.with_name(f"{out.stem}_files")) as folder:
        for drafter in dict.fromkeys(one.drafter for one in records):
            mine = [one for one in records if one.drafter == drafter]
            name = f"overlap-{names[drafter].replace('/', '-')}"
            draw_gains(mine, folder / f"{name}.png")
            caption = f"{names[drafter]}: {CAPTION}"
            parts.append(image(f"{out.stem}_files/{name}.png", caption))
            parts += paired_tables(mine, names[drafter])
    files.write_text(out, page("dflow-lightning paired rounds", parts))


def slot_gains(record: Overlap, *, with_row: bool) -> list[tuple[float, int] | None]:
    """Gain in hits of each slot, and its number of drafts; of slots with a relay row or without.

    A hit is a draft that equals the target's token, whatever came before it in its block.
    """
    found: list[tuple[float, int] | None] = []
    for j in range(record.num_draft_tokens):
        rows = [a for a, counts in enumerate(record.slots_with_row) if bool(counts[j]) is with_row]
        total = sum(record.slots[a][j] for a in rows)
        gain = sum(record.hits_on[a][j] - record.hits_off[a][j] for a in rows)
        found.append((gain / total, total) if total else None)
    return found


def entropy_bins(record: Overlap) -> list[str]:
    """What the bins are called, in nats."""
    edges = [f"{edge:g}" for edge in record.entropy_edges]
    inner = [f"{low} to {high}" for low, high in itertools.pairwise(edges)]
    return [f"below {edges[0]}", *inner, f"above {edges[-1]}"]


def paired_tables(records: Sequence[Overlap], title: str) -> list[str]:
    """Gain by the round before, by slot and by entropy; a line a family."""
    counts = range(records[0].num_draft_tokens + 1)
    by_round, by_slot, by_entropy = [], [], []
    for one in records:
        name = [one.family, f"{one.temperature:g}"]
        cells = [
            "-" if gain is None else f"{gain[0]:+.2f} ± {gain[1]:.2f} ({rounds})"
            for gain, rounds in zip(one.gain(), one.rounds, strict=True)
        ]
        by_round.append([*name, number(one.entropy, 2), *cells])
        for with_row in (True, False):
            gains = slot_gains(one, with_row=with_row)
            shown = ["-" if g is None else f"{100 * g[0]:+.1f} ({g[1]})" for g in gains]
            by_slot.append([*name, "with a row" if with_row else "without", *shown])
        by_entropy.append([*name, *entropy_cells(one)])
    header = ["family", "T"]
    slots = [f"slot {j}" for j in counts[1:]]
    return [
        html_table(
            f"{title}: gain in accepted drafts (rounds) by accepted drafts a of the round before",
            [*header, "entropy, nats", *(f"a = {a}" for a in counts)],
            by_round,
        ),
        html_table(
            f"{title}: gain in hits, percentage points (drafts), by slot",
            [*header, "relay row", *slots],
            by_slot,
        ),
        html_table(
            f"{title}: hits with / without relay in %, slots with a row, by the target's entropy",
            [*header, *entropy_bins(records[0])],
            by_entropy,
        ),
    ]


def entropy_cells(record: Overlap) -> list[str]:
    """Share of hits with and without the relay, and the number of drafts, in each bin."""
    return [
        f"{100 * on / total:.1f} / {100 * off / total:.1f} ({total})" if total else "-"
        for total, on, off in zip(
            record.entropy_slots, record.entropy_hits_on, record.entropy_hits_off, strict=True
        )
    ]


CAPTION = (
    "what the relay gains, same rounds drafted with and without it; points of "
    f"fewer than {FEWEST} rounds or drafts are left out. Top: by accepted drafts of the "
    "round before, bars are standard errors. Middle: hits by slot; open and dotted where "
    "the slot had no relay row. Bottom: hits of slots with a row, by the target's entropy"
)


def draw_gains(records: Sequence[Overlap], path: Path) -> None:
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
    figure.savefig(path, dpi=110)


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
