"""Which device a run computes in bfloat16 on, when Lightning builds its trainer for GPUs.

Rollouts and `validate` enter the precision plug-in themselves, so its autocast must be of the run's
device. The trainers are Lightning's own, built by the names that recipes have.
"""

import pytest
import torch
from fake_cuda.machine import gpus
from lightning.pytorch import Trainer

from dflow_lightning.run.strategy import NAMES

pytest.importorskip("deepspeed")


def trainer(strategy: str, accelerator: str, devices: int, precision: str) -> Trainer:
    return Trainer(
        strategy=strategy, accelerator=accelerator, devices=devices, precision=precision,
        logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False,
    )  # fmt: skip


@pytest.mark.filterwarnings("ignore:GPU available but not used")
@pytest.mark.parametrize("precision", ["bf16-mixed", "32-true"])
@pytest.mark.parametrize("strategy", ["auto", "ddp", *NAMES])
@pytest.mark.parametrize(("accelerator", "devices"), [("gpu", 8), ("gpu", 1), ("cpu", 2)])
def test_autocast_is_of_the_device_of_the_run(strategy, accelerator, devices, precision):
    with gpus(8):
        built = trainer(strategy, accelerator, devices, precision)
        plugin, device = built.precision_plugin, built.strategy.root_device.type
        assert device == {"gpu": "cuda", "cpu": "cpu"}[accelerator]
        other = {"cuda": "cpu", "cpu": "cuda"}[device]
        contexts = (
            plugin.forward_context, plugin.train_step_context,
            plugin.val_step_context, plugin.test_step_context,
        )  # fmt: skip
        for context in contexts:
            with context():
                assert torch.is_autocast_enabled(device) == (precision == "bf16-mixed")
                assert not torch.is_autocast_enabled(other)
                if precision == "bf16-mixed":
                    assert torch.get_autocast_dtype(device) == torch.bfloat16
