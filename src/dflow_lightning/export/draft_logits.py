"""What a drafter drafts after given tokens: logits to compare two copies of its weights by.

Shapes: J drafts, K block size, D hidden, V vocabulary.
"""

import torch
from torch import Tensor

from dflow_lightning.formats.tap_fingerprint import tapped_states
from dflow_lightning.models.drafter import embed_blocks, relay_correction
from dflow_lightning.models.eagle3 import AnyDrafter, Eagle3Drafter, Unroll
from dflow_lightning.models.relay import ProjectedRows, Relay
from dflow_lightning.models.target import FrozenTarget


@torch.inference_mode()
def eagle3_logits(target: FrozenTarget, drafter: Eagle3Drafter, token_ids: list[int]) -> Tensor:
    """Logits of the greedy drafts that follow some tokens, two or more of them, `[1, J, V]`."""
    ids_1S = torch.tensor([token_ids], device=target.device)
    dtype = drafter.fc.weight.dtype
    taps_1SC = tapped_states(target, token_ids, drafter.dims.target_layer_ids)
    h_1SD = drafter.project(taps_1SC.to(dtype))
    positions_1S = torch.arange(ids_1S.shape[1], device=target.device).unsqueeze(0)
    embeds_1SD = target.embed(ids_1S.roll(-1, dims=1)).to(dtype)
    context = drafter.context_kv(h_1SD, embeds_1SD, positions_1S)
    steps = Unroll(drafter, h_1SD[:, -2:-1], positions_1S[:, -2:-1], context)
    token_11, logits = ids_1S[:, -1:], []
    for _ in range(drafter.dims.block_size - 1):
        hidden = steps.advance(target.embed(token_11).to(dtype))
        logits.append(target.head(hidden.to(target.dtype)))
        token_11 = logits[-1].argmax(-1)
    return torch.cat(logits, dim=1)


@torch.inference_mode()
def draft_logits(
    target: FrozenTarget, drafter: AnyDrafter, relay: Relay | None, token_ids: list[int]
) -> Tensor:
    """Logits of the block that starts at the last of some tokens, `[1, 1, K, V]`.

    With a relay, the block before it is taken to be rejected as a whole. An EAGLE-3 drafter has
    those of its drafts, `[1, J, V]`.
    """
    if isinstance(drafter, Eagle3Drafter):
        return eagle3_logits(target, drafter, token_ids)
    dims = drafter.dims
    while len(token_ids) <= dims.block_size:
        token_ids = token_ids + token_ids
    ids_1S = torch.tensor([token_ids], device=target.device)
    h_1SD = drafter.project(tapped_states(target, token_ids, dims.target_layer_ids))
    positions_1S = torch.arange(len(token_ids), device=target.device).unsqueeze(0)
    rows_11KD = h_1SD[:, -dims.block_size :].unsqueeze(1)
    valid_11K = torch.ones_like(rows_11KD[..., 0], dtype=torch.bool)
    rows = ProjectedRows(rows_11KD, valid_11K, ids_1S[:, -1:], ids_1S[:, -2:-1])
    correction = None if relay is None else relay_correction(target, relay, rows)
    x_11KD = embed_blocks(target, drafter, ids_1S[:, -1:], correction)
    context = drafter.context_kv(h_1SD, positions_1S)
    hidden = drafter(x_11KD, context, positions_1S[:, -1:], carried=drafter.carry(rows))
    return target.head(hidden.to(target.dtype))
