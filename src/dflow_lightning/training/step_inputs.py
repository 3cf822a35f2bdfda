"""What a training step feeds the drafter: clean target features, and rounds of blocks.

Shapes: B batch, S sequence, N blocks per sequence, K block size, C tapped width.
"""

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from dflow_lightning.data.token_rows import Batch
from dflow_lightning.models.draft import embed_blocks, relay_correction
from dflow_lightning.models.drafter import Drafter
from dflow_lightning.models.relay import Relay, RelayInput
from dflow_lightning.models.slot_cache import SlotCache
from dflow_lightning.models.target import FrozenTarget
from dflow_lightning.tensors.blocks import Anchors


@dataclass(frozen=True)
class RelayRows:
    """Verify rows aligned to the slots of the next block, not yet projected, and the boundary."""

    taps_BNKC: Tensor
    valid_BNK: Tensor
    bonus_BN: Tensor
    rejected_BN: Tensor

    def project(self, drafter: Drafter, *, detach: bool = False) -> RelayInput:
        """The relay's input under the drafter's current projection; `detach` cuts its gradient."""
        h_BNKD = drafter.project(self.taps_BNKC)
        return RelayInput(
            h_BNKD.detach() if detach else h_BNKD, self.valid_BNK, self.bonus_BN, self.rejected_BN
        )


@dataclass(frozen=True)
class Round:
    """One set of blocks: the mask round (no relay) or a rollout round."""

    anchors: Anchors
    relay: RelayRows | None = None

    def project(self, drafter: Drafter) -> RelayInput | None:
        """The rejected rows under the drafter's current projection, if the round has any."""
        return None if self.relay is None else self.relay.project(drafter)

    def embed(
        self,
        batch: Batch,
        target: FrozenTarget,
        drafter: Drafter,
        relay: Relay | None,
        *,
        detach: bool = False,
        rows: RelayInput | None = None,
    ) -> Tensor:
        """Slot inputs of the round's blocks, `[B, N, K, D]`.

        Args:
            rows: from `project`, where something else needs them too.
        """
        anchor_ids_BN = batch.input_ids_BS.gather(1, self.anchors.positions_BN)
        correction = None
        if relay is not None and self.relay is not None:
            if rows is None:
                rows = self.relay.project(drafter, detach=detach)
            elif detach:
                rows = replace(rows, h_BNKD=rows.h_BNKD.detach())
            correction = relay_correction(target, relay, rows)
        return embed_blocks(target, drafter, anchor_ids_BN, correction)


@dataclass
class StepInputs:
    """All that a training step feeds the drafter: clean target features and the rounds' blocks.

    Attributes:
        hidden_BSD: what the target's head reads at the clean tokens, where it was computed.
    """

    batch: Batch
    taps_BSC: Tensor
    cache: SlotCache
    rounds: list[Round] = field(default_factory=list)
    hidden_BSD: Tensor | None = None

    @property
    def positions_BS(self) -> Tensor:
        """Positions of the clean tokens in their documents."""
        return clean_positions(self.batch)


def clean_positions(batch: Batch) -> Tensor:
    """Position of each token in its document, `[B, S]`."""
    ids_BS = batch.input_ids_BS
    index_BS = torch.arange(ids_BS.shape[1], device=ids_BS.device).expand_as(ids_BS)
    return index_BS if batch.documents is None else index_BS - batch.documents.starts_BS


@torch.no_grad()
def clean_forward(
    target: FrozenTarget,
    batch: Batch,
    target_layer_ids: list[int],
    extra_slots: int,
    *,
    up_to_head: bool = False,
) -> StepInputs:
    """Features of the data's own tokens; the cache keeps room for `extra_slots` block tokens.

    Args:
        up_to_head: also run the layers above the taps, which a block's logits will need.
    """
    ids_BS = batch.input_ids_BS
    B, S = ids_BS.shape
    cache = target.new_cache(S + extra_slots)
    cache.length = S  # what the blocks will need is not read yet
    slots_S = torch.arange(S, device=ids_BS.device)
    slots_BS = slots_S.expand(B, S)
    visible_BQL = slots_S <= slots_BS.unsqueeze(-1)
    if batch.documents is not None:
        visible_BQL = visible_BQL & (slots_S >= batch.documents.starts_BS.unsqueeze(-1))
    arguments = (
        ids_BS, clean_positions(batch), cache, slots_BS, visible_BQL, target_layer_ids
    )  # fmt: skip
    hidden_BSD = None
    if up_to_head:
        output = target.forward(*arguments)
        taps_BSC, hidden_BSD = output.taps_BQC, output.hidden_BQD
    else:
        taps_BSC = target.features(*arguments)
    cache.length = cache.capacity
    return StepInputs(batch, taps_BSC, cache, hidden_BSD=hidden_BSD)
