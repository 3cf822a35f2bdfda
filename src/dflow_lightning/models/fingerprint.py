"""A hash of a model's weights that does not depend on the dtype they are loaded in."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable

import torch
from torch import Tensor

VALUES = 4096  # hashed per tensor


def weights_fingerprint(tensors: Iterable[tuple[str, Tensor]]) -> str:
    """Names, shapes and a strided sample of every tensor in bfloat16, in the order of the names."""
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors, key=lambda item: item[0]):
        flat = tensor.detach().flatten()
        sample = flat[:: max(1, flat.numel() // VALUES)]
        # Rounded, so that the dtype a target is loaded in does not matter.
        sample = sample.to(torch.bfloat16).float().cpu()
        digest.update(json.dumps([name, list(tensor.shape)]).encode())
        digest.update(sample.numpy().tobytes())
    return digest.hexdigest()
