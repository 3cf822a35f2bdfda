"""What all drafters' layers are made of: norm and rotation, whose backward passes keep little."""

from __future__ import annotations

from collections.abc import Callable
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


class Rotary(nn.Module):
    """The angles of a drafter's rotary position embedding.

    The frequencies lie beside the weights, so that no call copies them from the host, and are not
    part of a state dict: they follow from the dimensions.
    """

    inverse_frequencies: Tensor

    def __init__(self, dims: LayerDims) -> None:
        super().__init__()
        frequencies, self.scale = rope_frequencies(dims)
        self.register_buffer("inverse_frequencies", frequencies, persistent=False)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Rotary:
        exact = self.inverse_frequencies
        super()._apply(fn, recurse)
        # A cast of the module moves them, and must not round them: at position 30,000 a bfloat16
        # frequency is off by many turns.
        self.inverse_frequencies = exact.to(self.inverse_frequencies.device)
        return self

    def forward(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Cosine and sine of positions `[B, ...]`, each `[B, 1, ..., E]`; angles are float32."""
        angles = positions.unsqueeze(1).unsqueeze(-1).float() * self.inverse_frequencies
        angles = torch.cat([angles, angles], dim=-1)
        return (angles.cos() * self.scale).to(dtype), (angles.sin() * self.scale).to(dtype)


def in_compute_type(x: Tensor, weight: Tensor) -> Tensor:
    """`x` in a type that a product with `weight` takes.

    The target may compute in another type than the drafter. Under autocast the product casts both
    sides itself; without it nothing does.
    """
    if x.dtype == weight.dtype or torch.is_autocast_enabled(x.device.type):
        return x
    return x.to(weight.dtype)


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
