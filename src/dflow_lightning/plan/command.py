"""`dflow-train plan`: what a recipe needs, before any GPU time is spent.

Parameters, memory by part (`memory.py`, `eagle3.py`), tokens, work (`work.py`) and hours, steps and
disk; `--measure` runs two steps and prints what they took beside the prediction (`measure.py`).
"""

import math
import os
import time
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from dflow_lightning.commandline.arguments import spell_out
from dflow_lightning.commandline.json_output import HELP as JSON_HELP
from dflow_lightning.commandline.json_output import JsonOutput
from dflow_lightning.commandline.recipe import Recipe
from dflow_lightning.data.prepared import is_prepared
from dflow_lightning.data.sets import count_rows
from dflow_lightning.errors import InputError, check_counts
from dflow_lightning.models.causal_head import CausalHeadConfig
from dflow_lightning.models.dims import DrafterConfig, DrafterDims
from dflow_lightning.models.drafter import Drafter
from dflow_lightning.models.eagle3 import Eagle3Config, Eagle3Dims, Eagle3Drafter
from dflow_lightning.models.pretrained import read_config, reading
from dflow_lightning.models.relay import RelayConfig
from dflow_lightning.models.target import FrozenTarget
from dflow_lightning.plan.eagle3 import Eagle3Plan
from dflow_lightning.plan.memory import (
    GIB,
    PRECISIONS,
    RESERVE,
    Plan,
    Sharding,
    amount,
    parameter_count,
)
from dflow_lightning.plan.work import work_of
from dflow_lightning.prepare.verify import read_on_policy
from dflow_lightning.run.fit import check_sections, method_of, recipe_parser
from dflow_lightning.training.base import BLOCK, Method

GPUS = "Processes with one GPU each; by default trainer.devices, or 1 if that is not a number."
TARGET_CONFIG = "The target's config.json or its folder, if the target itself is not here."
GPU_MEMORY = (
    "GiB of one GPU, 80 by default; with trainer.accelerator cpu of this machine, by default what "
    "it has."
)
TFLOPS = (
    "Work that one GPU gets done, TFLOP/s, for the hours; 40 % of the peak is usual: 125 (the "
    "default) for an A800 or A100, 400 for an H100 or H200. With trainer.accelerator cpu that of "
    "this CPU, by default measured with a product of matrices."
)
A100_MEMORY, A100_TFLOPS = 80.0, 125.0
CPU_SHARE = 0.4  # of the rate of one large product that a whole step reaches
FLAGS = {"--measure": bool, "--json": Path | None}
MEASURE = "Run two steps of the recipe's shapes on one device, and print memory and time."


def plan_command(args: Sequence[str]) -> int:
    """Print parameters, memory, work, steps and disk of a recipe; refuse what cannot fit."""
    recipe = parse(args)
    if recipe.measure and recipe.method != BLOCK:
        raise InputError(f"measure: it runs block drafters only; leave it out with {recipe.method}")
    result_json = JsonOutput(recipe.json)
    plan = make_plan(recipe)
    result_json.write(numbers(plan))
    with redirect_stdout(result_json.text):
        print("\n".join([*counts(plan), "", *memory_table(plan, recipe.gpu_memory), ""]))
        plan.refuse_what_does_not_fit(recipe.gpu_memory)
        print("\n".join([*work(plan), *steps(plan), *answers(plan), *hours(plan), *disk(plan)]))
        if recipe.measure:
            from dflow_lightning.plan.measure import measured_lines

            print("\n".join(["", *measured_lines(plan)]))
    return 0


def numbers(plan: Plan) -> dict[str, Any]:
    """The same numbers for a script; steps and rows are null where they are unknown."""
    total, epoch, rows = planned_steps(plan)
    each = step_seconds(plan)
    return {
        "parameters": {
            "target": parameter_count(plan.target.model),
            "drafter": parameter_count(plan.drafter),
            "relay": parameter_count(plan.relay),
        },
        "gpus": plan.gpus,
        "gpu_memory_bytes": plan.memory(),
        "cpu_memory_bytes": plan.cpu_memory,
        "loading_memory_bytes": None if plan.on_cpu else plan.loading_memory,
        "rows": rows,
        "rows_per_step": plan.gpus * plan.rows * plan.recipe.trainer.accumulate_grad_batches,
        "steps": total,
        "steps_per_epoch": epoch,
        "seconds_per_step": each,
        "hours": None if total is None else total * each / 3600,
        "checkpoint_bytes": plan.checkpoint(),
        "checkpoints": max(0, plan.recipe.checkpoint.save_top_k) + 1,
    }


def parse(args: Sequence[str]) -> Any:
    """The merged recipe, read and checked as `fit` does, and the options of this command.

    Raises:
        InputError: an option or a key of the recipe is unknown or has a wrong value.
    """
    given = Recipe.read(spell_out(FLAGS, args))
    recipe = given.parse(plan_parser(method_of(given)))
    on_cpu = recipe.trainer.accelerator == "cpu"
    for name, unit in (("gpu_memory", "GiB"), ("gpu_tflops", "TFLOP/s")):
        value = getattr(recipe, name)
        if value is not None and value <= 0:
            raise InputError(f"{name} is {value:g}; give the {unit} of one GPU")
    if recipe.gpu_memory is None:
        recipe.gpu_memory = machine_memory() if on_cpu else A100_MEMORY
    if recipe.gpu_tflops is None:
        recipe.gpu_tflops = cpu_tflops() if on_cpu else A100_TFLOPS
    if recipe.rows is not None and recipe.rows < 1:
        raise InputError(f"rows is {recipe.rows}; give the number of rows of data.train")
    return recipe


def plan_parser(method: Method = BLOCK) -> Any:
    """The parser of a recipe, with the options of this command."""
    parser = recipe_parser(method, prog="dflow-train plan")
    parser.add_argument("--gpus", type=int | None, default=None, help=GPUS)
    parser.add_argument("--gpu_memory", type=float | None, default=None, help=GPU_MEMORY)
    parser.add_argument("--target_config", type=str | None, default=None, help=TARGET_CONFIG)
    parser.add_argument(
        "--rows", type=int | None, default=None, help="Rows of data.train, if it is not here."
    )
    parser.add_argument("--gpu_tflops", type=float | None, default=None, help=TFLOPS)
    parser.add_argument("--measure", type=bool, default=False, help=MEASURE)
    parser.add_argument("--json", type=Path | None, default=None, help=JSON_HELP)
    return parser


def machine_memory() -> float:
    """GiB of this machine's memory."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / GIB


def cpu_tflops() -> float:
    """What this CPU gets done in float32 in a training step, from a product of two matrices."""
    size = 1024
    left, right = torch.rand(size, size), torch.rand(size, size)
    seconds = []
    for _ in range(3):
        began = time.perf_counter()
        left @ right
        seconds.append(time.perf_counter() - began)
    return CPU_SHARE * 2 * size**3 / min(seconds) / 1e12


def make_plan(recipe: Any) -> Plan:
    """The models, on the meta device, from what `parse` gives.

    Raises:
        InputError: the target's config.json is not found, or a setting cannot be planned for.
    """
    model, trainer = recipe.model, recipe.trainer
    if trainer.precision not in PRECISIONS:
        known = ", ".join(name for name in PRECISIONS if isinstance(name, str))
        raise InputError(f"trainer.precision {trainer.precision} has no plan; choose from {known}")
    check_sections(recipe)
    devices = trainer.devices if isinstance(trainer.devices, int) else 1
    gpus = max(1, devices) * trainer.num_nodes if recipe.gpus is None else recipe.gpus
    check_counts(gpus=gpus)
    target = empty_target(model.target.path, recipe.target_config)
    settings = {
        "sharding": sharding_of(trainer.strategy),
        "recompute": model.gradient_checkpointing,
        "shard_target": bool(getattr(model.target, "shard", False)),
    }
    if recipe.method == "eagle3":
        eagle3 = Eagle3Dims.resolve(Eagle3Config(**model.drafter.as_dict()), target)
        with torch.device("meta"):
            layer = Eagle3Drafter(eagle3)
        return Eagle3Plan(recipe, target, layer, None, gpus, recipe.data.batch_size, **settings)
    dims = DrafterDims.resolve(
        with_mask(DrafterConfig(**model.drafter.as_dict()), target),
        target,
        CausalHeadConfig(**model.causal_head.as_dict()),
    )
    relay = RelayConfig(**model.relay.as_dict())
    with torch.device("meta"):
        drafter = Drafter(dims)
        built = relay.build(dims.hidden_size, dims.rms_norm_eps) if relay.enabled else None
    return Plan(recipe, target, drafter, built, gpus, recipe.data.batch_size, **settings)


def sharding_of(strategy: Any) -> Sharding:
    """The sharding of `trainer.strategy`, which is a name or a class with its arguments."""
    if isinstance(strategy, str):
        name = strategy.removeprefix("zero").removesuffix("_offload")
        zero = strategy.startswith("zero") and name in ("1", "2", "3")
        return Sharding(int(name), strategy.endswith("_offload")) if zero else Sharding()
    chosen = getattr(strategy, "init_args", None)
    stage = getattr(chosen, "stage", 0)
    return Sharding(stage, bool(getattr(chosen, "offload", False))) if stage else Sharding()


def empty_target(path: str, target_config: str | None) -> FrozenTarget:
    """The target without storage, built from its config.json alone."""
    source = target_config or path
    field = "target_config" if target_config else "target"
    try:
        config = read_config(source, field)
    except InputError as error:
        advice = "" if target_config else "; or give --target_config, a config.json or its folder"
        raise InputError(f"{error}{advice}") from error
    with reading(source, field, "the config of "), torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    no_tokenizer = dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"))
    return FrozenTarget(
        model, SimpleNamespace(vocab_size=0, all_special_ids=[], **no_tokenizer), path
    )


def with_mask(config: DrafterConfig, target: FrozenTarget) -> DrafterConfig:
    """The config with some mask id: the tokenizer would choose it, and counting needs none."""
    free = next(i for i in range(target.vocab_size) if i not in target.stop_token_ids)
    return replace(config, mask_token_id=free) if config.mask_token_id is None else config


def counts(plan: Plan) -> list[str]:
    """Parameters by model."""
    dims = plan.drafter.dims
    taps = " ".join(map(str, dims.target_layer_ids))
    layers = f"{dims.num_layers} layer{'s' * (dims.num_layers != 1)}"
    lines = {
        f"target   {plan.target.name[-46:]}": plan.target.model,
        f"drafter  {layers}, taps {taps}": plan.drafter,
        f"relay    {'' if plan.relay else 'none'}": plan.relay,
    }
    return ["parameters", *(f"  {name:<56}{parameter_count(m):>18,}" for name, m in lines.items())]


def memory_table(plan: Plan, gpu_memory: float) -> list[str]:
    """Memory by part, beside the memory of a GPU or of this machine."""
    free = "kept free" if plan.on_cpu else "kept free (CUDA, NCCL, fragments)"
    parts = plan.memory() | {free: int(gpu_memory * RESERVE * GIB)}
    where, of = ("process", f"{gpu_memory:.1f} of this machine") if plan.on_cpu else (
        "GPU", f"{gpu_memory:g}")  # fmt: skip
    return [
        f"memory per {where}, GiB, at the longest rows (predicted, not measured)",
        *(f"  {part:<56}{amount(size / GIB):>18}" for part, size in parts.items()),
        f"  {f'total, of {of}':<56}{sum(parts.values()) / GIB:>18.2f}",
        *([f"  {'CPU memory of all processes':<56}{plan.cpu_memory / GIB:>18.2f}"]
          if plan.cpu_memory else []),
        *([] if plan.on_cpu else [f"  {loading(plan):<56}{plan.loading_memory / GIB:>18.2f}"]),
    ]  # fmt: skip


def loading(plan: Plan) -> str:
    """What a node's CPU memory holds while the target is loaded."""
    copies = plan.target_copies
    shared = "mapped once" if copies == 1 else f"{copies} copies in {plan.target_dtype}"
    return f"CPU memory of a node, target being loaded, {shared}"


def work(plan: Plan) -> list[str]:
    """Rows, tokens and work of one optimizer step."""
    accumulate = plan.recipe.trainer.accumulate_grad_batches
    rows = plan.gpus * plan.rows * accumulate
    clean, verified = rows * plan.recipe.data.max_length, rows * plan.verified
    found = work_of(plan)
    processes = ("process" if plan.gpus == 1 else "processes") if plan.on_cpu else "GPUs"
    shares = ", ".join(f"{k} {100 * v / found.row:.0f}%" for k, v in found.parts().items())
    return [
        f"step     {rows} rows: {plan.gpus} {processes} x {plan.rows} x {accumulate} accumulated",
        f"  target   up to {clean:,} tokens"
        + (f", with rollouts {clean + verified:,}" if plan.rolls_out else "")
        + (f", {plan.target_dtype}" if plan.recipe.model.target.dtype == "auto" else ""),
        f"  drafter  {rows * plan.slots:,} slots",
        f"  work     {amount(rows * found.row / 1e15)} PFLOP: {shares}",
    ]


def step_seconds(plan: Plan) -> float:
    """Time of an optimizer step at `gpu_tflops`, with rows of `max_length`."""
    rows = plan.rows * plan.recipe.trainer.accumulate_grad_batches
    return rows * work_of(plan).row / (plan.recipe.gpu_tflops * 1e12)


def hours(plan: Plan) -> list[str]:
    """Hours of the run, or of a million rows where its length is not known."""
    each, total = step_seconds(plan), planned_steps(plan)[0]
    rows = plan.gpus * plan.rows * plan.recipe.trainer.accumulate_grad_batches
    if total is None:
        length = f"{amount(1e6 / rows * each / 3600, 1)} for a million rows"
    else:
        length = f"at most {amount(total * each / 3600, 1)}"
    return [
        f"hours    {length}, {amount(each)} s a step,",
        f"           at {amount(plan.recipe.gpu_tflops)} TFLOP/s on this CPU (--gpu_tflops)"
        if plan.on_cpu
        else f"           at {plan.recipe.gpu_tflops:g} TFLOP/s a GPU (--gpu_tflops)",
    ]


def planned_steps(plan: Plan) -> tuple[int | None, int | None, int | None]:
    """Steps of the run and of an epoch, as the loader and Lightning count them, and rows."""
    trainer, rows = plan.recipe.trainer, train_rows(plan)
    if rows is None:
        return (trainer.max_steps if trainer.max_steps >= 0 else None), None, None
    batches = max(rows // plan.rows, min(rows, 1)) // plan.gpus
    if not batches:
        raise InputError(
            f"data.train has {rows} rows, no batch of {plan.rows} for each of {plan.gpus} GPUs; "
            "lower data.batch_size or add rows"
        )
    epoch = math.ceil(batches / trainer.accumulate_grad_batches)
    limits = [trainer.max_steps] if trainer.max_steps >= 0 else []
    epochs = trainer.max_epochs if limits or trainer.max_epochs else 1000  # Lightning's default
    limits += [epochs * epoch] if epochs is not None and epochs >= 0 else []
    return (min(limits) if limits else None), epoch, rows


def train_rows(plan: Plan) -> int | None:
    """Rows of `data.train`, else `--rows`; None if neither is known.

    Packed rows hold several conversations; they are counted as conversations.
    """
    if missing_sets(plan):
        return plan.recipe.rows
    return sum(count_rows(path, "data.train") for path in train_sets(plan))


def train_sets(plan: Plan) -> list[Path]:
    """The files and folders of `data.train`."""
    given = plan.recipe.data.train
    return [Path(one).expanduser() for one in (given if isinstance(given, list) else [given])]


def missing_sets(plan: Plan) -> list[Path]:
    """The sets of `data.train` that do not exist here."""
    return [path for path in train_sets(plan) if not path.exists()]


def steps(plan: Plan) -> list[str]:
    """Optimizer steps, or what is missing to compute them."""
    total, epoch, rows = planned_steps(plan)
    if epoch is None or rows is None:
        each = plan.gpus * plan.rows * plan.recipe.trainer.accumulate_grad_batches
        return [
            f"steps    one for {each} rows; data.train is missing (--rows for its number):",
            f"           {missing_sets(plan)[0]}",
        ]
    length = f"{total:,} ({total / epoch:.1f} epochs)" if total is not None else "without end"
    packed = ", at most: rows are packed" if plan.recipe.data.pack else ""
    return [f"steps    {length}; {epoch:,} for the {rows:,} rows of an epoch{packed}"]


def answers(plan: Plan) -> list[str]:
    """How far the answers of each prepared set are the target's own, where that was measured."""
    found = ((path, read_on_policy(path)) for path in train_sets(plan) if is_prepared(path))
    return [
        line
        for path, report in found
        if report
        for line in (f"answers  of {path}:", *_indented(report.describe().split("; ")))
    ]


def _indented(phrases: Sequence[str]) -> list[str]:
    return [f"           {phrase}" for phrase in phrases]


def disk(plan: Plan) -> list[str]:
    """Size of checkpoints: the best ones, the last one, and one more while it is being written.

    Also the size of a feature cache, which is not written: the features of all tokens would be
    `rows * max_length * taps * hidden size` numbers, so each step computes its own.
    """
    files = max(0, plan.recipe.checkpoint.save_top_k) + 1
    size = plan.checkpoint() / 1e9
    rows = planned_steps(plan)[2] or 1_000_000
    tokens = rows * plan.recipe.data.max_length
    cache = tokens * plan.drafter.fc.in_features * plan.target_bytes / 1e12
    return [
        f"disk     {amount((files + 1) * size)} GB: {files} checkpoints of {amount(size)}, one more"
        " while written",
        f"  export   {amount(plan.trained * 2 / 1e9)} GB in bfloat16",
        f"  cache    none; features of {rows:,} rows would take up to {amount(cache)} TB",
    ]
