"""`dflow-train prepare`: prompts in, the target's own answers out, as tokens with a loss mask."""

import sqlite3
import sys
from contextlib import redirect_stdout
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

from dflow_lightning.commandline.json_output import JsonOutput
from dflow_lightning.data.conversations import open_source
from dflow_lightning.data.prepared import is_prepared, read_manifest
from dflow_lightning.data.template import ChatEncoder
from dflow_lightning.data.tokenizer import (
    end_token_id,
    load_tokenizer,
    stop_token_ids,
    template_sha256,
    tokenizer_sha256,
)
from dflow_lightning.data.turns import Supervise
from dflow_lightning.errors import InputError
from dflow_lightning.files import check_writable
from dflow_lightning.models.device import choose_device
from dflow_lightning.models.target import FrozenTarget
from dflow_lightning.prepare.dialogue import AnswerSettings, Generator
from dflow_lightning.prepare.from_engine import EngineGenerator
from dflow_lightning.prepare.from_server import ServerGenerator, ServerOptions
from dflow_lightning.prepare.run import Preparation, RowOptions, TooLong
from dflow_lightning.prepare.verify import report_on_policy
from dflow_lightning.terminal import labelled


def prepare_command(
    *,
    data: str | None = None,
    target: str,
    out: Path,
    config_name: str | None = None,
    split: str = "train",
    limit: int | None = None,
    keep_answers: bool = False,
    server: list[str] = [],  # noqa: B006 - the parser reads the type
    model: str | None = None,
    concurrency: int | None = None,
    timeout: float = 600.0,
    retries: int = 5,
    device: str = "auto",
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto",
    thinking: bool = False,
    temperature: float = 0.0,
    top_p: float = 1.0,
    max_new_tokens: int = 2048,
    samples_per_prompt: int = 1,
    seed: int = 0,
    supervise: Supervise = "all_turns",
    supervise_thinking: bool = True,
    max_length: int = 3072,
    too_long: TooLong = "truncate",
    held_out: list[Path] = [],  # noqa: B006
    max_reject_share: float = 0.01,
    verify: bool = False,
    verify_rows: int = 256,
    min_agreement: float = 0.8,
    overwrite: bool = False,
    json: Path | None = None,
) -> None:
    """Let the target answer prompts, and write tokens with a loss mask to train on.

    An interrupted run keeps what is answered; the same command goes on from there.

    Args:
        data: JSONL, JSON or Parquet file of prompts or conversations, or a data set's hub id; may
            be left out to verify a folder that is there.
        target: hub id or folder of the target; with a server only its tokenizer is loaded.
        out: folder to write.
        config_name: configuration of a data set of the hub.
        split: split of a data set of the hub.
        limit: read only so many rows.
        keep_answers: take the answers of the file, as if the target had written them.
        server: address of an OpenAI-compatible API that serves the target, as
            http://host:8000/v1; may be given several times. Without one the target runs here.
        model: name under which the servers know the target; by default the only one they have.
        concurrency: conversations answered at the same time; by default 16 here, 64 on servers.
        timeout: seconds that a server's answer may take.
        retries: further tries after a server's answer that failed.
        device: where the target runs; auto is the GPU if there is one.
        dtype: of the target's weights; auto is float32 on a CPU and bfloat16 elsewhere.
        thinking: let the target think first, where its chat template knows how.
        temperature: 0 is greedy.
        top_p: sample among the most likely tokens that together reach this probability.
        max_new_tokens: upper limit of an answer.
        samples_per_prompt: answers to each prompt; more than one needs a temperature.
        seed: of the sampling noise.
        supervise: learn from every answer of a conversation, or from the last one.
        supervise_thinking: learn from the reasoning as well.
        max_length: longest row, in tokens.
        too_long: end longer conversations at the last turn that fits, or reject them.
        held_out: prepared folder whose prompts are left out here; may be given several times.
        max_reject_share: share of rejects among all rows above which nothing is written.
        verify: compare rows with what the target itself would choose.
        verify_rows: how many rows are compared.
        min_agreement: share of equal tokens below which regeneration is proposed.
        overwrite: replace a folder or an unfinished run that was made with other settings.
        json: also write the counts to this file as JSON; without a file name print them on
            standard output and everything else on standard error.
    """
    if out.exists() and not is_prepared(out) and (out.is_file() or any(out.iterdir())):
        raise InputError(f"out: {out} is there and holds no prepared data; name another folder")
    check_writable(out / "manifest.json", "out")
    result_json = JsonOutput(json)
    spoken = redirect_stdout(result_json.text)
    frozen = None
    if data is not None:
        options = RowOptions(
            supervise=supervise,
            supervise_thinking=supervise_thinking,
            max_length=max_length,
            too_long=too_long,
        )
        sampling = AnswerSettings(
            temperature=temperature,
            top_p=top_p,
            max_new_tokens=max_new_tokens,
            samples_per_prompt=samples_per_prompt,
            seed=seed,
            max_length=max_length,
        )
        if concurrency is not None and concurrency < 1:
            raise InputError(f"concurrency is {concurrency}; give 1 or more")
        if keep_answers and server:
            raise InputError("server is given, but keep_answers asks nobody; leave one of them out")
        if not keep_answers and not server:
            frozen = _load(target, device, dtype)
        servers = server and ServerOptions(
            urls=tuple(server),
            model=model,
            concurrency=concurrency or 64,
            timeout=timeout,
            retries=retries,
        )
        source = open_source(data, config=config_name, split=split, limit=limit)
        tokenizer = frozen.tokenizer if frozen else load_tokenizer(target, "target")
        encoder = ChatEncoder(tokenizer, enable_thinking=thinking)
        stop_ids = frozen.stop_token_ids if frozen else stop_token_ids(target, tokenizer)
        end_id = end_token_id(encoder, stop_ids, strict=not keep_answers)
        generator: Generator | None = None
        if frozen:
            generator = EngineGenerator(
                frozen, concurrency=concurrency or 16, max_length=max_length
            )
        elif servers:
            generator = ServerGenerator(
                servers, tokenizer, stop_token_ids=stop_ids, end_token_id=end_id
            )
        preparation = Preparation(
            source=source,
            out=out,
            encoder=encoder,
            stop_ids=(*stop_ids, end_id),
            options=options,
            generator=generator,
            sampling=None if keep_answers else sampling,
            held_out=tuple(held_out),
            max_reject_share=max_reject_share,
            described={
                "target": {"name": target, "weights": frozen.fingerprint if frozen else None},
                "tokenizer_sha256": tokenizer_sha256(tokenizer),
                "template_sha256": template_sha256(tokenizer),
                "enable_thinking": thinking,
            },
        )
        with spoken:
            _run(preparation, overwrite)
    elif not (verify and is_prepared(out)):
        raise InputError("data is missing: give --data")
    manifest, found = read_manifest(out, "out"), None
    with spoken:
        _summary(out, manifest)
        if verify:
            frozen = frozen or _load(target, device, dtype)
            found = report_on_policy(out, frozen, num_rows=verify_rows, min_agreement=min_agreement)
    result_json.write({"out": str(out), **manifest["counts"], "on_policy": found and asdict(found)})


def _load(target: str, device: str, dtype: str) -> FrozenTarget:
    return FrozenTarget.load(target, dtype=dtype, device=choose_device(device))


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
        said = f"what is answered is kept in {preparation.partial}; the same command goes on"
        print(labelled("", said, sys.stderr), file=sys.stderr)
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
