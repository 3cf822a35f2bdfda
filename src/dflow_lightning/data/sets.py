"""A set of conversations by its path: a prepared folder or a file, in whichever shape."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from dflow_lightning.data.conversations import (
    Conversation,
    asked_hash,
    raw_rows,
    read_conversations,
)
from dflow_lightning.data.prepared import MANIFEST, count_shared, is_prepared, read_manifest
from dflow_lightning.data.template import ChatEncoder, EncodedRow
from dflow_lightning.data.token_rows import PreparedRows, last_answer
from dflow_lightning.data.turns import Supervise, written_rows
from dflow_lightning.errors import InputError


def read_set(path: Path, field: str) -> list[Conversation] | PreparedRows:
    """The rows of a prepared folder, on disk, or of a file of conversations.

    Args:
        field: the setting that named the path, for messages.

    Raises:
        InputError: there is neither, or a row does not fit.
    """
    path = path.expanduser()
    if is_prepared(path):
        prepared = PreparedRows(path)
        if not len(prepared):
            raise InputError(f"{field}: {path} has no rows; prepare data that gives some")
        return prepared
    if path.is_dir():
        raise InputError(
            f"{field}: {path} is a directory without {MANIFEST}; give a folder that dflow-train "
            "prepare wrote, or a JSONL file"
        )
    return read_conversations(path, field=field)


class FileRow(NamedTuple):
    """A row of tokens from a file; `where` names the conversation that it comes from."""

    id: str
    where: str
    tokens: EncodedRow


def encode_rows(
    encoder: ChatEncoder, rows: Sequence[Conversation], supervise: Supervise
) -> list[FileRow]:
    """Token ids and loss masks of conversations: a row of each, or one for each answer.

    Raises:
        InputError: the template refuses a conversation, or leaves it without a supervised token.
    """
    encoded = []
    for row in rows:
        try:
            found = written_rows(encoder, row, supervise)
        except InputError as error:
            raise InputError(f"{row.where}: {error}; fix the row or drop it") from error
        encoded += [FileRow(name, row.where, one.tokens) for name, one in found]
    return encoded


def check_manifest(rows: PreparedRows, encoder: ChatEncoder, field: str) -> None:
    """Refuse rows that were prepared for another tokenizer, template or way of thinking.

    Raises:
        InputError: naming what differs.
    """
    from dflow_lightning.data.tokenizer import template_sha256, tokenizer_sha256

    manifest = read_manifest(rows.folder, field)
    tokenizer = encoder.tokenizer
    ours = {
        "tokenizer_sha256": ("tokenizer", tokenizer_sha256(tokenizer)),
        "template_sha256": ("chat template", template_sha256(tokenizer)),
    }
    for key, (name, value) in ours.items():
        if manifest.get(key, value) != value:
            raise InputError(
                f"{field}: {rows.folder} was prepared with another {name} than the target's; "
                "prepare the data with this target"
            )
    thinking = manifest.get("enable_thinking", encoder.enable_thinking)
    if thinking != encoder.enable_thinking:
        raise InputError(
            f"data.enable_thinking is {encoder.enable_thinking}, but {rows.folder} was prepared "
            f"with {thinking}; set it to the same"
        )


def count_rows(path: Path, field: str) -> int:
    """Rows of a folder; conversations of a file, which may give several, without tokenizing any."""
    if is_prepared(path):
        return sum(record["rows"] for record in read_manifest(path, field)["files"])
    return sum(1 for _ in raw_rows(path, field))


def check_disjoint(
    train: list[Conversation] | PreparedRows,
    held_out: list[Conversation] | PreparedRows,
    encoder: Callable[[], ChatEncoder],
    field: str,
) -> None:
    """Refuse held-out prompts that are trained on.

    Rows of files are compared by their messages, prepared ones by the hash that they carry, and one
    kind with the other by the tokens of the prompts.

    Raises:
        InputError: with how many they are.
    """
    if isinstance(train, list) and isinstance(held_out, list):
        asked = set(map(asked_hash, train))
        repeated = [row.id for row in held_out if asked_hash(row) in asked]
        if repeated:
            raise InputError(
                f"{field}: {len(repeated)} of {len(held_out)} prompts are also in data.train, "
                f"first {repeated[0]!r}; take them out of one of the two files"
            )
        return
    if isinstance(train, PreparedRows) and isinstance(held_out, PreparedRows):
        shared = count_shared(train.folder, held_out.folder)
    else:
        known = set(_prompt_list(train, encoder))
        shared = sum(digest in known for digest in _prompt_list(held_out, encoder))
    if shared:
        raise InputError(
            f"{field}: {shared} of {len(held_out)} prompts are also in data.train; "
            "take them out of one of the two sets"
        )


def _prompt_list(
    rows: list[Conversation] | PreparedRows, encoder: Callable[[], ChatEncoder]
) -> list[bytes]:
    """A digest of each prompt's tokens."""
    if isinstance(rows, list):
        return [_digest(encoder().prompt(row.prompt, row.tools)) for row in rows]
    digests = []
    for number in range(len(rows)):
        tokens, loss_mask = rows.read(number)
        digests.append(_digest(tokens[: last_answer(loss_mask).start]))
    return digests


def _digest(token_ids: Sequence[int] | np.ndarray) -> bytes:
    return hashlib.sha256(np.asarray(token_ids, np.int32).tobytes()).digest()[:16]
