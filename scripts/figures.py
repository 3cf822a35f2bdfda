"""Draw the figures of docs/relay.md: `make figures`.

Rows, slots and arrows come from the functions that decoding uses (`relay.relay_rows`), so a figure
cannot say anything else than the code. Greys, hatches and line styles carry the meaning, no colour
does; the files are the same bytes each time they are made with the pinned matplotlib.
"""

import argparse
from pathlib import Path
from typing import Any

import matplotlib as mpl
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, Rectangle

from dflow_lightning.models.relay import relay_rows

BLOCK_SIZE, ACCEPTED = 8, 2  # the example of README.md
CLEAN, PLAIN, MARKED, DARK = "white", "#f0f0f0", "#c8c8c8", "#5a5a5a"
STYLE: Any = {
    "svg.hashsalt": "dflow",
    "svg.fonttype": "path",
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "hatch.linewidth": 0.6,
}


def canvas(width: float, height: float) -> Axes:
    """Empty axes whose unit is a tenth of an inch, y downwards."""
    axes = Figure(figsize=(width / 10, height / 10)).add_axes((0, 0, 1, 1))
    axes.set_xlim(0, width)
    axes.set_ylim(height, 0)
    axes.axis("off")
    return axes


def box(
    axes: Axes, x: float, y: float, width: float, height: float, text: str = "",
    *, fill: str = CLEAN, hatch: str = "", bold: bool = False,
    size: float = 9,
) -> None:  # fmt: skip
    """A rectangle with a text in its middle."""
    face: Any = {"facecolor": fill, "edgecolor": "black", "linewidth": 0.9}
    axes.add_patch(Rectangle((x, y), width, height, **face))
    if hatch:
        lines: Any = {"facecolor": "none", "edgecolor": "#9a9a9a", "linewidth": 0, "hatch": hatch}
        axes.add_patch(Rectangle((x, y), width, height, **lines))
    colour, weight = "white" if fill == DARK else "black", "bold" if bold else "normal"
    middle = (x + width / 2, y + height / 2)
    axes.text(
        *middle, text, ha="center", va="center", color=colour, fontsize=size, fontweight=weight,
        linespacing=1.35,
    )  # fmt: skip


def say(axes: Axes, x: float, y: float, text: str, *, at: str = "left", size: float = 9) -> None:
    """A text beside the boxes."""
    axes.text(x, y, text, ha=at, va="center", fontsize=size, linespacing=1.4)


def arrow(
    axes: Axes, start: tuple[float, float], end: tuple[float, float], *, dashed: bool = False,
) -> None:  # fmt: skip
    """An arrow from one point to another."""
    axes.add_patch(
        FancyArrowPatch(
            start, end, arrowstyle="-|>", mutation_scale=9, linewidth=1.0, color="black",
            linestyle=(0, (3, 2)) if dashed else "-", shrinkA=0, shrinkB=0,
        )
    )  # fmt: skip


def cells(axes: Axes, x: float, y: float, texts: list[str], fills: list[str], wide: float) -> None:
    """A row of boxes; an empty text with an empty fill leaves a gap."""
    for index, (text, fill) in enumerate(zip(texts, fills, strict=True)):
        if fill:
            hatch = "////" if fill == MARKED else ""
            box(axes, x + index * wide, y, wide, 3.4, text, fill=fill, hatch=hatch)


def round_timeline() -> Axes:
    """One round: draft, verify, accept, commit, and where the next one begins."""
    axes, left, wide, K, a = canvas(86, 42), 17.0, 6.0, BLOCK_SIZE, ACCEPTED
    slots = K + a + 1
    for j in range(slots):
        name = "S" if j == 0 else f"S+{j}"
        say(axes, left + (j + 0.5) * wide, 2.5, name, at="center", size=8)
    say(axes, 1, 2.5, "position", size=8)

    say(axes, 1, 7.7, "draft", size=10)
    say(axes, 1, 9.8, "1 drafter forward", size=7)
    drafts = ["anchor", *(f"d{j}" for j in range(1, K))]
    cells(axes, left, 6.5, drafts, [CLEAN] + [PLAIN] * (K - 1), wide)

    say(axes, 1, 15.2, "verify", size=10)
    say(axes, 1, 17.3, "1 target forward", size=7)
    rejected = [CLEAN] * (a + 1) + [MARKED] * (K - a - 1)
    cells(axes, left, 14.0, [f"H{j}" for j in range(K)], rejected, wide)

    say(axes, 1, 22.7, "accept", size=10)
    for j in range(1, a + 2):
        word = "yes" if j <= a else "no"
        say(axes, left + (j + 0.5) * wide, 22.7, word, at="center", size=10)
    say(axes, left + (a + 2.3) * wide, 22.7, f"a = {a}: the first {a} drafts are the target's own")

    say(axes, 1, 28.7, "commit", size=10)
    cells(axes, left + wide, 27.0, [*(f"d{j}" for j in range(1, a + 1)), "bonus"],
          [CLEAN] * (a + 1), wide)  # fmt: skip
    say(axes, left + (a + 2.3) * wide, 28.7, f"tau = a + 1 = {a + 1} tokens for one target forward")

    say(axes, 1, 36.2, "next draft", size=10)
    start = left + (a + 1) * wide
    arrow(axes, (start + wide / 2, 30.4), (start + wide / 2, 35.0))
    texts = ["anchor", *(f"m{j}" for j in range(1, K))]
    cells(axes, start, 35.0, texts, [CLEAN] + [PLAIN] * (K - 1), wide)
    note = "hatched: rows on the rejected branch. DFlash throws them away, DFlow relays them"
    say(axes, left, 40.5, note, size=8)
    return axes


def rejected_rows() -> Axes:
    """Which verify row each slot of the next block reads: the shift by one."""
    axes, left, wide, K, a = canvas(92, 37), 21.0, 6.2, BLOCK_SIZE, ACCEPTED
    rows, valid = relay_rows(torch.tensor(a), K)
    start = left + (a + 1) * wide
    for j in range(K + a + 1):
        name = "S" if j == 0 else f"S+{j}"
        say(axes, left + (j + 0.5) * wide, 2.5, name, at="center", size=8)
    say(axes, 1, 2.5, "position", size=8)
    inputs = ["anchor", *(f"d{j}" for j in range(1, K))]
    say(axes, 1, 6.6, "input of the row", size=8)
    for j, text in enumerate(inputs):
        wrong = " (wrong)" if j == a + 1 else ""
        say(axes, left + (j + 0.5) * wide, 6.6, text + wrong, at="center", size=7)
    say(axes, 1, 10.2, "verify rows", size=10)
    fills = [CLEAN] * (a + 1) + [MARKED] * (K - a - 1)
    cells(axes, left, 8.5, [f"H{j}" for j in range(K)], fills, wide)
    say(axes, 1, 14.2, "predicts", size=8)
    for j in range(K):
        at = left + (j + 0.5) * wide
        say(axes, at, 14.2, f"S+{j + 1}", at="center", size=7)
    used = {int(rows[j]): j for j in range(K) if bool(valid[j])}
    for row, slot in used.items():
        arrow(axes, (left + (row + 0.5) * wide, 15.6), (start + (slot + 0.5) * wide, 23.8))
    say(axes, 1, 25.7, "next block", size=10)
    fills = [CLEAN] + [MARKED if bool(valid[j]) else PLAIN for j in range(1, K)]
    cells(axes, start, 24.0, ["bonus", *(f"m{j}" for j in range(1, K))], fills, wide)
    say(axes, 1, 29.9, "slot predicts", size=8)
    for j in range(1, K):
        say(axes, start + (j + 0.5) * wide, 29.9, f"S+{a + 1 + j}", at="center", size=7)
    first, last = min(used), max(used)
    note = (
        f"Slot j reads row a + j, here rows {first} to {last}. A row predicts the position after "
        "its own, a slot predicts its own: so every row\nmoves one position to the right. Slot 0 "
        "holds the clean bonus token; slots without a row stay plain masks. Rows live one round."
    )
    say(axes, 1, 34.2, note, size=8)
    return axes


def relay_formula() -> Axes:
    """How the input of one mask slot is made."""
    axes = canvas(92, 41)
    say(axes, 1, 2.5, "from the target", size=8)
    box(axes, 1, 4, 15, 4, "E(bonus)", fill=CLEAN)
    box(axes, 1, 10, 15, 4, "E(first rejected)", fill=CLEAN)
    box(axes, 1, 16, 15, 5, "taps of the\nverify row", fill=MARKED, hatch="////")
    box(axes, 1, 33, 15, 4, "E(mask)", fill=CLEAN)
    box(axes, 20, 16, 13, 5, "fc, hidden_norm", fill=PLAIN)
    arrow(axes, (16, 18.5), (20, 18.5))
    say(axes, 34.2, 17.3, "h", size=10)
    box(axes, 40, 4, 14, 17, "MLP\n\n3H to R\nSiLU\nR to 2H", fill=PLAIN)
    arrow(axes, (16, 6), (40, 6))
    arrow(axes, (16, 12), (40, 12))
    arrow(axes, (33, 18.5), (40, 18.5))
    box(axes, 40, 25, 14, 4, "LayerNorm", fill=PLAIN)
    axes.plot([36.5, 36.5], [18.5, 27], color="black", linewidth=1.0)
    arrow(axes, (36.5, 27), (40, 27))
    box(axes, 62, 24.8, 5, 4.4, "×", size=13)
    box(axes, 71, 24.8, 5, 4.4, "+", size=13)
    box(axes, 71, 32.8, 5, 4.4, "+", size=13)
    arrow(axes, (54, 27), (62, 27))
    arrow(axes, (67, 27), (71, 27))
    axes.plot([54, 64.5], [15, 15], color="black", linewidth=1.0)
    arrow(axes, (64.5, 15), (64.5, 24.8))
    say(axes, 60, 13.6, "beta", size=9)
    axes.plot([54, 73.5], [8, 8], color="black", linewidth=1.0)
    arrow(axes, (73.5, 8), (73.5, 24.8))
    say(axes, 60, 6.6, "gamma", size=9)
    arrow(axes, (73.5, 29.2), (73.5, 32.8))
    arrow(axes, (16, 35), (71, 35))
    box(axes, 80, 32, 11, 6, "slot\ninput", fill=MARKED, bold=True)
    arrow(axes, (76, 35), (80, 35))
    note = "last layer zero at first:\nan untrained relay\nadds exactly 0"
    say(axes, 76, 15, note, size=7)
    say(axes, 20, 13.8, "as for the context", size=7)
    legend = (
        "white: frozen embedding of the target; light grey: trained; H: width of target and drafter"
    )
    say(axes, 1, 39, legend, size=7)
    return axes


def training_step() -> Axes:
    """A training step: rounds without gradient, then one drafter forward over all of them."""
    axes = canvas(96, 44)
    box(axes, 1, 7, 15, 8, "clean forward\nof the target\n(taps, cache)", fill=MARKED, hatch="////")
    for index in range(3):
        x = 21 + index * 25
        name = "the mask round" if index == 0 else f"rollout round {index}"
        box(axes, x, 5, 17, 5, f"blocks of\n{name}", fill=CLEAN)
        if index < 2:
            steps = "draft  (drafter)\nverify (target)\naccept, align"
            box(axes, x + 4, 14, 17, 8, steps, fill=PLAIN)
            arrow(axes, (x + 8.5, 10), (x + 8.5, 14))
            axes.plot([x + 21, x + 23], [18, 18], color="black", linewidth=1.0)
            axes.plot([x + 23, x + 23], [18, 7.5], color="black", linewidth=1.0)
            arrow(axes, (x + 23, 7.5), (x + 25, 7.5))
        arrow(axes, (x + 1.7, 10), (x + 1.7, 30), dashed=True)
    arrow(axes, (16, 8.5), (21, 7.5))
    axes.plot([0.5, 95.5], [24.8, 24.8], color="black", linewidth=1.0, linestyle=(0, (1, 2)))
    say(axes, 95, 23.2, "no gradient", at="right", size=8)
    say(axes, 95, 26.6, "with gradient", at="right", size=8)
    say(axes, 1, 2.2, "one round follows the other, each with the current drafter", size=8)
    box(axes, 21, 30, 67, 5, "one drafter forward over the blocks of all rounds, relay included",
        fill=PLAIN)  # fmt: skip
    axes.plot([8.5, 8.5], [15, 32.5], color="black", linewidth=1.0, linestyle=(0, (3, 2)))
    arrow(axes, (8.5, 32.5), (21, 32.5), dashed=True)
    say(axes, 9.2, 20.5, "context taps", size=7)
    arrow(axes, (54.5, 35), (54.5, 38))
    loss = "one loss: weighted cross-entropy on the data's tokens"
    box(axes, 31, 38, 47, 4.5, loss, fill=DARK)
    return axes


FIGURES = {
    "round": round_timeline,
    "rejected-rows": rejected_rows,
    "relay-formula": relay_formula,
    "training-step": training_step,
}


def draw(folder: Path, kind: str = "svg") -> list[Path]:
    """Writes every figure into `folder` and returns the files."""
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    with mpl.rc_context(STYLE):
        for name, make in FIGURES.items():
            path = folder / f"{name}.{kind}"
            metadata = {"Date": None, "Creator": None} if kind == "svg" else None
            figure = make().get_figure(root=True)
            assert figure is not None
            figure.savefig(path, metadata=metadata, dpi=110)
            written.append(path)
    return written


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("docs/figures"))
    parser.add_argument("--kind", choices=["svg", "png"], default="svg")
    arguments = parser.parse_args()
    for path in draw(arguments.out, arguments.kind):
        print(path)


if __name__ == "__main__":
    main()
