"""Train and bench the tiny drafters side by side: the table that says what the relay is worth.

    python scripts/compare.py                 # 3 seeds, all rows: about 80 minutes on 2 cores
    python scripts/compare.py --quick         # 1 seed, a tenth of the steps: a look, no result

Every row is one recipe with at most one thing changed, trained with the same data, seeds,
optimizer steps and mask-round anchors, exported from its best checkpoint by validation tau, and
decoded on the same held-out prompts. Finished trainings and benches are kept and not repeated; a
second run goes on where the first one stopped.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

TARGET = "data/tiny-qwen3"
BASE = "dflash"
SHIPPED = ("dflash", "dflow")
RESULTS = Path("docs/results.md")
MARKS = ("<!-- compare -->", "<!-- /compare -->")


@dataclass(frozen=True)
class Variant:
    """A row: a recipe, what is changed on its command line, and what it is for."""

    name: str
    recipe: str
    changes: tuple[str, ...] = ()
    equal_time_to: str | None = None
    one_seed: bool = False


def variants(num_blocks: int) -> list[Variant]:
    """All rows; `num_blocks` is how many blocks per row of data DFlow learns from in a step."""
    return [
        Variant("dflow", "tiny-dflow"),
        Variant("dflash", "tiny-dflash"),
        Variant("dflash-sc", "tiny-dflash-sc"),
        # As many blocks per step as the mask round and the rollout rounds of DFlow together.
        Variant(
            "dflash-equal-blocks",
            "tiny-dflash",
            ("--model.num_anchors", str(num_blocks)),
            one_seed=True,
        ),
        Variant("dflash-equal-time", "tiny-dflash", equal_time_to="dflow", one_seed=True),
        Variant(
            "dflow-clean-features",
            "tiny-dflow",
            ("--rollout.mode", "clean_features"),
            one_seed=True,
        ),
    ]


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
        """CPU seconds of a training; waits for one that another job has at hand."""
        path = self.out / f"{name}-{seed}" / "seconds.json"
        while not path.exists():
            time.sleep(1)
        return json.loads(path.read_text())["seconds"]

    def steps(self, variant: Variant, seed: int) -> int:
        """Optimizer steps of a run: the recipe's, fewer when quick, more for equal time."""
        steps = read_recipe(variant.recipe)["trainer"]["max_steps"]
        if self.quick:
            steps //= 10
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
        # On one thread these are wall seconds on a machine that does nothing else.
        seconds = dflow_train(
            "fit", "--config", f"recipes/{variant.recipe}.yaml", "--run_dir", folder,
            "--seed_everything", seed, "--model.seed", seed, "--data.seed", seed,
            "--trainer.max_steps", steps, "--trainer.val_check_interval", max(1, steps // 2),
            *variant.changes, log=log,
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
                "--temperature", "0,1", "--per_family", self.per_family, "--concurrency", 8,
                "--json", result, log=folder.with_suffix(".bench.log"),
            )  # fmt: skip
        return json.loads(result.read_text())["rows"]


def num_blocks(recipe: str) -> int:
    """Blocks per row of data that a DFlow recipe learns from: the mask round and all rollouts."""
    read = read_recipe(recipe)
    rollout = read["rollout"]
    return read["model"]["num_anchors"] + rollout["num_anchors"] * rollout["num_rounds"]


def read_recipe(recipe: str) -> Any:
    """The values of a recipe, by section."""
    return OmegaConf.load(f"recipes/{recipe}.yaml")


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


def collect(rows: dict[tuple[str, int], list[dict]]) -> dict[str, dict]:
    """Tau of each seed by `row name`, `temperature/family`; relay-off rows have their own names."""
    table: dict[str, dict] = {}
    for (name, _), found in sorted(rows.items()):
        has_relay = any(row["relay"] == "on" for row in found)
        for row in found:
            title = f"{name}, relay {row['relay']}" if has_relay else name
            cell = f"{row['temperature']:g}/{row['family']}"
            entry = table.setdefault(title, {}).setdefault(cell, {"tau": [], "lossless": True})
            entry["tau"].append(row["tau"])
            entry["lossless"] &= row["lossless"] is not False
    return table


def markdown(table: dict[str, dict], study: Study) -> str:
    """The table of tau, a row a drafter; a spread only where there is more than one seed."""
    cells = [f"{t}/{family}" for t in (0, 1) for family in ("math", "code", "chat", "pooled")]
    lines = [
        f"tau (accepted drafts + 1), mean of the seeds ± (largest - smallest); "
        f"{study.per_family} prompts a family",
        "",
        "| drafter | seeds | "
        + " | ".join(f"T={c.replace('/', ' ')}" for c in cells)
        + " | lossless |",
        "|---|---|" + "---|" * (len(cells) + 1),
    ]
    for title, row in table.items():
        values = [shown(row[c]["tau"]) for c in cells]
        seeds = len(row[cells[0]]["tau"])
        lossless = "yes" if all(entry["lossless"] for entry in row.values()) else "NO"
        lines.append(f"| {title} | {seeds} | " + " | ".join(values) + f" | {lossless} |")
    return "\n".join(lines)


def shown(values: list[float]) -> str:
    """A mean, with its spread where there is one."""
    mean = f"{statistics.mean(values):.3f}"
    return mean if len(values) == 1 else f"{mean} ± {spread(values):.3f}"


def spread(values: list[float]) -> float:
    """Largest minus smallest."""
    return max(values) - min(values)


def ratio(table: dict, one: str, other: str, cell: str) -> list[float]:
    """One row over another, seed by seed; rows of fewer seeds are compared on those."""
    return [a / b for a, b in zip(table[one][cell]["tau"], table[other][cell]["tau"], strict=False)]


BARS = (  # one, other, temperature, at least
    ("dflow, relay on", "dflash", 0, 1.10),
    ("dflow, relay on", "dflash", 1, 1.09),
    ("dflow, relay on", "dflow, relay off", 0, 1.05),
    ("dflow, relay on", "dflow, relay off", 1, 1.05),
    ("dflow, relay on", "dflash-sc", 0, 1.0),
    ("dflow, relay on", "dflash-sc", 1, 1.0),
    ("dflash-sc", "dflash", 0, 1.0),
    ("dflash-sc", "dflash", 1, 1.0),
    ("dflow, relay on", "dflash-equal-blocks", 0, 1.05),
    ("dflow, relay on", "dflash-equal-blocks", 1, 1.0),
    ("dflow, relay on", "dflash-equal-time", 0, 1.0),
    ("dflow, relay on", "dflash-equal-time", 1, 1.0),
    ("dflow, relay on", "dflow-clean-features, relay on", 0, 1.0),
)


def bars(table: dict) -> list[str]:
    """The table of goals: pooled tau of one row over another, and whether it is high enough."""
    lines = [
        "| pooled tau of | over | T | ratio (mean of seeds) | each seed | goal | met |",
        "|---|---|---|---|---|---|---|",
    ]
    for one, other, temperature, goal in BARS:
        if not {one, other} <= table.keys():
            continue  # left out by --rows
        values = ratio(table, one, other, f"{temperature}/pooled")
        mean = statistics.mean(values)
        each = ", ".join(f"{value:.3f}" for value in values)
        met = "yes" if mean >= goal else "no"
        lines.append(
            f"| {one} | {other} | {temperature} | {mean:.3f} | {each} | {goal:.2f} | {met} |"
        )
    return lines


def publish(summary: str) -> None:
    """Put the tables between their marks in docs/results.md, with where they come from."""
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    ).stdout.strip()
    command = " ".join(["python", *sys.argv])
    page = RESULTS.read_text()
    before, _, rest = page.partition(MARKS[0])
    _, _, after = rest.partition(MARKS[1])
    origin = f"Made by `{command}` at commit `{commit}`."
    RESULTS.write_text(f"{before}{MARKS[0]}\n{origin}\n\n{summary}{MARKS[1]}{after}")


def main(
    out: Path, seeds: list[int], jobs: int, quick: bool, per_family: int, ship: bool, record: bool,
    rows: list[str], finished: bool,
) -> None:  # fmt: skip
    """Train, bench and tabulate all rows, or some."""
    study = Study(out, seeds[:1] if quick else seeds, quick, 8 if quick else per_family)
    chosen = [one for one in variants(num_blocks("tiny-dflow")) if not rows or one.name in rows]
    # The rows that matter most come first, whatever time is left.
    pairs = [
        (variant, seed)
        for variant in chosen
        for seed in study.seeds
        if seed == study.seeds[0] or not variant.one_seed
    ]
    if finished:
        pairs = [pair for pair in pairs if (study.folder(*pair) / "bench.json").exists()]
    results = in_pairs(study.measure, pairs, jobs)
    table = collect(
        {(v.name, seed): found for (v, seed), found in zip(pairs, results, strict=True)}
    )
    summary = "\n".join([markdown(table, study), "", *bars(table), ""])
    (out / "summary.md").write_text(summary)
    (out / "summary.json").write_text(json.dumps(table, indent=1))
    print(summary)
    if record:
        publish(summary)
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
    parser.add_argument("--per-family", type=int, default=32)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument(
        "--ship", action="store_true", help="copy the first seed's drafters to data/tiny-drafters"
    )
    parser.add_argument(
        "--record", action="store_true", help="write the tables into docs/results.md"
    )
    main(**vars(parser.parse_args()))
