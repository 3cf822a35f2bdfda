"""Token rows in memory and the loaders that batch them in a fixed order.

Shapes: B batch, S sequence, R rows.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, islice
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from dflow_lightning.data.template import EncodedRow
from dflow_lightning.errors import InputError

POOL_BATCHES = 64  # rows are sorted by length within pools of this many batches


class Batch(NamedTuple):
    """Rows of like length, padded on the right: int64 ids, and a bool mask, false on padding."""

    input_ids_BS: Tensor
    loss_mask_BS: Tensor
    sample_ids_B: Tensor


@dataclass(frozen=True)
class TokenRows(Dataset[Batch]):
    """All rows of one file end to end; row r is `tokens[offsets[r] : offsets[r + 1]]`."""

    tokens: np.ndarray
    loss_mask: np.ndarray
    offsets: np.ndarray
    sample_ids: np.ndarray
    pad_id: int

    @classmethod
    def pack(cls, rows: Sequence[EncodedRow], ids: Sequence[str], pad_id: int) -> TokenRows:
        lengths = [len(row.input_ids) for row in rows]
        total = sum(lengths)
        flat = chain.from_iterable
        return cls(
            np.fromiter(flat(row.input_ids for row in rows), np.int32, total),
            np.fromiter(flat(row.loss_mask for row in rows), np.bool_, total),
            np.cumsum([0, *lengths]),
            np.array([sample_id(one) for one in ids], np.int64),
            pad_id,
        )

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def lengths(self) -> np.ndarray:
        return np.diff(self.offsets)

    def __getitem__(self, rows_B: np.ndarray) -> Batch:
        """The batch of these rows."""
        shape = len(rows_B), int(self.lengths[rows_B].max())
        input_ids_BS = np.full(shape, self.pad_id, np.int64)
        loss_mask_BS = np.zeros(shape, np.bool_)
        for b, row in enumerate(rows_B):
            start, stop = self.offsets[row : row + 2]
            input_ids_BS[b, : stop - start] = self.tokens[start:stop]
            loss_mask_BS[b, : stop - start] = self.loss_mask[start:stop]
        return Batch(
            torch.from_numpy(input_ids_BS),
            torch.from_numpy(loss_mask_BS),
            torch.from_numpy(self.sample_ids[rows_B]),
        )


def sample_id(row_id: str) -> int:
    """63 bits that follow from the row's id alone, whatever file or position it stands in."""
    return int.from_bytes(hashlib.sha256(row_id.encode()).digest()[:8], "big") >> 1


def shuffled_batches(
    lengths_R: np.ndarray, batch_size: int, *, seed: int, epoch: int
) -> list[np.ndarray]:
    """Row numbers of one epoch's batches, all full; a set smaller than one batch is one batch.

    Rows are shuffled, sorted by length within pools of batches, and the batches are shuffled again:
    little padding, and still other neighbours in every epoch.
    """
    generator = np.random.default_rng([seed, epoch])
    rows = generator.permutation(len(lengths_R))
    if len(rows) > batch_size:
        rows = rows[: len(rows) - len(rows) % batch_size]
    batches = []
    for start in range(0, len(rows), POOL_BATCHES * batch_size):
        pool = rows[start : start + POOL_BATCHES * batch_size]
        pool = pool[np.argsort(lengths_R[pool], kind="stable")]
        batches += [pool[i : i + batch_size] for i in range(0, len(pool), batch_size)]
    return [batches[i] for i in generator.permutation(len(batches))]


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
        rows: TokenRows,
        *,
        batch_size: int,
        seed: int,
        num_workers: int = 0,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        self._rows = rows
        self._batch_size = batch_size
        self._seed = seed
        self._num_workers = num_workers
        self._rank = rank
        self._world_size = world_size
        self._epoch = 0
        self._batch = 0  # of the epoch, counted over all ranks
        total = len(self._epoch_batches(0))
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
        steps = list(islice(self._steps(), len(self)))
        loader = DataLoader(
            self._rows,
            batch_size=None,
            sampler=[step.rows_B for step in steps],
            num_workers=self._num_workers,
            collate_fn=_as_it_is,
            pin_memory=torch.cuda.is_available(),
            generator=torch.Generator(),  # or each iteration would draw from the global one
        )
        # Workers read ahead; what counts is what has been handed out.
        for step, batch in zip(steps, loader, strict=True):
            self._epoch, self._batch = step.epoch, step.batch
            yield batch

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self._epoch, "batch": self._batch, **self._order()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue after the last batch handed out; another number of processes may take over.

        Raises:
            InputError: the rows, the batch size or the seed are not those of the saved run.
        """
        for key, value in self._order().items():
            if state[key] != value:
                raise InputError(
                    f"data.{key} is {value}, but the checkpoint was trained with {state[key]}, and "
                    "other batches would follow; resume with the same data settings"
                )
        self._epoch, self._batch = state["epoch"], state["batch"]

    @cached_property
    def _fingerprint(self) -> str:
        """Of ids and lengths; asked for at every step."""
        rows = hashlib.sha256(self._rows.sample_ids.tobytes() + self._rows.lengths.tobytes())
        return rows.hexdigest()[:8]

    def _order(self) -> dict[str, Any]:
        """What the order of batches follows from, by the names of the settings."""
        return {
            "train": f"{len(self._rows)} rows ({self._fingerprint})",
            "batch_size": self._batch_size,
            "seed": self._seed,
        }

    def _epoch_batches(self, epoch: int) -> list[np.ndarray]:
        return shuffled_batches(self._rows.lengths, self._batch_size, seed=self._seed, epoch=epoch)

    def _steps(self) -> Iterator[_Step]:
        """This rank's batches from the current position on, without end."""
        epoch, first = self._epoch, self._batch
        while True:
            batches = self._epoch_batches(epoch)
            for start in range(first, len(batches) - self._world_size + 1, self._world_size):
                yield _Step(batches[start + self._rank], epoch, start + self._world_size)
            epoch, first = epoch + 1, 0


class _Step(NamedTuple):
    """A batch's rows, and the position of the stream once it has been handed out."""

    rows_B: np.ndarray
    epoch: int
    batch: int


class HeldOutLoader:
    """Every row once, rows of like length together, always in the same order.

    Every rank gets the same number of batches, or their collective calls would not meet: a rank
    with none left gets one without supervised tokens, which adds nothing to sums and counts.
    """

    def __init__(
        self, rows: TokenRows, *, batch_size: int, rank: int = 0, world_size: int = 1
    ) -> None:
        self._rows = rows
        self._rank = rank
        self._world_size = world_size
        order = np.argsort(rows.lengths, kind="stable")
        self._batches = [order[i : i + batch_size] for i in range(0, len(order), batch_size)]

    def __len__(self) -> int:
        return -(-len(self._batches) // self._world_size)

    def __iter__(self) -> Iterator[Batch]:
        for step in range(len(self)):
            number = step * self._world_size + self._rank
            batch = self._rows[self._batches[number % len(self._batches)]]
            if number >= len(self._batches):
                batch = batch._replace(loss_mask_BS=torch.zeros_like(batch.loss_mask_BS))
            yield batch


def _as_it_is(batch: Any) -> Any:
    return batch
