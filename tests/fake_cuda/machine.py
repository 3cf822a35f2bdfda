"""A machine that seems to have GPUs: what Lightning, DeepSpeed and this package ask for is patched.

No kernel runs. Trainers are built as on that machine, and fake tensors may lie on its devices.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch


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
