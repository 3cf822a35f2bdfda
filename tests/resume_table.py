"""The table of exact resumes: 10 steps at once, and 4 + 6, bit for bit; then 20 kill -9.

    python tests/resume_table.py                  both tables
    python tests/resume_table.py --only ddp,none  some processes

Exits with 1 if a cell differs or a killed run loses more than the steps since its last checkpoint.
"""

import argparse
import itertools
import json
import random
import shutil
import signal
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from processes import Plant, Server, steps_of, tensors_of, wait_until
from targets import random_target

STEPS, CUT = 10, 4
STRATEGIES = {
    "1 process": (1, []),
    "DDP x2": (2, ["--trainer.strategy=ddp"]),
    "ZeRO-1 x2": (2, ["--trainer.strategy=zero1"]),
    "ZeRO-2 x2": (2, ["--trainer.strategy=zero2"]),
    "ZeRO-3 x2": (2, ["--trainer.strategy=zero3"]),
}


def write_data(folder: Path, rows: int = 26) -> None:
    """Sums, spelled out, of uneven length."""
    rng = random.Random(0)
    for split, count in {"train": rows, "validation": 6}.items():
        lines = []
        for i in range(count):
            terms = [str(rng.randrange(100)) for _ in range(2 + i % 4)]
            prompt = f"{split} {i}: {' + '.join(terms)}"
            answer = f"It is {sum(map(int, terms))}."
            lines.append(json.dumps({"id": f"{split}-{i}", "family": "math", "prompt": prompt,
                                     "answer": answer}))  # fmt: skip
        (folder / f"{split}.jsonl").write_text("\n".join(lines) + "\n")


@dataclass(frozen=True)
class Case:
    """One cell: how many processes, loader workers and batches a step."""

    name: str
    workers: int
    accumulate: int

    def options(self, shared: Path, **more: Any) -> list[str]:
        """The command line of a run that takes a second."""
        ranks, strategy = STRATEGIES[self.name]
        values = {
            "model.target.path": shared / "target",
            "model.drafter.num_layers": 1,
            "model.drafter.block_size": 4,
            "model.drafter.target_layer_ids": "[0,1,2]",
            "model.relay.enabled": "true",
            "model.num_anchors": 6,
            "rollout.num_rounds": 2,
            "rollout.num_anchors": 4,
            "data.train": shared / "train.jsonl",
            "data.validation": shared / "validation.jsonl",
            "data.batch_size": 2,
            "data.num_workers": self.workers,
            "validation.prompts_per_family": 1,
            "validation.max_new_tokens": 8,
            "trainer.accelerator": "cpu",
            "trainer.devices": ranks,
            "trainer.max_steps": STEPS,
            "trainer.accumulate_grad_batches": self.accumulate,
            # In batches: with two batches a step, half of the validations come in the middle of one.
            "trainer.val_check_interval": 7,
            "trainer.check_val_every_n_epoch": "null",
            "trainer.log_every_n_steps": 1,
            "trainer.num_sanity_val_steps": 0,
            "trainer.gradient_clip_val": 1.0,
            "tracking.enabled": "false",
        } | more
        return ["fit", *(f"--{key}={value}" for key, value in values.items()), *strategy]

    @property
    def ranks(self) -> int:
        return STRATEGIES[self.name][0]


def differences(folder: Path, ranks: int, whole: str, parts: str) -> list[str]:
    """What of a run in parts is not as in the whole one, bit for bit; nothing, it is hoped."""
    found = []
    for rank in range(ranks):
        (expected,) = steps_of(folder / f"{whole}-rank{rank}.jsonl")
        runs = steps_of(folder / f"{parts}-rank{rank}.jsonl")
        covered = set()
        for run in runs:
            for step, batches in run.items():
                for key in ("ids", "anchors", "loss"):
                    seen = [batch[key] for batch in batches]
                    right = [batch[key] for batch in expected.get(step, [])][: len(seen)]
                    if seen != right:
                        found.append(f"rank {rank} step {step}: {key}")
                if len(batches) == len(expected.get(step, [])):
                    covered.add(step)
        if missing := expected.keys() - covered:
            found.append(f"rank {rank}: steps {sorted(missing)} never finished")
    one, other = (tensors_of(folder / f"{run}/checkpoints/last.ckpt") for run in (whole, parts))
    if one.keys() != other.keys() or not one:
        found.append("tensors of the checkpoint")
    found += [name for name in one if name in other and not torch.equal(one[name], other[name])]
    return found


def compare(
    server: Server, shared: Path, folder: Path, case: Case, cut: int = CUT, **more: Any
) -> list[str]:
    """10 steps beside 4 + 6: the first part ends by a signal to the last rank alone.

    With two batches a step it comes in the first one of the fifth step, which is then thrown away.
    """
    record = lambda name: Plant("record", {"path": str(folder / name)})  # noqa: E731
    stop = Plant(
        "signal_at",
        {"signum": int(signal.SIGTERM), "step": cut - (case.accumulate == 1)},
        rank=case.ranks - 1,
    )
    runs = {
        "whole": ((record("whole"),), {"run_dir": "whole"}, 0),
        "first": ((record("parts"), stop), {"run_dir": "parts"}, 143),
        "second": ((record("parts"),), {"run_dir": "parts", "ckpt_path": "last"}, 0),
    }
    for name, (plants, options, status) in runs.items():
        args = case.options(shared, **more, **options)
        codes, run = server(args, folder, ranks=case.ranks, plants=plants)
        if codes != [status] * case.ranks:
            return [f"{name} run ended with {codes}: {run.output().strip()[-2000:]}"]
    return differences(folder, case.ranks, "whole", "parts")


def resume_table(server: Server, shared: Path, scratch: Path, names: list[str]) -> bool:
    """Prints the first table; whether all cells are equal."""
    print("10 steps = 4 + 6: sample ids, anchors, losses, weights and moments, bit for bit\n")
    print(f"{'processes':<12}{'workers':>8}{'batches a step':>16}   result")
    good = True
    for name, workers, accumulate in itertools.product(names, (0, 2), (1, 2)):
        folder = scratch / f"{name}-{workers}-{accumulate}".replace(" ", "-")
        folder.mkdir()
        found = compare(server, shared, folder, Case(name, workers, accumulate))
        good = good and not found
        result = f"{len(found)} differences: {'; '.join(found[:3])}" if found else "equal"
        print(f"{name:<12}{workers:>8}{accumulate:>16}   {result}", flush=True)
    return good


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", help="names of processes, separated by commas")
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    names = args.only.split(",") if args.only else list(STRATEGIES)
    scratch = Path(tempfile.mkdtemp(prefix="resume-"))
    started = time.monotonic()
    try:
        random_target(scratch / "target")
        write_data(scratch)
        server = Server()
        good = resume_table(server, scratch, scratch, [n for n in names if n in STRATEGIES])
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    print(f"\n{'all equal' if good else 'NOT equal'}, {time.monotonic() - started:.0f} s")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
