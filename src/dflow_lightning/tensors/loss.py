"""The block loss: cross-entropy on the data's tokens, or the divergence from the target.

Slots further from the anchor weigh less, because an early mistake makes every later draft of the
block worthless. `[blocks, slots, vocabulary]` logits never exist at once: the head runs in chunks.

Shapes: B batch, N blocks per sequence, K block size, J = K-1 drafts, D hidden, V
vocabulary, T tokens of a chunk.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import cross_entropy, kl_div, linear
from torch.utils.checkpoint import checkpoint

from dflow_lightning.errors import InputError, check_counts

OfChunk = Callable[[slice, Tensor, bool], tuple[Tensor, Tensor, Tensor | None]]
CHUNK_BYTES = 2**28  # of float32 logits; enough rows for a GPU's matrix product to be worth it


@dataclass(kw_only=True)
class LossConfig:
    """The training objective.

    Args:
        kind: `cross_entropy` on the data's tokens with weights that decay from the anchor;
            `dpace`, the same losses with weights that follow the drafter's own confidence
            (`dpace_weights`); `kl`, the divergence of the drafter's distribution from the target's,
            with the decaying weights.
        gamma: decay of the slot weights, `exp(-(k-1)/gamma)`; 7 for blocks of 16, 5 for 10, 4 for 8
            (DFlash's values) and linear in the block size between, when left out.
        dpace_alpha: smoothing of the confidence in `dpace`; at 1 every slot that follows counts
            fully, near 0 nothing after the first doubtful slot does.
        round_weights: weight of the mask round and of each rollout round; by default their numbers
            of blocks.
        chunk_blocks: blocks whose logits exist at the same time, by default as many as have 256
            MiB of them in float32; memory does not grow with the number of blocks.
    """

    kind: Literal["cross_entropy", "dpace", "kl"] = "cross_entropy"
    gamma: float | None = None
    dpace_alpha: float = 0.5
    round_weights: list[float] | None = None
    chunk_blocks: int | None = None

    def __post_init__(self) -> None:
        if self.gamma is not None and self.gamma <= 0:
            raise InputError(f"loss.gamma is {self.gamma}; give a positive number or leave it out")
        if self.gamma is not None and self.kind == "dpace":
            raise InputError(
                f"loss.gamma is {self.gamma} but loss.kind is dpace, whose weights do not decay; "
                "leave gamma out (null in an overlay)"
            )
        if not 0 < self.dpace_alpha <= 1:
            raise InputError(
                f"loss.dpace_alpha is {self.dpace_alpha}; give a number above 0 and up to 1"
            )
        weights = self.round_weights
        if weights is not None and (min(weights, default=0) < 0 or not sum(weights) > 0):
            raise InputError(
                f"loss.round_weights is {weights}; give numbers of 0 or more, one of them positive"
            )
        check_counts("loss.", chunk_blocks=self.chunk_blocks)

    def decay(self, block_size: int) -> float:
        """The decay `gamma` of the slot weights, given or from the block size."""
        if self.gamma is not None:
            return self.gamma
        return max(1.0, 4.0 + (block_size - 8) * 3.0 / 8.0)

    def blocks_at_once(self, block_size: int, vocab_size: int) -> int:
        """Blocks of a chunk, `chunk_blocks` or what fits into `CHUNK_BYTES`."""
        if self.chunk_blocks is not None:
            return self.chunk_blocks
        logits = 2 if self.kind == "kl" else 1  # the target's beside the drafter's
        return blocks_within(CHUNK_BYTES // logits, block_size - 1, vocab_size)

    def weigh(
        self, losses_BNJ: Tensor, supervised_BNJ: Tensor, slot_weights_J: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Weights of the slots' losses, and the terms whose sum normalizes the weighted loss.

        The size of a `dpace` weight carries meaning (the slot's contribution to the acceptance
        length), so the weights are not divided out: the loss is a mean over supervised slots.
        (The authors' code divides by the number of rows, a different constant.)
        """
        if self.kind == "dpace":
            weights_BNJ = dpace_weights(losses_BNJ, supervised_BNJ, self.dpace_alpha)
            return weights_BNJ, supervised_BNJ.to(weights_BNJ.dtype)
        weights_BNJ = supervised_BNJ * slot_weights_J
        return weights_BNJ, weights_BNJ


def blocks_within(limit: int, slots: int, vocab_size: int) -> int:
    """How many blocks of `slots` slots have float32 logits of at most `limit` bytes; at least 1."""
    return max(1, limit // (4 * slots * vocab_size))


@dataclass
class LossWindow:
    """Sums over the micro-batches of one step, so that the loss is one mean over all their slots.

    One mean, not a mean per round: every block counts alike. Fewer blocks are rolled out than
    drawn, so equally weighted rounds would let a few blocks carry most of the gradient's noise.

    The weight of later micro-batches is known only after their rollouts, but each backward pass
    runs before that. So every micro-batch divides by the weight of the first, and the accumulated
    gradients are multiplied by `correction` before they are clipped.

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
        """The factor for the accumulated gradients: the first weight over the total weight."""
        return self._first / _positive((self.totals_R4[:, 1] * self._shares_R).sum())


def _positive(weight: Tensor) -> Tensor:
    """The weight, or 1 where it is 0: the loss is 0 there too, and 0 / 1 is what it should be."""
    return weight.where(weight > 0, torch.ones_like(weight))


def slot_weights(block_size: int, gamma: float) -> Tensor:
    """Weights of slots 1..K-1: `exp(-(k-1)/gamma)`."""
    return torch.exp(-torch.arange(block_size - 1, dtype=torch.float32) / gamma)


def dpace_weights(losses_BNJ: Tensor, supervised_BNJ: Tensor, alpha: float) -> Tensor:
    """Weights of slots 1..K-1: the contribution of each to the expected acceptance length.

    `w_j = sum over m >= j of product over i <= m of ((1 - alpha) q_i + alpha)`, where
    `q_i = exp(-loss_i)` is the drafter's probability of the label, without gradient. The product is
    a smoothed probability that the first m drafts are accepted. A slot that is not supervised is 1
    in products and 0 in sums, and weighs nothing. D-PACE (arXiv 2605.18810), equation 8.

    Args:
        losses_BNJ: cross-entropy of each slot, `[B, N, J]`.
    """
    confidence_BNJ = (1 - alpha) * torch.exp(-losses_BNJ.detach()) + alpha
    prefix_BNJ = confidence_BNJ.where(supervised_BNJ, torch.ones_like(confidence_BNJ)).cumprod(-1)
    counted_BNJ = prefix_BNJ * supervised_BNJ
    return counted_BNJ.flip(-1).cumsum(-1).flip(-1) * supervised_BNJ


def token_losses(
    hidden_BNJD: Tensor, labels_BNJ: Tensor, head: Callable[[Tensor], Tensor], chunk_blocks: int,
    weight_VD: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Cross-entropy and greedy prediction of every slot, without ever holding all logits.

    Args:
        hidden_BNJD: drafter output of the predicted slots.
        labels_BNJ: token ids; unsupervised ones may be any id of the vocabulary.
        head: hidden states to logits.
        weight_VD: the head's frozen matrix if the head is a plain matrix product. Then no logit is
            computed twice; any other head is recomputed in the backward pass.

    Returns:
        float32 losses and predicted ids, both shaped like the labels.
    """
    hidden = hidden_BNJD.flatten(0, 1)
    labels = labels_BNJ.flatten(0, 1)
    if weight_VD is not None:

        def of_chunk(part: slice, rows_TD: Tensor, gradient: bool):
            return _head_loss(rows_TD, labels[part].flatten(), weight_VD, gradient=gradient)

        losses, predicted = HeadLoss.apply(hidden, weight_VD.dtype, chunk_blocks, of_chunk)
    else:
        parts = [
            checkpoint(_chunk, *part, head, use_reentrant=False)
            for part in zip(hidden.split(chunk_blocks), labels.split(chunk_blocks), strict=True)
        ]
        losses, predicted = (torch.cat(one) for one in zip(*parts, strict=True))
    return losses.view_as(labels_BNJ), predicted.view_as(labels_BNJ)


def _chunk(
    hidden: Tensor, labels: Tensor, head: Callable[[Tensor], Tensor]
) -> tuple[Tensor, Tensor]:
    """For heads that are more than a matrix: the backward pass computes the logits again."""
    logits = head(hidden).float().flatten(0, 1)
    loss = cross_entropy(logits, labels.flatten(), reduction="none")
    return loss.view_as(labels), logits.detach().argmax(-1).view_as(labels)


class HeadLoss(torch.autograd.Function):
    """Head and loss chunk by chunk; the gradient is computed while the chunk's logits exist.

    A slot's loss depends on its own hidden state alone. So the gradient for an upstream gradient of
    1 (for cross-entropy `(softmax - onehot) W`) has the shape of the hidden state, and the backward
    pass only scales it: no logit is kept, and none is computed twice. `of_chunk` gets the chunk's
    slice, its rows `[T, D]` and whether a gradient is needed; it returns losses and predictions
    `[T]`, and unit gradients `[T, D]` or None.
    """

    @staticmethod
    def forward(ctx: Any, hidden, dtype: torch.dtype, chunk_blocks: int, of_chunk: OfChunk):
        losses = torch.empty(hidden.shape[:-1], device=hidden.device)
        predicted = torch.empty(hidden.shape[:-1], dtype=torch.long, device=hidden.device)
        unit = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        for start in range(0, hidden.shape[0], chunk_blocks):
            part = slice(start, start + chunk_blocks)
            rows_TD = hidden[part].flatten(0, -2).to(dtype)
            loss_T, predicted_T, unit_TD = of_chunk(part, rows_TD, unit is not None)
            losses[part] = loss_T.view_as(losses[part])
            predicted[part] = predicted_T.view_as(losses[part])
            if unit is not None and unit_TD is not None:
                unit[part] = unit_TD.view_as(hidden[part])
        ctx.save_for_backward(unit)
        ctx.mark_non_differentiable(predicted)
        return losses, predicted

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor):
        (unit,) = ctx.saved_tensors
        return (unit * gradients[0].unsqueeze(-1)).to(unit.dtype), None, None, None


def _head_loss(
    rows_TD: Tensor, labels_T: Tensor, weight_VD: Tensor, *, gradient: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Losses, predictions and unit gradients of one chunk; the softmax is float32 throughout."""
    labels_T1 = labels_T.unsqueeze(-1)
    with torch.autocast(rows_TD.device.type, enabled=False):
        logits_TV = linear(rows_TD, weight_VD).float()
        top_T1, predicted_T1 = logits_TV.max(dim=-1, keepdim=True)
        of_label_T1 = logits_TV.gather(-1, labels_T1)
        # In place: a second `[T, V]` buffer would double the memory of the chunk.
        exponentials_TV = logits_TV.sub_(top_T1).exp_()
        total_T1 = exponentials_TV.sum(dim=-1, keepdim=True)
        losses_T1 = total_T1.log() + top_T1 - of_label_T1
        unit_TD = None
        if gradient:
            exponentials_TV.scatter_add_(-1, labels_T1, -total_T1)
            unit_TD = (exponentials_TV.to(weight_VD.dtype) @ weight_VD) / total_T1
    return losses_T1.squeeze(-1), predicted_T1.squeeze(-1), unit_TD


def soft_losses(
    hidden_BNJD: Tensor, clean_BSD: Tensor | None, rows_BNJ: Tensor,
    head: Callable[[Tensor], Tensor], chunk_blocks: int, weight_VD: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Divergence `KL(p || q)` of every slot, without ever holding all logits.

    p is the target's distribution at temperature 1 on the data's own path, q the drafter's: the
    forward divergence of DistillSpec (arXiv 2310.08461). The target's logits are computed chunk by
    chunk as well, from its clean hidden states.

    Args:
        hidden_BNJD: drafter output of the predicted slots, `[B, N, J, D]`.
        clean_BSD: input of the target's head at the clean tokens, without gradient.
        rows_BNJ: position of the clean token before each slot, whose row predicts the slot;
            unsupervised ones may lie beyond the end of the sequence. `[B, N, J]`.
        head: hidden states to logits.
        weight_VD: the head's frozen matrix if the head is a plain matrix product. Then no logit of
            the drafter is computed twice.

    Returns:
        float32 losses and the drafter's greedy ids, both shaped like the rows.
    """
    assert clean_BSD is not None, "the clean forward stopped at the taps"
    length = clean_BSD.shape[1]
    first_B = torch.arange(clean_BSD.shape[0], device=rows_BNJ.device) * length
    rows = (rows_BNJ.clamp(max=length - 1) + first_B[:, None, None]).flatten(0, 1)
    hidden, clean = hidden_BNJD.flatten(0, 1), clean_BSD.flatten(0, 1)
    if weight_VD is not None:

        def of_chunk(part: slice, drafted_TD: Tensor, gradient: bool):
            clean_TD = clean[rows[part].flatten()].to(weight_VD.dtype)
            return _soft_loss(drafted_TD, clean_TD, weight_VD, gradient=gradient)

        losses, predicted = HeadLoss.apply(hidden, weight_VD.dtype, chunk_blocks, of_chunk)
    else:
        parts = [
            checkpoint(_soft_chunk, part, clean[of_part], head, use_reentrant=False)
            for part, of_part in zip(
                hidden.split(chunk_blocks), rows.split(chunk_blocks), strict=True
            )
        ]
        losses, predicted = (torch.cat(one) for one in zip(*parts, strict=True))
    return losses.view_as(rows_BNJ), predicted.view_as(rows_BNJ)


def _soft_chunk(
    hidden: Tensor, clean: Tensor, head: Callable[[Tensor], Tensor]
) -> tuple[Tensor, Tensor]:
    """For heads that are more than a matrix: the backward pass computes the logits again."""
    logits = head(hidden).float()
    wanted = head(clean).float().log_softmax(-1)
    losses = kl_div(logits.log_softmax(-1), wanted, reduction="none", log_target=True).sum(-1)
    return losses, logits.detach().argmax(-1)


def _soft_loss(
    drafted_TD: Tensor, clean_TD: Tensor, weight_VD: Tensor, *, gradient: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Losses, predictions and unit gradients `(q - p) W` of one chunk; softmaxes are float32."""
    with torch.autocast(drafted_TD.device.type, enabled=False):
        logits_TV = linear(drafted_TD, weight_VD).float()
        predicted_T = logits_TV.argmax(-1)
        log_q_TV = logits_TV.log_softmax(-1)
        log_p_TV = linear(clean_TD, weight_VD).float().log_softmax(-1)
        p_TV = log_p_TV.exp()
        losses_T = (p_TV * (log_p_TV - log_q_TV)).sum(-1)
        unit_TD = None
        if gradient:
            unit_TD = log_q_TV.exp_().sub_(p_TV).to(weight_VD.dtype) @ weight_VD
    return losses_T, predicted_T, unit_TD
