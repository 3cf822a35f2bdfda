"""What a training step holds at Qwen3's vocabulary: ours beside speculators', and by its parts.

    make memory

Hidden 256, 5 drafter layers, rows of 512 tokens, blocks of 16, float32, on this CPU. A process a
side; the peak is the largest resident memory during steps after the first. What must grow with the
blocks are activations and their gradients, counted here by their formulas in `plan`; the rest may
grow by a tenth from 64 to 512 blocks. Exit status 1 when we take more than half of the peer, or
grow.
"""

import argparse
import sys
import tempfile
from pathlib import Path

from step_process import Shape, Step, Worker, ours, peers, save_random_target

from dflow_lightning.plan.command import make_plan, parse

SHARE, GROWTH = 0.5, 1.1  # the goals
# The C library keeps freed memory below this size; resident is then what is used.
GIVE_BACK = {"MALLOC_MMAP_THRESHOLD_": str(2**20)}
VOCABULARY, LAYERS, BLOCK, LENGTH = 151936, 5, 16, 512


def largest(worker: Worker, steps: int, kind: str = "dflash") -> Step:
    """The step with the highest peak; the first, which allocates what stays, does not count."""
    found = [worker.step(kind) for _ in range(1 + steps)][1:]
    worker.close()
    return max(found, key=lambda step: step.peak_mib)


def activations_mib(target: Path, anchors: int, *, recompute: bool) -> dict[str, float]:
    """What the backward pass needs of each block, MiB by part, as `dflow-train plan` counts it."""
    plan = make_plan(parse([
        f"--model.target.path={target}", f"--model.drafter.num_layers={LAYERS}",
        f"--model.num_anchors={anchors}", "--rollout.num_rounds=0", "--data.train=none",
        f"--data.max_length={LENGTH}", "--data.batch_size=1", "--trainer.accelerator=cpu",
        "--trainer.precision=32-true", f"--model.gradient_checkpointing={str(recompute).lower()}",
    ]))  # fmt: skip
    parts = plan.activation_parts() | {"masks": plan.masks()}
    return {part: size / 2**20 for part, size in parts.items()}


def main(steps: int) -> int:
    """Print the tables; returns the exit status."""
    with tempfile.TemporaryDirectory() as folder:
        target = save_random_target(Path(folder), VOCABULARY, 256, 64)
        shapes = {n: Shape("", target, 8, LENGTH, 1, n, BLOCK, LAYERS) for n in (64, 512)}
        print("MiB resident                        before    peak   a step")
        found = {}
        rows: list[tuple[str, int, bool | None]] = [
            ("speculators, 64 blocks", 64, None), ("ours, 64 blocks", 64, False),
            ("ours, 512 blocks", 512, False), ("ours, 512 blocks, recomputed", 512, True),
        ]  # fmt: skip
        for name, blocks, recompute in rows:
            options = ["--gradient-checkpointing"] if recompute else []
            shape = shapes[blocks]
            worker = (
                peers(shape, **GIVE_BACK) if recompute is None
                else ours(shape, *options, **GIVE_BACK)
            )  # fmt: skip
            step = found[name] = largest(worker, steps)
            print(
                f"{name:<34}{step.before_mib:>8.0f}{step.peak_mib:>8.0f}"
                f"{step.peak_mib - step.before_mib:>9.0f}",
                flush=True,
            )
        parts = {
            (n, r): activations_mib(target, n, recompute=r)
            for n, r in ((64, False), (512, False), (512, True))
        }
    print("\nactivations by part, MiB           64 blocks  512 blocks  512 recomputed")
    for part in parts[64, False]:
        print(f"{part:<34}" + "".join(f"{one[part]:>12.1f}" for one in parts.values()))
    share = found["ours, 64 blocks"].peak_mib / found["speculators, 64 blocks"].peak_mib
    rest = {
        (n, r): found[f"ours, {n} blocks" + ", recomputed" * r].peak_mib - sum(parts[n, r].values())
        for n, r in parts
    }
    growth = max(rest[512, False], rest[512, True]) / rest[64, False]
    print(
        "\nwithout activations               " + "".join(f"{one:>12.0f}" for one in rest.values())
    )
    print(
        f"ours / speculators at 64 blocks: {share:.2f} (goal {SHARE:g}); without activations, 512 "
        f"blocks / 64: {growth:.2f} (goal {GROWTH:g})"
    )
    return int(share > SHARE or growth > GROWTH)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=2)
    sys.exit(main(**vars(parser.parse_args())))
