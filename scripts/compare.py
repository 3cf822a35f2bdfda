"""Train and bench the tiny drafters side by side: the table that says what each method is worth.

    python scripts/compare.py                 # all rows, 3 seeds: hours on 2 cores
    python scripts/compare.py --quick         # 1 seed, few steps: the harness works, no result
    python scripts/compare.py --cost          # what the rows cost; of drafters that are there

Every row is one recipe with at most one thing changed, trained with the same data, seeds,
optimizer steps and mask-round anchors, exported from its best checkpoint by validation tau, and
decoded on the same held-out prompts. Finished trainings and benches are kept and not repeated; a
second run goes on where the first one stopped.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from compare_cost import cost_tables
from compare_rows import BASE, Variant, variants
from compare_tables import collect, goals_table, paper_table, publish, tau_table

TARGET = "data/tiny-qwen3"
SHIPPED = ("dflash", "dflow", "domino-dflow", "eagle3")
QUICK_STEPS, QUICK_PROMPTS = 100, 2
QUICK_FIT = ("--validation.prompts_per_family", 1, "--validation.max_new_tokens", 32)


@dataclass(frozen=True)
class Study:
    """One comparison: where it writes, and how much it trains and decodes."""

    out: Path
    seeds: Sequence[int]
    quick: bool
    per_family: int

    def folder(self, variant: Variant, seed: int) -> Path:
        """The run folder of a row and seed."""
        return self.out / f"{variant.name}-{seed}"

    def seconds(self, name: str, seed: int) -> float:
        """CPU seconds of a training; waits for one that another job is running."""
        path = self.out / f"{name}-{seed}" / "seconds.json"
        while not path.exists():
            time.sleep(1)
        return json.loads(path.read_text())["seconds"]

    def steps(self, variant: Variant, seed: int) -> int:
        """Optimizer steps of a run: the recipe's, fewer when quick, more for equal time."""
        steps = QUICK_STEPS if self.quick else variant.read()["trainer"]["max_steps"]
        if variant.equal_time_to:
            ratio = self.seconds(variant.equal_time_to, seed) / self.seconds(BASE, seed)
            return round(steps * ratio)
        return steps

    def train(self, variant: Variant, seed: int) -> None:
        """Train a row and export its best checkpoint, unless that is done already."""
        folder = self.folder(variant, seed)
        if (folder / "export" / "config.json").exists():
            return
        shutil.rmtree(folder, ignore_errors=True)
        steps = self.steps(variant, seed)
        log = folder.with_suffix(".log")
        every = steps if self.quick else max(1, steps // 2)
        # On one thread these are wall seconds on a machine that does nothing else.
        seconds = dflow_train(
            "fit", "--config", variant.path, "--run_dir", folder,
            "--seed_everything", seed, "--model.seed", seed, "--data.seed", seed,
            "--trainer.max_steps", steps, "--trainer.val_check_interval", every,
            *(QUICK_FIT if self.quick else ()), *variant.changes, log=log,
        )  # fmt: skip
        (folder / "seconds.json").write_text(json.dumps({"seconds": seconds, "steps": steps}))
        best = folder / "checkpoints" / "best.ckpt"
        dflow_train("export", "--checkpoint", best, "--out", folder / "export", log=log)
        print(f"{variant.name} seed {seed}: {steps} steps, {seconds:.0f} s", flush=True)

    def measure(self, variant: Variant, seed: int) -> list[dict]:
        """Train, export and bench one row."""
        self.train(variant, seed)
        return self.bench(variant, seed)

    def bench(self, variant: Variant, seed: int) -> list[dict]:
        """The bench rows of an exported drafter, measured unless that is done already."""
        folder = self.folder(variant, seed)
        result = folder / "bench.json"
        if not result.exists():
            dflow_train(
                "bench", "--target", TARGET, "--drafter", folder / "export", "--suite", "tiny",
                "--temperature", "0,1", "--per_family", self.per_family,
                "--concurrency", min(8, self.per_family),
                "--max_new_tokens", 64 if self.quick else 128,
                "--json", result, log=folder.with_suffix(".bench.log"),
            )  # fmt: skip
        return json.loads(result.read_text())["rows"]


def dflow_train(*arguments: object, log: Path) -> float:
    """Run one command in a process of one thread, its output to a file; returns CPU seconds."""
    command = [sys.executable, "-m", "dflow_lightning", *map(str, arguments)]
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("a") as file:
        process = subprocess.Popen(
            command, stdout=file, stderr=file, env=os.environ | {"OMP_NUM_THREADS": "1"}
        )
        _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)  # Popen need not wait any more
    if process.returncode:
        raise SystemExit(f"{' '.join(command)} failed, see {log}")
    return usage.ru_utime + usage.ru_stime


def in_pairs(
    function: Callable[[Variant, int], Any], pairs: list[tuple[Variant, int]], jobs: int
) -> list:
    """Results of a function for each row and seed, `jobs` at the same time."""
    with ThreadPoolExecutor(jobs) as pool:
        return list(pool.map(lambda pair: function(*pair), pairs))


def chosen_rows(names: list[str]) -> list[Variant]:
    """All rows, or those that are named; the row of equal time only by name."""
    known = {one.name: one for one in variants()}
    unknown = [name for name in names if name not in known]
    if unknown:
        raise SystemExit(f"--rows: there is no {unknown[0]}; choose of {', '.join(known)}")
    return [known[name] for name in names] or [v for v in known.values() if not v.equal_time_to]


def compare(study: Study, chosen: list[Variant], jobs: int, finished: bool, record: bool) -> None:
    """Train and bench what is not done yet, and tabulate."""
    missing = [one for one in chosen if not one.path.is_file()]
    for one in missing:
        print(f"{one.name} is left out: there is no recipe {one.path}", file=sys.stderr)
    # Seed by seed, so that a whole table is there first and its spread later.
    pairs = [
        (variant, seed)
        for seed in study.seeds
        for variant in chosen
        if variant not in missing and (seed == study.seeds[0] or not variant.one_seed)
    ]
    if finished:
        pairs = [pair for pair in pairs if (study.folder(*pair) / "bench.json").exists()]
    if not pairs:
        raise SystemExit(f"--out: {study.out} holds no finished row; train some first")
    results = in_pairs(study.measure, pairs, jobs)
    table = collect(
        {(v.name, seed): found for (v, seed), found in zip(pairs, results, strict=True)}
    )
    lines = [*tau_table(table, study.per_family), "", *paper_table(table), "", *goals_table(table)]
    (study.out / "summary.md").write_text("\n".join([*lines, ""]))
    (study.out / "summary.json").write_text(json.dumps(table, indent=1))
    print("\n".join(lines))
    if record:
        publish("compare", lines)


def main(
    out: Path, seeds: list[int], jobs: int, quick: bool, per_family: int, ship: bool, record: bool,
    rows: list[str], finished: bool, cost: bool,
) -> None:  # fmt: skip
    """Train, bench and tabulate all rows, or some; or say what they cost."""
    study = Study(out, seeds[:1] if quick else seeds, quick, QUICK_PROMPTS if quick else per_family)
    chosen = chosen_rows(rows)
    if cost:
        drafters = {v.name: study.folder(v, study.seeds[0]) / "export" for v in chosen}
        lines = cost_tables([v for v in chosen if v.path.is_file()], drafters, out, quick=quick)
        print("\n".join(lines))
        if record:
            publish("compare-cost", lines)
        return
    compare(study, chosen, jobs, finished, record)
    if ship:
        for name in SHIPPED:
            destination = Path("data/tiny-drafters") / name
            shutil.rmtree(destination, ignore_errors=True)
            shutil.copytree(out / f"{name}-{study.seeds[0]}" / "export", destination)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("runs/compare"))
    parser.add_argument(
        "--seeds", type=lambda text: [int(part) for part in text.split(",")], default=[0, 1, 2]
    )
    parser.add_argument(
        "--jobs", type=int, default=2, help="trainings at the same time, one thread each"
    )
    parser.add_argument(
        "--rows", type=lambda text: text.split(","), default=[], help="only these, by name"
    )
    parser.add_argument(
        "--finished", action="store_true", help="tabulate what is there and train nothing"
    )
    parser.add_argument(
        "--cost", action="store_true",
        help="time a step of each row and a round of each exported drafter, and train nothing else",
    )  # fmt: skip
    parser.add_argument("--per-family", type=int, default=32)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument(
        "--ship", action="store_true", help="copy the first seed's drafters to data/tiny-drafters"
    )
    parser.add_argument(
        "--record", action="store_true", help="write the tables into docs/results.md"
    )
    main(**vars(parser.parse_args()))
