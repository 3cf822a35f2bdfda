"""A process that runs one training step for each line it is sent: what both sides have in common.

Answers are lines of JSON: the first once all is built, then one a step, with wall and processor
seconds and the process's memory. So two programs, each in its own environment, can take turns.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path


def step_parser(description: str) -> argparse.ArgumentParser:
    """A parser of the shape that both sides train on."""
    parser = argparse.ArgumentParser(description=description.split("\n")[0])
    parser.add_argument("--target", required=True, help="folder, transformers format")
    parser.add_argument("--seq-len", type=int, required=True)
    parser.add_argument("--batch", type=int, required=True)
    parser.add_argument("--anchors", type=int, required=True, help="blocks per sequence")
    parser.add_argument("--block-size", type=int, required=True, help="the anchor included")
    parser.add_argument("--layers", type=int, required=True, help="of the drafter")
    parser.add_argument("--seed", type=int, default=0)
    return parser


def memory_mib(field: str) -> float:
    """VmRSS (now) or VmHWM (largest since the last reset) of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(field)).split()[1]) / 1024


def answer(values: dict) -> None:
    """One line to the process that asks."""
    sys.__stdout__.write(json.dumps(values) + "\n")  # type: ignore[union-attr]
    sys.__stdout__.flush()  # type: ignore[union-attr]


def serve(steps: dict[str, Callable[[], float]], about: dict) -> None:
    """Run the step that each line names until the input ends; a step returns its loss."""
    answer(about)
    for line in sys.stdin:
        Path("/proc/self/clear_refs").write_text("5")  # Linux: VmHWM starts again from here
        before = memory_mib("VmRSS")
        cpu, wall = time.process_time(), time.perf_counter()
        loss = steps[line.strip()]()
        answer(
            {
                "wall": time.perf_counter() - wall,
                "cpu": time.process_time() - cpu,
                "before_mib": before,
                "peak_mib": memory_mib("VmHWM"),
                "loss": loss,
            }
        )
