"""What a training step costs: ours against speculators', and DFlow against DFlash.

    make bench-step

Each side runs in a process of its own; they take turns, one thread each, float32, on the same
shapes. Reported are medians of processor seconds, which other processes on the machine disturb less
than the clock. The last line has the ratios; the exit status is 1 if one of them misses its goal.

    ours against the peer   forward and backward of DFlash, target excluded: at least 2 times faster
    DFlow against DFlash    two rounds from an eighth of the blocks: at most 1.6 times a DFlash
                            step, both from the target's clean forward to the last gradient
"""

import argparse
import statistics
import sys
import tempfile
from pathlib import Path

from step_process import Shape, Step, Worker, ours, peers, save_random_target

FASTER, DFLOW = 2.0, 1.6  # the goals
OURS = ("dflash", "dflow", "dflash_whole", "dflow_whole")


def shapes(folder: Path) -> list[Shape]:
    """A small random target with two block sizes, and one with Qwen3's vocabulary."""
    small = save_random_target(folder / "small", 2048, 128, 32)
    large = save_random_target(folder / "large", 151936, 256, 64)
    return [
        Shape("64 blocks of 8", small, 8, 256, 8, 64, 8, 3),
        Shape("64 blocks of 16", small, 8, 256, 8, 64, 16, 3),
        Shape("vocabulary 151,936", large, 8, 512, 1, 64, 16, 5),
    ]


def measure(shape: Shape, repeats: int) -> dict[str, list[Step]]:
    """All kinds of steps in turn, `repeats` times after one round that does not count."""
    mine, theirs = ours(shape), peers(shape)
    turns: list[tuple[str, Worker, str]] = [("peer", theirs, "dflash")]
    turns += [(kind, mine, kind) for kind in OURS]
    if mine.about != theirs.about:
        raise SystemExit(f"error: the drafters differ: {mine.about} here, {theirs.about} there")
    found: dict[str, list[Step]] = {name: [] for name, _, _ in turns}
    for number in range(1 + repeats):
        for name, worker, kind in turns:
            step = worker.step(kind)
            if number:
                found[name].append(step)
    mine.close()
    theirs.close()
    return found


def main(repeats: int, only: str | None) -> int:
    """Print the table; returns the exit status."""
    print(
        "processor seconds a step      peer  DFlash   DFlow |  with the clean forward: DFlash DFlow"
    )
    faster, dearer, dearer_alone = {}, {}, {}
    with tempfile.TemporaryDirectory() as folder:
        for shape in shapes(Path(folder)):
            if only is not None and only not in shape.name:
                continue
            found = measure(shape, repeats)
            cpu = {name: statistics.median(s.cpu for s in steps) for name, steps in found.items()}
            row = "".join(f"{cpu[name]:8.3f}" for name in ("peer", "dflash", "dflow"))
            whole = "".join(f"{cpu[name]:8.3f}" for name in ("dflash_whole", "dflow_whole"))
            print(f"{shape.name:<26}{row} |{whole}", flush=True)
            faster[shape.name] = cpu["peer"] / cpu["dflash"]
            dearer[shape.name] = cpu["dflow_whole"] / cpu["dflash_whole"]
            dearer_alone[shape.name] = cpu["dflow"] / cpu["dflash"]
    listed = {
        f"faster than the peer (goal {FASTER:g})": faster,
        "DFlow / DFlash without the clean forward": dearer_alone,
        f"DFlow / DFlash (goal {DFLOW:g})": dearer,
    }
    print("; ".join(f"{k}: " + " ".join(f"{r:.2f}" for r in v.values()) for k, v in listed.items()))
    return int(min(faster.values()) < FASTER or max(dearer.values()) > DFLOW)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--only", help="shapes whose name holds this")
    sys.exit(main(**vars(parser.parse_args())))
