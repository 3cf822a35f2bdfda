"""`dflow-train validate-export`: is a folder what was trained, and what engines expect?

Everything is read from the files again. Each check is one line, and none keeps the others from
running:

    files            JSON, tensor names, shapes, dtypes, checksums; nothing to unpickle or to run
    engine contract  what the loaders of SGLang and vLLM ask of the folder
    config           against the target: sizes, taps, mask token, RoPE
    tap fingerprint  the target's tapped layers give what they gave at the export
    checkpoint       weights and draft logits are bit for bit those of the checkpoint, rounded to
                     the stored dtype
    lossless         answers equal plain decoding, relay on and off, at temperatures 0 and 1
    compiled         the compiled decoder gives what the eager one gives, token for token
    package          the same for the draft step in decode/draft.pt2
    tau              real decoding beside what validation measured during training
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path

from dflow_lightning.bench.command import versions
from dflow_lightning.bench.suite import suite_path
from dflow_lightning.checks import Check, Found, outcome
from dflow_lightning.commandline.json_output import JsonOutput
from dflow_lightning.data.prompts import read_prompts
from dflow_lightning.decode.request import check_answer_length
from dflow_lightning.errors import check_counts
from dflow_lightning.export import validate_decoding, validate_folder
from dflow_lightning.export.validate_folder import Subject, interleaved
from dflow_lightning.formats.drafter_folder import require_folder
from dflow_lightning.models.device import Dtype, choose_device
from dflow_lightning.models.target import FrozenTarget
from dflow_lightning.terminal import labelled
from dflow_lightning.training.saved import open_checkpoint

CHECKS: dict[str, Callable[[Subject], Found]] = {
    "files": validate_folder.files_check,
    "engine contract": validate_folder.engine_contract_check,
    "config": validate_folder.config_check,
    "tap fingerprint": validate_folder.taps_check,
    "checkpoint": validate_folder.checkpoint_check,
    "lossless": validate_decoding.lossless_check,
    "compiled": validate_decoding.compiled_check,
    "package": validate_decoding.package_check,
    "tau": validate_decoding.tau_check,
}


def validate_export_command(
    *,
    drafter: Path,
    target: str,
    checkpoint: Path | None = None,
    num_prompts: int = 12,
    suite: str = "tiny",
    max_new_tokens: int = 64,
    json: Path | None = None,
    device: str = "auto",
    dtype: Dtype = "auto",
) -> None:
    """Check an exported drafter before it is served; exit status 1 if a check fails.

    Args:
        drafter: folder of the export.
        target: hub id or folder of the target.
        checkpoint: the checkpoint file it was exported from, to compare weights and logits.
        num_prompts: prompts for the lossless check.
        suite: `tiny` (the embedded target's test prompts) or a JSONL file of prompts.
        max_new_tokens: maximum length of an answer, in tokens.
        json: also write the checks to this file as JSON; without a file name print them on
            standard output and everything else on standard error.
        device: `cpu`, `cuda`, or one GPU such as `cuda:1`; auto is the GPU where there is one.
        dtype: dtype of the target's weights; auto is bfloat16 on a GPU and float32 on a CPU.
            Whether answers equal plain decoding is decided in float32 alone.
    """
    check_counts(num_prompts=num_prompts)
    check_answer_length(max_new_tokens)
    chosen = choose_device(device)
    require_folder(drafter)
    result_json = JsonOutput(json)
    saved = None if checkpoint is None else open_checkpoint(checkpoint)
    if saved is not None:
        saved.require_identity()
    content = None if saved is None else saved.content
    path = suite_path(suite, target)
    frozen = FrozenTarget.load(target, device=chosen, dtype=dtype)
    limit = frozen.config.max_position_embeddings - 1
    prompts = read_prompts(
        frozen.tokenizer, path, vocab_size=frozen.vocab_size, max_length=limit, field="suite"
    )
    subject = Subject(
        drafter,
        frozen,
        interleaved(prompts)[:num_prompts],
        max_new_tokens,
        path,
        content,
    )
    checks = []
    for check in validate_export(subject):
        line = labelled(f"{check.status:<5} {check.name:<16} ", check.detail, result_json.text)
        print(line, file=result_json.text, flush=True)
        checks.append(check)
    failed = any(check.status == "FAIL" for check in checks)
    about = {"drafter": str(drafter), "target": frozen.name, "versions": versions()}
    rows = [asdict(check) for check in checks]
    result_json.write(about | {"ok": not failed, "checks": rows})
    if failed:
        raise SystemExit(1)


def validate_export(subject: Subject) -> Iterator[Check]:
    """Run all checks, one after the other; a drafter that does not load fails the first one."""
    unusable = None
    for name, check in CHECKS.items():
        if unusable and check is not validate_folder.engine_contract_check:
            yield Check(name, "skip", unusable)
            continue
        found = outcome(name, check, subject)
        if check is validate_folder.files_check and found.status == "FAIL":
            unusable = "the drafter does not load"
        yield found
