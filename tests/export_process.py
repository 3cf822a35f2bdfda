"""Kills exports of a random drafter with SIGKILL and prints what each left; a process of its own.

    python export_process.py TARGET FOLDER

Models are loaded once; every export is a forked child. It is killed either just before one of its
file operations, each in turn, or after a random part of the time an export takes. Prints one JSON
object a line: how it was killed, over which earlier export, and what lies at `FOLDER/out` now.
"""

import json
import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

from dflow_lightning.export.write import export_drafter
from dflow_lightning.models.dims import DrafterConfig, DrafterDims
from dflow_lightning.models.drafter import Drafter
from dflow_lightning.models.relay import Relay
from dflow_lightning.models.target import FrozenTarget

RANDOM_KILLS = 20
BEFORE, STATES = ("fresh", "over"), ("old", "new")


def content(folder: Path) -> dict[str, bytes]:
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def state(folder: Path, references: dict[str, Path]) -> str:
    """`absent`, `old`, `new`, or `broken`: every byte of every file counts."""
    if not os.path.lexists(folder):
        return "absent"
    found = content(folder)
    return next((name for name in STATES if found == content(references[name])), "broken")


def child(work: Callable[[], None]) -> int:
    process = os.fork()
    if process == 0:
        status = 1
        try:
            work()
            status = 0
        finally:
            os._exit(status)
    return process


def killed(process: int) -> bool:
    _, status = os.waitpid(process, 0)
    if os.WIFSIGNALED(status):
        return True
    assert os.WEXITSTATUS(status) == 0, "the export itself failed"
    return False


def die_at(number: int, folder: Path) -> None:
    """Kill this process just before its file operation of this number, counted from 1."""
    seen = 0

    def watch(event: str, args: tuple) -> None:
        nonlocal seen
        inside = args and isinstance(args[0], (str, os.PathLike)) and str(folder) in str(args[0])
        if inside or event in ("ctypes.dlsym", "fcntl.flock"):
            seen += 1
            if seen == number:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(watch)


def main(target_path: str, folder: Path) -> None:
    torch.set_num_threads(1)
    target = FrozenTarget.load(target_path)
    config = DrafterConfig(num_layers=2, block_size=4, target_layer_ids=[0, 1, 2])
    parts = {}
    for seed, name in enumerate(STATES):
        torch.manual_seed(seed)
        parts[name] = Drafter(DrafterDims.resolve(config, target)), Relay(64, 96)
    references = {name: folder / name for name in STATES}
    for name, (drafter, relay) in parts.items():
        export_drafter(drafter, relay, target, references[name])
    place = folder / "place"
    place.mkdir()
    out = place / "out"

    def export() -> None:
        export_drafter(*parts["new"], target, out)

    def attempt(
        before: str, work: Callable[[], None], delay: float | None = None
    ) -> tuple[bool, float]:
        """Whether an export was killed, and how long it ran."""
        shutil.rmtree(out, ignore_errors=True)
        if before == "over":
            shutil.copytree(references["old"], out)
        process, start = child(work), time.perf_counter()
        if delay is not None:
            time.sleep(delay)
            os.kill(process, signal.SIGKILL)
        return killed(process), time.perf_counter() - start

    def tell(before: str, how: str, was_killed: bool) -> None:
        others = sorted(path.name for path in place.iterdir() if path != out)
        found = state(out, references)
        row = {"before": before, "how": how, "killed": was_killed, "state": found, "left": others}
        print(json.dumps(row), flush=True)

    for before in BEFORE:
        number, was_killed = 0, True
        while was_killed:
            number += 1

            def work(number: int = number) -> None:
                die_at(number, place)
                export()

            was_killed, _ = attempt(before, work)
            tell(before, f"operation {number}", was_killed)
        moments, kills = random.Random(before), 0
        seconds = min(attempt(before, export)[1] for _ in range(3))
        while kills < RANDOM_KILLS:
            delay = seconds * (kills + moments.random()) / RANDOM_KILLS
            was_killed, _ = attempt(before, export, delay)
            tell(before, f"moment {kills}", was_killed)
            if was_killed:
                kills += 1
            else:  # this export was quicker than those that were timed
                seconds *= 0.9
        attempt(before, export)
        tell(before, "finished", False)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
