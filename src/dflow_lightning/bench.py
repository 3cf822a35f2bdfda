"""`dflow-train bench`: drafters on held-out prompts, by real decoding."""

import hashlib
import json as jsonlib
import os
import platform
import shlex
import sys
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress

from dflow_lightning import atomic
from dflow_lightning.bench_table import show
from dflow_lightning.data.prompts import Prompt, read_prompts
from dflow_lightning.decode import SpeculativeDecoder
from dflow_lightning.errors import InputError
from dflow_lightning.measure import (
    BenchSettings,
    RelayChoice,
    Row,
    bench,
    num_steps,
)
from dflow_lightning.target import FrozenTarget

__all__ = ["BenchSettings", "Row", "bench", "bench_command"]

TINY_SUITE = Path("prompts/test.jsonl")  # beside the weights of the embedded target


def bench_command(
    *,
    target: str,
    drafter: list[Path],
    suite: str = "tiny",
    temperature: list[float] = [0.0],  # noqa: B006  (read by the command line, never changed)
    per_family: int = 32,
    max_new_tokens: int = 128,
    relay: RelayChoice = "both",
    json: Path | None = None,
    batch_size: int = 1,
    seed: int = 0,
    quiet: bool = False,
) -> None:
    """Measure drafters by real decoding of held-out prompts, against plain decoding.

    Args:
        target: hub id or folder of the target.
        drafter: folder of an exported drafter; give it again for each further one.
        suite: `tiny` (the embedded target's test prompts) or a JSONL file of prompts.
        temperature: one or more, separated by commas.
        per_family: prompts of each family.
        max_new_tokens: upper limit of an answer.
        relay: how drafters that have a relay are measured.
        json: also write the rows and the environment to this file.
        batch_size: requests decoded together.
        seed: of the sampling noise.
        quiet: print the tables only.
    """
    settings = BenchSettings(
        temperatures=temperature,
        relay=relay,
        max_new_tokens=max_new_tokens,
        batch_size=batch_size,
        seed=seed,
    )
    check_settings(settings, drafter, per_family)
    path = suite_path(suite, target)
    frozen = FrozenTarget.load(target)
    prompts = read_prompts(
        frozen.tokenizer,
        path,
        per_family=per_family,
        max_length=frozen.config.max_position_embeddings - 1,
        field="suite",
    )
    decoders = {str(one): SpeculativeDecoder.from_export(one, frozen) for one in drafter}
    if json is not None:
        atomic.check_writable(json, "json")
    rows = bench_shown(decoders, prompts, settings, quiet)
    if json is not None:
        about = environment(frozen, settings, suite, path, prompts)
        content = {"rows": [asdict(row) for row in rows], "environment": about}
        atomic.write_text(json, jsonlib.dumps(content, indent=1) + "\n")
    show(rows)
    if json is not None:
        print(f"rows and environment written to {json}")
    if any(row.lossless is False for row in rows):
        print("NOT LOSSLESS: answers differ from plain decoding (see above)", file=sys.stderr)
        raise SystemExit(1)


def bench_shown(
    decoders: dict[str, SpeculativeDecoder],
    prompts: list[Prompt],
    settings: BenchSettings,
    quiet: bool,
) -> list[Row]:
    """`bench` with a bar on a terminal, and a line per family in a log."""
    errors = Console(stderr=True)
    shown = ""
    with Progress(console=errors, disable=quiet or not errors.is_terminal, transient=True) as bar:
        task = bar.add_task("", total=num_steps(prompts, settings))

        def progress(description: str) -> None:
            nonlocal shown
            bar.update(task, description=description, advance=1)
            if bar.disable and not quiet and description != shown:
                print(f"decoding {description}", file=sys.stderr, flush=True)
            shown = description

        return bench(decoders, prompts, settings, progress=progress)


def check_settings(settings: BenchSettings, drafters: list[Path], per_family: int) -> None:
    if not drafters:
        raise InputError("drafter: none given; name the folder of an export")
    if len(set(drafters)) < len(drafters):
        raise InputError("drafter: the same folder is given twice; name each once")
    if not settings.temperatures:
        raise InputError("temperature: none given; 0 is greedy")
    for temperature in settings.temperatures:
        if temperature < 0:
            raise InputError(
                f"temperature holds {temperature}; give 0 for greedy or positive numbers"
            )
    counts = {
        "per_family": per_family,
        "max_new_tokens": settings.max_new_tokens,
        "batch_size": settings.batch_size,
    }
    for name, value in counts.items():
        if value < 1:
            raise InputError(f"{name} is {value}; give 1 or more")


def suite_path(suite: str, target: str) -> Path:
    """The file a suite's name stands for."""
    if suite != "tiny":
        return Path(suite)
    path = Path(target) / TINY_SUITE
    if not path.is_file():
        raise InputError(
            f"suite: {target} holds no {TINY_SUITE}, which the suite tiny reads; give a JSONL file"
        )
    return path


def versions() -> dict[str, str]:
    """Python and the packages whose change may change a number."""
    found = {"python": platform.python_version()}
    for package in ("dflow-lightning", "torch", "transformers", "safetensors"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:  # run from a source folder
            found[package] = "not installed"
    return found


def environment(
    target: FrozenTarget,
    settings: BenchSettings,
    suite: str,
    path: Path,
    prompts: list[Prompt],
) -> dict[str, Any]:
    """What has to be known to measure the same again, or to refuse a comparison."""
    template = getattr(target.tokenizer, "chat_template", None) or ""
    families = [prompt.family for prompt in prompts]
    return {
        "command": shlex.join(["dflow-train", *sys.argv[1:]]),
        "engine": "dflow-lightning eager",
        "versions": versions(),
        "machine": f"{platform.system()} {platform.machine()}",
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "device": str(target.device),
        "dtype": str(target.dtype).removeprefix("torch."),
        "target": target.name,
        "target_fingerprint": target.fingerprint,
        "template_hash": hashlib.sha256(str(template).encode()).hexdigest()[:16],
        "enable_thinking": False,
        "suite": suite,
        "suite_hash": hashlib.sha256(path.read_bytes()).hexdigest()[:16],
        "prompts": {family: families.count(family) for family in dict.fromkeys(families)},
        "max_new_tokens": settings.max_new_tokens,
        "batch_size": settings.batch_size,
        "seed": settings.seed,
    }
