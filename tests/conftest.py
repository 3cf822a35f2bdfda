"""Fixtures of the whole suite."""

import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
from targets import random_target

from dflow_lightning.models.dims import DrafterConfig, DrafterDims
from dflow_lightning.models.drafter import Drafter
from dflow_lightning.models.relay import Relay
from dflow_lightning.models.target import FrozenTarget


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--codegen", action="store_true", help="compiled rounds run generated code in every test"
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what `make codegen` alone runs; that command selects it by its marker."""
    if config.getoption("--codegen"):
        return
    left_out = [item for item in items if item.get_closest_marker("codegen")]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in left_out]


@pytest.fixture
def traced(request, monkeypatch) -> None:
    """Compiled rounds are captured and guarded as ever, and run the kernels of eager mode.

    Generating code for a graph takes most of a minute of C++ compiler; `--codegen` does it.
    """
    if not request.config.getoption("--codegen"):
        monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))


@pytest.fixture(autouse=True)
def group_of_one_test() -> Iterator[None]:
    """No test sees the process group of another: with one, Lightning takes a run for distributed.

    DeepSpeed remembers the first group of a process, and is made to forget it.
    """
    yield
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
        if (deepspeed := sys.modules.get("deepspeed")) is not None:
            deepspeed.comm.comm.cdb = None
            deepspeed.utils.groups._WORLD_GROUP = deepspeed.utils.groups.mesh_device = None


@pytest.fixture(scope="session")
def tiny_target_dir(tmp_path_factory) -> Path:
    """The folder of a random target of four layers."""
    return random_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="session")
def tiny_target(tiny_target_dir) -> FrozenTarget:
    """That target, loaded."""
    return FrozenTarget.load(str(tiny_target_dir))


@pytest.fixture
def tiny_drafter(tiny_target) -> Drafter:
    """A random drafter of two layers and blocks of four, with weights that make drafts vary."""
    torch.manual_seed(1)
    config = DrafterConfig(num_layers=2, block_size=4, target_layer_ids=[0, 1, 2])
    drafter = Drafter(DrafterDims.resolve(config, tiny_target)).eval()
    with torch.no_grad():
        for parameter in drafter.parameters():
            if parameter.ndim > 1:
                parameter.mul_(4.0)
    return drafter


@pytest.fixture
def tiny_relay(tiny_drafter) -> Relay:
    """A relay whose last layer is not zero, so that it changes drafts."""
    torch.manual_seed(2)
    relay = Relay(tiny_drafter.dims.hidden_size, 96)
    with torch.no_grad():
        for parameter in relay.parameters():
            parameter.add_(0.5 * torch.randn_like(parameter))
    return relay.eval()


@pytest.fixture(scope="session")
def half_trained(tiny_target_dir):
    """A DFlow module that drafts well early in one text and badly later, with the text it saw."""
    from training import make_module, one_text, train

    module = make_module(tiny_target_dir)
    batch = one_text(module, [3, 5, 7, 9], 60)
    train(module, batch, 40)
    return module.eval(), batch
