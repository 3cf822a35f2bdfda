"""The table of exact resumes: 10 steps at once, and 4 + 6, bit for bit; then 20 kill -9.

    python tests/resume_table.py                  both tables
    python tests/resume_table.py --only "DDP x2"  some of the processes

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
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from processes import Plant, Server, steps_of, tensors_of, wait_until
from targets import random_target

STEPS, CUT, EVERY = 10, 4, 2
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
            # In batches: with two batches a step, half of the validations come within one.
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


def record_of(run: Path, rank: int) -> Path:
    """Where `plants.record` writes for a run folder."""
    return run.with_name(f"{run.name}-rank{rank}.jsonl")


def whole_run(server: Server, shared: Path, case: Case) -> tuple[Path, str]:
    """The run that nothing stops, made once for all numbers of workers; and what went wrong."""
    folder = shared / f"whole-{case.name}-{case.accumulate}".replace(" ", "-")
    if not folder.exists():
        folder.mkdir()
        args = replace(case, workers=0).options(shared, run_dir="run")
        record = Plant("record", {"path": str(folder / "run")})
        codes, run = server(args, folder, ranks=case.ranks, plants=(record,))
        if any(codes):
            return folder / "run", f"whole run ended with {codes}: {last_line(run)}"
    return folder / "run", ""


def last_line(run: Any) -> str:
    """What a failed run said in the end."""
    return (run.output().strip().splitlines() or [""])[-1]


def differences(ranks: int, whole: Path, parts: Path) -> list[str]:
    """What of a run in parts is not as in the whole one, bit for bit; nothing, it is hoped."""
    found = []
    for rank in range(ranks):
        (expected,) = steps_of(record_of(whole, rank))
        runs = steps_of(record_of(parts, rank))
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
    one, other = (tensors_of(run / "checkpoints/last.ckpt") for run in (whole, parts))
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
    whole, wrong = whole_run(server, shared, case)
    if wrong:
        return [wrong]
    record = Plant("record", {"path": str(folder / "parts")})
    stop = Plant(
        "signal_at",
        {"signum": int(signal.SIGTERM), "step": cut - (case.accumulate == 1)},
        rank=case.ranks - 1,
    )
    parts = [((record, stop), {}, 143), ((record,), {"ckpt_path": "last"}, 0)]
    for plants, options, status in parts:
        args = case.options(shared, run_dir="parts", **more, **options)
        codes, run = server(args, folder, ranks=case.ranks, plants=plants)
        if codes != [status] * case.ranks:
            return [f"run ended with {codes}: {last_line(run)}"]
    resumed = min(steps_of(record_of(folder / "parts", 0))[-1])
    found = [f"resumed at step {resumed}"] if resumed != cut else []
    return found + differences(case.ranks, whole, folder / "parts")


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


@dataclass(frozen=True)
class Kill:
    """A run and when it gets kill -9: in a checkpoint, or so many seconds after a step began."""

    case: Case
    in_save: tuple[int, float] | None
    step: int
    delay: float
    rank: int

    @classmethod
    def draw(cls, rng: random.Random, number: int, names: list[str], in_save: bool) -> "Kill":
        case = Case(names[number % len(names)], rng.choice((0, 2)), rng.choice((1, 2)))
        share = rng.choice([rng.random(), 1, 2])
        return cls(
            case,
            (rng.randint(1, STEPS // EVERY), share) if in_save else None,
            rng.randint(0, STEPS - 1),
            rng.random() * 0.3,
            0 if in_save else rng.randrange(case.ranks),  # the first process writes
        )

    def __str__(self) -> str:
        if self.in_save is None:
            return f"{self.delay:.2f} s after step {self.step} of rank {self.rank}"
        number, share = self.in_save
        at = {1: "before its new name", 2: "after its new name"}.get(share, f"at {share:.0%}")
        return f"checkpoint {number}, {at}"


def kill_once(server: Server, shared: Path, folder: Path, kill: Kill) -> tuple[str, bool]:
    """A killed run and its continuation beside one that is not killed; a row of the table."""
    case, ranks = kill.case, kill.case.ranks
    whole, wrong = whole_run(server, shared, case)
    if wrong:
        return wrong, False
    record = Plant("record", {"path": str(folder / "parts")})
    more = {"checkpoint.every_n_steps": EVERY, "ckpt_path": "auto"}
    args = case.options(shared, run_dir="parts", **more)
    plants = [record, Plant("slow", {"seconds": 0.05})]
    if kill.in_save:
        number, share = kill.in_save
        plants.append(Plant("kill_in_save", {"number": number, "share": share}, rank=0))
    run = server.start(args, folder, ranks=ranks, plants=tuple(plants))
    seen = record_of(folder / "parts", kill.rank)
    if not kill.in_save:
        wait_until(lambda: any(kill.step in steps for steps in steps_of(seen)))
        time.sleep(kill.delay)
        run.signal(signal.SIGKILL, kill.rank)
    codes = run.wait()  # the other process notices by itself
    killed = codes[kill.rank] == 128 + signal.SIGKILL
    (before,) = steps_of(seen)
    codes, run = server(args, folder, ranks=ranks, plants=(record,))
    if any(codes):
        return f"continued run ended with {codes}: {last_line(run)}", False
    after = steps_of(seen)[1:]
    reached, resumed = max(before), min(after[0]) if after else STEPS
    found = differences(ranks, whole, folder / "parts")
    good = not found and resumed >= reached // EVERY * EVERY
    result = f"{len(found)} differences: {'; '.join(found[:3])}" if found else "equal"
    late = "" if killed else " (it had ended)"
    return f"in step {reached:>2}{late}, resumed at {resumed:>2}, {result}", good


def kill_table(
    server: Server, shared: Path, scratch: Path, names: list[str], kills: int, seed: int
) -> bool:
    """Prints the second table; whether all were resumed and none lost a saved step."""
    print(
        f"\nkill -9 of one process, checkpoints every {EVERY} steps, then the same command again\n"
    )
    rng, good = random.Random(seed), True
    for number in range(kills):
        kill = Kill.draw(rng, number, names, in_save=number < kills // 4)
        folder = scratch / f"kill{number}"
        folder.mkdir()
        row, passed = kill_once(server, shared, folder, kill)
        good = good and passed
        case = f"{kill.case.name}, {kill.case.workers} workers, {kill.case.accumulate} batches"
        print(
            f"{number + 1:>3}  {case:<36}{kill!s:<40}{row}{'' if passed else '  FAILED'}",
            flush=True,
        )
    return good


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", help="names of processes, separated by commas")
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--kills_only", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    names = args.only.split(",") if args.only else [n for n in STRATEGIES if n != "ZeRO-1 x2"]
    scratch = Path(tempfile.mkdtemp(prefix="resume-"))
    started = time.monotonic()
    try:
        random_target(scratch / "target")
        write_data(scratch)
        server = Server()
        good = True
        if not args.kills_only:
            good = resume_table(server, scratch, scratch, names)
        if args.kills:
            good = kill_table(server, scratch, scratch, names, args.kills, args.seed) and good
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    print(f"\n{'all passed' if good else 'FAILED'}, {time.monotonic() - started:.0f} s")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
