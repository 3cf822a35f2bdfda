"""Where a target runs and in which type: the one place that decides both."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Literal, get_args

import torch

from dflow_lightning.errors import InputError

Dtype = Literal["auto", "float32", "bfloat16", "float16"]
_RUN_DEVICE: ContextVar[torch.device | None] = ContextVar("device of the run", default=None)


def choose_device(name: str = "auto") -> torch.device:
    """The device of a name; `auto` is the GPU where torch can use one, else the CPU.

    Raises:
        InputError: the name is unknown, or the machine has no such device.
    """
    there = torch.cuda.is_available()
    if name == "auto":
        return torch.device("cuda" if there else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", "cuda"):
        raise InputError(f"device is {name}; choose auto, cpu, cuda or one GPU such as cuda:1")
    if device.type == "cpu":
        return device
    if not there:
        raise InputError(f"device is {name}, but torch finds no GPU here; choose auto or cpu")
    if (device.index or 0) >= torch.cuda.device_count():
        raise InputError(
            f"device is {name}, but there are {torch.cuda.device_count()} GPUs, numbered from "
            "cuda:0; choose one of them"
        )
    return device


def choose_dtype(name: str, device: torch.device) -> torch.dtype:
    """The type of a target's weights; `auto` is float32 on a CPU and bfloat16 elsewhere.

    On a CPU bfloat16 is slower than float32 on most machines, and float32 lets decoding be compared
    token for token; on a GPU bfloat16 is what targets are trained and served in.

    Raises:
        InputError: the name is unknown.
    """
    if name not in get_args(Dtype):
        raise InputError(f"dtype is {name}; choose one of {', '.join(get_args(Dtype))}")
    if name == "auto":
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    return getattr(torch, name)


@contextmanager
def run_on(device: torch.device) -> Iterator[None]:
    """Modules that are built meanwhile are for this device, wherever they are built.

    A training module loads its target before a trainer has told it the device.
    """
    token = _RUN_DEVICE.set(device)
    try:
        yield
    finally:
        _RUN_DEVICE.reset(token)


def run_device() -> torch.device:
    """The device of `run_on`; outside it that of `auto`."""
    return _RUN_DEVICE.get() or choose_device()


def device_of(accelerator: Any) -> torch.device:
    """The kind of device that `trainer.accelerator` leads to: a name of Lightning's, or a class."""
    name = str(getattr(accelerator, "class_path", accelerator)).lower()
    if name == "auto":
        return choose_device()
    return torch.device("cpu" if "cpu" in name else "cuda")
