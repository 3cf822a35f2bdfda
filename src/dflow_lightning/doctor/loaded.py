"""What `dflow-train doctor --config` checks of the models as a whole, and the models themselves.

    drafter      built as the recipe says, from `init_from` where that is given
    weights      all finite
    on policy    the target would have chosen the answers that are learned

Shapes: B batch, S sequence, V vocabulary.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from dflow_lightning.checks import DoubtError, FailedError
from dflow_lightning.data.datamodule import Batch
from dflow_lightning.data.prepared import is_prepared, read_manifest
from dflow_lightning.doctor.recipe import Preflight, documents
from dflow_lightning.formats.tap_fingerprint import ROUNDED_TOLERANCE, TOLERANCE
from dflow_lightning.plan.command import make_plan
from dflow_lightning.plan.measure import TYPES, build
from dflow_lightning.tensors.blocks import Documents
from dflow_lightning.training.module import DrafterModule
from dflow_lightning.training.step_inputs import StepInputs

MAX_TOKENS = 512  # of the row that is looked at
NUM_BLOCKS = 8
ON_POLICY = 0.6  # share of learned tokens that the target chooses itself, at the least


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
            raise FailedError(
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
    relay += ", carryover" if module.drafter.carryover is not None else ""
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
                raise FailedError(f"{name}: {key} holds a number that is not finite; {mend}")
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
