"""The order of training rows: a pure function of (seed, epoch), the same on every process.

Shapes: R rows.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass

import numpy as np

from dflow_lightning.errors import InputError

POOL_BATCHES = 64  # rows are sorted by length within pools of this many batches
POOL_ROWS = 4096  # documents that are packed together: larger ones hardly fill rows better


@dataclass(frozen=True)
class Order:
    """How the rows of one or several sets become batches.

    Args:
        lengths_R: tokens of every row, the sets one after the other.
        sizes: rows of each set.
        weights: share of each set in an epoch, any positive numbers; None takes every row once.
        width: tokens of a packed row; None keeps a row a document.
    """

    lengths_R: np.ndarray
    sizes: tuple[int, ...]
    batch_size: int
    seed: int
    weights: tuple[float, ...] | None = None
    width: int | None = None

    def batches(self, epoch: int) -> np.ndarray | list[list[np.ndarray]]:
        """Batches of an epoch: of row numbers, or of lists of row numbers where rows are packed.

        All are full; a set smaller than one batch is one batch.
        """
        generator = np.random.default_rng([self.seed, epoch])
        rows_R = self._rows(epoch, generator)
        if self.width is not None:
            return self._packed(rows_R, self.width, generator)
        return self._bucketed(rows_R, generator)

    def quotas(self) -> list[int]:
        """Rows that each set contributes to an epoch; their sum is the size of all sets."""
        if self.weights is None:
            return list(self.sizes)
        exact = np.array(self.weights) / sum(self.weights) * sum(self.sizes)
        quotas = np.floor(exact).astype(int)
        short = sum(self.sizes) - quotas.sum()
        quotas[np.argsort(quotas - exact, kind="stable")[:short]] += 1
        if not quotas.all():
            raise InputError(
                f"data.train_weights are {list(self.weights)}, which leave set "
                f"{int(quotas.argmin()) + 1} no row of an epoch of {sum(self.sizes)}; raise its own"
            )
        return quotas.tolist()

    def _rows(self, epoch: int, generator: np.random.Generator) -> np.ndarray:
        """The rows of an epoch, shuffled."""
        if self.weights is None:
            return generator.permutation(len(self.lengths_R))
        firsts = np.cumsum([0, *self.sizes])
        parts = [
            firsts[number] + self._stream(number, epoch * quota, quota)
            for number, quota in enumerate(self.quotas())
        ]
        return generator.permutation(np.concatenate(parts))

    def _stream(self, number: int, start: int, count: int) -> np.ndarray:
        """A slice of a set's own endless stream: every pass over it is reshuffled.

        So epochs go on where the last one stopped, and no row comes again before all others did.
        """
        size, found = self.sizes[number], []
        while count:
            rounds, first = divmod(start, size)
            order = np.random.default_rng([self.seed, rounds, 1 + number]).permutation(size)
            found.append(order[first : first + count])
            start, count = start + len(found[-1]), count - len(found[-1])
        return np.concatenate(found)

    def _bucketed(self, rows_R: np.ndarray, generator: np.random.Generator) -> np.ndarray:
        """Sorted by length within pools, then the batches shuffled: little padding, and different
        neighbours in every epoch."""
        size = min(self.batch_size, len(rows_R))
        rows_R = rows_R[: len(rows_R) - len(rows_R) % size]
        pools = []
        for start in range(0, len(rows_R), POOL_BATCHES * size):
            pool = rows_R[start : start + POOL_BATCHES * size]
            pools.append(pool[np.argsort(self.lengths_R[pool], kind="stable")])
        batches = np.concatenate(pools).reshape(-1, size)
        return batches[generator.permutation(len(batches))]

    def _packed(
        self, rows_R: np.ndarray, width: int, generator: np.random.Generator
    ) -> list[list[np.ndarray]]:
        """Documents packed within pools, and the packed rows shuffled."""
        bins: list[np.ndarray] = []
        for start in range(0, len(rows_R), POOL_ROWS):
            pool = rows_R[start : start + POOL_ROWS]
            bins += pack(pool, self.lengths_R[pool], width)
        bins = [bins[i] for i in generator.permutation(len(bins))]
        size = min(self.batch_size, len(bins))
        return [bins[i : i + size] for i in range(0, len(bins) - size + 1, size)]


def pack(rows_R: np.ndarray, lengths_R: np.ndarray, width: int) -> list[np.ndarray]:
    """Rows put together so that none exceeds `width` tokens: best fit, the longest first.

    Raises:
        ValueError: a row is longer than `width`.
    """
    bins: list[list[int]] = []
    free: list[tuple[int, int]] = []  # room that is left, bin; ascending
    longest_first = np.argsort(-lengths_R, kind="stable")
    for index in longest_first:
        length = int(lengths_R[index])
        if length > width:
            raise ValueError(f"a row of {length} tokens does not fit into {width}")
        at = bisect_left(free, (length, 0))
        room, number = free.pop(at) if at < len(free) else (width, len(bins))
        if number == len(bins):
            bins.append([])
        bins[number].append(int(rows_R[index]))
        if room > length:
            insort(free, (room - length, number))
    return [np.array(one) for one in bins]
