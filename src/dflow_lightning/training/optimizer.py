"""The optimizer's settings and its learning-rate schedule."""

import math
from dataclasses import dataclass

from dflow_lightning.errors import InputError


@dataclass(kw_only=True)
class OptimizerConfig:
    """AdamW with linear warm-up and cosine decay.

    Args:
        lr: peak learning rate.
        betas: decay of the first and second moment.
        weight_decay: decoupled weight decay.
        warmup_ratio: share of all steps that warm up.
        min_lr_ratio: final learning rate as a share of the peak.
    """

    lr: float = 6e-4
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.0
    warmup_ratio: float = 0.04
    min_lr_ratio: float = 0.0

    def __post_init__(self) -> None:
        if self.lr <= 0:
            raise InputError(f"optimizer.lr is {self.lr}; give a positive number")
        if not all(0 <= beta < 1 for beta in self.betas):
            raise InputError(f"optimizer.betas is {self.betas}; give numbers from 0 to below 1")
        if self.weight_decay < 0:
            raise InputError(f"optimizer.weight_decay is {self.weight_decay}; give 0 or more")
        for name in ("warmup_ratio", "min_lr_ratio"):
            value = getattr(self, name)
            if not 0 <= value <= 1:
                raise InputError(f"optimizer.{name} is {value}; give a number from 0 to 1")

    def factor(self, step: int, total: int) -> float:
        """Learning rate of a step as a share of the peak."""
        warmup = max(1, round(self.warmup_ratio * total))
        if step < warmup:
            return (step + 1) / warmup
        progress = min(1.0, (step - warmup) / max(1, total - warmup))
        cosine = 1 + math.cos(math.pi * progress)
        return self.min_lr_ratio + (1 - self.min_lr_ratio) * 0.5 * cosine
