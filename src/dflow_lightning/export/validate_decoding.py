"""Checks of an exported folder by decoding with it: lossless, compiled, package and tau.

What tau is compared with: training decodes its validation prompts before it writes a checkpoint,
with that checkpoint's weights in the training's dtype, and the export records the result and the
prompts (`export.training_record`). Here the same prompts are decoded with the same limits by the
weights of the files, rounded to the stored dtype, so the two numbers differ by rounding alone;
`TAU_TOLERANCE` is far above that and far below what a wrong mask, tap or RoPE base costs. Other
prompts say nothing, since tau differs by far more between kinds of prompts: without those of the
training (same file name, same sha256 where it is known) the check is skipped.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from dflow_lightning.checks import FailedError, Found, SkippedError
from dflow_lightning.data.prompts import Prompt, read_prompts
from dflow_lightning.decode import Completion
from dflow_lightning.decode.equality import Difference
from dflow_lightning.export.validate_folder import NUM_FEW, Subject
from dflow_lightning.formats import integrity
from dflow_lightning.tensors.metrics import acceptance_summary

TAU_TOLERANCE = 0.15
TEMPERATURES = (0.0, 1.0)
BATCH_SIZE = 4


def lossless_check(subject: Subject) -> Found:
    """Speculative answers against plain ones, with the ties that `equality` excuses."""
    decoder, prompts = subject.decoder, subject.prompts
    found: list[tuple[str, Difference]] = []
    for temperature in TEMPERATURES:
        plain = _decode(subject, decoder.generate_plain, prompts, temperature)
        for relay in subject.relay_modes:
            ours = _decode(subject, decoder.generate, prompts, temperature, use_rejected=relay)
            how = f"relay {'on' if relay else 'off'}, T={temperature:g}"
            pairs = compare(subject, prompts, ours, plain, temperature)
            found += [(how, difference) for difference in pairs]
    answers = len(prompts) * len(TEMPERATURES) * len(subject.relay_modes)
    return _judge(subject, found, answers, "plain decoding")


def compiled_check(subject: Subject) -> Found:
    """The compiled decoder against the eager one."""
    return _backend(subject, "compiled")


def package_check(subject: Subject) -> Found:
    """The decoder of the export's package against the eager one."""
    if not (subject.folder / integrity.PACKAGE_PATH).is_file():
        raise SkippedError(f"the folder holds no {integrity.PACKAGE_PATH}")
    return _backend(subject, "package")


def _backend(subject: Subject, backend: str) -> Found:
    decoder, prompts = subject.decoder, subject.prompts[:NUM_FEW]
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
            f"{str(subject.target.dtype).removeprefix('torch.')}; decide it with --dtype float32"
        )
    if wrong:
        how, one = wrong[0]
        raise FailedError(
            f"{len(wrong)} of {answers} answers leave {reference}, first {one.prompt} ({how}) at "
            f"token {one.position}: {one.token} instead of {one.plain_token}",
            values | {"first": asdict(one)},
        )
    return f"{answers} answers equal {reference} token for token, {ties} excused ties", values


def tau_check(subject: Subject) -> Found:
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
        use_rejected=mode == "on",
    )
    num_drafts = subject.loaded.drafter.dims.block_size - 1
    real = acceptance_summary([one.accepted for one in completions], num_drafts).tau
    gap = real / estimate - 1
    values = {"relay": mode, "tau": real, "training_tau": estimate, "prompts": len(prompts)}
    summary = f"{real:.3f} against {estimate:.3f} in training ({gap:+.1%}), relay {mode}"
    if abs(gap) > TAU_TOLERANCE:
        raise FailedError(f"{summary}: more than {TAU_TOLERANCE:.0%} apart", values)
    return f"{summary}, {len(prompts)} validation prompts", values


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
                vocab_size=subject.target.vocab_size,
                per_family=settings["per_family"],
            )
    raise SkippedError(
        f"the training's prompts ({settings['file']}) are not here; give them as --suite"
    )
