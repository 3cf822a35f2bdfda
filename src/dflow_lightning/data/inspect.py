"""`dflow-train inspect`: what the drafter would learn from one row."""

import unicodedata
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.text import Text

from dflow_lightning.commandline.json_output import JsonOutput
from dflow_lightning.data.conversations import Conversation, Reject, parse_conversations
from dflow_lightning.data.prepared import is_prepared, open_prepared, read_manifest
from dflow_lightning.data.template import ChatEncoder, EncodedRow
from dflow_lightning.data.tokenizer import embedding_rows, load_tokenizer, tokenizer_sha256
from dflow_lightning.data.turns import Supervise, written_rows
from dflow_lightning.errors import InputError
from dflow_lightning.tensors.blocks import draw_anchors
from dflow_lightning.terminal import screen

SUPERVISED = "bold green"
Put = Callable[[str, str, str, Sequence[str], Any, EncodedRow, Console | None], None]


def inspect_command(
    *,
    data: Path,
    target: str | None = None,
    row: int = 1,
    thinking: bool = False,
    supervise: Supervise = "all_turns",
    json: Path | None = None,
) -> None:
    """Show a row as the target's chat template renders it, and which tokens are learned from.

    A conversation of a file is shown as the rows that training makes of it. Supervised tokens are
    coloured on a terminal and stand between «marks» elsewhere.

    Args:
        data: folder that dflow-train prepare wrote, or JSONL, JSON or Parquet file of rows.
        target: hub id or folder of the target, whose tokenizer alone is loaded; by default the one
            that the folder was prepared for.
        row: number of the row in a folder, a JSON array or a Parquet file, or its line; from 1.
        thinking: let the target think first, where its chat template knows how (files only).
        supervise: learn from every answer of a conversation, or from the last one (files only).
        json: also write each row to this file as a line of JSON, with its token ids and loss mask;
            without a file name print the lines on standard output instead of text.
    """
    result_json = JsonOutput(json)

    def put(*shown: Any) -> None:
        result_json.write_line(row_as_json(*shown[:6]))
        if not result_json.on_stdout:
            print_row(*shown)

    data = data.expanduser()
    if is_prepared(data):
        _show_prepared(data, target, row, put)
        return
    conversation = find_row(data, row)
    if target is None:
        raise InputError("target is missing: give --target")
    tokenizer = load_tokenizer(target, "target")
    encoder = ChatEncoder(tokenizer, enable_thinking=thinking, vocab_size=embedding_rows(target))
    try:
        show_conversation(f"row {row} of {data}", conversation, encoder, supervise, put=put)
    except InputError as error:
        raise InputError(f"row: line {row} of {data}: {error}") from error


def show_conversation(
    title: str,
    conversation: Conversation,
    encoder: ChatEncoder,
    supervise: Supervise = "all_turns",
    console: Console | None = None,
    put: Put | None = None,
) -> None:
    """Print every row that training makes of a conversation; without an answer, its prompt.

    Raises:
        InputError: the template does not fit the conversation.
    """
    rows = [
        (name, one.tokens, _ending(one.finished))
        for name, one in written_rows(encoder, conversation, supervise)
    ]
    if not rows:
        ids = encoder.prompt(conversation.messages, conversation.tools)
        prompt = EncodedRow(ids, [False] * len(ids))
        rows = [(conversation.id, prompt, "no answer: this is what the target is given")]
    for i, (name, tokens, note) in enumerate(rows, start=1):
        place = [f"{i} of the {len(rows)} rows of this conversation"] if len(rows) > 1 else []
        notes = [note, *place]
        (put or print_row)(
            title, name, conversation.family, notes, encoder.tokenizer, tokens, console
        )


def _show_prepared(folder: Path, target: str | None, row: int, put: Put) -> None:
    """A row of a prepared folder, its text made from its tokens."""
    manifest, rows = read_manifest(folder), open_prepared(folder)
    if not 1 <= row <= len(rows):
        raise InputError(f"row is {row}; {folder} has rows 1 to {len(rows)}")
    tokenizer = load_tokenizer(target or manifest["target"]["name"], "target")
    if tokenizer_sha256(tokenizer) != manifest["tokenizer_sha256"]:
        raise InputError(
            f"target: the tokenizer is not the one that {folder} was prepared with "
            f"({manifest['target']['name']}); give that target"
        )
    found = rows[row - 1]
    tokens = EncodedRow(found["input_ids"], found["loss_mask"])
    notes = [_ending(found["finished"])]
    put(f"row {row} of {folder}", found["id"], found["family"], notes, tokenizer, tokens, None)


def _ending(finished: bool) -> str:
    return f"the last answer is {'finished' if finished else 'cut off where its limit was reached'}"


def _stretches(tokenizer: Any, tokens: EncodedRow) -> Iterator[tuple[str, bool]]:
    """The text of each stretch, which is what the whole text gains by it.

    Some tokenizers drop the space that a text begins with, which must not happen in its middle.
    """
    position, before = 0, ""
    for supervised, members in groupby(tokens.loss_mask):
        position += len(list(members))
        after = tokenizer.decode(tokens.input_ids[:position], skip_special_tokens=False)
        yield after[len(before) :], supervised
        before = after


def find_row(path: Path, row: int) -> Conversation:
    """The conversation at a line of a file.

    Raises:
        InputError: the file cannot be read, the line is blank or not there, or its row is a reject.
    """
    if row < 1:
        raise InputError(f"row is {row}; give 1 or more")
    line = 0
    for line, found in parse_conversations(path):
        if line == row and isinstance(found, Reject):
            raise InputError(
                f"row: line {row} of {path} is rejected ({found.reason}): {found.detail}"
            )
        if line == row and isinstance(found, Conversation):
            return found
        if line > row:
            raise InputError(f"row: line {row} of {path} is blank; the next row is {line}")
    last = f"its last row is {line}" if line else "it is empty"
    raise InputError(f"row: {path} has no line {row}; {last}")


def anchor_candidates(loss_mask: Sequence[bool]) -> list[int]:
    """Positions that `draw_anchors` may choose, ascending."""
    if not loss_mask:
        return []
    mask_BS = torch.tensor([list(loss_mask)])
    anchors = draw_anchors(
        mask_BS, torch.zeros(1, dtype=torch.long), len(loss_mask), seed=0, step=0
    )
    return sorted(anchors.positions_BN[anchors.valid_BN].tolist())


def print_row(
    title: str,
    name: str,
    family: str,
    notes: Sequence[str],
    tokenizer: Any,
    tokens: EncodedRow,
    console: Console | None = None,
) -> None:
    """Print the counts of a row, its text with what is supervised, and the token ids."""
    input_ids, loss_mask = tokens.input_ids, tokens.loss_mask
    console = console or screen()
    if not console.is_terminal:
        console = screen(console.file)
    coloured = console.color_system is not None and not console.no_color
    candidates = anchor_candidates(loss_mask)
    lines = [
        title,
        f"id {name}, family {family}",
        f"{len(input_ids)} tokens, {sum(loss_mask)} supervised",
        f"{len(candidates)} anchor candidates ({', '.join(_ranges(candidates)) or 'none'})",
        *notes,
    ]

    def put(*parts: tuple[str, bool]) -> None:
        text = Text(overflow="fold")
        for part, supervised in parts:
            marked = part if coloured or not supervised else f"«{part}»"
            text.append(visible(marked), SUPERVISED if supervised else None)
        console.print(text, highlight=False)

    for line in lines:
        put((line, False))
    put(("", False))
    put(*_stretches(tokenizer, tokens))
    put(("token ids", False))
    runs = groupby(zip(loss_mask, input_ids, strict=True), key=lambda pair: pair[0])
    parts: list[tuple[str, bool]] = []
    for supervised, pairs in runs:
        ids = " ".join(str(token) for _, token in pairs)
        parts += [(" ", False), (ids, supervised)] if parts else [(ids, supervised)]
    put(*parts)


def row_as_json(
    title: str, name: str, family: str, notes: Sequence[str], tokenizer: Any, tokens: EncodedRow
) -> dict[str, Any]:
    """What `print_row` prints, for a script."""
    return {
        "title": title,
        "id": name,
        "family": family,
        "notes": list(notes),
        "text": tokenizer.decode(tokens.input_ids, skip_special_tokens=False),
        "input_ids": list(tokens.input_ids),
        "loss_mask": list(map(bool, tokens.loss_mask)),
        "anchors": anchor_candidates(tokens.loss_mask),
    }


def visible(text: str) -> str:
    """The text with control characters spelled out, so that none reaches the terminal."""
    return "".join(
        repr(letter)[1:-1]
        if unicodedata.category(letter) == "Cc" and letter not in "\n\t"
        else letter
        for letter in text
    )


def _ranges(positions: Sequence[int]) -> Iterator[str]:
    """Runs of neighbours as `first-last`."""
    for _, run in groupby(enumerate(positions), key=lambda pair: pair[1] - pair[0]):
        members = [position for _, position in run]
        yield str(members[0]) if len(members) == 1 else f"{members[0]}-{members[-1]}"
