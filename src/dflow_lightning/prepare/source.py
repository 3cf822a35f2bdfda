"""Where prompts come from: a file, or a data set of the hub."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

from dflow_lightning.data.conversations import Rows, convert_rows, parse_conversations
from dflow_lightning.data.files import FORMATS
from dflow_lightning.data.shapes import Conversation
from dflow_lightning.errors import InputError
from dflow_lightning.formats.integrity import file_sha256


class Source(Protocol):
    """Rows that come in the same order each time they are read."""

    path: Path

    def rows(self) -> Rows:
        """Every row with its line, as a conversation or as a reject."""
        ...

    def describe(self) -> dict[str, Any]:
        """Its name and what tells that its content is the same."""
        ...


class FileSource:
    """A JSONL, JSON or Parquet file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        next(self.rows(), None)  # refuses what cannot be read, before it is hashed
        self._sha256 = file_sha256(path)

    def rows(self) -> Rows:
        """See `Source`."""
        return parse_conversations(self.path)

    def describe(self) -> dict[str, Any]:
        """The file's name without its folder, and its checksum."""
        return {"name": self.path.name, "sha256": self._sha256}


class HubSource:
    """A split of a data set that `datasets` can load; its Arrow cache is read, not memory."""

    def __init__(self, name: str, config: str | None, split: str) -> None:
        import datasets

        self.path, self._config, self._split = Path(name), config, split
        try:
            self._rows = datasets.load_dataset(name, config, split=split)
        except (datasets.exceptions.DatasetsError, OSError, ValueError) as error:
            reason = " ".join(str(error).split())[:300]
            raise InputError(
                f"data: {name} is no file and no data set that can be loaded ({reason}); give a "
                f"{', '.join(FORMATS)} file, or a hub id with --config_name and --split"
            ) from error

    def rows(self) -> Rows:
        """See `Source`; the line is the row's number."""
        return convert_rows(enumerate(iter(self._rows), start=1), self.path.name)

    def describe(self) -> dict[str, Any]:
        """The hub id with its split, and the fingerprint that `datasets` gives the content."""
        name = "/".join(filter(None, [str(self.path), self._config, self._split]))
        return {"name": name, "fingerprint": self._rows._fingerprint}


class FirstRows:
    """The first rows of another source."""

    def __init__(self, source: Source, limit: int) -> None:
        if limit < 1:
            raise InputError(f"limit is {limit}; give 1 or more")
        self.path, self._source, self._limit = source.path, source, limit

    def rows(self) -> Rows:
        """See `Source`."""
        for number, row in enumerate(self._source.rows()):
            if number == self._limit:
                return
            yield row

    def describe(self) -> dict[str, Any]:
        """The whole source, and how many of its rows are read."""
        return {**self._source.describe(), "limit": self._limit}


def open_source(data: str, *, config: str | None, split: str, limit: int | None) -> Source:
    """The source that `--data` names.

    Raises:
        InputError: it cannot be read.
    """
    path = Path(data).expanduser()
    # What reads like a hub id is looked for there, unless its folder lies here.
    local = path.exists() or data.count("/") != 1 or path.suffix in FORMATS or path.parent.exists()
    source: Source = FileSource(path) if local else HubSource(data, config, split)
    return source if limit is None else FirstRows(source, limit)


def prompt_hash(conversation: Conversation) -> int:
    """Of all that was said to the target; answers do not matter. 64 bits, signed."""
    said = [
        (message["role"], message["content"])
        for message in conversation.messages
        if message["role"] != "assistant"
    ]
    return _hash([said, list(conversation.tools)])


def conversation_hash(conversation: Conversation) -> int:
    """Of all that was said, by anyone."""
    return _hash([conversation.messages, list(conversation.tools)])


def _hash(value: Any) -> int:
    import json

    text = json.dumps(value, sort_keys=True, ensure_ascii=True, default=str)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big", signed=True)


def conversations(source: Source) -> Iterator[tuple[int, Conversation]]:
    """The rows that are conversations, with their lines."""
    for line, row in source.rows():
        if isinstance(row, Conversation):
            yield line, row
