"""What all processes of a run must know alike."""

import torch
import torch.distributed as dist
from lightning.pytorch import Trainer


class Ranks:
    """Exchanges a few numbers between all processes, on the CPU: a GPU is not waited for."""

    def __init__(self) -> None:
        self._group: dist.ProcessGroup | None = None

    def largest(self, trainer: Trainer, value: int) -> int:
        """The largest of all processes' values, on all of them."""
        if trainer.world_size == 1:
            return value
        if self._group is None:
            self._group = dist.new_group(backend="gloo")
        number = torch.tensor(value)
        dist.all_reduce(number, op=dist.ReduceOp.MAX, group=self._group)
        return int(number)
