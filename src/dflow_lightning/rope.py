"""Rotary position embedding of the drafter, of any type that transformers knows.

Shapes: B batch, E head size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from dflow_lightning.dims import LayerDims


def rope_frequencies(dims: LayerDims) -> tuple[Tensor, float]:
    """Inverse frequencies in float32 and the scale of cosine and sine, for any RoPE type."""
    kind = dims.rope_parameters.get("rope_type", "default")
    if kind != "default":
        frequencies, scale = ROPE_INIT_FUNCTIONS[kind](dims.qwen3_config(), torch.device("cpu"))
        return frequencies.float(), scale
    exponents = torch.arange(0, dims.head_dim, 2, dtype=torch.float32) / dims.head_dim
    return 1.0 / dims.rope_parameters["rope_theta"] ** exponents, 1.0


def rope_at(
    frequencies: Tensor, scale: float, positions: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Cosine and sine of positions `[B, ...]`, each `[B, 1, ..., E]`; the angles are float32."""
    angles = positions.unsqueeze(1).unsqueeze(-1).float() * frequencies.to(positions.device)
    angles = torch.cat([angles, angles], dim=-1)
    return (angles.cos() * scale).to(dtype), (angles.sin() * scale).to(dtype)


def rotate(x: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
    """Rotary position embedding in the half-split layout, in the type of `x`.

    Under autocast `x` is bfloat16 and the angles are float32: the rotation is then float32 too.
    """
    cos, sin = rope
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        return _Rotation.apply(x, cos, sin)
    return _rotated(x, cos, sin)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return (x * cos + torch.cat([-second, first], dim=-1) * sin).to(x.dtype)


class _Rotation(torch.autograd.Function):
    """The rotation, and the rotation back, without halves put side by side on the way."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _turned(x, cos, sin, 1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor):
        cos, sin = ctx.saved_tensors
        return _turned(gradients[0], cos, sin, -1), None, None


def _turned(x: Tensor, cos: Tensor, sin: Tensor, sign: int) -> Tensor:
    out = x * cos
    half = x.shape[-1] // 2
    first, second = x[..., :half], x[..., half:]
    out[..., :half].addcmul_(second, sin[..., :half], value=-sign)
    out[..., half:].addcmul_(first, sin[..., half:], value=sign)
    return out.to(x.dtype)
