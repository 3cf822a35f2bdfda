"""Prepared data: the folder that `dflow-train prepare` writes and training reads.

    manifest.json           how the rows came to be, how many they are; the files with checksums
    data-00000.arrow, ...   Arrow streams as `datasets` writes them, `ROWS_PER_FILE` rows each
    rejects.jsonl           what of the source is not in the rows, and why
    on_policy.json          how far the target agrees with the rows, where that was asked for

A row has

    id             the conversation's, with `#turn` and `@sample` where it gave several rows
    family         part of metric names
    input_ids      int32; the prompt and the answers
    loss_mask      bool, as long; true on what the drafter learns from
    finished       whether the last answer ended by itself; without that it has no end token
    prompt_hash    int64 hash of everything except the answers; equal in all rows of a conversation

A folder appears whole or not at all. It depends on its source and its settings alone: prepared
again, interrupted or not, its bytes are the same.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypedDict

from dflow_lightning.errors import InputError
from dflow_lightning.formats.integrity import file_sha256

if TYPE_CHECKING:
    from datasets import Dataset

PREPARED_FORMAT = 1
MANIFEST = "manifest.json"
REJECTS = "rejects.jsonl"
ON_POLICY_FILE = "on_policy.json"
ROWS_PER_FILE = 50_000
ROWS_PER_BATCH = 1000  # of one Arrow record batch: what a writer holds


class PreparedRow(NamedTuple):
    """One row of the folder; see the head of this module."""

    id: str
    family: str
    input_ids: list[int]
    loss_mask: list[bool]
    finished: bool
    prompt_hash: int


class FileRecord(TypedDict):
    """What the manifest says about one Arrow file."""

    name: str
    rows: int
    bytes: int
    sha256: str


class PreparedWriter:
    """Writes rows to the Arrow files of a folder; only `ROWS_PER_BATCH` of them are held.

    `close` completes the files and returns their records, which `finish` takes.
    """

    def __init__(self, folder: Path, rows_per_file: int = ROWS_PER_FILE) -> None:
        self.folder, self.rows_per_file = folder, rows_per_file
        self._records: list[FileRecord] = []
        self._writer: Any = None
        self._rows = 0

    def write(self, row: PreparedRow) -> None:
        """Add a row, in the order that readers will see."""
        if self._writer is None:
            self._open()
        self._writer.write(row._asdict())
        self._rows += 1
        if self._rows == self.rows_per_file:
            self._end_file()

    def close(self) -> list[FileRecord]:
        """End the last file; an empty set has one file without rows."""
        if self._writer is None and not self._records:
            self._open()
        if self._writer is not None:
            self._end_file()
        return self._records

    def _open(self) -> None:
        from datasets.arrow_writer import ArrowWriter

        path = self.folder / f"data-{len(self._records):05}.arrow"
        self._writer = ArrowWriter(
            path=str(path), features=_features(), writer_batch_size=ROWS_PER_BATCH
        )
        self._rows = 0

    def _end_file(self) -> None:
        path = self.folder / f"data-{len(self._records):05}.arrow"
        self._writer.finalize()
        self._writer = None
        self._records.append(
            FileRecord(
                name=path.name,
                rows=self._rows,
                bytes=path.stat().st_size,
                sha256=file_sha256(path),
            )
        )


def finish(folder: Path, manifest: Mapping[str, Any], files: list[FileRecord]) -> None:
    """Write the manifest, and prove the folder by reading it.

    Raises:
        OSError: what was written does not read back.
    """
    content = {"format": PREPARED_FORMAT, **manifest, "files": files}
    text = json.dumps(content, indent=2, ensure_ascii=False) + "\n"
    (folder / MANIFEST).write_text(text, encoding="utf-8")
    found = open_prepared(folder)
    wrong = [one["name"] for one in files if file_sha256(folder / one["name"]) != one["sha256"]]
    if wrong or len(found) != sum(one["rows"] for one in files):
        raise OSError(f"{folder}: {wrong or 'rows'} did not read back as written")


def is_prepared(folder: Path) -> bool:
    """Whether a path is a folder of this format, by its manifest's presence."""
    return (folder / MANIFEST).is_file()


def read_manifest(folder: Path, field: str = "data") -> dict[str, Any]:
    """The manifest of a prepared folder.

    Raises:
        InputError: the manifest is missing or of another format.
    """
    path = folder / MANIFEST
    if not path.is_file():
        raise InputError(
            f"{field}: {folder} holds no {MANIFEST}; give a folder that dflow-train prepare wrote"
        )
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
        version = manifest["format"]
        [(one["name"], one["rows"], one["bytes"]) for one in manifest["files"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(
            f"{field}: {path} is damaged ({type(error).__name__}); prepare the data again"
        ) from error
    if version != PREPARED_FORMAT:
        raise InputError(
            f"{field}: {folder} is of format {version} and this version reads {PREPARED_FORMAT}; "
            "prepare the data again"
        )
    return manifest


def open_prepared(folder: Path) -> Dataset:
    """The rows of a prepared folder, memory-mapped: nothing is loaded before it is read.

    Sizes and columns are checked against the manifest, which takes no time; checksums are not.

    Raises:
        InputError: the folder has no manifest or does not match it.
    """
    from datasets import Dataset, concatenate_datasets

    manifest = read_manifest(folder)
    parts = []
    for record in manifest["files"]:
        path = folder / record["name"]
        size = path.stat().st_size if path.is_file() else None
        if size != record["bytes"]:
            raise InputError(
                f"data: {path} has {'no' if size is None else size} bytes instead of "
                f"{record['bytes']}; copy the folder again or prepare the data again"
            )
        part = Dataset.from_file(str(path))
        if part.features != _features() or len(part) != record["rows"]:
            raise InputError(
                f"data: {path} has other columns or rows than {MANIFEST} says; "
                "copy the folder again or prepare the data again"
            )
        parts.append(part)
    return concatenate_datasets(parts)


def check_unchanged(folder: Path) -> None:
    """Compare every file with its checksum in the manifest; reads all of them.

    Raises:
        InputError: one of them differs.
    """
    for record in read_manifest(folder)["files"]:
        path = folder / record["name"]
        if not path.is_file() or file_sha256(path) != record["sha256"]:
            raise InputError(
                f"data: the checksum of {path} is not that of {MANIFEST}; copy the folder again "
                "or prepare the data again"
            )


def prompt_hashes(folder: Path) -> Iterator[int]:
    """The `prompt_hash` of every row; no other column is read."""
    column = open_prepared(folder).select_columns("prompt_hash").with_format("arrow")
    for batch in column.iter(batch_size=ROWS_PER_BATCH):
        yield from batch["prompt_hash"].to_pylist()


def count_shared(train: Path, held_out: Path) -> int:
    """Rows of `held_out` whose prompt is also in `train`."""
    import numpy as np

    known, asked = (np.fromiter(prompt_hashes(folder), np.int64) for folder in (train, held_out))
    return int(np.isin(asked, known).sum())


def _features() -> Any:
    from datasets import Features, List, Value

    return Features(
        {
            "id": Value("string"),
            "family": Value("string"),
            "input_ids": List(Value("int32")),
            "loss_mask": List(Value("bool")),
            "finished": Value("bool"),
            "prompt_hash": Value("int64"),
        }
    )
