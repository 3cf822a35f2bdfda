"""Bytes per number of a training: by precision, and by what ZeRO spreads over the GPUs.

Shapes: D hidden, F intermediate, H/G query and key heads, E head size.
"""

import math
from typing import Any, NamedTuple

from torch import nn

GIB = 2**30


class Sharding(NamedTuple):
    """What is spread over the GPUs: ZeRO's stage, 0 for none, and whether the CPU steps."""

    stage: int = 0
    offload: bool = False

    @property
    def name(self) -> str:
        """As `trainer.strategy` has it."""
        return f"zero{self.stage}" + "_offload" * self.offload


SHARDINGS = [Sharding(2), Sharding(2, offload=True), Sharding(3), Sharding(3, offload=True)]


class Precision(NamedTuple):
    """Bytes per number: parameters, their copy under autocast, activations, the residual stream.

    `saved` are bytes kept for the backward pass per slot and layer, as multiples of D, H*E, G*E
    and F: the inputs of norms, and what each linear layer and the attention read, cast once for
    each of them under autocast.
    """

    weight: int
    copy: int
    compute: int
    residual: int
    saved: tuple[int, int, int, int]


MIXED = Precision(4, 2, 2, 4, (18, 8, 2, 8))
FULL = Precision(4, 0, 4, 4, (16, 16, 4, 16))
HALF = Precision(2, 0, 2, 2, (8, 8, 2, 8))
PRECISIONS: dict[Any, Precision] = {
    **dict.fromkeys(("bf16-mixed", "16-mixed"), MIXED),
    **dict.fromkeys((None, "32-true", "32", 32), FULL),
    **dict.fromkeys(("bf16-true", "16-true"), HALF),
}


def amount(value: float, decimals: int = 2) -> str:
    """A number with so many decimals, or with two digits where they would all be zero."""
    if not 0 < value < 0.5 * 10**-decimals:
        return f"{value:.{decimals}f}"
    return f"{value:.{1 - math.floor(math.log10(value))}f}"


def count(module: nn.Module | None) -> int:
    """Parameters of a module, tied ones once."""
    return sum(p.numel() for p in module.parameters()) if module else 0
