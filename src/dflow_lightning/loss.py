"""The block loss: cross-entropy on the data's tokens, weighted down away from the anchor.

Shapes: B batch, N blocks per sequence, K block size, D hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

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


@dataclass
class LossWindow:
    """Sums of the micro-batches of one step, so that the loss is one mean over all their slots.

    A backward pass is due before the weight of later micro-batches is known. So each divides by the
    weight of the first one, and `correction` is what the sum of their gradients lacks at the end.

    Attributes:
        totals_R4: per round, over processes and micro-batches: weighted loss, weight, accepted
            drafts and blocks.
    """

    totals_R4: Tensor = field(default_factory=lambda: torch.zeros(0, 4))
    _shares_R: Tensor = field(default_factory=lambda: torch.zeros(0))
    _first: Tensor = field(default_factory=lambda: torch.ones(()))

    def add(self, sums_R4: Tensor, totals_R4: Tensor, shares_R: Tensor) -> Tensor:
        """Add one micro-batch; returns its loss over the weight of the first micro-batch.

        Args:
            sums_R4: this process's sums, with gradient.
            totals_R4: the sums over all processes.
            shares_R: how much a slot of each round counts.
        """
        if not self.totals_R4.numel():
            self._first = _positive((totals_R4[:, 1] * shares_R).sum())
            self.totals_R4, self._shares_R = totals_R4, shares_R
        else:
            self.totals_R4 = self.totals_R4 + totals_R4
        return (sums_R4[:, 0] * shares_R).sum() / self._first

    def loss(self) -> Tensor:
        """The mean over everything added so far; 0 where nothing was supervised."""
        losses_R, weights_R, _, _ = self.totals_R4.unbind(-1)
        return (losses_R * self._shares_R).sum() / _positive((weights_R * self._shares_R).sum())

    def correction(self) -> Tensor:
        """What the sum of the gradients is to be multiplied by."""
        return self._first / _positive((self.totals_R4[:, 1] * self._shares_R).sum())


def _positive(weight: Tensor) -> Tensor:
    """The weight, or 1 in place of 0, where the loss is 0 as well."""
    return weight.where(weight > 0, torch.ones_like(weight))


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
