"""The draft step as a compiled package: relay, drafter and the choice of drafts in one file.

The package is made by AOTInductor for the kind of device it was exported on, with any number of
requests and any context length. It holds no weights: those come from the export's safetensors files
and, for embedding and head, from the target. What it computes is `rounds.draft`.

Shapes: R requests, K slots of a block, J = K-1 drafts, L drafter layers, G key/value heads, T
context slots, E head size, D hidden, V vocabulary.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dflow_lightning.decode import rounds
from dflow_lightning.decode.rounds import Drafts, RoundMode
from dflow_lightning.decode.state import DecodeState, Models, no_rejected_rows
from dflow_lightning.errors import InputError
from dflow_lightning.models.drafter import Drafter, best, draft_hidden
from dflow_lightning.models.relay import ProjectedRows, Relay
from dflow_lightning.tensors.blocks import KV, slot_inputs

PACKAGE_FOLDER = "decode"
PACKAGE_FILE = "draft.pt2"
PACKAGE_MANIFEST = "manifest.json"
MAX_CONTEXT = 1 << 20


class DraftProgram(nn.Module):
    """What the package computes; all arguments are tensors."""

    def __init__(self, drafter: Drafter, relay: Relay | None) -> None:
        super().__init__()
        self.drafter, self.relay = drafter, relay

    def forward(
        self,
        embedding_VD: Tensor,
        head_VD: Tensor,
        anchor_ids_R: Tensor,
        anchors_R: Tensor,
        keys: list[Tensor],
        values: list[Tensor],
        relay_h_RKD: Tensor | None = None,
        relay_valid_RK: Tensor | None = None,
        bonus_R: Tensor | None = None,
        rejected_R: Tensor | None = None,
    ) -> Tensor:
        """Draft tokens, `[R, J]`.

        Args:
            embedding_VD, head_VD: the target's.
            anchor_ids_R, anchors_R: token and absolute position of slot 0.
            keys, values: the drafter's context of each layer, `[R, G, T, E]`.
            relay_h_RKD, relay_valid_RK: projected rows aligned to the slots, and where there is
                one; none are valid in a request's first round.
            bonus_R, rejected_R: the tokens at the rejection boundary.
        """
        embed = nn.functional.embedding
        dtype = self.drafter.fc.weight.dtype
        correction = carried = None
        if relay_h_RKD is not None:
            assert bonus_R is not None
            assert rejected_R is not None
            assert relay_valid_RK is not None
            parts = (relay_h_RKD, relay_valid_RK, bonus_R, rejected_R)
            carried = self.drafter.carry(ProjectedRows(*(part.unsqueeze(1) for part in parts)))
        if self.relay is not None:
            assert relay_h_RKD is not None
            assert bonus_R is not None
            assert rejected_R is not None
            assert relay_valid_RK is not None
            correction = self.relay(
                relay_h_RKD,
                embed(bonus_R, embedding_VD).to(dtype),
                embed(rejected_R, embedding_VD).to(dtype),
                relay_valid_RK,
            ).unsqueeze(1)
        x_RNKD = slot_inputs(
            embed(anchor_ids_R, embedding_VD).to(dtype).unsqueeze(1),
            embedding_VD[self.drafter.dims.mask_token_id].to(dtype),
            self.drafter.dims.block_size,
            correction,
        )
        context = [KV(*pair) for pair in zip(keys, values, strict=True)]
        hidden_RNJD = draft_hidden(
            self.drafter, x_RNKD, context, anchors_R.unsqueeze(1), carried=carried
        )
        hidden_RJD = hidden_RNJD.squeeze(1)
        logits_RJV = nn.functional.linear(hidden_RJD.to(head_VD.dtype), head_VD)
        if self.drafter.causal_head is None:
            return logits_RJV.argmax(-1)

        def embedded(ids_R: Tensor) -> Tensor:
            return embed(ids_R, embedding_VD).to(dtype)

        return self.drafter.causal_head.unroll(logits_RJV, hidden_RJD, embedded, best, anchor_ids_R)


def program_inputs(
    models: Models, state: DecodeState, rejected: ProjectedRows | None
) -> tuple[Any, ...]:
    """The arguments of `DraftProgram` for the next block of each request."""
    target = models.target
    arguments: list[Any] = [
        target.embedding_weight,
        target.head_weight,
        state.tokens_RT.gather(1, state.anchor_R.unsqueeze(1)).squeeze(1),
        state.anchor_R,
        [layer.keys for layer in state.context],
        [layer.values for layer in state.context],
    ]
    if rejected is not None:
        arguments += [
            rejected.h_BNKD.squeeze(1),
            rejected.valid_BNK.squeeze(1),
            rejected.bonus_BN.squeeze(1),
            rejected.rejected_BN.squeeze(1),
        ]
    return tuple(arguments)


def compile_package(models: Models, folder: Path) -> None:
    """Write `draft.pt2` and its manifest.

    Raises:
        InputError: the target's head has a bias, which the package does not know, or the drafter is
            no block drafter.
    """
    drafter = block_drafter(models)
    if models.target.head_weight is None:
        raise InputError(f"target: {models.target.name} has a head that no package can be made for")
    program = DraftProgram(drafter, models.relay).eval()
    # Two of everything: a size of one would be taken for a constant.
    state = DecodeState.empty(models, 2, 64, 1, rejection=False)
    rows = torch.export.Dim("rows", min=1, max=4096)
    length = torch.export.Dim("length", min=2, max=MAX_CONTEXT)
    context = [{0: rows, 2: length}] * drafter.dims.num_layers
    shapes: list[Any] = [None, None, {0: rows}, {0: rows}, context, context]
    if models.keeps_rejected:
        shapes += [{0: rows}] * 4
    with torch.no_grad():
        exported = torch.export.export(
            program, program_inputs(models, state, state.rejected), dynamic_shapes=tuple(shapes)
        )
    folder.mkdir(parents=True, exist_ok=True)
    torch._inductor.aoti_compile_and_package(
        exported,
        package_path=str(folder / PACKAGE_FILE),
        inductor_configs={"aot_inductor.package_constants_in_so": False},
    )
    (folder / PACKAGE_MANIFEST).write_text(
        json.dumps(manifest(models), indent=2) + "\n", encoding="utf-8"
    )


def block_drafter(models: Models) -> Drafter:
    """The drafter that a package can be made of.

    Raises:
        InputError: it drafts one token after the other.
    """
    if not isinstance(models.drafter, Drafter):
        raise InputError(
            "drafter: a package holds the one step of a block drafter, and this one is EAGLE-3; "
            "use the backend eager or compiled"
        )
    return models.drafter


def manifest(models: Models) -> dict[str, Any]:
    """What a package must agree with to be used."""
    assert models.drafter is not None
    # Keys of their own only where they are true: packages from before these parts are still good.
    parts = {"carryover": models.drafter.carryover, "causal_head": models.drafter.causal_head}
    return {name: True for name, part in parts.items() if part is not None} | {
        "torch": torch.__version__,
        "device": models.target.device.type,
        "dtype": str(models.target.dtype).removeprefix("torch."),
        "relay": models.relay is not None,
        "block_size": models.drafter.dims.block_size,
        "num_layers": models.drafter.dims.num_layers,
        "vocab_size": models.target.vocab_size,
    }


def constants(models: Models, names: list[str]) -> dict[str, Tensor]:
    """The weights a package asks for.

    The RoPE frequencies are no weight and have no name of their own; short ones are inlined.
    """
    drafter = block_drafter(models)
    weights = DraftProgram(drafter, models.relay).state_dict()
    unnamed = [name for name in names if name not in weights]
    if len(unnamed) > 1:
        raise InputError(
            f"drafter: the package asks for {unnamed[1]}, which is no weight of the drafter; "
            "export it again with --compile"
        )
    frequencies = drafter.rotary.inverse_frequencies
    return {name: weights.get(name, frequencies) for name in names}


class PackagedDraft:
    """`rounds.draft` by the package of an export, in which the relay is included.

    The package takes whole buffers, not slices of them: its steps are static.
    """

    def __init__(self, folder: Path, models: Models) -> None:
        """
        Args:
            models: with the relay, if the export has one, whether it will be used or not.

        Raises:
            InputError: there is no package, or it is of another device, dtype or version.
        """
        self._models = models
        block_drafter(models)
        path, ours = folder / PACKAGE_FOLDER / PACKAGE_FILE, manifest(models)
        if not path.is_file():
            raise InputError(
                f"drafter: {folder} holds no {PACKAGE_FOLDER}/{PACKAGE_FILE}; export with "
                "--compile, or use the backend eager or compiled"
            )
        try:
            theirs = json.loads(
                (folder / PACKAGE_FOLDER / PACKAGE_MANIFEST).read_text(encoding="utf-8")
            )
        except (OSError, ValueError) as error:
            raise InputError(
                f"drafter: {folder}/{PACKAGE_FOLDER}/{PACKAGE_MANIFEST} cannot be read ({error}); "
                "export again"
            ) from None
        for name, value in ours.items():
            if theirs.get(name) != value:
                raise InputError(
                    f"drafter: the package of {folder} has {name} {theirs.get(name)}, but here it "
                    f"is {value}; export it again with --compile on this machine"
                )
        self._run = torch._inductor.aoti_load_package(str(path))
        self._run.load_constants(
            constants(models, self._run.get_constant_fqns()), check_full_update=True
        )

    def __call__(self, models: Models, state: DecodeState, mode: RoundMode) -> Drafts:
        """Greedy drafts; rejection sampling needs the drafter's distribution and runs eagerly."""
        if mode.rejection:
            return rounds.draft(models, state, mode, rounds.correct(models, state))
        rejected = state.rejected
        if rejected is None and self._models.keeps_rejected:  # switched off: no valid rows
            rejected = no_rejected_rows(self._models, state.length_R.shape[0])
        return Drafts(self._run(*program_inputs(models, state, rejected)))
