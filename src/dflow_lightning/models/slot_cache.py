"""A cache of the target that is written by slot and never cropped.

Positions, cache slots and visibility are arguments of the target's forward: a rejected row is
simply not visible, and overwritten later. So one class serves plain decoding, ragged batches and
the blocks of a rollout, and shapes stay fixed.

Shapes: B batch, Q query tokens, L cache slots, G key/value heads, E head size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin


class SlotLayer(CacheLayerMixin):
    """Keys and values of one layer in buffers of fixed shape, written at the cache's slots.

    It does not hold the cache, which holds it: in a circle the buffers of a step would live on, and
    beside them those of later steps, until Python looks for circles.
    """

    is_sliding = False

    def __init__(self, capacity: int, num_rows: int | None) -> None:
        super().__init__()
        self._capacity, self._num_rows = capacity, num_rows

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocate the buffers, `[B, G, L, E]`, once the shape of the states is known."""
        batch, heads, _, size = key_states.shape
        shape = (self._num_rows or batch, heads, self._capacity, size)
        self.keys = key_states.new_zeros(shape)
        self.values = value_states.new_zeros(*shape[:3], value_states.shape[-1])
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any):
        """Write the new rows to the slots of the cache, which is the third argument.

        Returns:
            the buffers of the written requests.
        """
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        assert self.keys is not None
        assert self.values is not None
        (cache,) = args
        rows_B = cache.rows_B
        if rows_B is None:  # the first B requests: read as views, without a copy
            rows_B = torch.arange(key_states.shape[0], device=key_states.device)
            read: Any = slice(key_states.shape[0])
        else:
            read = rows_B
        index = (rows_B.unsqueeze(1), slice(None), cache.slots_BQ)
        self.keys[index] = key_states.transpose(1, 2)
        self.values[index] = value_states.transpose(1, 2)
        return self.keys[read, :, : cache.length], self.values[read, :, : cache.length]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Length and offset of the keys that a mask covers, where the cache is not asked."""
        return self._capacity, 0

    def get_seq_length(self) -> int:
        """Zero: the caller always passes positions and masks."""
        return 0

    def get_max_length(self) -> int:
        """Capacity of the buffers, in slots."""
        return self._capacity


class SlotCache(Cache):
    """A target cache in which the caller chooses the slot of each token's keys and values.

    Nothing is ever removed: masks hide rejected rows until the next block overwrites them. That is
    how requests of different length share one batch.

    Attributes:
        slots_BQ: slots that the next tokens are written to.
        rows_B: requests of the next tokens; None means the first B.
        length: slots that attention reads, at most the capacity.
    """

    def __init__(self, num_layers: int, capacity: int, num_rows: int | None = None) -> None:
        self.capacity = self.length = capacity
        self.num_rows = num_rows
        self.slots_BQ = torch.zeros(1, 1, dtype=torch.long)
        self.rows_B: Tensor | None = None
        self._written = [SlotLayer(capacity, num_rows) for _ in range(num_layers)]
        super().__init__(layers=list(self._written))

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write a layer's new rows to the slots; returns the buffers of the written requests."""
        return self._written[layer_idx].update(key_states, value_states, self)

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Length and offset of the keys that a mask covers."""
        return self.length, 0

    def buffers(self) -> list[Tensor]:
        """Keys and values of all layers written so far, one row per request."""
        found = [buffer for layer in self._written for buffer in (layer.keys, layer.values)]
        return [buffer for buffer in found if buffer is not None]
