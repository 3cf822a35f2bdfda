"""A trained module from its checkpoint, whatever the method of its run."""

from pathlib import Path
from typing import Any

import torch

from dflow_lightning.eagle3_module import Eagle3Module
from dflow_lightning.errors import InputError
from dflow_lightning.module import DrafterModule
from dflow_lightning.training_module import BLOCK, CHECKPOINT_KEY


def load_trained(
    path: str | Path, *, target: str | None = None, **training: Any
) -> DrafterModule | Eagle3Module:
    """Rebuild the module of a checkpoint, on the target it was trained with or a given one.

    Args:
        training: arguments of the module that only a training step needs, such as its loss.

    Raises:
        InputError: `dflow-train` did not write it, or it is of another target.
    """
    content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    if CHECKPOINT_KEY not in content:
        raise InputError(
            f"checkpoint: {path} was not written by dflow-train; give a .ckpt file of a run"
        )
    block = content[CHECKPOINT_KEY].get("method", BLOCK) == BLOCK
    module: type[DrafterModule | Eagle3Module] = DrafterModule if block else Eagle3Module
    return module.from_checkpoint(path, target=target, **training)
