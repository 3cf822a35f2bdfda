"""The loaders that batch token rows in a fixed order."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Iterator
from functools import cached_property
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import DataLoader

from dflow_lightning.data.order import Order
from dflow_lightning.data.token_rows import Batch, Batches, RowSource
from dflow_lightning.errors import InputError


class TrainLoader:
    """An endless stream of batches, cut into epochs, whose position can be saved and restored.

    The order follows from (seed, epoch). Ranks take batches in turn, every rank the same number;
    what is left over at the end of an epoch is dropped. An iteration gives `len(self)` batches from
    where the last one stopped, so neither Lightning's own count of epochs nor
    `limit_train_batches` has a say in the order, and a resumed run meets the batches that the
    uninterrupted one would have met.

    It is no torch DataLoader, because Lightning takes those apart to put in a sampler per rank, and
    no part of one has a state that Lightning saves.
    """

    def __init__(
        self,
        rows: RowSource,
        *,
        batch_size: int,
        seed: int,
        pad_id: int = 0,
        num_workers: int = 0,
        rank: int = 0,
        world_size: int = 1,
        sizes: tuple[int, ...] | None = None,
        weights: tuple[float, ...] | None = None,
        width: int | None = None,
    ) -> None:
        """
        Args:
            sizes: rows of each set that `rows` consists of; by default one.
            weights: share of each set, see `Order`.
            width: pack documents into rows of this many tokens.
        """
        self._rows = rows
        self._order = Order(rows.lengths, sizes or (len(rows),), batch_size, seed, weights, width)
        self._batches = Batches(rows, pad_id, width)
        self._num_workers = num_workers
        self._rank = rank
        self._world_size = world_size
        self._epoch = 0
        self._batch = 0  # of the epoch, counted over all ranks
        total = len(self._order.batches(0))
        self._length = total // world_size
        if not self._length:
            raise InputError(
                f"data.train gives {total} batches of {batch_size} rows for {world_size} "
                "processes; lower data.batch_size or add rows"
            )

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Batch]:
        # A generator on purpose: nothing is read before the first batch is asked for, and Lightning
        # makes iterators that it never uses.
        ahead: deque[_Step] = deque()  # asked of the workers, not handed out yet
        loader = DataLoader(
            self._batches,
            batch_size=None,
            sampler=self._asked(ahead),
            num_workers=self._num_workers,
            collate_fn=_as_it_is,
            pin_memory=torch.cuda.is_available(),
            generator=torch.Generator(),  # or each iteration would draw from the global one
        )
        # Workers read ahead; what counts is what has been handed out.
        for batch in loader:
            _, self._epoch, self._batch = ahead.popleft()
            yield batch

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self._epoch, "batch": self._batch, **self._identity()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue after the last batch handed out; another number of processes may take over.

        Raises:
            InputError: the rows, or what orders them, are not those of the saved run.
        """
        ours, theirs = self._identity(), {k: v for k, v in state.items() if k not in _POSITION}
        for key in ours | theirs:
            if theirs.get(key) != ours.get(key):
                raise InputError(
                    f"data.{key} is {ours.get(key)}, but the checkpoint was trained with "
                    f"{theirs.get(key)}, and other batches would follow; resume with the same data "
                    "settings"
                )
        self._epoch, self._batch = state["epoch"], state["batch"]

    @cached_property
    def _fingerprint(self) -> str:
        """Of ids and lengths; asked for at every step."""
        rows = hashlib.sha256(
            self._rows.sample_ids.tobytes() + self._rows.lengths.astype(np.int64).tobytes()
        )
        return rows.hexdigest()[:8]

    def _identity(self) -> dict[str, Any]:
        """The settings that determine the order of batches, by name."""
        order = self._order
        mixed = {} if order.weights is None else {"train_weights": f"{order.weights} {order.sizes}"}
        packed = {} if order.width is None else {"pack": order.width}
        return {
            "train": f"{len(self._rows)} rows ({self._fingerprint})",
            "batch_size": order.batch_size,
            "seed": order.seed,
        } | (mixed | packed)

    def _asked(self, ahead: deque[_Step]) -> Iterator[Any]:
        """Rows of the batches of one iteration; notes each step as it is asked for."""
        for step in islice(self._steps(), len(self)):
            ahead.append(step)
            yield step.rows

    def _steps(self) -> Iterator[_Step]:
        """This rank's batches from the current position on, without end."""
        epoch, first = self._epoch, self._batch
        while True:
            batches = self._order.batches(epoch)
            for start in range(first, len(batches) - self._world_size + 1, self._world_size):
                yield _Step(batches[start + self._rank], epoch, start + self._world_size)
            epoch, first = epoch + 1, 0


_POSITION = ("epoch", "batch")


class _Step(NamedTuple):
    """A batch's rows, and the position of the stream once it has been handed out."""

    rows: Any
    epoch: int
    batch: int


class HeldOutLoader:
    """Every row once, rows of similar length together, always in the same order.

    Every rank gets the same number of batches, or their collective calls would not meet: a rank
    with none left gets one without supervised tokens, which adds nothing to sums and counts.
    """

    def __init__(
        self,
        rows: RowSource,
        *,
        batch_size: int,
        pad_id: int = 0,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        self._made = Batches(rows, pad_id)
        self._rank = rank
        self._world_size = world_size
        order = np.argsort(rows.lengths, kind="stable")
        self._batches = [order[i : i + batch_size] for i in range(0, len(order), batch_size)]

    def __len__(self) -> int:
        return -(-len(self._batches) // self._world_size)

    def __iter__(self) -> Iterator[Batch]:
        for step in range(len(self)):
            number = step * self._world_size + self._rank
            batch = self._made[self._batches[number % len(self._batches)]]
            if number >= len(self._batches):
                batch = batch._replace(loss_mask_BS=torch.zeros_like(batch.loss_mask_BS))
            yield batch


def _as_it_is(batch: Any) -> Any:
    return batch
