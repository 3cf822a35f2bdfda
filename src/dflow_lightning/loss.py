"""The block loss: cross-entropy on the data's tokens, weighted down away from the anchor.

Shapes: B batch, N blocks per sequence, K block size, D hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

from dflow_lightning.errors import InputError


@dataclass(kw_only=True)
class LossConfig:
    """The training objective.

    Args:
        gamma: decay of the slot weights, `exp(-(k-1)/gamma)`; 7 for blocks of 16, 5 for 10, 4 for 8
            (DFlash's values) and linear in the block size between, when left out.
        round_weights: weight of the mask round and of each rollout round; by default their numbers
            of blocks.
        chunk_blocks: blocks whose logits exist at the same time; logits are recomputed in the
            backward pass, so memory does not grow with the number of blocks.
    """

    gamma: float | None = None
    round_weights: list[float] | None = None
    chunk_blocks: int = 128

    def __post_init__(self) -> None:
        if self.gamma is not None and self.gamma <= 0:
            raise InputError(f"loss.gamma is {self.gamma}; give a positive number or leave it out")
        weights = self.round_weights
        if weights is not None and (min(weights, default=0) < 0 or not sum(weights) > 0):
            raise InputError(
                f"loss.round_weights is {weights}; give numbers of 0 or more, one of them positive"
            )
        if self.chunk_blocks < 1:
            raise InputError(f"loss.chunk_blocks is {self.chunk_blocks}; give 1 or more")

    def decay(self, block_size: int) -> float:
        """The decay `gamma` of the slot weights, given or from the block size."""
        if self.gamma is not None:
            return self.gamma
        return max(1.0, 4.0 + (block_size - 8) * 3.0 / 8.0)


def slot_weights(block_size: int, gamma: float) -> Tensor:
    """Weights of slots 1..K-1: `exp(-(k-1)/gamma)`."""
    return torch.exp(-torch.arange(block_size - 1, dtype=torch.float32) / gamma)


def token_losses(
    hidden_BNKD: Tensor, labels_BNK: Tensor, head: Callable[[Tensor], Tensor], chunk_blocks: int
) -> tuple[Tensor, Tensor]:
    """Cross-entropy and greedy prediction of every slot, without ever holding all logits.

    Args:
        hidden_BNKD: drafter output of the predicted slots.
        labels_BNK: token ids; those that do not count may be anything inside the vocabulary.

    Returns:
        float32 losses and predicted ids, both shaped like the labels.
    """
    hidden = hidden_BNKD.flatten(0, 1)
    labels = labels_BNK.flatten(0, 1)
    losses, predictions = [], []
    for start in range(0, hidden.shape[0], chunk_blocks):
        part = slice(start, start + chunk_blocks)
        loss, predicted = checkpoint(_chunk, hidden[part], labels[part], head, use_reentrant=False)
        losses.append(loss)
        predictions.append(predicted)
    return torch.cat(losses).view_as(labels_BNK), torch.cat(predictions).view_as(labels_BNK)


def _chunk(
    hidden: Tensor, labels: Tensor, head: Callable[[Tensor], Tensor]
) -> tuple[Tensor, Tensor]:
    logits = head(hidden).float().flatten(0, 1)
    loss = cross_entropy(logits, labels.flatten(), reduction="none")
    return loss.view_as(labels), logits.detach().argmax(-1).view_as(labels)
