"""JSONL, JSON and Parquet files as streams of raw rows: memory does not grow with a file.

A file that cannot be read at all, or not to its end, is an `InputError`.
"""

from __future__ import annotations

import io
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, TextIO

from dflow_lightning.errors import InputError

MAX_ROW = 16 * 2**20  # bytes of a JSON row, above what any conversation takes
CHUNK = 2**20
FORMATS = {".jsonl": "JSONL", ".ndjson": "JSONL", ".json": "JSON", ".parquet": "Parquet"}
SIGNATURES = {
    b"\x1f\x8b": ("gzip-compressed", "unpack it"),
    b"\x28\xb5\x2f\xfd": ("zstd-compressed", "unpack it"),
    b"\xff\xfe": ("UTF-16 text", "save it as UTF-8"),
    b"\xfe\xff": ("UTF-16 text", "save it as UTF-8"),
}
WHITE = re.compile(r"[ \t\r\n]*")


def raw_rows(path: Path, field: str) -> Iterator[tuple[int, Any]]:
    """Rows not looked into: bytes or text of JSON, None for one that is too long, a Parquet row."""
    where = f"{field}: {path}"
    if path.is_dir():
        raise InputError(f"{where} is a directory; give one file in it")
    if not path.exists():
        raise InputError(f"{where} does not exist; give a JSONL, JSON or Parquet file")
    if not path.is_file():
        raise InputError(f"{where} is not a regular file; save the rows to one")
    if path.suffix.lower() not in FORMATS:
        known = ", ".join(FORMATS)
        raise InputError(f"{where} has the suffix {path.suffix!r}; give a file named {known}")
    try:
        with path.open("rb") as file:
            head = file.read(4096)
            file.seek(0)
            for signature, (what, mend) in SIGNATURES.items():
                if head.startswith(signature):
                    raise InputError(f"{where} is {what}; {mend}")
            parquet = head.startswith(b"PAR1")
            if parquet != (FORMATS[path.suffix.lower()] == "Parquet") and head:
                what = "a Parquet file" if parquet else "no Parquet file"
                raise InputError(f"{where} is {what}; name it by its format")
            if parquet:
                yield from _parquet_rows(file, where)
            elif path.suffix.lower() == ".json" and _without_mark(head).lstrip()[:1] == b"[":
                yield from _array_rows(file, where)
            else:
                yield from _lines(file)
    except OSError as error:
        reason = error.strerror or str(error).partition("\n")[0]
        raise InputError(f"{where} cannot be read ({reason}); give a readable file") from error


def _lines(file: BinaryIO) -> Iterator[tuple[int, bytes | None]]:
    number = 0
    while line := file.readline(MAX_ROW + 1):
        number += 1
        if len(line) > MAX_ROW:
            while not line.endswith(b"\n") and (line := file.readline(CHUNK)):
                pass
            yield number, None
            continue
        line = (_without_mark(line) if number == 1 else line).strip()
        if line:
            yield number, line


def _without_mark(text: bytes) -> bytes:
    return text.removeprefix(b"\xef\xbb\xbf")


def _array_rows(file: BinaryIO, where: str) -> Iterator[tuple[int, str]]:
    """The texts of an array's elements; only so much is held as one element needs."""
    number = 0
    try:
        with io.TextIOWrapper(file, encoding="utf-8-sig", newline="") as reader:
            for number, text in _elements(reader, where):
                yield number, text
    except UnicodeDecodeError as error:
        raise InputError(
            f"{where} is not UTF-8 text after element {number} ({error.reason}); save it as UTF-8"
        ) from error
    except RecursionError as error:
        raise InputError(f"{where}: element {number + 1} is nested too deep; mend it") from error


def _elements(reader: TextIO, where: str) -> Iterator[tuple[int, str]]:
    """Numbered texts; `reader` stands before the array."""
    # Finds where an element ends and is content with more than JSON; `_load` is strict.
    scanner = json.JSONDecoder(strict=False, parse_int=str, parse_float=str)
    number = 0
    buffer = reader.read(CHUNK)
    at = buffer.index("[") + 1
    closed = ""
    while closed != "]":
        start = _skip_white(buffer, at)
        end, closed = start, ""
        if number == 0 and buffer[start : start + 1] == "]":
            at, closed = start + 1, "]"
            continue
        try:
            end = scanner.raw_decode(buffer, start)[1]
            at = _skip_white(buffer, end)
            closed = buffer[at : at + 1]
        except json.JSONDecodeError:
            pass
        if closed in (",", "]"):
            number, at = number + 1, at + 1
            yield number, buffer[start:end]
            continue
        held = len(buffer) - start
        more = reader.read(max(CHUNK, held)) if held <= MAX_ROW else ""
        if not more:
            raise InputError(
                f"{where}: element {number + 1} of the array is broken, cut off or longer than "
                f"{MAX_ROW >> 20} MiB, and nothing after it can be read; mend the file"
            )
        buffer, at, closed = buffer[start:] + more, 0, ""
    if (buffer[at:] + reader.read(CHUNK)).strip():
        raise InputError(
            f"{where} goes on after its array; write one array, or one object per line in a "
            ".jsonl file"
        )


def _skip_white(text: str, at: int) -> int:
    found = WHITE.match(text, at)
    return found.end() if found else at


def _parquet_rows(file: BinaryIO, where: str) -> Iterator[tuple[int, Any]]:
    """Record batches of one row each."""
    from pyarrow import ArrowException
    from pyarrow.parquet import ParquetFile

    number = 0
    try:
        for batch in ParquetFile(file).iter_batches(batch_size=256):
            for i in range(batch.num_rows):
                number += 1
                yield number, batch.slice(i, 1)
    except ArrowException as error:
        reason = str(error).partition("\n")[0]
        raise InputError(
            f"{where} is a damaged Parquet file, unreadable after row {number} ({reason}); "
            "fetch or write it again"
        ) from error
