"""A machine that seems to have GPUs: what Lightning, DeepSpeed and this package ask for is patched.

No kernel runs. Trainers are built as on that machine, and fake tensors may lie on its devices.
"""

import ctypes
import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

CUDA, META = 1, 14  # of c10::DeviceType
DRIVER = Path(sys.prefix) / "libcuda.so.1"  # of driver.c, by `make env-cuda`
HAS_BACKWARD = torch.version.cuda is not None  # and driver.c stands in for its driver


@contextmanager
def gpus(count: int) -> Iterator[None]:
    """`count` CUDA devices, of compute capability 9.0, until the context ends."""
    answers: dict[str, Any] = {
        "torch.cuda.is_available": True,
        "torch.cuda.device_count": count,
        "torch.cuda.get_device_capability": (9, 0),
        "torch.cuda.is_bf16_supported": True,
        "torch.cuda.amp.common.amp_definitely_not_available": False,
        "lightning.fabric.accelerators.cuda.num_cuda_devices": count,
        "lightning.fabric.accelerators.cuda.is_cuda_available": True,
        "lightning.pytorch.accelerators.cuda.num_cuda_devices": count,
        "lightning.fabric.accelerators.cuda._check_cuda_matmul_precision": None,
    }
    with ExitStack() as stack:
        for name, answer in answers.items():
            stack.enter_context(patch(name, return_value=answer))
        yield


def allow_fake_devices() -> None:
    """Let this process make fake tensors on `cuda:0`, whatever torch was built for.

    A build without CUDA has no device guard for it, which every copy and every index asks for; the
    guard of the meta device does nothing, and that is right for fake tensors. Devices need their
    index, since that guard would answer a question for the current one with its own. Gradients go
    through autograd's queue of the CPU: there is no thread of a device.
    """
    torch.autograd.set_multithreading_enabled(False)
    if HAS_BACKWARD:
        return
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib/libc10.so"))
    name = "_ZN3c104impl26device_guard_impl_registryE"
    guards = (ctypes.c_void_p * (META + 1)).in_dll(library, name)
    guards[CUDA] = guards[META]


def need_driver() -> None:
    """Start this process again with driver.c's driver, which a CUDA build of torch asks for."""
    if not HAS_BACKWARD or "LD_PRELOAD" in os.environ:
        return
    if not DRIVER.exists():
        sys.exit(f"{DRIVER} is missing; make env-cuda builds it")
    os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | {"LD_PRELOAD": str(DRIVER)})


class Event:
    """In place of `torch.cuda.Event`."""

    def __init__(self, enable_timing: bool = False) -> None:
        """Nothing is timed."""

    def record(self, stream: Any = None) -> None:
        """Nothing runs."""

    def synchronize(self) -> None:
        """Nothing runs."""

    def query(self) -> bool:
        """Whether all work before it is done."""
        return True

    def elapsed_time(self, end: "Event") -> float:
        """Milliseconds."""
        return 1.0
