"""The relay: the target's states of a rejected suffix correct the next block's mask slots.

A relay lives one round: the next verification covers every position that an older row could still
serve, so keeping older rows adds nothing. It changes drafts only and never reaches the target's
input, cache or logits: decoding stays lossless.

Shapes: B batch, N blocks per sequence, K block size, R verified rows, D hidden; `...` any leading
dimensions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from dflow_lightning.errors import InputError

Terms = Literal["both", "scale", "shift"]
TERMS = get_args(Terms)


@dataclass(kw_only=True)
class RelayConfig:
    """The relay of a DFlow drafter.

    Args:
        enabled: build the relay; without it the drafter is DFlash.
        hidden_size: width of the relay's hidden layer; twice the drafter's hidden size by default.
        first_rejected: also relay the row of the first rejected token, into slot 1. `false` is the
            paper's literal text.
        detach_features: keep the relay's gradient out of `fc` and `hidden_norm`.
        normalize_boundary: bring the two boundary embeddings to the scale of `h`, since those of
            tokens are often ten times smaller. `false` is the paper's literal text.
        terms: of `beta * LayerNorm(h) + gamma` both terms, the `scale` alone or the `shift` alone.
    """

    enabled: bool = False
    hidden_size: int | None = None
    first_rejected: bool = True
    detach_features: bool = False
    normalize_boundary: bool = True
    terms: Terms = "both"

    def __post_init__(self) -> None:
        if self.hidden_size is not None and self.hidden_size < 1:
            raise InputError(
                f"relay.hidden_size is {self.hidden_size}; give 1 or more, or leave it out"
            )

    def build(self, hidden_size: int, norm_eps: float) -> Relay:
        """The relay of a drafter of this width, untrained."""
        width = self.hidden_size or 2 * hidden_size
        return Relay(
            hidden_size, width, norm_eps, normalize_boundary=self.normalize_boundary,
            terms=self.terms, first_rejected=self.first_rejected,
        )  # fmt: skip


def relay_rows(
    num_accepted: Tensor, block_size: int, *, first_rejected: bool = True
) -> tuple[Tensor, Tensor]:
    """The verified row that each slot of the next block reads, and whether it exists: `[..., K]`.

    A row goes to the slot that predicts the position the row predicts: slot j reads row a+j, which
    exists while a+j <= K-1. Slot 0 holds the bonus token, which is clean, and reads none.
    After a fully accepted block no row is valid.
    """
    slots = torch.arange(block_size, device=num_accepted.device)
    # Row j stands at S+j, reads draft j and predicts S+j+1. The next anchor is S' = S+a+1, so slot
    # j of the next block predicts S'+j = S+(a+j)+1: the position that row a+j predicts.
    rows = num_accepted.unsqueeze(-1) + slots
    # Row a+1 reads the first rejected draft itself, but it predicts the position right after the
    # bonus token, so it is relayed by default. The paper's literal text begins one row later.
    valid = (rows < block_size) & (slots >= (1 if first_rejected else 2))
    # Clamped, not dropped: shapes must not depend on how many drafts were accepted.
    return rows.clamp(max=block_size - 1), valid


def align(
    features: Tensor, num_accepted: Tensor, block_size: int, *, first_rejected: bool = True
) -> tuple[Tensor, Tensor]:
    """Move the verified rows of a block to the slots of the next block.

    Args:
        features: one vector per verified row, `[..., R, D]`.
        num_accepted: accepted drafts per block, `[...]`.

    Returns:
        `[..., K, D]` (arbitrary values where invalid) and the validity per slot, `[..., K]`.
    """
    rows, valid = relay_rows(num_accepted, block_size, first_rejected=first_rejected)
    index = rows.unsqueeze(-1).expand(*rows.shape, features.shape[-1])
    return features.gather(-2, index), valid


@dataclass(frozen=True)
class ProjectedRows:
    """Rows of the rejected suffixes, aligned to the slots of the next blocks and projected.

    Relay and carryover read the same rows, so they are projected once.

    Args:
        h_BNKD: `hidden_norm(fc(taps))` of each slot's row.
        valid_BNK: whether a slot has a row.
        bonus_BN: the target's token at the position of the rejected draft.
        rejected_BN: the first rejected draft.
    """

    h_BNKD: Tensor
    valid_BNK: Tensor
    bonus_BN: Tensor
    rejected_BN: Tensor


def _unit_rms(x: Tensor) -> Tensor:
    """Root mean square 1 over the last dimension, with float32 statistics."""
    return nn.functional.rms_norm(x.float(), x.shape[-1:], eps=1e-6).to(x.dtype)


class Relay(nn.Module):
    """`beta * LayerNorm(h) + gamma`, the correction added to a mask embedding.

    `[beta; gamma] = MLP([E(bonus); E(rejected); h])` with one hidden layer and SiLU (DFlow paper,
    equations 4 and 5). The boundary embeddings are optionally scaled to unit RMS, because token
    embeddings are often ten times smaller than h; optionally only one of the two terms is used.
    The last layer starts at zero: an untrained relay adds exactly zero, the drafter is DFlash bit
    for bit, and any DFlash checkpoint is a warm start.
    """

    def __init__(
        self,
        hidden_size: int,
        relay_hidden_size: int,
        norm_eps: float = 1e-6,
        *,
        normalize_boundary: bool = True,
        terms: Terms = "both",
        first_rejected: bool = True,
    ) -> None:
        """
        Args:
            relay_hidden_size: width of the hidden layer.
            first_rejected: whether slot 1 gets the row of the first rejected token.
        """
        super().__init__()
        self.first_rejected = first_rejected
        self.hidden_size = relay_hidden_size
        self.normalize_boundary = normalize_boundary
        self.terms: Terms = terms
        self.norm_eps = norm_eps
        # An omitted term has no weights: DDP needs a gradient for every parameter in every step.
        self.relay_norm = None if terms == "shift" else nn.LayerNorm(hidden_size, eps=norm_eps)
        self.relay_mlp = nn.Sequential(
            nn.Linear(3 * hidden_size, relay_hidden_size),
            nn.SiLU(),
            nn.Linear(relay_hidden_size, (2 if terms == "both" else 1) * hidden_size),
        )
        last = self.relay_mlp[2]
        assert isinstance(last, nn.Linear)
        nn.init.zeros_(last.weight)
        nn.init.zeros_(last.bias)

    def forward(
        self, h: Tensor, bonus_embed: Tensor, rejected_embed: Tensor, valid: Tensor
    ) -> Tensor:
        """Correction per slot, `[..., K, D]`; exactly zero where `valid` (`[..., K]`) is false.

        Args:
            h: aligned rows, `[..., K, D]`.
            bonus_embed: target embedding of the bonus token, `[..., D]`.
            rejected_embed: target embedding of the first rejected draft, `[..., D]`.
        """
        if self.normalize_boundary:
            bonus_embed, rejected_embed = _unit_rms(bonus_embed), _unit_rms(rejected_embed)
        boundary = torch.cat([bonus_embed, rejected_embed], dim=-1)
        first, activation, last = self.relay_mlp
        assert isinstance(first, nn.Linear)
        # The first layer reads [boundary; h]. The boundary is common to all slots of a block, so
        # its part of the product is computed once.
        of_boundary, of_h = first.weight.split([boundary.shape[-1], h.shape[-1]], dim=-1)
        hidden = linear(boundary, of_boundary, first.bias).unsqueeze(-2) + linear(h, of_h)
        correction = last(activation(hidden))
        if self.terms == "both":
            beta, gamma = correction.chunk(2, dim=-1)
            correction = beta * self._normed(h) + gamma
        elif self.terms == "scale":
            correction = correction * self._normed(h)
        return correction.masked_fill(~valid.unsqueeze(-1), 0.0)

    def _normed(self, h: Tensor) -> Tensor:
        assert self.relay_norm is not None
        return self.relay_norm(h)
