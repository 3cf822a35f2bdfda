"""What a run on fake tensors does to a device: live bytes, copies from and to the host, dtypes."""

import traceback
import weakref
from collections import Counter
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

aten = torch.ops.aten
MOVES = ("_to_copy", "to", "copy_")  # under inference mode `to` is one operation
READS = ("_local_scalar_dense", "item")  # their value decides what the host does next
WAITS = ("nonzero", "masked_select", "is_nonzero", "equal", "unique", "_unique2")
PINNED = "cpu to cuda, pinned"
VALUES = {torch.bool: True, **dict.fromkeys((torch.float32, torch.float64), 1.0)}
PRODUCTS = {"mm": (0, 1), "bmm": (0, 1), "linear": (0, 1), "matmul": (0, 1), "addmm": (1, 2),
            "baddbmm": (1, 2)}  # fmt: skip


class Watch(TorchDispatchMode):
    """Sees every operation; enter it inside a `FakeTensorMode`.

    Attributes:
        now, peak: bytes of all storages on the device that are alive, and the most there were.
        copies: copies between host and device and waits for the device, by kind and source line.
            A value that is read back is 1.

    Raises:
        RuntimeError: two factors of a product have different dtypes, or values are written into a
            tensor of another dtype. CUDA kernels refuse both; fake tensors do not.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self.copies: Counter[tuple[str, str]] = Counter()
        self._alive: dict[int, Any] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.removeprefix("aten::")
        self._check(name, args)
        if name in READS:
            self._wait(name, args[0])
            return VALUES.get(args[0].dtype, 1)
        result = func(*args, **(kwargs or {}))
        self._note_copies(name, args, result)
        for found in tree_iter(result):
            if isinstance(found, Tensor) and found.device.type == "cuda":
                self._count(found.untyped_storage())
        return result

    def note(self, kind: str) -> None:
        """Count one copy or wait at the line of the package that asked for it."""
        self.copies[kind, place()] += 1

    def _count(self, storage: Any) -> None:
        key = storage._cdata
        if key in self._alive:
            return
        size = storage.nbytes()

        def gone(_: Any) -> None:
            del self._alive[key]
            self.now -= size

        self._alive[key] = weakref.ref(storage, gone)
        self.now += size
        self.peak = max(self.peak, self.now)

    def _note_copies(self, name: str, args: Any, result: Any) -> None:
        if name in MOVES:
            source = args[1] if name == "copy_" else args[0]
            if source.device.type != result.device.type:
                self.note(move(source, result))
        elif name in WAITS:
            self._wait(name, args[0])
        elif name in ("index", "index_put", "index_put_"):
            indices = [index for index in args[1] if index is not None]
            if any(index.device != args[0].device for index in indices):
                self.note("index on the host")
            if name == "index" and any(index.dtype == torch.bool for index in indices):
                self._wait("index by a mask", args[0])

    def _wait(self, kind: str, tensor: Tensor) -> None:
        if tensor.device.type == "cuda":
            self.note(kind)

    def _check(self, name: str, args: Any) -> None:
        if name in PRODUCTS:
            one, other = (args[i] for i in PRODUCTS[name])
            same(one.dtype, other.dtype, name)
        elif name in ("index_put", "index_put_"):
            same(args[0].dtype, args[2].dtype, name)


def move(source: Tensor, result: Tensor) -> str:
    """From where to where; a copy from pinned memory to the device waits for nothing."""
    kind = f"{source.device.type} to {result.device.type}"
    return PINNED if getattr(source, "is_in_pinned_memory", False) else kind


def same(one: torch.dtype, other: torch.dtype, what: Any) -> None:
    """Raise as a CUDA kernel would."""
    if one != other:
        raise RuntimeError(f"{what}: expected the same dtype, but got {one} and {other}")


def place() -> str:
    """The innermost line of the package on the stack."""
    for frame in reversed(traceback.extract_stack()):
        if "/dflow_lightning/" in frame.filename:
            return f"{frame.filename.split('/dflow_lightning/')[1]}:{frame.lineno}"
    return "elsewhere"
