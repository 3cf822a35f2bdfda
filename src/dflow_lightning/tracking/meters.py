"""Speed, memory and rollout statistics of a training, as metrics of its record.

MLflow sorts its charts by group. `system/` is a tab of its own there, so that `train/` and `val/`,
which hold loss and tau, come first.
"""

import os
import resource
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Trainer

from dflow_lightning.stopwatch import Stopwatch
from dflow_lightning.training.rollout import OnlineRollout


class Meters:
    """Averages over the steps since the last `take`, without validation and checkpoints."""

    def __init__(self) -> None:
        self._steps = self._tokens = 0
        self._seconds = 0.0
        self._rows: dict[str, torch.Tensor] = {}
        self._since = time.perf_counter()
        self._cpu = cpu_seconds()
        self._looked = self._since

    def resume(self) -> None:
        """Restart the clock after a pause."""
        self._since = time.perf_counter()

    @staticmethod
    def watch_rollouts(trainer: Trainer) -> None:
        """From here on the rollouts of a training are timed, for `take` to read."""
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(callback, OnlineRollout):
                callback.watch = Stopwatch()

    def count(self, tokens: int) -> None:
        """Add a batch of `tokens` tokens on all processes together."""
        now = time.perf_counter()
        self._seconds, self._since = self._seconds + now - self._since, now
        self._steps, self._tokens = self._steps + 1, self._tokens + tokens

    def see_rounds(self, rounds: list[Any]) -> None:
        """Keep statistics of a step's rounds, as tensors: reading them would wait for the GPU."""
        for number, one in enumerate(rounds[1:], start=1):
            live_BN = one.anchors.valid_BN
            self._rows[f"train/live_blocks_round{number}"] = live_BN.sum() / max(1, live_BN.numel())
            if one.rejected is not None:
                rows = one.rejected.valid_BNK.sum() / live_BN.sum().clamp(min=1)
                self._rows[f"train/relay_rows_round{number}"] = rows

    def take(self, trainer: Trainer) -> dict[str, float]:
        """All metrics since the last call, by name."""
        numbers = {name: float(value) for name, value in self._rows.items()}
        if self._steps:
            numbers |= {
                "system/tokens_per_second": self._tokens / max(self._seconds, 1e-9),
                "system/step_seconds": self._seconds / self._steps,
            }
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            watch = callback.watch if isinstance(callback, OnlineRollout) else None
            if watch is not None and (lap := watch.take()) is not None:
                numbers["system/rollout_seconds"] = lap
        self._steps = self._tokens = 0
        self._seconds = 0.0
        self._rows.clear()
        return numbers | self._system(trainer.strategy.root_device)

    def _system(self, device: torch.device) -> dict[str, float]:
        """Of the first process and its device; memory in gigabytes."""
        now, cpu = time.perf_counter(), cpu_seconds()
        numbers = {
            "system/process_memory_gb": resident_bytes() / 1e9,
            "system/cpu_cores_used": (cpu - self._cpu) / max(now - self._looked, 1e-9),
            "system/free_memory_gb": free_bytes() / 1e9,
        }
        self._looked, self._cpu = now, cpu
        if device.type == "cuda":
            free, total = torch.cuda.mem_get_info(device)
            numbers["system/gpu_memory_used_gb"] = (total - free) / 1e9
            numbers["system/gpu_memory_peak_gb"] = torch.cuda.max_memory_allocated(device) / 1e9
            with suppress(Exception):  # needs pynvml, which may be missing
                numbers["system/gpu_busy_percent"] = float(torch.cuda.utilization(device))
        return numbers


def cpu_seconds() -> float:
    """Processor time of this process and its finished children."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def resident_bytes() -> int:
    """Resident memory of this process; its peak on systems without /proc."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def free_bytes() -> int:
    """Memory of the machine that is available to programs."""
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        pass
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
