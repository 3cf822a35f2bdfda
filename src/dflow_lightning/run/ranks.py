"""Small collectives between the processes of a run."""

from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Trainer


class Ranks:
    """Exchanges a few numbers between all processes, on the CPU, without waiting for a GPU."""

    def __init__(self) -> None:
        self._group: dist.ProcessGroup | None = None

    def largest(self, trainer: Trainer, value: int) -> int:
        """The maximum of all processes' values, on all of them."""
        if trainer.world_size == 1:
            return value
        number = torch.tensor(value)
        dist.all_reduce(number, op=dist.ReduceOp.MAX, group=self._gloo())
        return int(number)

    def gather(self, trainer: Trainer, found: list[Any]) -> list[Any]:
        """All processes' lists, concatenated, on all of them."""
        if trainer.world_size == 1:
            return found
        lists: list[Any] = [None] * trainer.world_size
        dist.all_gather_object(lists, found, group=self._gloo())
        return [one for part in lists for one in part]

    def _gloo(self) -> dist.ProcessGroup:
        if self._group is None:
            self._group = dist.new_group(backend="gloo")
        return self._group
