"""`dflow-train bench`: drafters on held-out prompts, by real decoding."""

import os
import platform
import shlex
import sys
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from rich.progress import Progress

from dflow_lightning.bench.measure import BenchResult, BenchSettings, bench, num_steps
from dflow_lightning.bench.row import Row
from dflow_lightning.bench.suite import Suite, SuiteChoice, read_suite, suite_path
from dflow_lightning.bench.table import show_rows
from dflow_lightning.commandline.grouped import grouped
from dflow_lightning.commandline.json_output import JsonOutput
from dflow_lightning.data.prompts import Prompt
from dflow_lightning.decode import SpeculativeDecoder
from dflow_lightning.errors import InputError
from dflow_lightning.formats.drafter_folder import read_export_config
from dflow_lightning.models.device import Dtype, choose_device
from dflow_lightning.models.target import FrozenTarget
from dflow_lightning.terminal import bar, is_live, screen

__all__ = ["BenchResult", "BenchSettings", "Row", "bench", "bench_command"]
# Of the JSON file; 2 could hold paired rounds, 1 had no number and no joint histograms.
BENCH_FORMAT = 3


@grouped
def bench_command(
    *,
    target: str,
    drafter: list[Path],
    choice: SuiteChoice,
    settings: BenchSettings,
    json: Path | None = None,
    quiet: bool = False,
    device: str = "auto",
    dtype: Dtype = "auto",
) -> None:
    """Measure drafters by real decoding of held-out prompts, against plain decoding.

    Args:
        target: hub id or folder of the target.
        drafter: folder of an exported drafter; give it again for each further one.
        json: also write the rows and the environment to this file as JSON; without a file name
            print them on standard output and everything else on standard error.
        quiet: print the tables only.
        device: `cpu`, `cuda`, or one GPU such as `cuda:1`; auto is the GPU where there is one.
        dtype: of the target's weights; auto is bfloat16 on a GPU and float32 on a CPU. Whether
            answers equal the plain ones is asserted in float32 alone.
    """
    if not drafter:
        raise InputError("drafter: none given; name the folder of an export")
    if len(set(drafter)) < len(drafter):
        raise InputError("drafter: the same folder is given twice; name each once")
    settings.check()
    choice.check(max(settings.concurrency))
    if not choice.tasks:
        suite_path(choice.suite, target)  # refuses a missing file before a target is loaded
    for one in drafter:
        read_export_config(one)
    result_json = JsonOutput(json)
    frozen = FrozenTarget.load(target, device=choose_device(device), dtype=dtype)
    decoders = {str(one): SpeculativeDecoder.from_export(one, frozen) for one in drafter}
    asked = read_suite(choice, frozen, next(iter(decoders.values())))
    if not quiet:
        print("\n".join(asked.lines()), file=result_json.text, flush=True)
    result = bench_shown(decoders, asked.prompts, settings, quiet)
    if json is not None:
        about = environment(frozen, settings, asked)
        about |= {"warm_up_seconds": result.warm_up_seconds}
        content = {
            "format": BENCH_FORMAT,
            "rows": [asdict(row) for row in result.rows],
            "environment": about,
        }
        result_json.write(content)
    show_rows(result.rows, screen(result_json.text))
    if json is not None and not result_json.on_stdout:
        print(f"rows and environment written to {json}")
    if any(row.lossless is False for row in result.rows):
        print("NOT LOSSLESS: answers differ from plain decoding (see above)", file=sys.stderr)
        raise SystemExit(1)


def bench_shown(
    decoders: dict[str, SpeculativeDecoder],
    prompts: list[Prompt],
    settings: BenchSettings,
    quiet: bool,
) -> BenchResult:
    """`bench` with a bar on a terminal, and a line per family in a log."""
    shown = ""
    if quiet or not is_live(sys.stderr):

        def log(description: str) -> None:
            nonlocal shown
            if not quiet and description != shown:
                print(f"decoding {description}", file=sys.stderr, flush=True)
            shown = description

        return bench(decoders, prompts, settings, progress=log)
    with bar(*Progress.get_default_columns(), stream=sys.stderr, transient=True) as running:
        task = running.add_task("", total=num_steps(prompts, settings))

        def advance(description: str) -> None:
            running.update(task, description=description, advance=1)

        return bench(decoders, prompts, settings, progress=advance)


def versions() -> dict[str, str]:
    """Python and the packages whose change may change a number."""
    found = {"python": platform.python_version()}
    for package in ("dflow-lightning", "torch", "transformers", "safetensors"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:  # run from a source folder
            found[package] = "not installed"
    return found


def environment(target: FrozenTarget, settings: BenchSettings, suite: Suite) -> dict[str, Any]:
    """What a repetition has to know, and what a comparison refuses to mix."""
    families = [prompt.family for prompt in suite.prompts]
    return {
        "command": shlex.join(["dflow-train", *sys.argv[1:]]),
        "engine": f"dflow-lightning {settings.backend}"
        + (f", tree of {settings.tree_nodes}" if settings.tree_nodes else ""),
        "versions": versions(),
        "machine": f"{platform.system()} {platform.machine()}",
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "device": str(target.device),
        "gpu": torch.cuda.get_device_name(target.device) if target.device.type == "cuda" else None,
        "dtype": str(target.dtype).removeprefix("torch."),
        "target": target.name,
        "target_fingerprint": target.fingerprint,
        "template_hash": suite.template,
        "enable_thinking": suite.thinking,
        "suite": suite.name,
        "suite_hash": suite.digest,
        "suite_sources": suite.sources,
        "left_out": suite.left_out,
        "missing_tasks": suite.missing,
        "prompts": {family: families.count(family) for family in dict.fromkeys(families)},
        "max_new_tokens": settings.max_new_tokens,
        "concurrency": list(settings.concurrency),
        "backend": settings.backend,
        "acceptance": settings.acceptance,
        "tree_nodes": settings.tree_nodes,
        "seed": settings.seed,
    }
