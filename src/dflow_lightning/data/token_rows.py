"""Token rows, in memory or on disk, and the batches that are made of them.

Shapes: B batch, S sequence, R rows.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from dflow_lightning.data.prepared import open_prepared
from dflow_lightning.data.template import EncodedRow
from dflow_lightning.tensors.blocks import Documents

HELD = ("input_ids_BS", "loss_mask_BS", "sample_ids_B")  # by every batch


class Batch(NamedTuple):
    """Rows of like length, padded on the right: int64 ids, and a bool mask, false on padding.

    A packed row holds several documents; its sample id is that of the first one.

    Attributes:
        sample_ids_B: on the host wherever the rest is, since the host alone reads it.
        host_documents: the documents as they were on the host, where the batch was moved.
    """

    input_ids_BS: Tensor
    loss_mask_BS: Tensor
    sample_ids_B: Tensor
    documents: Documents | None = None
    host_documents: Documents | None = None

    def to(self, device: torch.device) -> Batch:
        """The batch for a device. What the host needs of it stays there, where no read waits.

        Lightning calls this, where an object has it, in place of moving every tensor.
        """
        ids_BS, mask_BS = (
            each.to(device, non_blocking=True) for each in (self.input_ids_BS, self.loss_mask_BS)
        )
        if self.documents is None:
            return self._replace(input_ids_BS=ids_BS, loss_mask_BS=mask_BS)
        moved = Documents(*(each.to(device, non_blocking=True) for each in self.documents))
        here = self.host_documents or self.documents
        return Batch(ids_BS, mask_BS, self.sample_ids_B, moved, here)

    @property
    def sample_ids(self) -> list[int]:
        """Of all documents, each once."""
        documents = self.host_documents or self.documents
        ids = self.sample_ids_B if documents is None else documents.sample_ids_BS
        return [number for number in dict.fromkeys(ids.flatten().tolist()) if number >= 0]

    def tensors(self) -> dict[str, Tensor]:
        """All there is by name, to be saved."""
        own = {name: getattr(self, name) for name in HELD}
        documents = {} if self.documents is None else self.documents._asdict()
        return own | {f"documents.{name}": value for name, value in documents.items()}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor]) -> Batch:
        """The inverse of `tensors`."""
        own = {name: value for name, value in tensors.items() if "." not in name}
        inner = {name.split(".")[1]: value for name, value in tensors.items() if "." in name}
        documents = Documents(**inner) if inner else None
        return cls(**own, documents=documents)  # type: ignore[arg-type]


class RowSource(Protocol):
    """Rows of tokens that can be read in any order; `read` gives ids and loss mask."""

    @property
    def lengths(self) -> np.ndarray: ...

    @property
    def sample_ids(self) -> np.ndarray: ...

    def __len__(self) -> int: ...

    def read(self, row: int) -> tuple[np.ndarray, np.ndarray]: ...

    def id(self, row: int) -> str: ...


class TokenRows:
    """Rows in memory, end to end; row r is `tokens[offsets[r] : offsets[r + 1]]`."""

    def __init__(
        self, tokens: np.ndarray, loss_mask: np.ndarray, offsets: np.ndarray, ids: Iterable[str]
    ) -> None:
        self.tokens, self.loss_mask, self.offsets = tokens, loss_mask, offsets
        self.ids = list(ids)
        self.sample_ids = sample_ids(self.ids)
        self.lengths = np.diff(offsets)

    @classmethod
    def pack(cls, rows: Sequence[EncodedRow], ids: Iterable[str]) -> TokenRows:
        """Keep encoded rows in a few arrays."""
        lengths = [len(row.input_ids) for row in rows]
        total = sum(lengths)
        flat = chain.from_iterable
        return cls(
            np.fromiter(flat(row.input_ids for row in rows), np.int32, total),
            np.fromiter(flat(row.loss_mask for row in rows), np.bool_, total),
            np.cumsum([0, *lengths]),
            ids,
        )

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def read(self, row: int) -> tuple[np.ndarray, np.ndarray]:
        """Ids and loss mask of a row; views."""
        span = slice(*self.offsets[row : row + 2])
        return self.tokens[span], self.loss_mask[span]

    def id(self, row: int) -> str:
        """What a row is called."""
        return self.ids[row]

    def without_anchor(self) -> np.ndarray:
        """Numbers of the rows with no two supervised tokens in a row, where no block can begin."""
        eligible = np.append(self.loss_mask[:-1] & self.loss_mask[1:], False)
        eligible[self.offsets[1:] - 1] = False  # the next token is another row's
        found = np.add.reduceat(eligible, self.offsets[:-1], dtype=np.int64)
        return np.nonzero(found == 0)[0]


class RowName(NamedTuple):
    """A row of a prepared folder: what it is called and where it stands."""

    id: str
    family: str
    number: int


class PreparedRows:
    """The rows of a prepared folder, which stay on disk: the system maps what is read.

    In memory are a length and a sample id a row. A copy in another process opens the files again.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._columns: tuple[_ListColumn, _ListColumn] | None = None
        self.lengths = self._open()[0].lengths
        ids = open_prepared(folder).data.column("id")
        self.sample_ids = sample_ids(one for chunk in ids.chunks for one in chunk.to_pylist())

    def __len__(self) -> int:
        return len(self.sample_ids)

    def read(self, row: int) -> tuple[np.ndarray, np.ndarray]:
        """Ids and loss mask of a row."""
        tokens, loss_mask = self._open()
        return tokens.read(row), loss_mask.read(row)

    def id(self, row: int) -> str:
        """What a row is called."""
        return open_prepared(self.folder).data.column("id")[row].as_py()

    def names(self) -> list[RowName]:
        """Id and family of every row, in order; all in memory, so for held-out sets."""
        table = open_prepared(self.folder).data
        ids, families = (table.column(name).to_pylist() for name in ("id", "family"))
        return [RowName(*one) for one in zip(ids, families, range(len(self)), strict=True)]

    def in_memory(self, numbers: Sequence[int]) -> TokenRows:
        """Some of the rows, loaded."""
        parts = [self.read(number) for number in numbers]
        tokens, loss_mask = (np.concatenate(column) for column in zip(*parts, strict=True))
        offsets = np.cumsum([0, *(len(part) for part, _ in parts)])
        names = self.names()
        return TokenRows(tokens, loss_mask, offsets, (names[number].id for number in numbers))

    def _open(self) -> tuple[_ListColumn, _ListColumn]:
        if self._columns is None:
            table = open_prepared(self.folder).data
            names = ("input_ids", "loss_mask")
            self._columns = _ListColumn(table.column(names[0])), _ListColumn(table.column(names[1]))
        return self._columns

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_columns": None}


class _ListColumn:
    """A column of lists in record batches: one list of any row, without a copy of its batch."""

    def __init__(self, column: Any) -> None:
        chunks = [chunk for chunk in column.chunks if len(chunk)]
        self._values = [chunk.values for chunk in chunks]
        self._offsets = [chunk.offsets.to_numpy() for chunk in chunks]
        self._first = np.cumsum([0, *map(len, chunks)])
        self.lengths = np.concatenate([np.diff(o) for o in self._offsets] or [np.zeros(0, int)])

    def read(self, row: int) -> np.ndarray:
        chunk = int(np.searchsorted(self._first, row, side="right")) - 1
        at = row - self._first[chunk]
        start, stop = (int(o) for o in self._offsets[chunk][at : at + 2])
        return self._values[chunk].slice(start, stop - start).to_numpy(zero_copy_only=False)


class ChainedRows:
    """Several sources as one, rows numbered through."""

    def __init__(self, sources: Sequence[RowSource]) -> None:
        self._sources = sources
        self._first = np.cumsum([0, *map(len, sources)])
        self.lengths = np.concatenate([source.lengths for source in sources])
        self.sample_ids = np.concatenate([source.sample_ids for source in sources])

    def __len__(self) -> int:
        return int(self._first[-1])

    def read(self, row: int) -> tuple[np.ndarray, np.ndarray]:
        """Ids and loss mask of a row."""
        source, number = self._at(row)
        return source.read(number)

    def id(self, row: int) -> str:
        """What a row is called."""
        source, number = self._at(row)
        return source.id(number)

    def _at(self, row: int) -> tuple[RowSource, int]:
        """The source of a row, and its number there."""
        number = int(np.searchsorted(self._first, row, side="right")) - 1
        return self._sources[number], int(row - self._first[number])


class Batches(Dataset[Batch]):
    """Makes batches of a source's rows.

    Args:
        pad_id: token on the right of shorter rows.
        width: length of packed rows; None for a row a document, as long as the longest.
    """

    def __init__(self, rows: RowSource, pad_id: int, width: int | None = None) -> None:
        self.rows, self.pad_id, self.width = rows, pad_id, width

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, chosen: Any) -> Batch:
        """The batch of these row numbers; of these lists of row numbers where rows are packed."""
        if self.width is None:
            return self._padded(chosen)
        return self._packed(chosen, self.width)

    def _padded(self, rows_B: np.ndarray) -> Batch:
        shape = len(rows_B), int(self.rows.lengths[rows_B].max())
        input_ids_BS = np.full(shape, self.pad_id, np.int64)
        loss_mask_BS = np.zeros(shape, np.bool_)
        for b, row in enumerate(rows_B):
            tokens, supervised = self.rows.read(row)
            input_ids_BS[b, : len(tokens)] = tokens
            loss_mask_BS[b, : len(tokens)] = supervised
        return Batch(
            torch.from_numpy(input_ids_BS),
            torch.from_numpy(loss_mask_BS),
            torch.from_numpy(self.rows.sample_ids[rows_B]),
        )

    def _packed(self, bins: Sequence[np.ndarray], width: int) -> Batch:
        shape = len(bins), width
        input_ids_BS = np.full(shape, self.pad_id, np.int64)
        loss_mask_BS = np.zeros(shape, np.bool_)
        starts_BS, sample_ids_BS = np.zeros(shape, np.int64), np.full(shape, -1, np.int64)
        for b, rows in enumerate(bins):
            at = 0
            for row in rows:
                tokens, supervised = self.rows.read(row)
                span = slice(at, at + len(tokens))
                input_ids_BS[b, span], loss_mask_BS[b, span] = tokens, supervised
                starts_BS[b, span], sample_ids_BS[b, span] = at, self.rows.sample_ids[row]
                at += len(tokens)
            starts_BS[b, at:] = at
        documents = Documents(torch.from_numpy(starts_BS), torch.from_numpy(sample_ids_BS))
        return Batch(
            torch.from_numpy(input_ids_BS),
            torch.from_numpy(loss_mask_BS),
            documents.sample_ids_BS[:, 0].clone(),
            documents,
        )


def last_answer(loss_mask: np.ndarray) -> slice:
    """The last supervised stretch of a row; empty, at the end, where nothing is supervised."""
    (supervised,) = np.nonzero(loss_mask)
    if not len(supervised):
        return slice(len(loss_mask), len(loss_mask))
    stop = int(supervised[-1]) + 1
    (gaps,) = np.nonzero(~loss_mask[:stop])
    return slice(int(gaps[-1]) + 1 if len(gaps) else 0, stop)


def sample_id(row_id: str) -> int:
    """63 bits that follow from the row's id alone, whatever its file or position."""
    return int.from_bytes(hashlib.sha256(row_id.encode()).digest()[:8], "big") >> 1


def sample_ids(row_ids: Iterable[str]) -> np.ndarray:
    """The same for many rows, int64."""
    return np.fromiter(map(sample_id, row_ids), np.int64)
