"""What `dflow-train doctor --config` computes twice, on one short row.

These are the mistakes that lower acceptance and raise no error. Each fast path is compared with a
slow one:

    taps         those of the training against Hugging Face's own `hidden_states`
    positions    blocks of clean tokens give the rows that the clean forward gave
    RoPE         the drafter rotates with the target's frequencies
    final norm   the target's before its head, and the drafter's
    attention    of blocks, against a dense mask

Shapes: B batch, S sequence, N blocks, K block size, D hidden, C tapped width, T tokens.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dflow_lightning.checks import FailedError
from dflow_lightning.doctor.check import Step
from dflow_lightning.doctor.loaded import (
    NUM_BLOCKS,
    Loaded,
    distance,
    drafter,
    loaded,
    on_policy,
    weights,
)
from dflow_lightning.doctor.recipe import Preflight, documents
from dflow_lightning.doctor.trial import lossless, overfit
from dflow_lightning.formats.tap_fingerprint import ROUNDED_TOLERANCE, tapped_states
from dflow_lightning.tensors.attention import choose
from dflow_lightning.tensors.blocks import gather_slots, slot_positions
from dflow_lightning.training.rollout import Rollout
from dflow_lightning.training.step_inputs import Round

NORM_TOLERANCE = 0.05  # of a root mean square of 1


@torch.no_grad()
def taps(preflight: Preflight) -> str:
    """Document by document, as Hugging Face itself runs it: also a test of packing and padding."""
    here = loaded(preflight)
    layer_ids, worst, at = here.drafter.dims.target_layer_ids, 0.0, 0
    everywhere = range(here.target.num_layers - 1)
    for ids_S, _ in documents(here.batch):
        found_SD = here.inputs.taps_BSC[0, at : at + len(ids_S)].chunk(len(layer_ids), dim=-1)
        at += len(ids_S)
        wanted_SC = tapped_states(here.target, ids_S.tolist(), everywhere)[0]
        wanted = wanted_SC.chunk(len(everywhere), dim=-1)
        for index, found in zip(layer_ids, found_SD, strict=True):
            far = distance(found, wanted[index])
            worst = max(worst, far)
            if not far <= here.tolerance:
                raise FailedError(_other_layer(index, far, found, wanted))
    ids = " ".join(str(index + 1) for index in layer_ids)
    return f"are hidden_states {ids} of Hugging Face (at most {worst:.1e} apart)"


def _other_layer(index: int, far: float, found: Tensor, wanted: tuple[Tensor, ...]) -> str:
    """Whose output it is instead, as far as that can be said."""
    gaps = [distance(found, one) for one in wanted]
    nearest = min(range(len(gaps)), key=gaps.__getitem__)
    if nearest != index and gaps[nearest] < far / 10:
        cause = f"it is the output of layer {nearest}, shifted by {nearest - index}"
    else:
        cause = "it is no layer's output: a wrong mask or wrong positions"
    return (
        f"the tap of layer {index} is {far:.1e} from Hugging Face's hidden_states[{index + 1}]; "
        f"{cause}; install the tested transformers (see packages)"
    )


@torch.no_grad()
def positions(preflight: Preflight) -> str:
    """Blocks of the data's own tokens, verified as a rollout does, against the clean forward."""
    here = loaded(preflight)
    inputs, K = here.inputs, here.drafter.dims.block_size
    anchors = inputs.rounds[0].anchors
    ids_BNK, inside_BNK = gather_slots(
        here.batch.input_ids_BS, anchors.positions_BN, K, anchors.ends_BN
    )
    rollout = Rollout(here.target, here.drafter, None, True, "online", "data")
    with here.precision():
        found_BNKC, _ = rollout.verify(inputs, ids_BNK, anchors)
    index_NK = slot_positions(anchors.positions_BN, K)[0].clamp(max=inputs.taps_BSC.shape[1] - 1)
    counts_BNK = inside_BNK & anchors.valid_BN.unsqueeze(-1)
    clean_TC = inputs.taps_BSC[0, index_NK][counts_BNK[0]]
    far = distance(found_BNKC[counts_BNK], clean_TC)
    if not far <= here.tolerance:
        raise FailedError(
            f"rows of verified blocks are {far:.1e} from those of the clean forward at the same "
            "positions; set model.target.attn_implementation to sdpa or eager"
        )
    return f"{len(clean_TC)} rows of blocks are those of the clean forward ({far:.1e} apart)"


def rope(preflight: Preflight) -> str:
    """Frequencies of both, and the base in both configurations."""
    here = loaded(preflight)
    ours = here.drafter.dims.rope_parameters
    theirs = here.target.config.rope_parameters
    mend = "start from another model.init_from, or leave it out"
    if ours["rope_theta"] != theirs.get("rope_theta"):
        raise FailedError(
            f"the drafter's rope_theta is {ours['rope_theta']}, the target's "
            f"{theirs.get('rope_theta')}; {mend}"
        )
    rotary = getattr(here.target.model.get_decoder(), "rotary_emb", None)
    wanted = getattr(rotary, "inv_freq", None)
    found = here.drafter.inverse_frequencies
    if wanted is not None and wanted.shape == found.shape:
        far = distance(found.cpu(), wanted.cpu())
        if not far <= 1e-5:
            raise FailedError(
                f"the drafter's RoPE frequencies are {far:.1e} from those that the target runs "
                f"with, though both configurations say {ours['rope_theta']:g}; {mend}"
            )
    return f"theta {ours['rope_theta']:g}, {ours.get('rope_type', 'default')}, in both"


@torch.no_grad()
def final_norm(preflight: Preflight) -> str:
    """The target's head on its own last states, and the scale of the drafter's output."""
    here = loaded(preflight)
    ids_S = next(documents(here.batch))[0]
    index_1S = torch.arange(len(ids_S), device=here.device)[None]
    output = here.target.forward(
        ids_S[None], index_1S, here.target.new_cache(len(ids_S)), index_1S,
        index_1S.unsqueeze(1) <= index_1S.unsqueeze(2), [],
    )  # fmt: skip
    wanted = here.target.model(ids_S[None], use_cache=False).logits
    far = distance(here.target.head(output.hidden_BQD), wanted)
    if not far <= here.tolerance:
        raise FailedError(
            f"the head's input gives logits that are {far:.1e} from the target's own: the final "
            "norm is missing or applied twice; install the tested transformers (see packages)"
        )
    with here.precision():
        hidden = block_hidden(here, "auto").float()
    scale_D = getattr(here.drafter.norm, "weight", torch.ones(hidden.shape[-1])).to(hidden)
    size = float((hidden / scale_D).square().mean(-1).sqrt().sub(1).abs().max())
    if bool((scale_D.abs() > 1e-3).all()) and not size <= NORM_TOLERANCE:
        raise FailedError(
            f"the drafter's output has a root mean square that is {size:.2f} from 1: its final "
            "norm is missing; start from another model.init_from"
        )
    return f"the target's is applied once (logits {far:.1e} apart), and so is the drafter's"


def block_hidden(here: Loaded, backend: Any) -> Tensor:
    """The drafter's output for the mask round, `[1, N, K, D]`."""
    inputs, anchors = here.inputs, here.inputs.rounds[0].anchors
    context = here.drafter.context_kv(here.drafter.project(inputs.taps_BSC), inputs.positions_BS)
    x_BNKD = Round(anchors).embed(here.batch, here.target, here.drafter, None)
    return here.drafter(x_BNKD, context, anchors.positions_BN, backend, starts_BN=anchors.starts_BN)


@torch.no_grad()
def attention(preflight: Preflight) -> str:
    """What a block sees by the formulation of the run, and by a mask of all slots by all keys."""
    here = loaded(preflight)
    with here.precision():
        found, wanted = (block_hidden(here, backend) for backend in ("auto", "dense"))
    valid_BN = here.inputs.rounds[0].anchors.valid_BN
    far = distance(found[valid_BN], wanted[valid_BN])
    chosen = here.drafter.attention
    if chosen == "auto":
        chosen = choose("auto", NUM_BLOCKS, here.device, found.dtype)
    if not far <= max(here.tolerance, ROUNDED_TOLERANCE * (found.dtype != torch.float32)):
        raise FailedError(
            f"model.attention {chosen} is {far:.1e} from a dense mask; set model.attention to dense"
        )
    return f"{chosen} sees what a dense mask shows ({far:.1e} apart)"


LOADED = ("drafter", "weights")
MODEL = {
    "drafter": Step(drafter, ("target", "template", "batches", "mask id")),
    "weights": Step(weights, ("drafter",)),
    "on policy": Step(on_policy, LOADED),
    "taps": Step(taps, LOADED),
    "positions": Step(positions, LOADED),
    "RoPE": Step(rope, LOADED),
    "final norm": Step(final_norm, LOADED),
    "attention": Step(attention, LOADED),
    "overfit": Step(overfit, (*LOADED, "masks")),
    "lossless": Step(lossless, LOADED),
}
