"""What `dflow-train doctor --config` checks with the loaded models, on one short row.

These are the mistakes that lower acceptance and raise no error. Each fast path is compared with a
slow one:

    drafter      built as the recipe says, from `init_from` where that is given
    weights      all finite
    on policy    the target would have chosen the answers that are learned
    taps         those of the training against Hugging Face's own `hidden_states`
    positions    blocks of clean tokens give the rows that the clean forward gave
    RoPE         the drafter rotates with the target's frequencies
    final norm   the target's before its head, and the drafter's
    attention    of blocks, against a dense mask
    overfit      one block is learned in 50 steps
    lossless     speculative decoding gives what plain decoding gives

Shapes: B batch, S sequence, N blocks, K block size, D hidden, C tapped width, T tokens.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from dflow_lightning.attention import choose
from dflow_lightning.blocks import Documents, gather_slots, slot_labels, slot_positions
from dflow_lightning.data.datamodule import Batch
from dflow_lightning.data.prepared import is_prepared, read_manifest
from dflow_lightning.doctor_check import DoubtError, FoundError, SkippedError, Step
from dflow_lightning.doctor_recipe import Preflight, documents
from dflow_lightning.equality import EqualityCheck, first_difference
from dflow_lightning.module import DrafterModule
from dflow_lightning.plan import make_plan
from dflow_lightning.plan_measure import TYPES, build
from dflow_lightning.rollout import Rollout, Round, StepInputs
from dflow_lightning.tap_fingerprint import ROUNDED_TOLERANCE, TOLERANCE, tapped_states

MAX_TOKENS = 512  # of the row that is looked at
NUM_BLOCKS = 8
OVERFIT_STEPS, OVERFIT_SHARE = 50, 0.25  # what may be left of the loss
ON_POLICY = 0.5  # share of learned tokens that the target chooses itself, at the least
NEW_TOKENS, NUM_PROMPTS = 32, 3
NORM_TOLERANCE = 0.05  # of a root mean square of 1


class Loaded:
    """The recipe's module with its target, on the device of the run, and a short row."""

    def __init__(self, preflight: Preflight) -> None:
        self.preflight, self.recipe = preflight, preflight.recipe
        gpu = torch.cuda.is_available() and self.recipe.trainer.accelerator != "cpu"
        self.device = torch.device("cuda" if gpu else "cpu")
        plan = make_plan(self.recipe)
        self.module: DrafterModule = build(plan, "init", "init_from").to(self.device)
        self.module.target.to(self.device)
        self.target, self.drafter = self.module.target, self.module.drafter

    def precision(self) -> AbstractContextManager[Any]:
        """The autocast of trainer.precision."""
        kind, _, mixed = str(self.recipe.trainer.precision or "32-true").partition("-")
        dtype = TYPES.get(kind) if mixed == "mixed" else None
        return torch.autocast(self.device.type, dtype) if dtype else nullcontext()

    @property
    def tolerance(self) -> float:
        """Relative distance of two ways to compute the same rows."""
        return TOLERANCE if self.target.dtype == torch.float32 else ROUNDED_TOLERANCE

    @cached_property
    def batch(self) -> Batch:
        """One row of the first batches, cut to `MAX_TOKENS`, with as much to learn as there is."""
        rows = [
            (int(mask_S[:MAX_TOKENS].sum()), batch, row)
            for batch in self.preflight.batches
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
        """The clean forward and mask round of a training step, with room for a verification."""
        self.module.num_anchors = NUM_BLOCKS
        extra = NUM_BLOCKS * self.drafter.dims.block_size
        with torch.no_grad(), self.precision():
            inputs = self.module.begin_step(self.batch, extra_slots=extra, up_to_head=True, step=0)
        if not inputs.rounds[0].anchors.valid_BN.any():
            raise FoundError(
                f"no block has room in the first {MAX_TOKENS} tokens of a row; look at the data "
                "with dflow-train inspect"
            )
        return inputs


def loaded(preflight: Preflight) -> Loaded:
    """The models; made by the check `drafter`, which says why where it cannot."""
    found = preflight.__dict__.get("_loaded")
    if found is None:
        found = preflight.__dict__["_loaded"] = Loaded(preflight)
    return found


def distance(found: Tensor, wanted: Tensor) -> float:
    """Relative distance of two tensors, as vectors."""
    found, wanted = found.float(), wanted.float()
    return float((found - wanted).norm() / wanted.norm().clamp(min=1e-12))


def drafter(preflight: Preflight) -> str:
    """What DrafterModule refuses: another target's `init_from`, taps, missing tensors."""
    module = loaded(preflight).module
    dims, init_from = module.drafter.dims, preflight.recipe.model.init_from
    start = f"from {init_from}" if init_from else f"from the {preflight.recipe.model.init} weights"
    taps = " ".join(map(str, dims.target_layer_ids))
    relay = "a relay" if module.relay is not None else "no relay"
    return f"{dims.num_layers} layers, blocks of {dims.block_size}, taps {taps}, {relay}, {start}"


def weights(preflight: Preflight) -> str:
    """Target, drafter and relay."""
    module = loaded(preflight).module
    parts = {"target": module.target.model, "drafter": module.drafter, "relay": module.relay}
    count = 0
    for name, part in parts.items():
        for key, weight in () if part is None else part.named_parameters():
            if not bool(torch.isfinite(weight).all()):
                mend = "download or save the target again" if name == "target" else (
                    "start from another model.init_from"
                )  # fmt: skip
                raise FoundError(f"{name}: {key} holds a number that is not finite; {mend}")
            count += weight.numel()
    return f"all {count / 1e6:,.1f} million are finite"


@torch.no_grad()
def on_policy(preflight: Preflight) -> str:
    """The target's greedy choice at every learned token of the row, and who wrote the data."""
    here = loaded(preflight)
    for path in preflight.sets:
        writer = read_manifest(path).get("target") or {} if is_prepared(path) else {}
        if writer.get("weights") not in (None, here.target.fingerprint):
            raise DoubtError(
                f"the answers of {path} are by {writer.get('name')}, other weights than "
                f"{here.target.name}; prepare the data with this target"
            )
    chosen = total = 0
    for ids_S, mask_S in documents(here.batch):
        logits_SV = here.target.model(ids_S.unsqueeze(0), use_cache=False).logits[0]
        learned_S = mask_S[1:]
        chosen += int((logits_SV[:-1].argmax(-1) == ids_S[1:])[learned_S].sum())
        total += int(learned_S.sum())
    said = f"the target itself would choose {chosen / max(total, 1):.0%} of {total} learned tokens"
    if chosen < ON_POLICY * total:
        raise DoubtError(
            f"{said}; let it answer with dflow-train prepare, and look whether its rope_theta and "
            "chat template are those that it was published with"
        )
    return said


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
                raise FoundError(_other_layer(index, far, found, wanted))
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
        raise FoundError(
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
        raise FoundError(
            f"the drafter's rope_theta is {ours['rope_theta']}, the target's "
            f"{theirs.get('rope_theta')}; {mend}"
        )
    rotary = getattr(here.target.model.get_decoder(), "rotary_emb", None)
    wanted = getattr(rotary, "inv_freq", None)
    found = here.drafter.inverse_frequencies
    if wanted is not None and wanted.shape == found.shape:
        far = distance(found.cpu(), wanted.cpu())
        if not far <= 1e-5:
            raise FoundError(
                f"the drafter's RoPE frequencies are {far:.1e} from those that the target runs "
                f"with, though both configurations say {ours['rope_theta']:g}; {mend}"
            )
    return f"theta {ours['rope_theta']:g}, {ours.get('rope_type', 'default')}, in both"


@torch.no_grad()
def final_norm(preflight: Preflight) -> str:
    """The target's head on its own last states, and the scale of the drafter's output."""
    here = loaded(preflight)
    ids_S = next(documents(here.batch))[0]
    alone = Batch(ids_S[None], torch.ones_like(ids_S[None], dtype=torch.bool), torch.zeros(1))
    length = len(ids_S)
    index_1S = torch.arange(length, device=here.device)[None]
    output = here.target.forward(
        alone.input_ids_BS, index_1S, here.target.new_cache(length), index_1S,
        index_1S.unsqueeze(1) <= index_1S.unsqueeze(2), [],
    )  # fmt: skip
    wanted = here.target.model(ids_S[None], use_cache=False).logits
    far = distance(here.target.head(output.hidden_BQD), wanted)
    if not far <= here.tolerance:
        raise FoundError(
            f"the head's input gives logits that are {far:.1e} from the target's own: the final "
            "norm is missing or applied twice; install the tested transformers (see packages)"
        )
    with here.precision():
        hidden = block_hidden(here, "auto").float()
    scale_D = getattr(here.drafter.norm, "weight", torch.ones(hidden.shape[-1])).to(hidden)
    used_D = scale_D.abs() > 1e-3
    mean_square = (hidden[..., used_D] / scale_D[used_D]).square().mean(-1)
    if not used_D.all():
        return "the target's is applied once"
    if float((mean_square.sqrt() - 1).abs().max()) > NORM_TOLERANCE:
        raise FoundError(
            f"the drafter's output has a root mean square of {float(mean_square.mean().sqrt()):.2f}"
            " instead of 1: its final norm is missing; start from another model.init_from"
        )
    return f"the target's is applied once (logits {far:.1e} apart), and the drafter has its own"


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
        raise FoundError(
            f"model.attention {chosen} is {far:.1e} from a dense mask; set model.attention to dense"
        )
    return f"{chosen} sees what a dense mask shows ({far:.1e} apart)"


def overfit(preflight: Preflight) -> str:
    """One block, the recipe's learning rate. The drafter is not the same afterwards."""
    here = loaded(preflight)
    module, inputs, K = here.module, here.inputs, here.drafter.dims.block_size
    batch = here.batch
    anchors = inputs.rounds[0].anchors
    _, supervised_BNK = slot_labels(batch.input_ids_BS, batch.loss_mask_BS, anchors, K)
    best = int(supervised_BNK.sum(-1)[0].argmax())
    parts = (anchors.positions_BN, anchors.valid_BN, anchors.starts_BN, anchors.ends_BN)
    one = type(anchors)(*(None if p is None else p[:, best : best + 1] for p in parts))  # type: ignore[arg-type]
    alone = StepInputs(batch, inputs.taps_BSC, inputs.cache, [Round(one)])
    lr = here.recipe.model.optimizer.lr
    optimizer = torch.optim.AdamW(module.parameters(), lr=lr)
    losses: list[float] = []
    accepted = 0.0
    module.train()
    for _ in range(OVERFIT_STEPS):
        with here.precision():
            loss, sums_R4 = module.objective(alone)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
        accepted = float(sums_R4[0, 2])
    module.eval()
    asked = int(supervised_BNK[0, best].sum())
    said = (
        f"one block: loss {losses[0]:.2f} to {losses[-1]:.2f} in {OVERFIT_STEPS} steps at "
        f"lr {lr:g}, {accepted:.0f} of {asked} drafts right"
    )
    if accepted < asked and not losses[-1] <= OVERFIT_SHARE * losses[0]:
        raise FoundError(
            f"{said}; set model.optimizer.lr to something like 6e-4, and mend what is said above"
        )
    return said


def lossless(preflight: Preflight) -> str:
    """With the drafter that has just learned a block, so that some drafts are accepted."""
    here = loaded(preflight)
    if here.target.dtype != torch.float32 and here.device.type == "cpu":
        raise SkippedError("a target in half precision on a CPU; ties are common there")
    prompts = []
    for ids_S, mask_S in (one for b in preflight.batches for one in documents(b)):
        prompts.append(ids_S[: int(mask_S.int().argmax())].tolist()[-MAX_TOKENS:])
    prompts = [prompt for prompt in prompts if prompt][:NUM_PROMPTS]
    decoder, options = here.module.decoder(), {"max_new_tokens": NEW_TOKENS, "batch_size": 2}
    plain = [one.token_ids for one in decoder.generate_plain(prompts, **options)]
    exact, ties, rounds, tokens = EqualityCheck(here.target), 0, 0, 0
    for relay in [True, False] if here.module.relay is not None else [False]:
        for number, found in enumerate(decoder.generate(prompts, relay=relay, **options)):
            rounds, tokens = rounds + len(found.accepted), tokens + sum(found.accepted)
            if first_difference(found.token_ids, plain[number]) is None:
                continue
            ties += 1
            if here.target.dtype != torch.float32:
                continue
            gap = exact.compare(
                f"prompt {number}", prompts[number], found.token_ids, plain[number],
                temperature=0.0, seed=number,
            )  # fmt: skip
            if gap is not None and not gap.excused:
                raise FoundError(
                    f"answer {number} leaves plain decoding at token {gap.position}, relay "
                    f"{'on' if relay else 'off'}; install the tested transformers (see packages)"
                )
    said = f"{len(prompts)} answers of {NEW_TOKENS} tokens equal plain decoding"
    if ties:
        raise DoubtError(
            f"{ties} answers leave plain decoding where the target is torn between two tokens "
            f"({here.target.dtype}); nothing to mend, or --model.target.dtype float32 to be sure"
        )
    return f"{said}, {1 + tokens / max(rounds, 1):.2f} tokens a round"


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
