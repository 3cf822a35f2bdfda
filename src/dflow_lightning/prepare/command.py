"""`dflow-train prepare`: prompts in, the target's own answers out, as tokens with a loss mask."""

import sqlite3
import sys
from contextlib import redirect_stdout
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from dflow_lightning.commandline.grouped import grouped
from dflow_lightning.commandline.json_output import JsonOutput
from dflow_lightning.data.conversations import open_source
from dflow_lightning.data.prepared import is_prepared, read_manifest
from dflow_lightning.data.template import ChatEncoder
from dflow_lightning.data.tokenizer import (
    embedding_rows,
    end_token_id,
    load_tokenizer,
    stop_token_ids,
    template_sha256,
    tokenizer_sha256,
)
from dflow_lightning.errors import InputError
from dflow_lightning.files import check_no_chain, check_writable
from dflow_lightning.models.device import choose_device
from dflow_lightning.models.target import FrozenTarget
from dflow_lightning.prepare.dialogue import AnswerSettings, Generator
from dflow_lightning.prepare.from_engine import EngineGenerator
from dflow_lightning.prepare.from_server import ServerGenerator, ServerOptions
from dflow_lightning.prepare.run import Preparation, RowOptions
from dflow_lightning.prepare.verify import report_on_policy
from dflow_lightning.terminal import labelled

CONCURRENCY_HERE = 16  # conversations that the target of this process answers at a time


@dataclass(frozen=True, kw_only=True)
class SourceOptions:
    """Where the prompts come from.

    Args:
        data: JSONL, JSON or Parquet file of prompts or conversations, or a data set's hub id; may
            be left out to verify a folder that is there.
        config_name: configuration of a data set of the hub.
        split: split of a data set of the hub.
        limit: read only so many rows.
    """

    data: str | None = None
    config_name: str | None = None
    split: str = "train"
    limit: int | None = None


@dataclass(frozen=True, kw_only=True)
class TargetOptions:
    """The model whose answers are wanted.

    Args:
        target: hub id or folder of the target; with a server only its tokenizer is loaded.
        device: where the target runs; auto is the GPU if there is one.
        dtype: of the target's weights; auto is float32 on a CPU and bfloat16 elsewhere.
        thinking: let the target think first, where its chat template knows how.
    """

    target: str
    device: str = "auto"
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    thinking: bool = False

    def load(self) -> FrozenTarget:
        return FrozenTarget.load(self.target, dtype=self.dtype, device=choose_device(self.device))


@dataclass(frozen=True, kw_only=True)
class VerifyOptions:
    """Whether and how rows are compared with the target.

    Args:
        verify: compare rows with what the target itself would choose.
        verify_rows: how many rows are compared.
        min_agreement: share of equal tokens below which regeneration is proposed.
    """

    verify: bool = False
    verify_rows: int = 256
    min_agreement: float = 0.8


@grouped
def prepare_command(
    *,
    source: SourceOptions,
    target: TargetOptions,
    out: Path,
    keep_answers: bool = False,
    server: ServerOptions,
    answers: AnswerSettings,
    rows: RowOptions,
    held_out: list[Path] = [],  # noqa: B006 - the parser reads the type
    max_reject_share: float = 0.01,
    checks: VerifyOptions,
    overwrite: bool = False,
    json: Path | None = None,
) -> None:
    """Let the target answer prompts, and write tokens with a loss mask to train on.

    An interrupted run keeps what is answered; the same command goes on from there.

    Args:
        out: folder to write.
        keep_answers: take the answers of the file, as if the target had written them.
        held_out: prepared folder whose prompts are left out here; may be given several times.
        max_reject_share: share of rejects among all rows above which nothing is written.
        overwrite: replace a folder or an unfinished run that was made with other settings.
        json: also write the counts to this file as JSON; without a file name print them on
            standard output and everything else on standard error.
    """
    if out.exists() and not is_prepared(out) and (out.is_file() or any(out.iterdir())):
        raise InputError(f"out: {out} is there and holds no prepared data; choose another folder")
    if keep_answers and server.server:
        raise InputError("server is given, but keep_answers asks no server; leave one of them out")
    if source.data is None and not (checks.verify and is_prepared(out)):
        raise InputError("data is missing: give --data")
    check_writable(out / "manifest.json", "out")
    check_no_chain(out, "out")
    result_json = JsonOutput(json)
    in_process = source.data is not None and not keep_answers and not server.server
    model = target.load() if in_process else None
    with redirect_stdout(result_json.text):
        if source.data is not None:
            tokenizer = model.tokenizer if model else load_tokenizer(target.target, "target")
            asked = open_source(
                source.data, config=source.config_name, split=source.split, limit=source.limit
            )
            preparation = Preparation(
                source=asked,
                out=out,
                rows=rows,
                answers=None if keep_answers else answers,
                held_out=tuple(held_out),
                max_reject_share=max_reject_share,
                **_about(target, model, tokenizer, server, rows.max_length, keep_answers),
            )
            _run(preparation, overwrite)
        manifest, on_policy = read_manifest(out, "out"), None
        _summary(out, manifest)
        if checks.verify:
            on_policy = report_on_policy(
                out,
                model or target.load(),
                num_rows=checks.verify_rows,
                min_agreement=checks.min_agreement,
            )
    counts = manifest["counts"]
    result_json.write({"out": str(out), **counts, "on_policy": on_policy and asdict(on_policy)})


def _about(
    target: TargetOptions,
    model: FrozenTarget | None,
    tokenizer: Any,
    server: ServerOptions,
    max_length: int,
    keep_answers: bool,
) -> dict[str, Any]:
    """What of a `Preparation` follows from the target: template, end tokens, and who answers."""
    vocabulary = model.vocab_size if model else embedding_rows(target.target)
    encoder = ChatEncoder(tokenizer, enable_thinking=target.thinking, vocab_size=vocabulary)
    stop_ids = model.stop_token_ids if model else stop_token_ids(target.target, tokenizer)
    end_id = end_token_id(encoder, stop_ids, strict=not keep_answers)
    generator: Generator | None = None
    if model:
        concurrency = server.concurrency or CONCURRENCY_HERE
        generator = EngineGenerator(model, concurrency=concurrency, max_length=max_length)
    elif not keep_answers:
        generator = ServerGenerator(server, tokenizer, stop_token_ids=stop_ids, end_token_id=end_id)
    described = {
        "target": {"name": target.target, "weights": model.fingerprint if model else None},
        "tokenizer_sha256": tokenizer_sha256(tokenizer),
        "template_sha256": template_sha256(tokenizer),
        "enable_thinking": target.thinking,
    }
    return {
        "encoder": encoder, "stop_ids": (*stop_ids, end_id), "generator": generator,
        "described": described,
    }  # fmt: skip


def _run(preparation: Preparation, overwrite: bool) -> None:
    """Prepare, or find that it is done; what is finished outlives any interruption."""
    if preparation.is_done(overwrite):
        print(labelled("", f"{preparation.out} is prepared already, with these settings"))
        return
    try:
        preparation.run(overwrite)
    except sqlite3.OperationalError as error:
        raise InputError(
            f"out: {preparation.partial} cannot be written ({error}); make room on the disk and "
            "run the same command again"
        ) from error
    except KeyboardInterrupt:
        note = f"answers so far are kept in {preparation.partial}; the same command goes on"
        print(labelled("", note, sys.stderr), file=sys.stderr)
        raise


def _summary(out: Path, manifest: dict[str, Any]) -> None:
    """What is in the folder, and what is not."""
    counts = manifest["counts"]
    found = (
        f"{counts['rows']:,} rows of {counts['source_rows']:,} in the source, "
        f"{counts['tokens']:,} tokens, {counts['supervised_tokens']:,} supervised, "
        f"{counts['anchors']:,} anchor candidates"
    )
    print(labelled("", f"{out}: {found}"))
    notes = {
        "unfinished": "end without an end token, where the answer's limit was reached",
        "cut": "conversations end before their last turn",
        "without_anchors": "answers are too short for an anchor and left out",
        "from_text": "conversations have tokens made from text, since the server returned no ids",
    }
    if manifest["target"]["weights"] is None:
        note = "no fingerprint of the target's weights in the manifest: they were not loaded here; "
        print(labelled("  ", note + "--verify compares the answers with them"))
    for name, note in notes.items():
        if counts[name]:
            print(labelled("  ", f"{counts[name]:,} {note}"))
    for reason, count in counts["rejects"].items():
        print(labelled("  ", f"rejected {count:,}: {reason}"))
    if counts["rejects"]:
        print(labelled("  ", f"all with their lines in {out / 'rejects.jsonl'}"))
