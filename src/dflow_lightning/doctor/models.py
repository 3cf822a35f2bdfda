"""What `dflow-train doctor --config` checks with the models loaded, on one short row.

    drafter      built as the recipe says, from `init_from` where that is given
    weights      all finite
    on policy    the target would have chosen the answers that are learned

And what a mistake would lower the acceptance by without any error. Each fast path is compared with
a slow one:

    taps         those of the training against Hugging Face's own `hidden_states`
    positions    blocks of clean tokens give the rows that the clean forward gave
    RoPE         the drafter rotates with the target's frequencies
    final norm   the target's before its head, and the drafter's
    attention    of blocks, against a dense mask

Shapes: B batch, S sequence, N blocks, K block size, D hidden, C tapped width, T tokens, V
vocabulary.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from dflow_lightning.checks import DoubtError, FailedError, SkippedError
from dflow_lightning.data.datamodule import Batch
from dflow_lightning.data.prepared import is_prepared, read_manifest
from dflow_lightning.doctor.recipe import Preflight, documents
from dflow_lightning.formats.tap_fingerprint import ROUNDED_TOLERANCE, TOLERANCE, tapped_states
from dflow_lightning.models.device import run_on
from dflow_lightning.models.target import FrozenTarget
from dflow_lightning.plan.measure import build_module
from dflow_lightning.tensors.attention import formulation_for
from dflow_lightning.tensors.blocks import Documents, gather_slots, slot_positions
from dflow_lightning.training.precision import ComputePrecision
from dflow_lightning.training.step_inputs import RolloutConfig, Round, StepInputs

MAX_TOKENS = 512  # of the row that is looked at
NUM_BLOCKS = 8
MIN_ON_POLICY = 0.6  # share of learned tokens that the target chooses itself, at the least
NORM_TOLERANCE = 0.05  # of a root mean square of 1


class Loaded(Preflight):
    """The recipe's module with its target, on the device of the run, and a short row."""

    @property
    def device(self) -> torch.device:
        gpu = torch.cuda.is_available() and self.recipe.trainer.accelerator != "cpu"
        return torch.device("cuda" if gpu else "cpu")

    @cached_property
    def module(self) -> Any:
        """Built by the check `drafter`, the first to ask for it, which reports what is refused."""
        with run_on(self.device):
            module = build_module(self.recipe.model)
        module.to(self.device)
        module.target.to(self.device)
        return module

    @property
    def target(self) -> FrozenTarget:
        return self.module.target

    @property
    def drafter(self) -> Any:
        return self.module.drafter

    def precision(self) -> AbstractContextManager[Any]:
        """The autocast of trainer.precision."""
        return ComputePrecision.named(self.recipe.trainer.precision).autocast(self.device)

    @property
    def tolerance(self) -> float:
        """Relative distance of two ways to compute the same rows."""
        return TOLERANCE if self.target.dtype == torch.float32 else ROUNDED_TOLERANCE

    @cached_property
    def row(self) -> Batch:
        """One row of the first batches, cut to `MAX_TOKENS`, with as much to learn as there is."""
        rows = [
            (int(mask_S[:MAX_TOKENS].sum()), batch, row)
            for batch in self.batches
            for row, mask_S in enumerate(batch.loss_mask_BS)
        ]
        _, batch, row = max(rows, key=lambda one: one[0])
        cut = slice(row, row + 1), slice(MAX_TOKENS)
        packed = batch.documents
        spans = (
            None if packed is None else Documents(*(each[cut].to(self.device) for each in packed))
        )
        ids, mask = (each[cut].to(self.device) for each in (batch.input_ids_BS, batch.loss_mask_BS))
        return Batch(ids, mask, batch.sample_ids_B[cut[0]], spans)

    @cached_property
    def inputs(self) -> StepInputs:
        """The clean forward of a training step, with its first round.

        For a block drafter that is the mask round, with room in the cache for a verification.
        """
        self.module.num_anchors = NUM_BLOCKS
        room = {}
        if not self.eagle3:
            slots = NUM_BLOCKS * self.drafter.dims.block_size
            room = {"extra_slots": slots, "up_to_head": True}
        with torch.no_grad(), self.precision():
            inputs: StepInputs = self.module.begin_step(self.row, step=0, **room)
        if not inputs.rounds[0].anchors.valid_BN.any():
            raise FailedError(
                f"no block has room in the first {MAX_TOKENS} tokens of a row; look at the data "
                "with dflow-train inspect"
            )
        return inputs


def distance(found: Tensor, wanted: Tensor) -> float:
    """Relative distance of two tensors, as vectors."""
    found, wanted = found.float(), wanted.float()
    return float((found - wanted).norm() / wanted.norm().clamp(min=1e-12))


def check_drafter(here: Loaded) -> str:
    """What DrafterModule refuses: another target's `init_from`, taps, missing tensors."""
    module = here.module
    dims, init_from = module.drafter.dims, here.recipe.model.init_from
    start = f"from {init_from}" if init_from else f"from the {here.recipe.model.init} weights"
    taps = " ".join(map(str, dims.target_layer_ids))
    relay = "a relay" if module.relay is not None else "no relay"
    relay += ", carryover" if module.drafter.carryover is not None else ""
    layers = f"{dims.num_layers} layer" + "s" * (dims.num_layers != 1)
    return f"{layers}, blocks of {dims.block_size}, taps {taps}, {relay}, {start}"


def check_weights(here: Loaded) -> str:
    """Target, drafter and relay."""
    module = here.module
    parts = {"target": module.target.model, "drafter": module.drafter, "relay": module.relay}
    count = 0
    for name, part in parts.items():
        for key, weight in () if part is None else part.named_parameters():
            if not bool(torch.isfinite(weight).all()):
                fix = "download or save the target again" if name == "target" else (
                    "start from another model.init_from"
                )  # fmt: skip
                raise FailedError(f"{name}: {key} holds a number that is not finite; {fix}")
            count += weight.numel()
    return f"all {count / 1e6:,.1f} million are finite"


@torch.no_grad()
def check_on_policy(here: Loaded) -> str:
    """The target's greedy choice at every learned token of the row, and who wrote the data."""
    for path in here.sets:
        writer = read_manifest(path).get("target") or {} if is_prepared(path) else {}
        if writer.get("weights") not in (None, here.target.fingerprint):
            raise DoubtError(
                f"the answers of {path} are by {writer.get('name')}, other weights than "
                f"{here.target.name}; prepare the data with this target"
            )
    chosen = total = 0
    for ids_S, mask_S in documents(here.row):
        logits_SV = here.target.model(ids_S.unsqueeze(0), use_cache=False).logits[0]
        learned_S = mask_S[1:]
        chosen += int((logits_SV[:-1].argmax(-1) == ids_S[1:])[learned_S].sum())
        total += int(learned_S.sum())
    summary = (
        f"the target itself would choose {chosen / max(total, 1):.0%} of {total} learned tokens"
    )
    if chosen < MIN_ON_POLICY * total:
        raise DoubtError(
            f"{summary}; let it answer with dflow-train prepare, and look whether its rope_theta "
            "and chat template are those that it was published with"
        )
    return summary


@torch.no_grad()
def check_taps(here: Loaded) -> str:
    """Document by document, as Hugging Face itself runs it: also a test of packing and padding."""
    layer_ids, worst, at = here.drafter.dims.target_layer_ids, 0.0, 0
    everywhere = range(here.target.num_layers - 1)
    for ids_S, _ in documents(here.row):
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
    """Whose output it is instead, where that can be determined."""
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
def check_positions(here: Loaded) -> str:
    """Blocks of the data's own tokens, verified as a rollout does, against the clean forward."""
    if here.eagle3:
        raise SkippedError("EAGLE-3 has no rollouts, so no block is verified in training")
    inputs, K = here.inputs, here.drafter.dims.block_size
    anchors = inputs.rounds[0].anchors
    ids_BNK, inside_BNK = gather_slots(
        here.row.input_ids_BS, anchors.positions_BN, K, anchors.ends_BN
    )
    rollout = here.module.rollout(RolloutConfig())
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


def check_rope(here: Loaded) -> str:
    """Frequencies of both, and the base in both configurations."""
    ours = here.drafter.dims.rope_parameters
    theirs = here.target.config.rope_parameters
    fix = "start from another model.init_from, or leave it out"
    if ours["rope_theta"] != theirs.get("rope_theta"):
        raise FailedError(
            f"the drafter's rope_theta is {ours['rope_theta']}, the target's "
            f"{theirs.get('rope_theta')}; {fix}"
        )
    rotary = getattr(here.target.model.get_decoder(), "rotary_emb", None)
    wanted = getattr(rotary, "inv_freq", None)
    found = here.drafter.rotary.inverse_frequencies
    if wanted is not None and wanted.shape == found.shape:
        far = distance(found.cpu(), wanted.cpu())
        if not far <= 1e-5:
            raise FailedError(
                f"the drafter's RoPE frequencies are {far:.1e} from those that the target runs "
                f"with, though both configurations say {ours['rope_theta']:g}; {fix}"
            )
    return f"theta {ours['rope_theta']:g}, {ours.get('rope_type', 'default')}, in both"


@torch.no_grad()
def check_final_norm(here: Loaded) -> str:
    """The target's head on its own last states, and the scale of the drafter's output."""
    ids_S = next(documents(here.row))[0]
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
        hidden = here.module.unroll(here.inputs) if here.eagle3 else block_hidden(here, "auto")
    hidden = hidden.float()
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
    x_BNKD = Round(anchors).embed(here.row, here.target, here.drafter, None)
    return here.drafter(x_BNKD, context, anchors.positions_BN, backend, starts_BN=anchors.starts_BN)


@torch.no_grad()
def check_attention(here: Loaded) -> str:
    """What a block sees by the formulation of the run, and by a mask of all slots by all keys."""
    if here.eagle3:
        raise SkippedError("the attention of EAGLE-3 has one formulation")
    with here.precision():
        found, wanted = (block_hidden(here, backend) for backend in ("auto", "dense"))
    valid_BN = here.inputs.rounds[0].anchors.valid_BN
    far = distance(found[valid_BN], wanted[valid_BN])
    chosen = here.drafter.attention
    if chosen == "auto":
        chosen = formulation_for("auto", NUM_BLOCKS, here.device, found.dtype)
    if not far <= max(here.tolerance, ROUNDED_TOLERANCE * (found.dtype != torch.float32)):
        raise FailedError(
            f"model.attention {chosen} is {far:.1e} from a dense mask; set model.attention to dense"
        )
    return f"{chosen} sees what a dense mask shows ({far:.1e} apart)"
