"""Checks of an exported folder that decode nothing: files, config, taps and draft logits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any

import torch

from dflow_lightning.checks import FailedError, Found, SkippedError
from dflow_lightning.data.prompts import Prompt
from dflow_lightning.decode import SpeculativeDecoder
from dflow_lightning.decode.equality import EqualityCheck
from dflow_lightning.export.draft_logits import draft_logits
from dflow_lightning.formats import integrity
from dflow_lightning.formats.drafter_folder import LoadedDrafter, load_export
from dflow_lightning.formats.engine_contract import check_contract
from dflow_lightning.formats.tap_fingerprint import far_layers, tap_fingerprint
from dflow_lightning.models.dims import DrafterDims, choose_mask_token_id
from dflow_lightning.models.eagle3 import AnyDrafter
from dflow_lightning.models.relay import Relay, RelayConfig
from dflow_lightning.models.target import FrozenTarget


def files_check(subject: Subject) -> Found:
    """Whatever `load_export` refuses."""
    loaded = subject.loaded
    parts = [part for part in (loaded.drafter, loaded.relay) if part is not None]
    tensors = sum(len(part.state_dict()) for part in parts)
    checksums = "checksums hold" if "checksums" in subject.section else "no checksums recorded"
    stored = loaded.config.get("dtype") or loaded.config.get("torch_dtype")
    return f"{tensors} tensors in {stored}, {checksums}", {"tensors": tensors}


def engine_contract_check(subject: Subject) -> Found:
    """Whatever `check_contract` lists."""
    problems = check_contract(subject.folder)
    if problems:
        others = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        raise FailedError(problems[0] + others, {"problems": problems})
    if subject.loaded.drafter.causal_head is not None:
        return "SGLang finds what it looks for; vLLM has no causal head", {}
    return "SGLang and vLLM find what they look for", {}


def config_check(subject: Subject) -> Found:
    """What agrees inside the folder, but not with the target.

    `load_export` has compared the sizes and weights of the target. A drafter has attention heads of
    its own: their number and size need not be the target's. Positions are shared, and so is RoPE.
    """
    dims, target = subject.loaded.drafter.dims, subject.target
    mask = "no mask token"
    if isinstance(dims, DrafterDims):
        choose_mask_token_id(dims.mask_token_id, target)
        mask = f"mask {dims.mask_token_id}"
    ours, theirs = (
        _rope(parameters) for parameters in (dims.rope_parameters, target.config.rope_parameters)
    )
    if ours != theirs:
        raise FailedError(f"rope_parameters is {ours}, but the target's {theirs}; export again")
    layers = ", ".join(str(index) for index in dims.target_layer_ids)
    found = f"taps {layers} of {target.num_layers}, {mask}"
    return f"{found}, RoPE as the target's", {}


def _rope(parameters: dict[str, Any]) -> dict[str, Any]:
    rope = {k: v for k, v in parameters.items() if k != "partial_rotary_factor" and v is not None}
    return {"rope_type": "default"} | rope


def taps_check(subject: Subject) -> Found:
    """The target's layers at the drafter's taps against the fingerprint of the export."""
    recorded = subject.section.get("tap_fingerprint")
    if recorded is None:
        raise SkippedError("the folder records no tap fingerprint")
    layer_ids = subject.loaded.drafter.dims.target_layer_ids
    if list(recorded["layers"]) != [str(index) for index in layer_ids]:
        raise FailedError(
            f"target_layer_ids is {layer_ids}, but the fingerprint is of layers "
            f"{', '.join(recorded['layers'])}"
        )
    found = tap_fingerprint(subject.target, layer_ids, recorded["token_ids"])
    far = far_layers(recorded, found)
    if far:
        layer, distance = next(iter(far.items()))
        raise FailedError(
            f"layer {layer} of the target is {distance:.1%} away from the fingerprint", far
        )
    return f"{len(layer_ids)} layers of the target give what they gave at the export", {}


def checkpoint_check(subject: Subject) -> Found:
    """Weights and draft logits of the files against those of the checkpoint, rounded alike."""
    if subject.checkpoint is None:
        raise SkippedError("no --checkpoint given")
    saved, loaded, target = subject.checkpoint["dflow"], subject.loaded, subject.target
    if saved["target_fingerprint"] != target.fingerprint:
        raise FailedError(
            f"the checkpoint is of {saved['target']}, whose weights are not the target's"
        )
    trained = asdict(type(loaded.drafter.dims)(**saved["drafter"]))
    for name, value in asdict(loaded.drafter.dims).items():
        if trained[name] != value:
            raise FailedError(f"{name} is {value}, but {trained[name]} in the checkpoint")
    relay_saved = saved.get("relay", {"enabled": False})  # EAGLE-3 has none
    if relay_saved["enabled"] != (loaded.relay is not None):
        raise FailedError("relay: one of checkpoint and export has a relay, the other has none")
    if loaded.relay and relay_saved["first_rejected"] != loaded.relay.first_rejected:
        here = loaded.relay.first_rejected
        raise FailedError(f"first_rejected is {here}, which the checkpoint is not")
    ours = rebuild(subject.checkpoint, loaded, target)
    for mine, read in zip(ours, (loaded.drafter, loaded.relay), strict=True):
        if mine is not None and read is not None:
            for name, tensor in mine.state_dict().items():
                if not torch.equal(tensor, read.state_dict()[name]):
                    raise FailedError(f"tensor {name} is not that of the checkpoint")
    blocks = [prompt.token_ids for prompt in subject.prompts[:NUM_FEW]]
    for token_ids in blocks:
        pair = [
            draft_logits(target, drafter, relay, token_ids)
            for drafter, relay in (ours, (loaded.drafter, loaded.relay))
        ]
        if not torch.equal(*pair):
            raise FailedError("draft logits are not those of the checkpoint")
    return f"draft logits of {len(blocks)} blocks are bit for bit the checkpoint's", {}


def rebuild(
    content: dict[str, Any], loaded: LoadedDrafter, target: FrozenTarget
) -> tuple[AnyDrafter, Relay | None]:
    """Drafter and relay of a checkpoint with weights as the export would store them."""
    dims = loaded.drafter.dims  # compared with the checkpoint's before
    drafter, relay = type(loaded.drafter)(dims), None  # type: ignore[arg-type]
    if loaded.relay is not None:
        settings = RelayConfig(**content["dflow"]["relay"])
        relay = settings.build(dims.hidden_size, dims.rms_norm_eps)
    stored = getattr(torch, loaded.config.get("dtype") or loaded.config["torch_dtype"])
    for prefix, part in {"drafter.": drafter, "relay.": relay}.items():
        if part is not None:
            state = {n: content["state_dict"][f"{prefix}{n}"].to(stored) for n in part.state_dict()}
            part.load_state_dict(state)
            part.to(target.device, target.dtype).eval()
    return drafter, relay


NUM_FEW = 4  # prompts for what takes long, or needs no more


@dataclass(frozen=True)
class Subject:
    """What is checked, and with what."""

    folder: Path
    target: FrozenTarget
    prompts: list[Prompt]
    max_new_tokens: int
    suite: Path
    checkpoint: dict[str, Any] | None

    @cached_property
    def loaded(self) -> LoadedDrafter:
        return load_export(self.folder, self.target)

    @cached_property
    def decoder(self) -> SpeculativeDecoder:
        return SpeculativeDecoder.from_export(self.folder, self.target)

    @cached_property
    def equality(self) -> EqualityCheck:
        return EqualityCheck(self.target)

    @property
    def section(self) -> dict[str, Any]:
        """What the export records about itself; empty for a folder that others published."""
        return self.loaded.config.get(integrity.SECTION) or {}

    @property
    def relay_modes(self) -> list[bool]:
        loaded = self.loaded
        used = loaded.relay is not None or loaded.drafter.carryover is not None
        return [True, False] if used else [False]


def interleaved(prompts: Sequence[Prompt]) -> list[Prompt]:
    """Prompts in an order in which every first few are of as many families as there are."""
    families: dict[str, list[Prompt]] = {}
    for prompt in prompts:
        families.setdefault(prompt.family, []).append(prompt)
    return [one for one in chain(*zip_longest(*families.values())) if one is not None]
