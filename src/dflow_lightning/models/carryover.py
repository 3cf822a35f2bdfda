"""Carryover: what the target computed on a rejected suffix stays in the drafter's context once.

The rows that the relay hands to the mask slots can also be attended to: keys and values like those
of the context, at the positions where the rows stood, seen by the next block alone and marked by a
learned embedding, since the tokens behind them were wrong (Carryover Drafting, arXiv 2609.14717).
Nothing of this reaches the target.

Shapes: B batch, N blocks per sequence, K block size, J = K-1 carried rows, D hidden.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dflow_lightning.models.relay import ProjectedRows
from dflow_lightning.tensors.blocks import rows_at


@dataclass(frozen=True)
class CarriedRows:
    """Marked rows that a block attends to beside its context and itself, and which there are.

    Row j stands at the block's anchor + j: a row predicts the position of the slot it is aligned
    to, the one after its own.
    """

    h_BNJD: Tensor
    valid_BNJ: Tensor

    def take_along(self, order_BN: Tensor) -> CarriedRows:
        """The rows of the blocks in another order."""
        return CarriedRows(rows_at(self.h_BNJD, order_BN), rows_at(self.valid_BNJ, order_BN))


class Carryover(nn.Module):
    """The mark of a rejected row, added to its features before keys and values are made.

    It starts at zero: rows then look like context of positions that are drafted at the moment.

    Attributes:
        first_rejected: whether slot 1 gets the row of the first rejected token, as in `Relay`.
    """

    def __init__(self, hidden_size: int, *, first_rejected: bool = True) -> None:
        super().__init__()
        self.first_rejected = first_rejected
        self.flag = nn.Parameter(torch.zeros(hidden_size))

    def forward(self, rows: ProjectedRows) -> CarriedRows:
        """Rows aligned to slots, as the relay gets them; slot 0 never has one."""
        marked_BNJD = rows.h_BNKD[..., 1:, :] + self.flag.to(rows.h_BNKD.dtype)
        return CarriedRows(marked_BNJD, rows.valid_BNK[..., 1:])


def side_by_side(
    carried: Sequence[CarriedRows | None], blocks: Sequence[int]
) -> CarriedRows | None:
    """The rows of several rounds' blocks one after the other; None where no round has any.

    Args:
        blocks: blocks of each round; those of a round without rows get some that are not valid.
    """
    some = next((each for each in carried if each is not None), None)
    if some is None:
        return None
    B, _, J, D = some.h_BNJD.shape
    parts = [
        CarriedRows(some.h_BNJD.new_zeros(B, n, J, D), some.valid_BNJ.new_zeros(B, n, J))
        if each is None
        else each
        for each, n in zip(carried, blocks, strict=True)
    ]
    return CarriedRows(
        torch.cat([part.h_BNJD for part in parts], dim=1),
        torch.cat([part.valid_BNJ for part in parts], dim=1),
    )
