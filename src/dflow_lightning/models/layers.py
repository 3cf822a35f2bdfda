"""The norm of the drafter's layers, with a backward pass that keeps its input alone."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from dflow_lightning.models.dims import LayerDims


class RMSNorm(nn.Module):
    """Root-mean-square norm with float32 statistics."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            return _Norm.apply(x, self.weight, self.eps)
        return _normed(x, self.weight, self.eps)


def _normed(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    normed = nn.functional.rms_norm(x.float(), (x.shape[-1],), eps=eps)
    return normed.to(x.dtype) * weight.to(x.dtype)


class _Norm(torch.autograd.Function):
    """The norm with a backward pass of few passes over memory, which keeps its input and no more.

    With `r = 1 / rms(x)` and `u` the gradient times the weight: `dx = r u - x r^3 mean(u x)`.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.eps = eps
        return _normed(x, weight, eps)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor):
        x, weight = ctx.saved_tensors
        size = x.shape[-1]
        gradient, wide = gradients[0].float(), x.float()
        mean = torch.linalg.vector_norm(wide, dim=-1, keepdim=True).square() / size
        scale = (mean + ctx.eps).rsqrt()
        product = gradient * wide
        dot = (product @ weight.float()).unsqueeze(-1)
        dx = (gradient * weight).mul_(scale)
        dx.addcmul_(wide, dot * scale**3 / size, value=-1)
        by_row = product.flatten(0, -2)
        dweight = scale.flatten() @ by_row  # a sum over rows, each with its scale
        return dx.to(x.dtype), dweight.to(weight.dtype), None


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
