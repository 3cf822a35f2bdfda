"""A set of conversations by its path: a prepared folder or a file, in whichever shape."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from dflow_lightning.data import rows as rows_of_files
from dflow_lightning.data.conversations import parse_conversations
from dflow_lightning.data.prepared import MANIFEST, count_shared, is_prepared, read_manifest
from dflow_lightning.data.rows import Row, read_rows
from dflow_lightning.data.shapes import Conversation
from dflow_lightning.data.template import ChatEncoder, EncodedRow
from dflow_lightning.data.token_rows import PreparedRows, last_answer
from dflow_lightning.data.turns import Supervise, written_rows
from dflow_lightning.errors import InputError

FOREIGN_KEYS = {"conversations", "instruction", "completion", "response", "output"}


def read_set(path: Path, field: str) -> list[Row] | PreparedRows:
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
    if path.suffix in (".json", ".parquet") or _is_foreign(path):
        return _conversation_rows(path, field)
    return read_rows(path, field=field)


class FileRow(NamedTuple):
    """A row of tokens from a file; `where` names the conversation that it comes from."""

    id: str
    where: str
    tokens: EncodedRow


def encode_rows(encoder: ChatEncoder, rows: Sequence[Row], supervise: Supervise) -> list[FileRow]:
    """Token ids and loss masks of conversations: a row of each, or one for each answer.

    Raises:
        InputError: the template refuses a conversation, or leaves it without a supervised token.
    """
    encoded = []
    for row in rows:
        try:
            found = written_rows(
                encoder, row.id, row.messages, finished=row.finished, supervise=supervise
            )
        except InputError as error:
            raise InputError(f"{row.where}: {error}; mend the row or drop it") from error
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
    if path.suffix in (".json", ".parquet") or _is_foreign(path):
        return sum(1 for _ in parse_conversations(path, field=field))
    try:
        with path.open("rb") as file:
            return sum(1 for line in file if line.strip())
    except OSError as error:
        raise InputError(f"{field}: {path} cannot be read ({error.strerror})") from error


def _is_foreign(path: Path) -> bool:
    """Whether the first row of a JSONL file has the keys of another project's shape."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        line = next((line for line in file if line.strip()), b"")
    try:
        record = json.loads(line.decode("utf-8-sig"))
    except ValueError:
        return False
    return isinstance(record, dict) and not FOREIGN_KEYS.isdisjoint(record)


def _conversation_rows(path: Path, field: str) -> list[Row]:
    """Rows in shapes that prepare reads; none may be a reject, since training counts on all."""
    rows: list[Row] = []
    seen: dict[str, int] = {}
    for line, found in parse_conversations(path, field=field):
        where = f"{field}: line {line} of {path}"
        if not isinstance(found, Conversation):
            raise InputError(
                f"{where} is rejected ({found.reason}): {found.detail}; mend the row, or let "
                "dflow-train prepare leave such rows out"
            )
        if found.tools:
            raise InputError(f"{where} has tools; let dflow-train prepare render them")
        name = f"{where} (id {found.id!r})"
        row = Row(found.id, found.family, found.messages, name, found.finished)
        if not row.is_answered:
            raise InputError(
                f"{where} does not end with an answer; let dflow-train prepare have the target "
                "write it"
            )
        if (earlier := seen.setdefault(row.id, line)) != line:
            raise InputError(f"{where} has the id {row.id!r} of line {earlier}; give it its own")
        rows.append(row)
    if not rows:
        raise InputError(f"{field}: {path} is empty; it needs at least one row")
    return rows


def check_disjoint(
    train: list[Row] | PreparedRows,
    held_out: list[Row] | PreparedRows,
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
        rows_of_files.check_disjoint(train, held_out, field)
        return
    if isinstance(train, PreparedRows) and isinstance(held_out, PreparedRows):
        shared = count_shared(train.folder, held_out.folder)
    else:
        known = _prompt_digests(train, encoder)
        shared = sum(digest in known for digest in _prompt_list(held_out, encoder))
    if shared:
        raise InputError(
            f"{field}: {shared} of {len(held_out)} prompts also stand in data.train; take them out "
            "of one of the two sets"
        )


def _prompt_digests(rows: list[Row] | PreparedRows, encoder: Callable[[], ChatEncoder]) -> set:
    return set(_prompt_list(rows, encoder))


def _prompt_list(rows: list[Row] | PreparedRows, encoder: Callable[[], ChatEncoder]) -> list[bytes]:
    """A digest of each prompt's tokens."""
    if isinstance(rows, list):
        return [_digest(encoder().prompt(row.prompt)) for row in rows]
    digests = []
    for number in range(len(rows)):
        tokens, loss_mask = rows.read(number)
        digests.append(_digest(tokens[: last_answer(loss_mask).start]))
    return digests


def _digest(token_ids: Sequence[int] | np.ndarray) -> bytes:
    return hashlib.sha256(np.asarray(token_ids, np.int32).tobytes()).digest()[:16]
