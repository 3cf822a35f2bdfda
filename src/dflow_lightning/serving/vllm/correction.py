"""From the rows a serving engine has just verified to the relay's correction of the next block.

An engine has the rows of all its requests in one flat batch and knows how many drafts of each were
rejected; the gather (`relay_rows`) and the formula (`Relay`) are those of training and decoding.
Static shapes, no wait for the device, nothing kept from one step to the next.

Shapes: R requests, T verified rows of all requests, K slots of a block, D hidden.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from dflow_lightning.models.relay import Relay, relay_rows


@dataclass(frozen=True)
class VerifiedBatch:
    """What an engine knows after it has verified a batch.

    Args:
        ids_T: the verified input ids, drafts included.
        ends_R: the row after each request's last one; requests lie one behind the other.
        num_rejected_R: drafts verified in this step less those accepted; 0 where none were.
        bonus_R: the token the target chose after the last accepted draft.
        features: numbers of rows to their `fc(taps)`, `[..., D]`, before `hidden_norm`.
    """

    ids_T: Tensor
    ends_R: Tensor
    num_rejected_R: Tensor
    bonus_R: Tensor
    features: Callable[[Tensor], Tensor]


def rejected_rows(
    ends_R: Tensor, num_rejected_R: Tensor, block_size: int, *, first_rejected: bool
) -> tuple[Tensor, Tensor]:
    """Which row of the flat batch each slot reads, and whether it may: both `[R, K]`.

    A verified block is laid against the end of a full one, so that its last row is row K-1 and the
    number of drafts verified, which engines may cut, does not matter: slot j reads one of the last
    `num_rejected_R` rows of its own request, or none.
    """
    rows_RK, valid_RK = relay_rows(
        block_size - 1 - num_rejected_R, block_size, first_rejected=first_rejected
    )
    return (ends_R.unsqueeze(-1) - block_size + rows_RK).clamp(min=0), valid_RK


def correction(
    relay: Relay,
    verified: VerifiedBatch,
    block_size: int,
    *,
    norm: Callable[[Tensor], Tensor],
    embed: Callable[[Tensor], Tensor],
) -> Tensor:
    """What to add to the slot inputs of each request's next block, `[R, K, D]`; zero without rows.

    Args:
        norm: the drafter's `hidden_norm`.
        embed: ids to the embedding that the drafter's slots use.
    """
    ends_R, num_rejected_R = verified.ends_R.long(), verified.num_rejected_R.long()
    rows_RK, valid_RK = rejected_rows(
        ends_R, num_rejected_R, block_size, first_rejected=relay.first_rejected
    )
    h_RKD = norm(verified.features(rows_RK.flatten())).view(*rows_RK.shape, -1)
    # With nothing rejected this is the last row, and no slot is valid.
    rejected_R = verified.ids_T[ends_R - num_rejected_R.clamp(min=1)]
    # An id below 0 stands for no token: of a request that still reads its prompt, for one.
    ids = torch.cat([verified.bonus_R.long(), rejected_R.long()]).clamp(min=0)
    bonus_RD, rejected_RD = embed(ids).to(h_RKD.dtype).chunk(2)
    return relay(h_RKD, bonus_RD, rejected_RD, valid_RK)
