"""`trainer.precision` means here what Lightning does with it."""

from typing import get_args

import pytest
import torch
from lightning.fabric.plugins.precision.precision import (
    _PRECISION_INPUT_STR,
    _PRECISION_INPUT_STR_ALIAS,
)
from lightning.pytorch import Trainer

from dflow_lightning.errors import InputError
from dflow_lightning.training.precision import ComputePrecision

NAMES = [
    name
    for name in (*get_args(_PRECISION_INPUT_STR), *get_args(_PRECISION_INPUT_STR_ALIAS))
    if not name.startswith("transformer-engine") and name not in ("16", "16-mixed")
]


@pytest.mark.filterwarnings("ignore:.*is supported for historical reasons")
@pytest.mark.parametrize("name", [*NAMES, None, 32, 64])
def test_types_are_those_of_lightning(name):
    trainer = Trainer(precision=name, accelerator="cpu", logger=False, devices=1)
    ours = ComputePrecision.named(name)
    module = trainer.precision_plugin.convert_module(torch.nn.Linear(2, 2))
    assert ours.parameters == module.weight.dtype
    x = torch.zeros(1, 2, dtype=module.weight.dtype)
    with trainer.precision_plugin.forward_context():
        theirs = module(x).dtype
    with ours.autocast(torch.device("cpu", 0)):
        assert module(x).dtype == theirs == ours.compute


@pytest.mark.parametrize("name", ["16-mixed", "16", 16])
def test_half_precision_is_mixed(name):
    """Lightning makes this plug-in on a GPU alone."""
    assert ComputePrecision.named(name) == ComputePrecision(
        torch.float32, torch.float16, mixed=True
    )


@pytest.mark.parametrize("name", ["bf17-mixed", "bf16-half", "32-mixed", "transformer-engine"])
def test_other_names_are_refused(name):
    with pytest.raises(InputError, match=r"trainer.precision is .*; choose of"):
        ComputePrecision.named(name)
