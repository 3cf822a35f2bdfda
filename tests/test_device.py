"""Where a target is loaded: one decision for all commands, refused before anything is read."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dflow_lightning.__main__ import main
from dflow_lightning.bench.command import bench_command
from dflow_lightning.decode.command import decode_command
from dflow_lightning.errors import InputError
from dflow_lightning.export import command as export_module
from dflow_lightning.export.command import export_command
from dflow_lightning.export.validate import validate_export_command
from dflow_lightning.models.device import (
    choose_device,
    choose_dtype,
    device_of,
    run_device,
    run_on,
)
from dflow_lightning.models.dims import DrafterConfig
from dflow_lightning.models.target import FrozenTarget
from dflow_lightning.run.fit import TrainCLI
from dflow_lightning.run.signals import Signals
from dflow_lightning.serving.check import serve_check_command
from dflow_lightning.sweep.command import SweepSettings
from dflow_lightning.training.base import TargetConfig
from dflow_lightning.training.module import DrafterModule
from dflow_lightning.training.saved import Checkpoint, load_trained

pytest_plugins = ["launch"]
CPU, GPU = torch.device("cpu"), torch.device("cuda")
DATA = Path(__file__).parents[1] / "data"
DRAFTER = DATA / "tiny-drafters/dflow"  # drafters and suites are looked at before a target
SUITE = str(DATA / "tiny-qwen3/prompts/test.jsonl")


@pytest.fixture
def gpus(monkeypatch) -> Callable[[int], None]:
    """Makes torch report so many GPUs."""

    def pretend(count: int) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)

    return pretend


@pytest.mark.parametrize(
    ("name", "count", "expected"),
    [
        ("auto", 0, "cpu"),
        ("auto", 2, "cuda"),
        ("cpu", 2, "cpu"),
        ("cuda", 1, "cuda"),
        ("cuda:1", 2, "cuda:1"),
    ],
)
def test_device(gpus, name, count, expected):
    gpus(count)
    assert choose_device(name) == torch.device(expected)


@pytest.mark.parametrize(
    ("name", "count", "expected"),
    [
        ("cuda", 0, "device is cuda, but torch finds no GPU here"),
        ("cuda:2", 2, "device is cuda:2, but there are 2 GPUs"),
        ("gpu", 1, "device is gpu; choose auto"),
        ("meta", 1, "device is meta; choose auto"),
        ("cuda:x", 1, "device is cuda:x; choose auto"),
    ],
)
def test_a_device_that_is_not_here(gpus, name, count, expected):
    gpus(count)
    with pytest.raises(InputError, match=expected):
        choose_device(name)
    with pytest.raises(InputError, match=expected):
        SweepSettings(config=[Path(__file__)], device=name)


@pytest.mark.parametrize(
    ("name", "device", "expected"),
    [
        ("auto", CPU, torch.float32),
        ("auto", GPU, torch.bfloat16),
        ("bfloat16", CPU, torch.bfloat16),
        ("float32", GPU, torch.float32),
        ("float16", GPU, torch.float16),
    ],
)
def test_dtype(name, device, expected):
    assert choose_dtype(name, device) is expected


def test_an_unknown_dtype(tiny_target_dir):
    with pytest.raises(InputError, match="dtype is fp8; choose one of auto, float32"):
        FrozenTarget.load(str(tiny_target_dir), dtype="fp8")


def test_loading_resolves_auto_by_its_device(tiny_target_dir, monkeypatch):
    monkeypatch.setattr(torch.nn.Module, "to", lambda self, *_: self)  # there is no GPU to go to
    assert FrozenTarget.load(str(tiny_target_dir), device="cuda").dtype is torch.bfloat16
    assert FrozenTarget.load(str(tiny_target_dir)).dtype is torch.float32


class LoadedError(Exception):
    """Carries what a target would have been loaded with."""


def bench_of(folder: str, **options: Any) -> None:
    bench_command(target=folder, drafter=[DRAFTER], suite=SUITE, **options)


def decode_of(folder: str, **options: Any) -> None:
    decode_command(target=folder, drafter=DRAFTER, prompt="hello", **options)


def validate_export_of(folder: str, **options: Any) -> None:
    validate_export_command(target=folder, drafter=DRAFTER, suite=SUITE, **options)


@pytest.mark.parametrize("command", [bench_of, decode_of, validate_export_of])
@pytest.mark.parametrize(
    ("options", "count", "device", "dtype"),
    [
        ({}, 1, GPU, torch.bfloat16),
        ({}, 0, CPU, torch.float32),
        ({"dtype": "float32"}, 1, GPU, torch.float32),
        ({"device": "cpu", "dtype": "bfloat16"}, 1, CPU, torch.bfloat16),
        ({"device": "cuda:1"}, 2, torch.device("cuda:1"), torch.bfloat16),
    ],
)
def test_commands_load_where_they_are_asked_to(
    command, options, count, device, dtype, gpus, monkeypatch
):
    def load(path: str, *, device: Any = "cpu", dtype: str = "auto") -> None:
        raise LoadedError(torch.device(device), choose_dtype(dtype, torch.device(device)))

    gpus(count)
    monkeypatch.setattr(FrozenTarget, "load", load)
    with pytest.raises(LoadedError) as caught:
        command("target", **options)
    assert caught.value.args == (device, dtype)


@pytest.mark.parametrize(
    ("options", "count", "device"),
    [({}, 1, GPU), ({}, 0, CPU), ({"device": "cuda:1"}, 2, torch.device("cuda:1"))],
)
def test_serve_check_decodes_where_it_is_asked_to(options, count, device, gpus, monkeypatch):
    """In float32 wherever it is: that is what judges answers."""

    def load(path: str, *, device: Any, dtype: str) -> None:
        raise LoadedError(torch.device(device), dtype)

    gpus(count)
    monkeypatch.setattr(FrozenTarget, "load", load)
    python = Path(__file__)  # any file that is there
    with pytest.raises(LoadedError) as caught:
        serve_check_command(drafter=DRAFTER, target="t", python=python, suite=SUITE, **options)
    assert caught.value.args == (device, "float32")


@pytest.mark.parametrize(
    ("options", "count", "device"),
    [({}, 1, GPU), ({}, 0, CPU), ({"device": "cuda:1"}, 2, torch.device("cuda:1"))],
)
def test_export_rebuilds_where_it_is_asked_to(options, count, device, gpus, monkeypatch, tmp_path):
    def load(saved: Checkpoint, *, target: str | None, device: torch.device) -> None:
        raise LoadedError(device)

    gpus(count)
    torch.save({"state_dict": {}}, tmp_path / "some.ckpt")
    monkeypatch.setattr(export_module, "load_trained", load)
    with pytest.raises(LoadedError) as caught:
        export_command(checkpoint=tmp_path / "some.ckpt", out=tmp_path / "out", **options)
    assert caught.value.args == (device,)


@pytest.mark.parametrize(
    ("accelerator", "count", "expected"),
    [("cpu", 8, CPU), ("gpu", 8, GPU), ("cuda", 1, GPU), ("auto", 8, GPU), ("auto", 0, CPU),
     (SimpleNamespace(class_path="lightning.pytorch.accelerators.CPUAccelerator"), 8, CPU)],
)  # fmt: skip
def test_auto_is_of_the_device_that_the_trainer_names(gpus, accelerator, count, expected):
    gpus(count)
    assert device_of(accelerator) == expected


@pytest.mark.filterwarnings("ignore:GPU available but not used")
@pytest.mark.usefixtures("launch")  # which takes back what the trainer sets
def test_a_recipe_for_the_cpu_is_float32_on_a_machine_with_gpus(gpus, recipe, run_options):
    """As tiny recipes and the demo are run there (F29)."""

    class Built(TrainCLI):
        def _run_subcommand(self, subcommand: str) -> None:
            """Nothing runs."""

    gpus(8)
    built = Built(["fit", "--config", str(recipe), *run_options], Signals())
    assert built.model.target.dtype is torch.float32
    assert built.model.target_config.dtype == "auto"  # the checkpoint may be used elsewhere
    drafter = DrafterConfig(num_layers=1, block_size=4, target_layer_ids=[0])
    with run_on(GPU):
        path = built.model.target.name
        module = DrafterModule(target=TargetConfig(path=path), drafter=drafter)
    assert module.target.dtype is torch.bfloat16
    assert run_device() == GPU  # `gpus` says so


@pytest.mark.parametrize(("device", "dtype"), [(CPU, "float32"), (GPU, "bfloat16")])
def test_a_trained_module_and_its_target_go_to_the_device(
    device, dtype, tiny_target_dir, tmp_path, monkeypatch
):
    config = TargetConfig(path=str(tiny_target_dir))
    drafter = DrafterConfig(num_layers=1, block_size=4, target_layer_ids=[0])
    module = DrafterModule(target=config, drafter=drafter)
    content = {"state_dict": module.state_dict()}
    module.on_save_checkpoint(content)
    moved = []

    def to(part: torch.nn.Module, where: Any) -> torch.nn.Module:
        moved.append((part, where))
        return part

    monkeypatch.setattr(torch.nn.Module, "to", to)
    load_trained(Checkpoint(tmp_path / "some.ckpt", content), device=device)
    loaded, target, whole = moved  # as it is loaded, where it is to be, and the module
    assert loaded[1] == "cpu"
    assert target == (loaded[0], device)
    assert whole[0] is not target[0]
    assert whole[1] == device
    assert target[0].dtype == getattr(torch, dtype)


@pytest.mark.parametrize("command", ["bench", "decode", "validate-export"])
@pytest.mark.parametrize(
    ("options", "expected"),
    [(["--device", "cuda"], "device is cuda, but"), (["--dtype", "int8"], "dtype")],
)
def test_one_sentence_and_status_2(command, options, expected, gpus, monkeypatch, capsys):
    gpus(0)
    monkeypatch.setattr(FrozenTarget, "load", lambda *_, **__: pytest.fail("loaded"))
    asked = ["--prompt", "hello"] if command == "decode" else ["--suite", SUITE]
    assert main([command, "--target", "t", "--drafter", str(DRAFTER), *asked, *options]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    assert expected in line


def test_a_sweep_measures_where_it_is_asked_to(gpus):
    gpus(2)
    config = [Path(__file__)]
    assert "--device" not in SweepSettings(config=config).bench_options()
    chosen = SweepSettings(config=config, device="cuda:1", dtype="float32").bench_options()
    assert chosen[-4:] == ["--device", "cuda:1", "--dtype", "float32"]
