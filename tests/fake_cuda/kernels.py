"""The kernels of block attention, compiled by Triton for GPUs that this machine does not have.

    python tests/fake_cuda/kernels.py          # all of them: part of `make fake-cuda`
    python tests/fake_cuda/kernels.py sm_90    # one architecture

flex_attention's forward and backward are traced on fake CUDA tensors, as training calls them, and
what inductor writes is compiled to machine code by Triton and ptxas, which need no device. A line
fails when a kernel does not compile, or needs more shared memory than a block may have there: on
the GPU that would be the error "out of resource", after which attention goes on with a dense mask.
Nothing is launched, so that numbers and speed are not tested. Needs `make env-cuda`.
"""

import argparse
import subprocess
import sys
import time
import types
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

ROOT = Path(__file__).resolve().parents[2]
for folder in (ROOT / "src", ROOT / "tests"):
    sys.path.insert(0, str(folder))

import torch  # noqa: E402
from fake_cuda.machine import HAS_BACKWARD, allow_fake_devices, gpus, need_driver  # noqa: E402
from torch import Tensor  # noqa: E402

from dflow_lightning.tensors.attention_flex import flex_blocks  # noqa: E402
from dflow_lightning.tensors.blocks import KV, BlockView  # noqa: E402


@dataclass(frozen=True)
class Gpu:
    """What inductor asks of a device; from NVIDIA's tables of compute capabilities.

    Attributes:
        shared: bytes of shared memory that a block may ask for.
    """

    capability: tuple[int, int]
    multiprocessors: int
    shared: int


GPUS = {
    "sm_80": Gpu((8, 0), 108, 163 * 1024),  # A100, A800
    "sm_90": Gpu((9, 0), 132, 227 * 1024),  # H100, H200
}
HEADS, GROUPS, HEAD_DIM, BLOCK_SIZE = 32, 8, 128, 16  # Qwen3-8B's drafter
CASES: dict[str, dict[str, Any]] = {
    "training, bfloat16": {},
    "rollout, bfloat16": {"gradient": False},
    "training, float32": {"dtype": torch.float32},
    "packed rows, bfloat16": {"packed": True},
    "carryover, bfloat16": {"carried": True},
}


class LaunchError(Exception):
    """Everything is compiled, and the first kernel would be launched."""


def no_launch(*_: Any) -> None:
    """In place of the guard around the launches."""
    raise LaunchError


@contextmanager
def compiling_for(gpu: Gpu, compiled: Any) -> Iterator[None]:
    """Fake tensors on one such GPU; `compiled` takes the place of inductor's Triton compiler."""
    import triton
    from torch._inductor import config
    from torch._inductor.async_compile import AsyncCompile
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv
    from triton.backends.compiler import GPUTarget

    major, minor = gpu.capability
    properties = types.SimpleNamespace(
        name="", major=major, minor=minor, multi_processor_count=gpu.multiprocessors,
        shared_memory_per_block_optin=gpu.shared, shared_memory_per_block=48 * 1024,
        regs_per_multiprocessor=65536, max_threads_per_multi_processor=2048,
        max_threads_per_block=1024, warp_size=32, total_memory=80 * 2**30, L2_cache_size=40 * 2**20,
    )  # fmt: skip
    driver = types.SimpleNamespace(
        get_current_target=lambda: GPUTarget("cuda", 10 * major + minor, 32),
        get_current_device=lambda: 0,
        utils=types.SimpleNamespace(
            get_device_properties=lambda _: {"max_shared_mem": gpu.shared}
        ),
    )  # fmt: skip
    state = torch.zeros(16, dtype=torch.uint8)  # of a random generator
    replaced = {
        "torch.cuda.get_device_properties": lambda *_: properties,
        "torch.cuda.get_device_capability": lambda *_: gpu.capability,
        "torch.cuda.current_device": lambda: 0,
        "torch.cuda._lazy_init": lambda: None,
        "torch.cuda.get_rng_state": lambda *_: state,
        "torch.cuda.set_rng_state": lambda *_: None,
        "torch.cuda.synchronize": lambda *_: None,
        "torch.cuda._DeviceGuard": no_launch,
        # Patterns of attention written out by hand; making them asks the device.
        "torch._inductor.fx_passes.joint_graph.lazy_init": lambda *_: None,
        "torch._inductor.fx_passes.post_grad.lazy_init": lambda *_: None,
        "torch._inductor.runtime.triton_helpers.set_driver_to_gpu": lambda: None,
    }
    with ExitStack() as stack:
        stack.enter_context(gpus(1))
        for name, value in replaced.items():
            stack.enter_context(patch(name, value))
        stack.enter_context(
            patch("torch.cuda._get_device_properties", lambda *_: properties, create=True)
        )
        stack.enter_context(patch.object(AsyncCompile, "triton", compiled))
        # The launcher of its own would be loaded onto the device.
        stack.enter_context(config.patch(use_static_cuda_launcher=False, compile_threads=1,
                                         force_disable_caches=True))  # fmt: skip
        # The backward pass is compiled with the forward, which is never run.
        stack.enter_context(
            patch.object(torch._functorch.config, "force_non_lazy_backward_lowering", True)
        )
        triton.runtime.driver.set_active(driver)
        stack.enter_context(FakeTensorMode(shape_env=ShapeEnv()))
        yield


def attend(*, dtype: torch.dtype = torch.bfloat16, gradient: bool = True, packed: bool = False,
           carried: bool = False) -> None:  # fmt: skip
    """Block attention of two rows of 40 blocks on 700 context positions, as training calls it."""
    B, N, L, K = 2, 40, 700, BLOCK_SIZE
    own_keys = K + (K - 1) * carried

    def rows(*shape: int) -> Tensor:
        return torch.empty(*shape, device="cuda:0", dtype=dtype, requires_grad=gradient)

    def kv(*shape: int) -> KV:
        return KV(rows(B, GROUPS, *shape, HEAD_DIM), rows(B, GROUPS, *shape, HEAD_DIM))

    anchors_BN = torch.empty(B, N, device="cuda:0", dtype=torch.long)
    seen_BNJ = torch.empty(B, N, K - 1, device="cuda:0", dtype=torch.bool) if carried else None
    view = BlockView(anchors_BN, anchors_BN.clone() if packed else None, seen_BNJ)
    with torch.set_grad_enabled(gradient):
        flex_blocks(rows(B, HEADS, N, K, HEAD_DIM), kv(N, own_keys), kv(L), view)


def compile_for(name: str, trace: bool) -> int:
    """All cases on one architecture; the number of failures."""
    from torch._inductor.async_compile import _load_triton_kernel_from_source

    gpu, failures = GPUS[name], 0
    kernels: list[Any] = []

    def compiled(self: Any, kernel_name: str, source_code: str, device_str: str = "") -> Any:
        tuner = _load_triton_kernel_from_source(kernel_name, source_code)
        tuner.precompile(warm_cache_only=True)
        kernels.extend(result.kernel for result in tuner.compile_results)
        return types.SimpleNamespace(run=no_launch)

    for case, settings in CASES.items():
        kernels.clear()
        torch._dynamo.reset()
        start, said = time.perf_counter(), "not launched"
        try:
            with compiling_for(gpu, compiled):
                attend(**settings)
        except LaunchError:
            said = ""
        except Exception as error:
            if trace:
                raise
            said = f"{type(error).__name__}: {str(error).splitlines()[0]}"
        # Made from templates; the rest are sums and products around them.
        attention = [one for one in kernels if one.metadata.name.startswith("triton_tem")]
        shared = max((one.metadata.shared for one in attention), default=0)
        if not said and len(attention) < 1 + settings.get("gradient", True):
            said = f"{len(attention)} kernels of attention"
        if not said and shared > gpu.shared:
            said = "shared memory"
        code = sum(len(one.asm["cubin"]) for one in kernels) / 1024
        failures += bool(said)
        print(
            f"{name} {case:<24}{said or 'ok':<20}{len(kernels):>3} kernels,{code:>5.0f} KiB, "
            f"shared memory{shared / 1024:>4.0f} of {gpu.shared / 1024:.0f} KiB"
            f"{time.perf_counter() - start:>6.0f} s",
            flush=True,
        )
    return failures


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("gpu", nargs="?", choices=GPUS)
    parser.add_argument("--trace", action="store_true", help="whole tracebacks")
    args = parser.parse_args()
    if not HAS_BACKWARD:
        sys.exit("torch is built without CUDA here; make env-cuda, and run with .venv-cuda")
    if args.gpu is None:  # inductor remembers the device of its process
        runs = [subprocess.run([sys.executable, *sys.argv, name], check=False) for name in GPUS]
        return max(run.returncode for run in runs)
    need_driver()
    warnings.filterwarnings("ignore")
    allow_fake_devices()
    return int(compile_for(args.gpu, args.trace) > 0)


if __name__ == "__main__":
    sys.exit(main())
