"""The state of all active requests between rounds, in buffers that are allocated once.

Shapes: R requests (slots of the engine), T token slots, K slots of a block, G key/value heads, E
head size, D hidden, M stop tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from dflow_lightning.decode.request import Request
from dflow_lightning.models.carryover import Carryover
from dflow_lightning.models.eagle3 import AnyDrafter, Eagle3Drafter
from dflow_lightning.models.relay import ProjectedRows, Relay
from dflow_lightning.models.slot_cache import SlotCache
from dflow_lightning.models.target import FrozenTarget
from dflow_lightning.tensors.acceptance import TokenSampling, position_uniforms
from dflow_lightning.tensors.blocks import KV

NO_TOKEN = -1
NOT_FINITE = 2  # in the report's last column, where a request goes on (0) or has ended (1)


@dataclass(frozen=True)
class Models:
    """The parts that a round runs; without a drafter a round is one step of plain decoding."""

    target: FrozenTarget
    drafter: AnyDrafter | None
    relay: Relay | None = None
    use_carryover: bool = True  # if the drafter has one
    tree_nodes: int | None = None  # tokens of a tree to verify, including the anchor
    tree_pairs: Tensor | None = None  # `tree.candidate_pairs(tree_nodes)`, on the device

    @property
    def keeps_rejected(self) -> bool:
        """Whether the rows of a rejected suffix go to the next block, by relay or carryover."""
        return self.relay is not None or self.carryover is not None

    @property
    def carryover(self) -> Carryover | None:
        """The drafter's carryover, None if unused."""
        used = self.drafter is not None and self.use_carryover
        return self.drafter.carryover if used and self.drafter is not None else None

    @property
    def first_rejected(self) -> bool:
        """Whether relay and carryover read the row of the first rejected token."""
        reader = self.carryover if self.relay is None else self.relay
        return reader is None or reader.first_rejected

    @property
    def verified_tokens(self) -> int:
        """Cache slots that a round writes, from the anchor on."""
        return max(self.block_size, self.tree_nodes or 0)

    @property
    def block_size(self) -> int:
        """Tokens that the target verifies in one forward, K."""
        return self.drafter.dims.block_size if self.drafter is not None else 1


@dataclass(frozen=True)
class DecodeState:
    """Tokens, caches and relay rows of every request; all steps write in place.

    Args:
        length_R: committed tokens; the last one's keys and values are not computed yet.
        end_R: the length at which a request is full.
        idle_R: the slot is not decoding: free, finished, or still reading its prompt.
        noise_RTC: uniform numbers per absolute position: the target's choice and, for rejection
            sampling, acceptance and the block's drafts, keyed by their anchor.
        rejected: rows of the rejected suffix, aligned to the next block (N = 1 block per
            request), for relay and carryover.
        feature_RD: the feature of the row before the anchor, for an EAGLE-3 drafter.
    """

    tokens_RT: Tensor
    length_R: Tensor
    end_R: Tensor
    idle_R: Tensor
    sampling: TokenSampling
    noise_RTC: Tensor
    stop_ids_RM: Tensor
    target_cache: SlotCache
    context: list[KV]
    rejected: ProjectedRows | None
    feature_RD: Tensor | None = None

    @property
    def anchor_R(self) -> Tensor:
        """Position of the last committed token: slot 0 of the next block."""
        return self.length_R - 1

    @classmethod
    def empty(
        cls, models: Models, num_slots: int, capacity: int, max_stop_ids: int, *, rejection: bool
    ) -> DecodeState:
        """Buffers for `num_slots` requests of `capacity` tokens, all slots free."""
        device, K = models.target.device, models.block_size
        noise = K + 1 if rejection else 1

        def full(value: float, dtype: torch.dtype) -> Tensor:
            return torch.full((num_slots,), value, dtype=dtype, device=device)

        return cls(
            tokens_RT=torch.zeros(num_slots, capacity, dtype=torch.long, device=device),
            length_R=full(1, torch.long),
            end_R=full(1, torch.long),
            idle_R=full(True, torch.bool),
            sampling=TokenSampling(
                full(0, torch.float32), full(0, torch.long), full(1, torch.float32)
            ),
            noise_RTC=torch.zeros(num_slots, capacity, noise, dtype=torch.float64, device=device),
            stop_ids_RM=torch.full((num_slots, max_stop_ids), NO_TOKEN, device=device),
            target_cache=models.target.new_cache(capacity, num_slots),
            context=_empty_context(models.drafter, num_slots, capacity),
            rejected=no_rejected_rows(models, num_slots),
            feature_RD=_empty_feature(models.drafter, num_slots),
        )

    def admit(self, slot: int, request: Request, capacity: int) -> None:
        """Put a request into a free slot; it is idle until its prompt is read."""
        prompt = torch.tensor(request.prompt_ids, device=self.tokens_RT.device)
        self.tokens_RT[slot, : len(prompt)] = prompt
        self.length_R[slot] = len(prompt)
        self.end_R[slot] = min(len(prompt) + request.max_new_tokens, capacity)
        self.idle_R[slot] = True
        self.sampling.temperature_R[slot] = float(request.temperature)
        self.sampling.top_k_R[slot] = int(request.top_k)
        self.sampling.top_p_R[slot] = float(request.top_p)
        columns = self.noise_RTC.shape[-1]
        if request.temperature > 0 or columns > 1:
            self.noise_RTC[slot] = position_uniforms(
                int(request.seed), self.noise_RTC.shape[1], columns
            )
        stop = torch.tensor(request.stop_token_ids or [], dtype=torch.long)
        self.stop_ids_RM[slot] = NO_TOKEN
        self.stop_ids_RM[slot, : len(stop)] = stop
        if self.rejected is not None:
            self.rejected.valid_BNK[slot] = False

    def move(self, source: int, destination: int) -> None:
        """Copy the whole state of a request from one slot to another."""
        groups: list[Any] = [self, self.sampling, *self.context, self.rejected]
        values = [value for group in groups if group is not None for value in vars(group).values()]
        held = [value for value in values if isinstance(value, Tensor)]
        held += self.target_cache.buffers()
        for buffer in held:
            buffer[destination] = buffer[source]

    def first(self, count: int, length: int) -> DecodeState:
        """The first `count` requests and `length` token slots, as views of the same buffers.

        All views share the target's cache, whose own `length` says how many slots are read; the
        caller sets it (`Engine._in_view`).
        """
        views: dict[str, Any] = {
            field.name: value[:count]
            for field in fields(self)
            if isinstance(value := getattr(self, field.name), Tensor)
        }
        return replace(
            self,
            **views,
            sampling=_each(self.sampling, count),
            rejected=None if self.rejected is None else _each(self.rejected, count),
            context=[
                KV(one.keys[:count, :, :length], one.values[:count, :, :length])
                for one in self.context
            ],
        )


def _each(group, count: int):
    """The same dataclass with the first `count` rows of every tensor."""
    return type(group)(**{f.name: getattr(group, f.name)[:count] for f in fields(group)})


def _empty_context(drafter: AnyDrafter | None, rows: int, capacity: int) -> list[KV]:
    if drafter is None:
        return []
    dims, weight = drafter.dims, drafter.fc.weight
    shape = (rows, dims.num_key_value_heads, capacity, dims.head_dim)
    return [KV(weight.new_zeros(shape), weight.new_zeros(shape)) for _ in range(dims.num_layers)]


def _empty_feature(drafter: AnyDrafter | None, rows: int) -> Tensor | None:
    if not isinstance(drafter, Eagle3Drafter):
        return None
    return drafter.fc.weight.new_zeros(rows, drafter.dims.hidden_size)


def no_rejected_rows(models: Models, rows: int) -> ProjectedRows | None:
    """No valid rows: the relay then adds exactly zero, and nothing is carried over."""
    if models.drafter is None or not models.keeps_rejected:
        return None
    dims, weight = models.drafter.dims, models.drafter.fc.weight
    K, device = dims.block_size, weight.device
    return ProjectedRows(
        h_BNKD=weight.new_zeros(rows, 1, K, dims.hidden_size),
        valid_BNK=torch.zeros(rows, 1, K, dtype=torch.bool, device=device),
        bonus_BN=torch.zeros(rows, 1, dtype=torch.long, device=device),
        rejected_BN=torch.zeros(rows, 1, dtype=torch.long, device=device),
    )
