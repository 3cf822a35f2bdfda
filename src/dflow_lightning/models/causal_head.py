"""Domino's causal head: corrects a slot's logits given the tokens drafted before it.

The body computes all slots of a block in one forward, so no slot knows what the others chose. The
head reads the chosen tokens with a GRU and adds a low-rank correction (Domino, arXiv 2605.29707):

    state = GRU(E(token), state)                  the anchor, then the drafts before the slot
    logits = head(h) + W_out SiLU(W_in [h; state])

The body still runs once; the serial part that follows is small. Tensor names are those of the
published checkpoints. Training feeds the GRU with the data's tokens (`features`, all slots at
once), drafting with its own drafts (`unroll`, slot by slot): the same computation.

Shapes: J = K-1 predicted slots, D hidden, U width of the GRU's state, E rank of the correction, V
vocabulary; R rows; `...` any leading dimensions.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, pad
from torch.utils.checkpoint import checkpoint

from dflow_lightning.errors import InputError, check_counts


@dataclass(kw_only=True)
class CausalHeadConfig:
    """The causal head of a Domino drafter.

    Args:
        enabled: build the head; without it drafts of a block are independent of each other.
        gru_hidden_dim: width of the GRU that reads the drafted tokens.
        emb_dim: rank of the correction of the logits.
        pure_draft_prefix_len: drafts at the start of a block that are left as the body gives them;
            SGLang's loader takes 1 alone.
        base_start: weight of the body's own loss at the first step; the corrected logits have the
            rest. It falls linearly to 0.
        decay_ratio: share of the run's steps after which it is 0.
    """

    enabled: bool = False
    gru_hidden_dim: int = 1024
    emb_dim: int = 256
    pure_draft_prefix_len: int = 1
    base_start: float = 1.0
    decay_ratio: float = 1.0

    def __post_init__(self) -> None:
        check_counts("causal_head.", gru_hidden_dim=self.gru_hidden_dim, emb_dim=self.emb_dim)
        if not 0 <= self.base_start <= 1:
            raise InputError(
                f"causal_head.base_start is {self.base_start}; give a number from 0 to 1"
            )
        if not 0 < self.decay_ratio <= 1:
            raise InputError(
                f"causal_head.decay_ratio is {self.decay_ratio}; give a share above 0 and up to 1"
            )

    def base_share(self, step: int, total: int) -> float:
        """Weight of the body's own loss in one of `total` steps, lambda in the paper."""
        return self.base_start * max(0.0, 1.0 - step / max(1.0, self.decay_ratio * total))


class PrefixGRU(nn.Module):
    """A layer of `nn.GRU` without biases, one token per call.

    `nn.GRU` itself cannot be part of a compiled round.
    """

    def __init__(self, input_size: int, hidden_size: int) -> None:
        super().__init__()
        self.hidden_size = hidden_size  # not from the weights: sharding changes their shape
        self.weight_ih_l0 = nn.Parameter(torch.empty(3 * hidden_size, input_size))
        self.weight_hh_l0 = nn.Parameter(torch.empty(3 * hidden_size, hidden_size))
        for weight in self.parameters():
            nn.init.uniform_(weight, -(hidden_size**-0.5), hidden_size**-0.5)

    @torch.no_grad()
    def fit_inputs(self, embedding_VD: Tensor) -> None:
        """Scale the input weights so that they map these embeddings to about unit size."""
        size = embedding_VD.float().square().mean().sqrt() * self.weight_ih_l0.shape[1] ** 0.5
        self.weight_ih_l0.div_(self.weight_ih_l0.square().mean().sqrt() * size)

    def start(self, embeds: Tensor) -> Tensor:
        """The state before the first token, `[..., U]`, for embeddings `[..., D]`."""
        return embeds.new_zeros(*embeds.shape[:-1], self.hidden_size)

    def forward(self, embeds: Tensor, state: Tensor) -> Tensor:
        """The state after one more token: `[..., D]` and `[..., U]` to `[..., U]`."""
        rows = (embeds.flatten(0, -2), state.flatten(0, -2))
        return torch.gru_cell(*rows, self.weight_ih_l0, self.weight_hh_l0).view(state.shape)


class CausalHead(nn.Module):
    """The correction, from the hidden state of a slot and the tokens before it.

    Its last layer starts at zero, so that an untrained head corrects nothing and the drafter is
    DFlash bit for bit.
    """

    def __init__(
        self,
        hidden_size: int,
        vocab_size: int,
        *,
        gru_hidden_dim: int,
        emb_dim: int,
        pure_draft_prefix_len: int = 1,
    ) -> None:
        super().__init__()
        self.pure_draft_prefix_len = pure_draft_prefix_len
        self.prefix_gru = PrefixGRU(hidden_size, gru_hidden_dim)
        width = hidden_size + gru_hidden_dim
        inner = nn.Linear(width, emb_dim, bias=False)
        outer = nn.Linear(emb_dim, vocab_size, bias=False)
        nn.init.normal_(inner.weight, std=width**-0.5)
        nn.init.zeros_(outer.weight)
        self.embed_proj = nn.Sequential(inner, nn.SiLU(), outer)

    def features(self, hidden: Tensor, before: Tensor) -> Tensor:
        """The input of `embed_proj[2]`, `[..., J, E]`: zero (no correction) in the pure prefix.

        Args:
            hidden: the body's output for the predicted slots, `[..., J, D]`.
            before: embeddings of the token before each of them, the anchor first, `[..., J, D]`.
        """
        state, states = self.prefix_gru.start(before[..., 0, :]), []
        for embeds in before.unbind(-2):
            state = self.prefix_gru(embeds, state)
            states.append(state)
        first = self.pure_draft_prefix_len
        after = torch.stack(states[first:], dim=-2)
        inner, activation, _ = self.embed_proj
        low_rank = activation(inner(torch.cat([hidden[..., first:, :], after], dim=-1)))
        return pad(low_rank, (0, 0, first, 0))

    def unroll(
        self,
        logits_RJV: Tensor,
        hidden_RJD: Tensor,
        embed: Callable[[Tensor], Tensor],
        choose: Callable[[Tensor, int], Tensor],
        anchor_ids_R: Tensor,
        gold_RJ: Tensor | None = None,
    ) -> Tensor:
        """Draft slot by slot, each corrected by the drafts before it; tokens, `[R, J]`.

        Args:
            logits_RJV: the body's logits, from the target's head.
            hidden_RJD: the body's output for the predicted slots.
            embed: token ids to embeddings, in the dtype of `hidden_RJD`.
            choose: maps a slot's corrected logits, `[R, V]`, and its number (from 0) to its token.
            anchor_ids_R: the token of slot 0.
            gold_RJ: tokens to read instead of the drafts, as in training.
        """
        read_R, tokens = anchor_ids_R, []
        state_RU = self.prefix_gru.start(hidden_RJD[:, 0])
        for slot in range(hidden_RJD.shape[1]):
            state_RU = self.prefix_gru(embed(read_R), state_RU)
            logits_RV = logits_RJV[:, slot]
            if slot >= self.pure_draft_prefix_len:
                joined = torch.cat([hidden_RJD[:, slot], state_RU], dim=-1)
                logits_RV = logits_RV + self.embed_proj(joined)
            tokens.append(choose(logits_RV, slot))
            read_R = tokens[-1] if gold_RJ is None else gold_RJ[:, slot]
        return torch.stack(tokens, dim=1)


def corrected_losses(
    causal_head: CausalHead,
    hidden_BNJD: Tensor,
    before_BNJD: Tensor,
    labels_BNJ: Tensor,
    head: Callable[[Tensor], Tensor],
    chunk_blocks: int,
    base_share: float,
) -> tuple[Tensor, Tensor]:
    """`loss.token_losses` with the head fed by the data's tokens.

    Cross-entropy of the corrected logits and of the body's own, weighted `1 - base_share` and
    `base_share`. Up to and including the first wrong prediction of a block, the predictions equal
    the drafts of `unroll`: so accepted drafts are counted as in decoding.

    Args:
        before_BNJD: embeddings of the data's token before each predicted slot.
        chunk_blocks: blocks whose logits exist at the same time; the backward pass computes them
            again.

    Returns:
        float32 losses and predicted ids, both shaped like the labels.
    """
    features_BNJE = causal_head.features(hidden_BNJD, before_BNJD)
    blocks = [part.flatten(0, 1).split(chunk_blocks) for part in (hidden_BNJD, features_BNJE)]
    correct = causal_head.embed_proj[2]
    parts = [
        checkpoint(_chunk, *part, head, correct, base_share, use_reentrant=False)
        for part in zip(*blocks, labels_BNJ.flatten(0, 1).split(chunk_blocks), strict=True)
    ]
    losses, predicted = (torch.cat(one) for one in zip(*parts, strict=True))
    return losses.view_as(labels_BNJ), predicted.view_as(labels_BNJ)


def _chunk(
    hidden: Tensor,
    features: Tensor,
    labels: Tensor,
    head: Callable[[Tensor], Tensor],
    correct: nn.Module,
    base_share: float,
) -> tuple[Tensor, Tensor]:
    base = head(hidden).float().flatten(0, 1)
    final = base + correct(features).float().flatten(0, 1)
    wanted = labels.flatten()
    # Not skipped at weight 0: every parameter needs a gradient, even if it is zero.
    loss = (1 - base_share) * cross_entropy(final, wanted, reduction="none")
    if base_share:
        loss = loss + base_share * cross_entropy(base, wanted, reduction="none")
    return loss.view_as(labels), final.detach().argmax(-1).view_as(labels)
