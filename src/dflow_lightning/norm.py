"""The norm of the drafter's layers, with a backward pass that keeps its input alone."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable


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
