"""Where the relay helps, from the joint histograms of a bench file.

tau after a round that accepted a drafts, relay on beside relay off. It is a hint and not a proof:
with and without its relay a drafter goes through different rounds. `scripts/overlap.py` compares
equal states.
"""

from collections.abc import Sequence

from dflow_lightning.html import html_table

UNPAIRED = (
    "<p>From separate decodings with the relay on and off, which go through different rounds: the "
    "difference also holds what kind of states follow each other.</p>"
)


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
            found[row["relay"]] = joint if before is None else _added(before, joint)
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
        html_table(f"{title}: tau (rounds) after a round that accepted a drafts", header, lines),
    ]


def tau_after(counts: Sequence[int]) -> str:
    """tau and number of rounds of one line of a joint histogram."""
    rounds = sum(counts)
    if not rounds:
        return "-"
    return f"{1 + sum(a * n for a, n in enumerate(counts)) / rounds:.2f} ({rounds})"


def _added(one: Sequence[list[int]], other: Sequence[list[int]]) -> list[list[int]]:
    """Two histograms of rounds as one."""
    return [[a + b for a, b in zip(*rows, strict=True)] for rows in zip(one, other, strict=True)]
