"""Where the relay helps, as tables: from paired rounds, and from joint histograms.

The bench's JSON holds both as plain lists; `overlap_record.Overlap` and `metrics.AcceptanceSummary`
say what they are.
"""

import itertools
from collections.abc import Sequence
from dataclasses import fields

from dflow_lightning.bench.overlap_record import Overlap
from dflow_lightning.html import number, table

PAIRED = (
    "<p>Every round of the relay-on decoding was drafted a second time, from the same state and "
    "without the relay; both drafts are scored against the target's own answer. So the gain is of "
    "equal states, while relay-on and relay-off decoding go through different rounds. Where all "
    "drafts were accepted there is no relay, and the gain is zero. ± is the standard error over "
    "rounds.</p>"
)
UNPAIRED = (
    "<p>From separate decodings with the relay on and off, which go through different rounds: the "
    "difference also holds what kind of states follow each other.</p>"
)


def read_overlaps(records: Sequence[dict]) -> list[Overlap]:
    """The records of a bench file; those of several seeds of one drafter can be added up."""
    names = [one.name for one in fields(Overlap)]
    return [Overlap(**{name: record[name] for name in names}) for record in records]


def added(records: Sequence[Overlap]) -> Overlap:
    """Several records of one kind as one: counts are sums, the entropy is a mean over prompts."""
    first, *others = records
    content = {one.name: getattr(first, one.name) for one in fields(Overlap)}
    for other in others:
        prompts = content["prompts"] + other.prompts
        entropy = content["entropy"] * content["prompts"] + other.entropy * other.prompts
        for name, value in content.items():
            more = getattr(other, name)
            if name not in ("entropy_edges", "entropy") and isinstance(value, list):
                content[name] = _sum(value, more)
        content |= {"prompts": prompts, "entropy": entropy / max(1, prompts)}
    return Overlap(**content)


def _sum(one: list, other: list) -> list:
    return [_sum(a, b) if isinstance(a, list) else a + b for a, b in zip(one, other, strict=True)]


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
        PAIRED,
        table(
            f"{title}: gain in accepted drafts (rounds) by accepted drafts a of the round before",
            [*header, "entropy, nats", *(f"a = {a}" for a in counts)],
            by_round,
        ),
        table(
            f"{title}: gain in hits, percentage points (drafts), by slot",
            [*header, "relay row", *slots],
            by_slot,
        ),
        table(
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


def unpaired_table(rows: Sequence[dict], title: str) -> list[str]:
    """tau by the accepted drafts of the round before, relay on and off; a line a family.

    Args:
        rows: of one drafter and temperature, whose joint histograms are summed over seeds.
    """
    joints: dict[str, dict[str, list]] = {}
    for row in rows:
        if row.get("joint_histogram"):
            found = joints.setdefault(row["family"], {})
            before = found.get(row["relay"])
            joint = row["joint_histogram"]
            found[row["relay"]] = joint if before is None else _sum(before, joint)
    lines = []
    for family, found in joints.items():
        for relay in ("on", "off"):
            if relay in found:
                lines.append([family, relay, *map(tau_after, found[relay])])
    if not lines:
        return []
    counts = range(len(lines[0]) - 2)
    header = ["family", "relay", *(f"a = {a}" for a in counts)]
    return [
        UNPAIRED,
        table(f"{title}: tau (rounds) after a round that accepted a drafts", header, lines),
    ]


def tau_after(counts: Sequence[int]) -> str:
    """tau and number of rounds of one line of a joint histogram."""
    rounds = sum(counts)
    if not rounds:
        return "-"
    return f"{1 + sum(a * n for a, n in enumerate(counts)) / rounds:.2f} ({rounds})"
