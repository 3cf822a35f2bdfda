"""`dflow-train bench`: drafters on held-out prompts, by real decoding."""

import os
import platform
import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from rich.progress import Progress

from dflow_lightning.bench.measure import BenchResult, BenchSettings, RelayChoice, bench, num_steps
from dflow_lightning.bench.row import Row
from dflow_lightning.bench.suite import Suite, SuiteChoice, read_suite, suite_path
from dflow_lightning.bench.table import show_rows
from dflow_lightning.commandline.json_output import JsonOutput
from dflow_lightning.data.prompts import Prompt
from dflow_lightning.decode import SpeculativeDecoder
from dflow_lightning.decode.engine import Acceptance
from dflow_lightning.decode.rounds import Backend
from dflow_lightning.decode.tree import check_tree_settings as check_tree_settings
from dflow_lightning.errors import InputError
from dflow_lightning.models.device import Dtype, choose_device
from dflow_lightning.models.target import FrozenTarget
from dflow_lightning.terminal import bar, is_live, screen

__all__ = ["BenchResult", "BenchSettings", "Row", "bench", "bench_command"]
# Of the JSON file; 2 could hold paired rounds, 1 had no number and no joint histograms.
BENCH_FORMAT = 3


def bench_command(
    *,
    target: str,
    drafter: list[Path],
    suite: str = "tiny",
    temperature: list[float] = [0.0],  # noqa: B006  (read by the command line, never changed)
    suite_dir: Path | None = None,
    limit: int | None = None,
    per_family: int = 32,
    thinking: bool = False,
    max_new_tokens: int = 128,
    relay: RelayChoice = "both",
    json: Path | None = None,
    concurrency: list[int] = [1],  # noqa: B006
    acceptance: Acceptance = "match",
    backend: Backend = "eager",
    tree_nodes: int | None = None,
    seed: int = 0,
    quiet: bool = False,
    device: str = "auto",
    dtype: Dtype = "auto",
) -> None:
    """Measure drafters by real decoding of held-out prompts, against plain decoding.

    Args:
        target: hub id or folder of the target.
        drafter: folder of an exported drafter; give it again for each further one.
        suite: `tiny` (the embedded target's test prompts), `all` or some of the benchmark tasks
            gsm8k, math500, humaneval, mbpp, mt-bench and alpaca, separated by commas, or a JSONL
            file of prompts or of conversations in turns.
        suite_dir: folder with the tasks as `<task>.jsonl`, those that are there are asked; by
            default they come from the hub.
        limit: conversations of each task, always the same ones (seed 42); by default all.
        temperature: one or more, separated by commas.
        per_family: prompts of each family of the suite `tiny` or of a file.
        thinking: let the target think first, where its chat template knows how.
        max_new_tokens: upper limit of an answer.
        relay: how drafters that have a relay are measured.
        json: also write the rows and the environment to this file as JSON; without a file name
            print them on standard output and everything else on standard error.
        concurrency: requests in flight at the same time, one number or more, separated by commas.
        acceptance: `match` accepts a draft that the target chooses; `rejection` is rejection
            sampling, whose answers above temperature 0 cannot be compared with the plain ones.
        backend: `eager` or `compiled`, for plain decoding as well; or `package`, the compiled draft
            step of the exports, against eager plain decoding.
        tree_nodes: drafters verify their most probable drafts as a tree of so many tokens, the
            anchor among them, in place of a chain; for DFlash and DFlow, eager, by match.
        seed: of the sampling noise.
        quiet: print the tables only.
        device: `cpu`, `cuda`, or one GPU such as `cuda:1`; auto is the GPU where there is one.
        dtype: of the target's weights; auto is bfloat16 on a GPU and float32 on a CPU. Whether
            answers equal the plain ones is asserted in float32 alone.
    """
    settings = BenchSettings(
        temperatures=temperature,
        relay=relay,
        max_new_tokens=max_new_tokens,
        concurrency=concurrency,
        acceptance=acceptance,
        backend=backend,
        tree_nodes=tree_nodes,
        seed=seed,
    )
    check_settings(settings, drafter, per_family)
    choice = SuiteChoice(
        name=suite, folder=suite_dir, limit=limit, per_family=per_family, thinking=thinking,
        max_new_tokens=max_new_tokens,
    )  # fmt: skip
    choice.check(max(concurrency))
    if not choice.tasks:
        suite_path(suite, target)  # a missing file is said before a target is loaded
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

        def told(description: str) -> None:
            nonlocal shown
            if not quiet and description != shown:
                print(f"decoding {description}", file=sys.stderr, flush=True)
            shown = description

        return bench(decoders, prompts, settings, progress=told)
    with bar(*Progress.get_default_columns(), stream=sys.stderr, transient=True) as running:
        task = running.add_task("", total=num_steps(prompts, settings))

        def advance(description: str) -> None:
            running.update(task, description=description, advance=1)

        return bench(decoders, prompts, settings, progress=advance)


def check_settings(settings: BenchSettings, drafters: list[Path], per_family: int) -> None:
    if not drafters:
        raise InputError("drafter: none given; name the folder of an export")
    if len(set(drafters)) < len(drafters):
        raise InputError("drafter: the same folder is given twice; name each once")
    lists: dict[str, tuple[Sequence[float], str]] = {
        "temperature": (settings.temperatures, "0 is greedy"),
        "concurrency": (settings.concurrency, "1 is one request at a time"),
    }
    for name, (values, example) in lists.items():
        if not values:
            raise InputError(f"{name}: none given; {example}")
        twice = [value for value in values if values.count(value) > 1]
        if twice:
            raise InputError(f"{name} holds {twice[0]} twice; give each value once")
    for temperature in settings.temperatures:
        if not 0 <= temperature < float("inf"):
            raise InputError(
                f"temperature holds {temperature}; give 0 for greedy or positive numbers"
            )
    for concurrency in settings.concurrency:
        if concurrency < 1:
            raise InputError(f"concurrency holds {concurrency}; give 1 or more")
    if per_family < 1:
        raise InputError(f"per_family is {per_family}; give 1 or more")
    check_tree_settings(settings.tree_nodes, settings.acceptance, settings.backend)
    if settings.max_new_tokens < 2:
        raise InputError(
            f"max_new_tokens is {settings.max_new_tokens}; give 2 or more, since the first token "
            "comes with the prompt and takes no round"
        )


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
    """What has to be known to measure the same again, or to refuse a comparison."""
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
