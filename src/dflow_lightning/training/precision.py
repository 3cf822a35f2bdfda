"""What `trainer.precision` means: the type of the weights, and that of the arithmetic.

Lightning decides this for a training. Whatever runs a step without a trainer (`plan --measure`,
`doctor`, `replay`) asks here, and so does ZeRO, whose precision plug-in is our own.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from dflow_lightning.errors import InputError

HALVES = {"bf16": torch.bfloat16, "16": torch.float16}
WHOLES = {"32": torch.float32, "64": torch.float64}


@dataclass(frozen=True)
class ComputePrecision:
    """One of Lightning's precision names, taken apart.

    Args:
        parameters: type of the drafter's weights and of the optimizer's moments.
        compute: type of matrix products.
        mixed: whether autocast stands between the two.
    """

    parameters: torch.dtype
    compute: torch.dtype
    mixed: bool = False

    @classmethod
    def named(cls, name: Any) -> ComputePrecision:
        """A precision by Lightning's name; None is its default, `32-true`.

        Short names mean what they mean there: `16` and `bf16` are mixed, `32` and `64` true.

        Raises:
            InputError: a name that is not of floating-point types alone, such as those of
                transformer-engine.
        """
        kind, _, how = str(name or "32-true").partition("-")
        half, whole = HALVES.get(kind), WHOLES.get(kind)
        if half is not None and how in ("", "mixed"):
            return cls(torch.float32, half, mixed=True)
        dtype = whole if half is None else half
        if dtype is None or how not in ("", "true"):
            raise InputError(
                f"trainer.precision is {name}; choose of 32-true, bf16-mixed, bf16-true, 16-mixed, "
                "16-true and 64-true"
            )
        return cls(dtype, dtype)

    def autocast(
        self, device: torch.device | str, *, cache_enabled: bool = True
    ) -> AbstractContextManager[Any]:
        """The autocast of a forward on a device; nothing where weights compute in their type."""
        if not self.mixed:
            return nullcontext()
        kind = torch.device(device).type
        return torch.autocast(kind, self.compute, cache_enabled=cache_enabled)
