"""Two defects of vLLM's CPU backend that every DFlash drafter meets; no GPU is touched.

1. `_C.rms_norm` ignores the row of a stacked weight, so that each layer's context keys are normed
   with the first layer's `k_norm`: a drafter with several layers drafts wrongly, without a word.
2. `expand_kernel` writes into a copy of its output: above temperature 0, speculation samples with
   uninitialised temperatures.

Where vLLM has fixed them, doing it here again changes nothing. `DFLOW_VLLM_CPU_FIXES=0` leaves
vLLM as it is, for the test that shows what they do.
"""

from __future__ import annotations

import os

import torch
from torch import Tensor


def wanted() -> bool:
    """On the CPU backend, unless switched off."""
    from vllm.platforms import current_platform

    return current_platform.is_cpu() and os.environ.get("DFLOW_VLLM_CPU_FIXES", "1") != "0"


def norm_by_layer(k: Tensor, weights: Tensor, eps: float) -> Tensor:
    """RMS norm of each layer's keys with its own weight: `[L, ..., E]` and `[L, E]`."""
    from vllm import _custom_ops as ops

    normed = torch.empty_like(k)
    for layer, weight in enumerate(weights):
        ops.rms_norm(normed[layer], k[layer], weight, eps)
    return normed


def expand_batch_to_tokens(
    x: Tensor, cu_num_tokens: Tensor, num_tokens: int, replace_from: int = 0, replace_to: int = 0
) -> Tensor:
    """Each request's value once for each of its tokens, `[num_tokens]`.

    Args:
        x: `[R]`.
        cu_num_tokens: running sum of the requests' tokens, `[R]`.
        replace_from, replace_to: a value to be replaced; equal ones replace nothing.
    """
    sums = cu_num_tokens.long()
    counts = torch.diff(sums, prepend=sums.new_zeros(1))
    if replace_from != replace_to:
        x = torch.where(x == replace_from, torch.full_like(x, replace_to), x)
    return x.repeat_interleave(counts, output_size=num_tokens)


def fix_sampling() -> None:
    """Put `expand_batch_to_tokens` in the place of vLLM's, where that wants a Triton it lacks."""
    from vllm.triton_utils import HAS_TRITON

    if wanted() and not HAS_TRITON:
        from vllm.v1.sample import rejection_sampler

        rejection_sampler.expand_batch_to_tokens = expand_batch_to_tokens
