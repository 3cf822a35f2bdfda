"""Every recipe, method and precision on fake CUDA tensors: one line each.

    python tests/fake_cuda/grid.py --out F            # the whole grid: `make fake-cuda`
    python tests/fake_cuda/grid.py --quick --json F   # small shapes: what `make test` runs
    python tests/fake_cuda/grid.py --only 8b          # cases whose name holds this

With `--out` every finished case is appended to a file at once, and a second run goes on where the
first one stopped; cases that ended with an error run again, and with `--fresh` all that are chosen.
A case is finished for the same settings, recipe and torch: after a change of the package, choose
what it touches and add `--fresh`.
A change of `plan` alone needs no new run: the peaks of finished cases are compared with what `plan`
says now. `--verdicts` does only that.

`ok` is no error of device or dtype, no copy between host and device in a round of decoding, and a
peak of memory within 15 % of `plan` (shapes of recipes alone: `plan` is for those). Training steps
say how often they copy or wait. Exit status 1 when a case fails. In an environment with a CUDA
build of torch (`make env-cuda`) the steps have their backward pass, and memory is compared.
"""

import argparse
import contextlib
import hashlib
import json
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

ROOT = Path(__file__).resolve().parents[2]
for folder in (ROOT / "src", ROOT / "tests"):
    sys.path.insert(0, str(folder))

import torch  # noqa: E402
import yaml  # noqa: E402
from fake_cuda.machine import HAS_BACKWARD, allow_fake_devices, need_driver  # noqa: E402
from fake_cuda.runs import GIB, Found, build, fake_run, planned, rounds, train_step  # noqa: E402
from fake_cuda.targets import SHAPES, saved  # noqa: E402
from fake_cuda.watch import PINNED, READS  # noqa: E402

from dflow_lightning.commandline.recipe import read_layers  # noqa: E402
from dflow_lightning.decode.state import Models  # noqa: E402
from dflow_lightning.tensors.blocks import slot_positions  # noqa: E402

NEAR = 0.15  # of plan
METHODS = {
    "dflash": ["--model.relay.enabled=false", "--rollout.num_rounds=0"],
    "dflash-sc": ["--model.relay.enabled=false", "--rollout.mode=off"],
    "dflow": [],
    "domino": ["--model.relay.enabled=false", "--rollout.num_rounds=0",
               "--model.causal_head.enabled=true"],
    "domino-dflow": ["--model.causal_head.enabled=true"],
    "carryover": ["--model.drafter.carryover=true"],
    "eagle3": [],
}  # fmt: skip
VARIANTS = {  # of DFlow at the smallest published shape
    "32-true": ["--trainer.precision=32-true"],
    "target in float32": ["--model.target.dtype=float32"],
    "ddp": ["--trainer.strategy=ddp"],
    "zero1": ["--trainer.strategy=zero1"],
    "zero3": ["--trainer.strategy=zero3"],
    "offload": ["--trainer.strategy=zero2_offload"],
    "recomputed": ["--model.gradient_checkpointing=true"],
    "kl": ["--model.loss.kind=kl"],
    "dpace": ["--model.loss.kind=dpace", "--model.loss.gamma=null"],
    "target's argmax": ["--rollout.reference=target"],
    "teacher forced": ["--rollout.mode=teacher_forced"],
    "clean features": ["--rollout.mode=clean_features"],
    "detached": ["--model.relay.detach_features=true"],
    "not packed": ["--data.pack=false"],
    "accumulated": ["--trainer.accumulate_grad_batches=2"],
}
SMALL = ["--model.num_anchors=24", "--rollout.num_anchors=6", "--data.max_length=96",
         "--data.batch_size=2", "--model.drafter.num_layers=2"]  # fmt: skip
QUICK_VARIANTS = ("32-true", "ddp", "zero3", "recomputed", "target's argmax", "not packed")


def copying(*args: Any, **kwargs: Any) -> Any:
    """`slot_positions` with a tensor that comes from the host."""
    return slot_positions(*args, **kwargs) + torch.zeros((), dtype=torch.long).to("cuda:0")


# Faults that were there once: what is patched, by what, what the table must then say, and the rules
# of the rounds that show it; a step without them.
PLANTS: dict[str, tuple[str, Any, str, tuple[str, ...]]] = {
    "no autocast in rollouts": (
        "dflow_lightning.run.strategy.ZeroPrecision.forward_context",
        lambda self: contextlib.nullcontext(), "torch.float32", (),
    ),
    "a copy that waits in a step": (
        "dflow_lightning.tensors.blocks._sent",
        lambda keys_BS, device: keys_BS.to(device), "waits in a step", (),
    ),
    "a copy in a round": ("dflow_lightning.decode.rounds.slot_positions", copying, "in a round",
                         ("greedy",)),
}  # fmt: skip
DTYPES = (torch.float32, torch.bfloat16)
RULES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"temperature": 1.0},
    "filtered": {"temperature": 1.0, "top_p": 0.9, "top_k": 50},
    "rejection": {"temperature": 1.0, "acceptance": "rejection"},
    "tree": {"tree_nodes": 32},
}


@dataclass(frozen=True)
class Case:
    """A recipe with its overrides: a training step, or rounds by each of these rules."""

    name: str
    size: str
    args: list[str]
    rules: tuple[str, ...] = ()
    plant: str | None = None  # a fault of PLANTS, which the case must show


def recipe_of(method: str, size: str) -> list[str]:
    """The method's recipe of a size, or DFlow's with the method's overrides."""
    published = size if size != "small" else "1.7b"
    own = ROOT / f"recipes/qwen3-{published}-{method}.yaml"
    if own.is_file():
        return [f"--config={own}"]
    return [f"--config={ROOT / f'recipes/qwen3-{published}-dflow.yaml'}", *METHODS[method]]


def overlays() -> list[Path]:
    """One file of recipes/hardware for each content, without those for CPUs."""
    files = sorted((ROOT / "recipes/hardware").glob("*.yaml"))
    texts = {str(yaml.safe_load(path.read_text())): path for path in files}
    return [path for path in texts.values() if "cpu" not in path.stem]


def cases(quick: bool) -> list[Case]:
    """All of them; the quick ones are small."""
    gpu = overlays()
    last = f"--config={gpu[-1]}"
    steps, rounds_, seen = [], [], set()
    for size in ["small"] if quick else [size for size in SHAPES if size != "small"]:
        for method in METHODS:
            recipe = recipe_of(method, size)
            seen.add((recipe[0] if len(recipe) == 1 else "", last))
            args = [*recipe, last, *small_options(size, method)]
            # A tree has no place in a causal head or an autoregressive drafter.
            chain = method in ("domino", "domino-dflow", "eagle3")
            rules = tuple(rule for rule in RULES if not (chain and rule == "tree"))
            steps.append(Case(f"{size} {method}", size, args))
            rounds_.append(Case(f"{size} {method}, rounds", size, args, rules))
    size = "small" if quick else "1.7b"
    for name, options in VARIANTS.items():
        if quick and name not in QUICK_VARIANTS:
            continue
        args = [*recipe_of("dflow", size), last, *small_options(size, "dflow"), *options]
        steps.append(Case(f"{size} dflow, {name}", size, args))
    if not quick:  # every recipe that is shipped, on every machine that it may name
        for recipe in sorted((ROOT / "recipes").glob("qwen3-*.yaml")):
            for overlay in gpu:
                args = [f"--config={recipe}", f"--config={overlay}"]
                size = recipe.stem.split("-")[1]
                if tuple(args) not in seen:
                    steps.append(Case(f"{recipe.stem} on {overlay.stem}", size, args))
    for plant, (*_, rules) in PLANTS.items():
        args = [*recipe_of("dflow", "small"), last, *small_options("small", "dflow")]
        steps.append(Case(f"planted: {plant}", "small", args, rules, plant))
    return steps + rounds_


def small_options(size: str, method: str) -> list[str]:
    """What makes a recipe small, as far as the method has it."""
    if size != "small":
        return []
    if method != "eagle3":
        return SMALL
    there = [option for option in SMALL if "rollout" not in option and "num_layers" not in option]
    return [*there, "--model.drafter.target_layer_ids=[1,2,4]"]


def arguments(case: Case, config: Path) -> list[str]:
    """The case's command line, without data."""
    return [*case.args, f"--model.target.path={config}", "--data.train=none.jsonl",
            "--data.validation=null", "--data.test=null"]  # fmt: skip


def run(case: Case, config: Path, out: Path) -> list[tuple[str, Found]]:
    """Lines of the table: the step, or one for each rule and dtype of the drafter."""
    args = arguments(case, config)
    with fake_run(8) as watch, planted(case):
        cli = build([*args, "--tracking.enabled=false", f"--run_dir={out}"])
        if not case.rules:
            found = [(case.name, train_step(cli, watch))]
        else:
            found = []
            for dtype in DTYPES:
                few = case.size == "small" and dtype == torch.float32
                found += decode(case, cli, watch, dtype, case.rules[:1] if few else case.rules)
    if not case.rules and compares(case):
        found[0][1].planned = planned(args, config)
    return found


def compares(case: Case) -> bool:
    """Whether a step's memory is compared with `plan`, which is for shapes of recipes."""
    return HAS_BACKWARD and case.size != "small"


def planned_now(case: Case, record: dict[str, Any], folder: Path) -> dict[str, Any]:
    """A finished case's record with what `plan` says now, and the verdict on that."""
    one = record["lines"][0]
    if case.rules or not compares(case) or not one.get("peak"):
        return record
    config = saved(case.size, folder)
    copies = Counter({(kind, place): count for kind, place, count in one["copies"]})
    now = planned(arguments(case, config), config)
    found = Found(peak=one["peak"], planned=now, copies=copies)
    said = verdict(found, decodes=False)
    return record | {"lines": [one | {"planned": found.planned, "failed": said}]}


def planted(case: Case) -> contextlib.AbstractContextManager[Any]:
    """The case's fault, while it runs."""
    if case.plant is None:
        return contextlib.nullcontext()
    name, fault, *_ = PLANTS[case.plant]
    return patch(name, fault)


def decode(
    case: Case, cli: Any, watch: Any, dtype: torch.dtype, rules: tuple[str, ...]
) -> list[tuple[str, Found]]:
    """These rules, drafter and relay in this dtype: float32 in validation, bfloat16 exported."""
    module = cli.model.eval()
    drafter = module.drafter.to(dtype)
    relay = None if module.relay is None else module.relay.to(dtype)
    models = Models(module.target, drafter, relay)
    slots, length = (3, 128) if case.size == "small" else (8, 2048)
    with torch.inference_mode():
        return [
            (f"{case.name.removesuffix(', rounds')}, {str(dtype)[6:]} {rule}",
             rounds(models, watch, slots, length, **RULES[rule]))
            for rule in rules
        ]  # fmt: skip


def verdict(found: Found, *, decodes: bool) -> str:
    """Empty where all is well, or what is not.

    Values may be read in a step that accumulates, right before the optimizer's, when the guards
    wait for the device as well.
    """
    waits = sum(n for (kind, _), n in found.copies.items() if kind not in (PINNED, *READS))
    if not decodes and waits:
        return f"{waits} waits in a step"
    if decodes and found.copies:
        return f"{sum(found.copies.values())} copies in a round"
    if found.planned and abs(found.peak / found.planned - 1) > NEAR:
        return f"peak {found.peak / found.planned - 1:+.0%} off plan"
    return ""


def as_line(label: str, found: Found | None, said: str) -> dict[str, Any]:
    """A line of the table as JSON has it: keys are texts, and nothing found leaves no numbers."""
    if found is None:
        return {"case": label, "failed": said}
    copies = [[*key, count] for key, count in found.copies.items()]
    return {"case": label, "failed": said, "peak": found.peak, "planned": found.planned,
            "copies": copies}  # fmt: skip


def line(one: dict[str, Any]) -> str:
    """One line of the table."""
    peak, planned_, ratio, copies = one.get("peak"), one.get("planned"), "-", "-"
    if peak and planned_:
        ratio = f"{peak / planned_:.2f}"
    if "copies" in one:
        copies = str(sum(count for *_, count in one["copies"]))
    sizes = [f"{size / GIB:.2f}" if size else "-" for size in (peak, planned_)]
    said = one["failed"] or "ok"
    return f"{one['case']:<58}{said:<24}{sizes[0]:>8}{sizes[1]:>8}{ratio:>7}{copies:>8}"


def key_of(case: Case) -> str:
    """A case's settings, its recipes with their bases and the torch that traces it, in short."""
    texts = [case.name, torch.__version__, str(HAS_BACKWARD)]
    for argument in case.args:
        option, _, value = argument.partition("=")
        if option == "--config":
            texts += [layer.text for layer in read_layers(Path(value))]
        else:
            texts.append(argument)
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()[:16]


def finished(out: Path | None) -> dict[str, dict[str, Any]]:
    """Records of an earlier run by key, the newest of each; a line cut short by a kill is none."""
    records = {}
    for text in out.read_text().splitlines() if out and out.is_file() else ():
        with contextlib.suppress(json.JSONDecodeError):
            record = json.loads(text)
            records[record["key"]] = record
    return records


def append(out: Path, record: dict[str, Any]) -> None:
    """Write a record as a line of its own, also after a line that a kill cut short."""
    out.parent.mkdir(parents=True, exist_ok=True)
    cut = out.is_file() and not out.read_bytes().endswith(b"\n") and out.stat().st_size > 0
    with out.open("a") as file:
        file.write("\n" * cut + json.dumps(record) + "\n")


def commit() -> str:
    """The commit that is checked out, or nothing outside a repository."""
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--only", default="", help="part of a case's name")
    parser.add_argument("--json", type=Path, help="all lines, at the end")
    parser.add_argument("--out", type=Path, help="one record per finished case, at once")
    parser.add_argument("--fresh", action="store_true", help="run cases that --out has, too")
    parser.add_argument(
        "--verdicts", action="store_true", help="run nothing; compare --out with plan"
    )
    parser.add_argument("--trace", action="store_true", help="whole tracebacks")
    args = parser.parse_args()
    need_driver()
    warnings.filterwarnings("ignore")
    allow_fake_devices()
    print(f"torch {torch.__version__}, {'with' if HAS_BACKWARD else 'without'} backward\n"
          f"{'case':<58}{'':<24}{'GiB':>8}{'plan':>8}{'ratio':>7}{'copies':>8}")  # fmt: skip
    lines, start = [], time.perf_counter()
    before, now = {} if args.fresh else finished(args.out), commit()
    others = set()  # commits of records that are taken over
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for case in cases(args.quick):
            if args.only not in case.name:
                continue
            key = key_of(case)
            if key in before and all(
                "peak" in one or not one["failed"] for one in before[key]["lines"]
            ):
                record = planned_now(case, before[key], folder)
                others |= {record["commit"]} - {now}
            elif args.verdicts:
                continue
            else:
                found = [as_line(*one) for one in results(case, folder, args.trace)]
                record = {"key": key, "commit": now, "lines": found}
                if args.out:
                    append(args.out, record)
            lines += record["lines"]
            for one in record["lines"]:
                print(line(one), flush=True)
    print(f"\n{len(lines)} lines in {time.perf_counter() - start:.0f} s")
    if others:
        print(f"some of them from {args.out}, of commit {', '.join(sorted(others))}; here is {now}")
    places = {
        (kind, place): one["case"] for one in lines for kind, place, _ in one.get("copies", ())
    }
    for (kind, place), label in sorted(places.items()):
        print(f"  {kind:<20} {place:<40} e.g. {label}")
    if args.json:
        args.json.write_text(json.dumps(lines, indent=1))
    failed = sum(bool(one["failed"]) for one in lines)
    print(f"{len(lines) - failed} passed, {failed} failed")
    return int(failed > 0 or not lines)


def results(case: Case, folder: Path, trace: bool) -> list[tuple[str, Found | None, str]]:
    """The lines of a case: its name, what was found and what is wrong with it."""
    try:
        found = run(case, saved(case.size, folder), folder / "run")
        lines: list[tuple[str, Found | None, str]] = [
            (label, one, verdict(one, decodes=bool(case.rules))) for label, one in found
        ]
    except Exception as error:
        if trace:
            traceback.print_exc()
        lines = [(case.name, None, where(error))]
    if case.plant is None:
        return lines
    seen = any(PLANTS[case.plant][2] in said for *_, said in lines)
    return [(case.name, None, "" if seen else "the fault was not seen")]


def where(error: Exception) -> str:
    """The error, and the innermost line of the package that it passed through."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [f for f in frames if "/dflow_lightning/" in f.filename]
    place = f"{Path(ours[-1].filename).name}:{ours[-1].lineno}: " if ours else ""
    return (
        f"{place}{type(error).__name__}: {str(error).splitlines()[0][:200] if str(error) else ''}"
    )


if __name__ == "__main__":
    sys.exit(main())
