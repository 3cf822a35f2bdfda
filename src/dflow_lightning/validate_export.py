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

What tau is compared with: training decodes its validation prompts before it writes a checkpoint,
with that checkpoint's weights in the training's dtype, and the export records the result and the
prompts (`export.training_record`). Here the same prompts are decoded with the same limits by the
weights of the files, rounded to the stored dtype, so the two numbers differ by rounding alone;
`TAU_TOLERANCE` is far above that and far below what a wrong mask, tap or RoPE base costs. Other
prompts say nothing, since tau differs by far more between kinds of prompts: without those of the
training (same file name, same sha256 where it is known) the check is skipped.
"""

from __future__ import annotations

import json as jsonlib
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dflow_lightning import atomic, integrity
from dflow_lightning.bench import versions
from dflow_lightning.bench_suite import suite_path
from dflow_lightning.checks import Check, FailedError, Found, SkippedError, outcome
from dflow_lightning.data.prompts import Prompt, read_prompts
from dflow_lightning.decode import Completion, SpeculativeDecoder
from dflow_lightning.dims import DrafterDims, choose_mask_token_id
from dflow_lightning.draft import embed_blocks, relay_correction
from dflow_lightning.drafter_folder import LoadedDrafter, load_export
from dflow_lightning.eagle3 import AnyDrafter, Eagle3Drafter
from dflow_lightning.eagle3_export import step_logits
from dflow_lightning.engine_contract import check_contract
from dflow_lightning.equality import Difference, EqualityCheck
from dflow_lightning.errors import InputError
from dflow_lightning.export import read_checkpoint
from dflow_lightning.metrics import acceptance_summary
from dflow_lightning.relay import Relay, RelayConfig, RelayInput
from dflow_lightning.tap_fingerprint import far_layers, tap_fingerprint, tapped_states
from dflow_lightning.target import FrozenTarget
from dflow_lightning.terminal import STDOUT, labelled, print_json

TAU_TOLERANCE = 0.15
TEMPERATURES = (0.0, 1.0)
BATCH_SIZE = 4
NUM_COMPILED = 4  # prompts that the compiled decoder and a package are tried on


@dataclass(frozen=True)
class Subject:
    """What is checked, and with what."""

    folder: Path
    target: FrozenTarget
    prompts: list[Prompt]
    max_new_tokens: int
    suite: Path
    checkpoint: dict[str, Any] | None

    @cached_property
    def loaded(self) -> LoadedDrafter:
        return load_export(self.folder, self.target)

    @cached_property
    def decoder(self) -> SpeculativeDecoder:
        return SpeculativeDecoder.from_export(self.folder, self.target)

    @cached_property
    def equality(self) -> EqualityCheck:
        return EqualityCheck(self.target)

    @property
    def section(self) -> dict[str, Any]:
        """What the export records about itself; empty for a folder that others published."""
        return self.loaded.config.get(integrity.SECTION) or {}

    @property
    def relay_modes(self) -> list[bool]:
        loaded = self.loaded
        used = loaded.relay is not None or loaded.drafter.carryover is not None
        return [True, False] if used else [False]


def validate_export_command(
    *,
    drafter: Path,
    target: str,
    checkpoint: Path | None = None,
    num_prompts: int = 12,
    suite: str = "tiny",
    max_new_tokens: int = 64,
    json: Path | None = None,
) -> None:
    """Prove an exported drafter before it is served; one line a check, status 1 if one fails.

    Args:
        drafter: folder of the export.
        target: hub id or folder of the target.
        checkpoint: the checkpoint file it was exported from, to compare weights and logits.
        num_prompts: prompts for the lossless check.
        suite: `tiny` (the embedded target's test prompts) or a JSONL file of prompts.
        max_new_tokens: upper limit of their answers.
        json: also write the checks to this file; without a name (or as `-`) to standard output,
            and the lines to standard error.
    """
    for name, value in {"num_prompts": num_prompts, "max_new_tokens": max_new_tokens}.items():
        if value < 1:
            raise InputError(f"{name} is {value}; give 1 or more")
    if not drafter.is_dir():
        raise InputError(f"drafter: {drafter} is no folder; give one that dflow-train export wrote")
    paper = sys.stderr if json == STDOUT else sys.stdout
    if json is not None and json != STDOUT:
        atomic.check_writable(json, "json")
    content = None if checkpoint is None else read_checkpoint(checkpoint)
    if content is not None and "dflow" not in content:
        raise InputError(
            f"checkpoint: {checkpoint} was not written by dflow-train; give a .ckpt file of a run"
        )
    path = suite_path(suite, target)
    frozen = FrozenTarget.load(target)
    limit = frozen.config.max_position_embeddings - 1
    prompts = read_prompts(frozen.tokenizer, path, max_length=limit, field="suite")
    subject = Subject(
        drafter, frozen, interleaved(prompts)[:num_prompts], max_new_tokens, path, content
    )
    checks = []
    for check in validate_export(subject):
        said = labelled(f"{check.status:<5} {check.name:<16} ", check.detail, paper)
        print(said, file=paper, flush=True)
        checks.append(check)
    failed = any(check.status == "FAIL" for check in checks)
    if json is not None:
        about = {"drafter": str(drafter), "target": frozen.name, "versions": versions()}
        rows = [asdict(check) for check in checks]
        content = about | {"ok": not failed, "checks": rows}
        if json == STDOUT:
            print_json(content)
        else:
            atomic.write_text(json, jsonlib.dumps(content, indent=1) + "\n")
    if failed:
        raise SystemExit(1)


def interleaved(prompts: Sequence[Prompt]) -> list[Prompt]:
    """Prompts in an order in which every first few are of as many families as there are."""
    families: dict[str, list[Prompt]] = {}
    for prompt in prompts:
        families.setdefault(prompt.family, []).append(prompt)
    return [one for one in chain(*zip_longest(*families.values())) if one is not None]


def validate_export(subject: Subject) -> Iterator[Check]:
    """Run all checks, one after the other; a drafter that does not load fails the first one."""
    unusable = None
    for name, check in CHECKS.items():
        if unusable and check is not engine_contract:
            yield Check(name, "skip", unusable)
            continue
        found = outcome(name, check, subject)
        if check is files and found.status == "FAIL":
            unusable = "the drafter does not load"
        yield found


def files(subject: Subject) -> Found:
    """Whatever `load_export` refuses."""
    loaded = subject.loaded
    parts = [part for part in (loaded.drafter, loaded.relay) if part is not None]
    tensors = sum(len(part.state_dict()) for part in parts)
    checksums = "checksums hold" if "checksums" in subject.section else "no checksums recorded"
    stored = loaded.config.get("dtype") or loaded.config.get("torch_dtype")
    return f"{tensors} tensors in {stored}, {checksums}", {"tensors": tensors}


def engine_contract(subject: Subject) -> Found:
    """Whatever `check_contract` lists."""
    problems = check_contract(subject.folder)
    if problems:
        others = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        raise FailedError(problems[0] + others, {"problems": problems})
    if subject.loaded.drafter.causal_head is not None:
        return "SGLang finds what it looks for; vLLM has no causal head", {}
    return "SGLang and vLLM find what they look for", {}


def config(subject: Subject) -> Found:
    """What agrees inside the folder, but not with the target.

    `load_export` has compared the sizes and weights of the target. A drafter has attention heads of
    its own: their number and size need not be the target's. Positions are shared, and so is RoPE.
    """
    dims, target = subject.loaded.drafter.dims, subject.target
    mask = "no mask token"
    if isinstance(dims, DrafterDims):
        choose_mask_token_id(dims.mask_token_id, target)
        mask = f"mask {dims.mask_token_id}"
    ours, theirs = (
        _rope(parameters) for parameters in (dims.rope_parameters, target.config.rope_parameters)
    )
    if ours != theirs:
        raise FailedError(f"rope_parameters is {ours}, but the target's {theirs}; export again")
    layers = ", ".join(str(index) for index in dims.target_layer_ids)
    found = f"taps {layers} of {target.num_layers}, {mask}"
    return f"{found}, RoPE as the target's", {}


def _rope(parameters: dict[str, Any]) -> dict[str, Any]:
    rope = {k: v for k, v in parameters.items() if k != "partial_rotary_factor" and v is not None}
    return {"rope_type": "default"} | rope


def taps(subject: Subject) -> Found:
    """The target's layers at the drafter's taps against the fingerprint of the export."""
    recorded = subject.section.get("tap_fingerprint")
    if recorded is None:
        raise SkippedError("the folder records no tap fingerprint")
    layer_ids = subject.loaded.drafter.dims.target_layer_ids
    if list(recorded["layers"]) != [str(index) for index in layer_ids]:
        raise FailedError(
            f"target_layer_ids is {layer_ids}, but the fingerprint is of layers "
            f"{', '.join(recorded['layers'])}"
        )
    found = tap_fingerprint(subject.target, layer_ids, recorded["token_ids"])
    far = far_layers(recorded, found)
    if far:
        layer, distance = next(iter(far.items()))
        raise FailedError(
            f"layer {layer} of the target is {distance:.1%} away from the fingerprint", far
        )
    return f"{len(layer_ids)} layers of the target give what they gave at the export", {}


def checkpoint(subject: Subject) -> Found:
    """Weights and draft logits of the files against those of the checkpoint, rounded alike."""
    if subject.checkpoint is None:
        raise SkippedError("no --checkpoint given")
    saved, loaded, target = subject.checkpoint["dflow"], subject.loaded, subject.target
    if saved["target_fingerprint"] != target.fingerprint:
        raise FailedError(
            f"the checkpoint is of {saved['target']}, whose weights are not the target's"
        )
    trained = asdict(type(loaded.drafter.dims)(**saved["drafter"]))
    for name, value in asdict(loaded.drafter.dims).items():
        if trained[name] != value:
            raise FailedError(f"{name} is {value}, but {trained[name]} in the checkpoint")
    relay_saved = saved.get("relay", {"enabled": False})  # of which EAGLE-3 knows nothing
    if relay_saved["enabled"] != (loaded.relay is not None):
        raise FailedError("relay: one of checkpoint and export has a relay, the other has none")
    if loaded.relay and relay_saved["first_rejected"] != loaded.first_rejected:
        raise FailedError(f"first_rejected is {loaded.first_rejected}, which the checkpoint is not")
    ours = rebuild(subject.checkpoint, loaded, target)
    for mine, read in zip(ours, (loaded.drafter, loaded.relay), strict=True):
        if mine is not None and read is not None:
            for name, tensor in mine.state_dict().items():
                if not torch.equal(tensor, read.state_dict()[name]):
                    raise FailedError(f"tensor {name} is not that of the checkpoint")
    blocks = [prompt.token_ids for prompt in subject.prompts[:NUM_COMPILED]]
    for token_ids in blocks:
        pair = [
            draft_logits(target, drafter, relay, token_ids)
            for drafter, relay in (ours, (loaded.drafter, loaded.relay))
        ]
        if not torch.equal(*pair):
            raise FailedError("draft logits are not those of the checkpoint")
    return f"draft logits of {len(blocks)} blocks are bit for bit the checkpoint's", {}


def rebuild(
    content: dict[str, Any], loaded: LoadedDrafter, target: FrozenTarget
) -> tuple[AnyDrafter, Relay | None]:
    """Drafter and relay of a checkpoint with weights as the export would store them."""
    dims = loaded.drafter.dims  # which are those of the checkpoint
    drafter, relay = type(loaded.drafter)(dims), None  # type: ignore[arg-type]
    if loaded.relay is not None:
        settings = RelayConfig(**content["dflow"]["relay"])
        relay = settings.build(dims.hidden_size, dims.rms_norm_eps)
    stored = getattr(torch, loaded.config.get("dtype") or loaded.config["torch_dtype"])
    for prefix, part in {"drafter.": drafter, "relay.": relay}.items():
        if part is not None:
            state = {n: content["state_dict"][f"{prefix}{n}"].to(stored) for n in part.state_dict()}
            part.load_state_dict(state)
            part.to(target.device, target.dtype).eval()
    return drafter, relay


@torch.inference_mode()
def draft_logits(
    target: FrozenTarget, drafter: AnyDrafter, relay: Relay | None, token_ids: list[int]
) -> Tensor:
    """Logits of the block that starts at the last of some tokens, `[1, 1, K, V]`.

    With a relay, the block before it is taken to be rejected as a whole. An EAGLE-3 drafter has
    those of its drafts, `[1, K-1, V]`.
    """
    if isinstance(drafter, Eagle3Drafter):
        return step_logits(target, drafter, token_ids)
    dims = drafter.dims
    while len(token_ids) <= dims.block_size:
        token_ids = token_ids + token_ids
    ids_1S = torch.tensor([token_ids], device=target.device)
    h_1SD = drafter.project(tapped_states(target, token_ids, dims.target_layer_ids))
    positions_1S = torch.arange(len(token_ids), device=target.device).unsqueeze(0)
    rows_11KD = h_1SD[:, -dims.block_size :].unsqueeze(1)
    valid_11K = torch.ones_like(rows_11KD[..., 0], dtype=torch.bool)
    rows = RelayInput(rows_11KD, valid_11K, ids_1S[:, -1:], ids_1S[:, -2:-1])
    correction = None if relay is None else relay_correction(target, relay, rows)
    x_11KD = embed_blocks(target, drafter, ids_1S[:, -1:], correction)
    context = drafter.context_kv(h_1SD, positions_1S)
    hidden = drafter(x_11KD, context, positions_1S[:, -1:], carried=drafter.carry(rows))
    return target.head(hidden.to(target.dtype))


def lossless(subject: Subject) -> Found:
    """Speculative answers against plain ones, with the ties that `equality` excuses."""
    decoder, prompts = subject.decoder, subject.prompts
    found: list[tuple[str, Difference]] = []
    for temperature in TEMPERATURES:
        plain = _decode(subject, decoder.generate_plain, prompts, temperature)
        for relay in subject.relay_modes:
            ours = _decode(subject, decoder.generate, prompts, temperature, relay=relay)
            how = f"relay {'on' if relay else 'off'}, T={temperature:g}"
            pairs = compare(subject, prompts, ours, plain, temperature)
            found += [(how, difference) for difference in pairs]
    answers = len(prompts) * len(TEMPERATURES) * len(subject.relay_modes)
    return _judge(subject, found, answers, "plain decoding")


def compiled(subject: Subject) -> Found:
    """The compiled decoder against the eager one."""
    return _backend(subject, "compiled")


def package(subject: Subject) -> Found:
    """The decoder of the export's package against the eager one."""
    if not (subject.folder / integrity.PACKAGE).is_file():
        raise SkippedError(f"the folder holds no {integrity.PACKAGE}")
    return _backend(subject, "package")


def _backend(subject: Subject, backend: str) -> Found:
    decoder, prompts = subject.decoder, subject.prompts[:NUM_COMPILED]
    found: list[tuple[str, Difference]] = []
    for temperature in TEMPERATURES:
        eager, other = (
            _decode(subject, decoder.generate, prompts, temperature, backend=name)
            for name in ("eager", backend)
        )
        how = f"{backend}, T={temperature:g}"
        differences = compare(subject, prompts, other, eager, temperature)
        found += [(how, difference) for difference in differences]
    return _judge(subject, found, len(prompts) * len(TEMPERATURES), "eager decoding")


def _decode(
    subject: Subject,
    generate: Callable[..., list[Completion]],
    prompts: Sequence[Prompt],
    temperature: float,
    **options: Any,
) -> list[Completion]:
    """Answers under the settings of the check; the seed of a prompt is its number."""
    return generate(
        [prompt.token_ids for prompt in prompts],
        max_new_tokens=subject.max_new_tokens,
        temperature=temperature,
        seeds=list(range(len(prompts))),
        batch_size=BATCH_SIZE,
        **options,
    )


def compare(
    subject: Subject,
    prompts: Sequence[Prompt],
    ours: Sequence[Completion],
    reference: Sequence[Completion],
    temperature: float,
) -> list[Difference]:
    """Where answers leave the reference, excused or not."""
    return subject.equality.differences(
        prompts,
        [one.token_ids for one in ours],
        [one.token_ids for one in reference],
        temperature=temperature,
        seeds=range(len(prompts)),
    )


def _judge(
    subject: Subject, found: list[tuple[str, Difference]], answers: int, reference: str
) -> Found:
    """Excused ties pass; below float32 ties are so common that a difference proves nothing."""
    wrong = [(how, difference) for how, difference in found if not difference.excused]
    ties = len(found) - len(wrong)
    values = {"answers": answers, "excused_ties": ties, "differences": len(wrong)}
    if wrong and subject.target.dtype not in (torch.float32, torch.float64):
        raise SkippedError(
            f"{len(wrong)} of {answers} answers leave {reference}, as ties do in "
            f"{str(subject.target.dtype).removeprefix('torch.')}; use a target in float32"
        )
    if wrong:
        how, one = wrong[0]
        raise FailedError(
            f"{len(wrong)} of {answers} answers leave {reference}, first {one.prompt} ({how}) at "
            f"token {one.position}: {one.token} instead of {one.plain_token}",
            values | {"first": asdict(one)},
        )
    return f"{answers} answers equal {reference} token for token, {ties} excused ties", values


def tau(subject: Subject) -> Found:
    """Tau on the training's validation prompts, against what the training measured on them."""
    training = subject.section.get("training")
    if training is None:
        raise SkippedError("the folder records no tau of its training")
    mode = next(mode for mode in ("on", "off") if f"val_tau_relay_{mode}" in training)
    settings, estimate = training["validation"], training[f"val_tau_relay_{mode}"]
    prompts = training_prompts(subject, settings)
    completions = subject.decoder.generate(
        [prompt.token_ids for prompt in prompts],
        max_new_tokens=settings["max_new_tokens"],
        temperature=settings["temperature"],
        batch_size=settings["batch_size"],
        relay=mode == "on",
    )
    num_drafts = subject.loaded.drafter.dims.block_size - 1
    real = acceptance_summary([one.accepted for one in completions], num_drafts).tau
    gap = real / estimate - 1
    values = {"relay": mode, "tau": real, "training_tau": estimate, "prompts": len(prompts)}
    said = f"{real:.3f} against {estimate:.3f} in training ({gap:+.1%}), relay {mode}"
    if abs(gap) > TAU_TOLERANCE:
        raise FailedError(f"{said}: more than {TAU_TOLERANCE:.0%} apart", values)
    return f"{said}, {len(prompts)} validation prompts", values


def training_prompts(subject: Subject, settings: dict[str, Any]) -> list[Prompt]:
    """The prompts of the training's validation: in the target's folder, or given as the suite."""
    for path in (Path(subject.target.name) / "prompts" / settings["file"], subject.suite):
        if path.name != settings["file"] or not path.is_file():
            continue
        if settings["sha256"] in (None, integrity.file_sha256(path)):
            return read_prompts(
                subject.target.tokenizer,
                path,
                enable_thinking=settings["enable_thinking"],
                per_family=settings["per_family"],
            )
    raise SkippedError(
        f"the training's prompts ({settings['file']}) are not here; give them as --suite"
    )


CHECKS: dict[str, Callable[[Subject], Found]] = {
    "files": files,
    "engine contract": engine_contract,
    "config": config,
    "tap fingerprint": taps,
    "checkpoint": checkpoint,
    "lossless": lossless,
    "compiled": compiled,
    "package": package,
    "tau": tau,
}
