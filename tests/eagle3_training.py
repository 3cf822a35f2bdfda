"""A small EAGLE-3 module, trained by hand, for tests that need real drafts."""

from pathlib import Path

import torch
from torch.optim import AdamW

from dflow_lightning.data.datamodule import Batch
from dflow_lightning.models.eagle3 import Eagle3Config
from dflow_lightning.training.base import TargetConfig
from dflow_lightning.training.eagle3_module import Eagle3Module


def make_eagle3(target_dir: Path, **options) -> Eagle3Module:
    """A module on the given target that drafts three tokens, the same weights each time."""
    torch.manual_seed(1)
    given = {"num_anchors": 12, "ttt_steps": 3} | options
    return Eagle3Module(
        target=TargetConfig(path=str(target_dir)),
        drafter=Eagle3Config(block_size=4, target_layer_ids=[0, 1, 2]),
        **given,
    )


def train_eagle3(module: Eagle3Module, batch: Batch, steps: int, *, lr: float = 3e-3) -> None:
    """Optimise on one batch; anchors are drawn anew each step."""
    optimizer = AdamW(module.parameters(), lr=lr)
    for step in range(steps):
        module.seed = step
        loss, _ = module.objective(module.begin_step(batch))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
