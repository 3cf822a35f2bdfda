"""Reads a drafter from its folder, strictly: whatever does not fit is an error that names it.

Serving stacks silently skip unknown tensors, leave missing ones random and fall back to defaults;
here that is refused. Only safetensors and JSON are read. A folder that
`dflow-train export` wrote is also compared with what it recorded (`integrity.py`).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflow_lightning.errors import InputError
from dflow_lightning.formats import integrity
from dflow_lightning.formats.config_keys import (
    CAUSAL_HEAD,
    DFLASH_ARCHITECTURE,
    DFLASH_SECTION,
    EAGLE3_ARCHITECTURE,
    EAGLE3_SAME_MODEL,
    EAGLE3_SECTION,
    EAGLE3_TAPS,
    SAME_MODEL,
    SIZES,
    TOP,
    other_models,
)
from dflow_lightning.formats.relay_folder import load_relay, load_tensors, read_config
from dflow_lightning.models.carryover import Carryover
from dflow_lightning.models.dims import HEAD, DrafterDims, LayerDims, check_mask_token_id
from dflow_lightning.models.drafter import Drafter
from dflow_lightning.models.eagle3 import AnyDrafter, Eagle3Dims, Eagle3Drafter
from dflow_lightning.models.relay import Relay
from dflow_lightning.models.target import FrozenTarget

FORMAT_VERSION = 1
LAYOUT = "anchor_first"
HEAD_PREFIX = "causal_head."  # of our names of its tensors; published ones begin without
CHAIN = "chain"  # the layout of drafts that are made one after the other


@dataclass(frozen=True)
class LoadedDrafter:
    """A drafter read from files, in the target's dtype and on its device.

    Args:
        relay: None when the folder is a DFlash or an EAGLE-3 drafter.
        config: config.json as it stands.
    """

    drafter: AnyDrafter
    relay: Relay | None
    config: dict[str, Any]


def load_export(folder: Path, target: FrozenTarget) -> LoadedDrafter:
    """Read an export of `dflow-train export`, or a DFlash folder in z-lab's layout, for `target`.

    An EAGLE-3 drafter is read as well, where embedding, head and vocabulary are the target's.

    Raises:
        InputError: the folder is incomplete, damaged, of another model, or of another target.
    """
    folder = Path(folder)
    config = read_export_config(folder)
    eagle3 = config.get("architectures") == [EAGLE3_ARCHITECTURE]
    dims = eagle3_dims(config, folder) if eagle3 else dims_from_config(config, folder)
    check_same_target(config, dims, target, folder)
    if "dflow_config" in config:  # folders that others publish may hold their own code
        integrity.check_files(folder)
    drafter = Eagle3Drafter(dims) if isinstance(dims, Eagle3Dims) else Drafter(dims)
    if isinstance(drafter, Drafter):
        drafter.carryover = None  # its weights are in a file of their own
    dtype = config.get("dtype") or config.get("torch_dtype")
    dtype = dtype if "dflow_config" in config else None
    load_tensors(drafter, folder / "model.safetensors", dtype, inner=HEAD_PREFIX)
    relay = load_relay(folder, config, dims.hidden_size)
    if isinstance(drafter, Drafter) and drafter.dims.carryover:
        drafter.carryover = Carryover(dims.hidden_size)
        load_carryover(drafter.carryover, folder, config)
    integrity.check_export_unchanged(folder, config)
    for part in (drafter, relay):
        if part is not None:
            part.to(target.device, target.dtype).eval().requires_grad_(False)
    return LoadedDrafter(drafter, relay, config)


def read_export_config(folder: Path) -> dict[str, Any]:
    """The config.json of a drafter; for commands, before a large target is loaded.

    Raises:
        InputError: there is no such folder, or its config is missing or damaged.
    """
    require_folder(folder)
    return read_config(folder / "config.json")


def require_folder(folder: Path) -> None:
    """Raise `InputError` where a drafter's folder is none."""
    if not folder.is_dir():
        what = "is not a folder" if folder.exists() else "does not exist"
        raise InputError(f"drafter: {folder} {what}; give a folder that dflow-train export wrote")


def load_carryover(carryover: Carryover, folder: Path, config: dict[str, Any]) -> None:
    """Fill the carryover that config.json promises.

    Raises:
        InputError: its folder is missing, damaged, not the promised one, or at odds with the relay.
    """
    promised = config["dflow_config"]["carryover"]
    if read_config(folder / "carryover/config.json") != promised:
        raise InputError(
            f"drafter: {folder}/carryover/config.json differs from dflow_config in config.json; "
            "export it again"
        )
    first = promised.get("first_rejected")
    relay = config["dflow_config"].get("relay")
    if type(first) is not bool or (relay and relay.get("first_rejected") != first):
        raise InputError(
            f"drafter: {folder}/carryover/config.json has first_rejected {first}, which is not "
            "that of the relay; export it again"
        )
    load_tensors(carryover, folder / integrity.CARRYOVER_FILE, None)
    carryover.first_rejected = first


def dims_from_config(config: dict[str, Any], folder: Path) -> DrafterDims:
    """The drafter's dimensions, from config.json alone."""
    draft = config.get(DFLASH_SECTION) or {}
    carryover = bool((config.get("dflow_config") or {}).get("carryover"))
    if carryover != (folder / "carryover").is_dir():
        raise InputError(
            f"drafter: {folder} {'lacks its' if carryover else 'has a'} carryover folder"
            f"{'' if carryover else ' that its config.json does not know'}; export the drafter "
            "again"
        )
    if config.get("architectures") != [DFLASH_ARCHITECTURE]:
        raise InputError(
            f"drafter: {folder} has architectures {config.get('architectures')}; only "
            f"{[DFLASH_ARCHITECTURE]} and {[EAGLE3_ARCHITECTURE]} can be decoded"
        )
    # SGLang also serves causal heads whose slots are shifted, which we cannot decode.
    supported = {**SAME_MODEL, "shift_label": False, "projector_type": CAUSAL_HEAD}
    _check_same_model(supported, {DFLASH_SECTION: draft, TOP: config}, folder)
    kinds = config.get("layer_types", ["full_attention"])
    kinds = ["full_attention"] if kinds is None else kinds
    if not isinstance(kinds, list) or any(kind != "full_attention" for kind in kinds):
        named = sorted(map(str, kinds)) if isinstance(kinds, list) else kinds
        raise InputError(
            f"drafter: {folder} has layer_types {named}; only full_attention can be decoded"
        )
    if (
        "block_size" in draft
        and config.get("block_size", draft["block_size"]) != draft["block_size"]
    ):
        raise InputError(
            f"drafter: {folder} has block_size {config['block_size']} at the top of config.json "
            f"and {draft['block_size']} in dflash_config; make both that of the training"
        )

    places = draft | {k: v for k, v in config.items() if draft.get(k) is None}
    own = ("mask_token_id", *(HEAD if draft.get("projector_type") else ()))
    return DrafterDims(
        carryover=carryover,
        **{key: _need(places, key, folder) for key in own},
        **_numbers(config, places, folder),
    )


def eagle3_dims(config: dict[str, Any], folder: Path) -> Eagle3Dims:
    """The dimensions of an EAGLE-3 drafter, from config.json alone.

    Only our own exports hold the number of drafts; engines take it from their command line.
    """
    eagle = config.get(EAGLE3_SECTION)
    if not isinstance(eagle, dict):
        raise InputError(f"drafter: {folder}/config.json lacks eagle_config; export it again")
    _check_same_model(EAGLE3_SAME_MODEL, {EAGLE3_SECTION: eagle, TOP: config}, folder)
    vocabularies = (None, config.get("vocab_size"))
    if config.get("draft_vocab_size") not in vocabularies:
        raise InputError(
            f"drafter: {folder} has a draft vocabulary of {config['draft_vocab_size']} tokens; "
            "only drafters over the whole vocabulary, with the target's head, can be decoded"
        )
    taps = eagle.get(EAGLE3_TAPS)
    places = (config.get("dflow_config") or {}) | config | {"target_layer_ids": taps}
    dims = Eagle3Dims(**_numbers(config, places, folder))
    if config.get(EAGLE3_TAPS) not in (None, [index + 1 for index in dims.target_layer_ids]):
        raise InputError(
            f"drafter: {folder} has {EAGLE3_TAPS} {config[EAGLE3_TAPS]} at the top of "
            "config.json, where layers count one more than the "
            f"{dims.target_layer_ids} in {EAGLE3_SECTION}; make them agree"
        )
    return dims


def _check_same_model(
    same: Mapping[str, Any], places: dict[str, dict[str, Any]], folder: Path
) -> None:
    """Refuse keys that would make another model than we decode."""
    for key, _, value in other_models(same, places):
        raise InputError(f"drafter: {folder} sets {key} to {value}, which is not supported")


def _numbers(config: dict[str, Any], places: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The numbers of `LayerDims`, most of which have the same name in config.json."""
    same_name = (*SIZES, "rms_norm_eps", "block_size", "target_layer_ids")
    numbers = {key: _need(places, key, folder) for key in same_name}
    numbers["num_layers"] = numbers.pop("num_hidden_layers")
    return numbers | {
        "rope_parameters": rope_from_config(config, folder),
        "initializer_range": config.get("initializer_range", 0.02),
    }


def _need(places: dict[str, Any], key: str, folder: Path) -> Any:
    value = places.get(key)
    if value is None:
        raise InputError(f"drafter: {folder}/config.json lacks {key}; export the drafter again")
    if not _fits(key, value):
        raise InputError(
            f"drafter: {folder}/config.json has {key} {value!r}, which is of the wrong type; "
            "export the drafter again"
        )
    return value


def _fits(key: str, value: Any) -> bool:
    if key == "target_layer_ids":
        return isinstance(value, list) and all(type(number) is int for number in value)
    return type(value) is int or (key == "rms_norm_eps" and type(value) is float)


def rope_from_config(config: dict[str, Any], folder: Path) -> dict[str, Any]:
    """RoPE in either of its two schemas; where both stand they have to agree."""
    new = config.get("rope_parameters")
    theta, scaling = config.get("rope_theta"), config.get("rope_scaling")
    if not isinstance(new or {}, dict) or not isinstance(scaling or {}, dict):
        raise InputError(
            f"drafter: {folder}/config.json has rope_parameters {new!r} and rope_scaling "
            f"{scaling!r}; both must be JSON objects, copy the target's"
        )
    if new is None:
        if theta is None:
            raise InputError(f"drafter: {folder}/config.json lacks rope_theta; copy the target's")
        new = {"rope_type": "default", **(scaling or {}), "rope_theta": theta}
    if theta is not None and theta != new.get("rope_theta"):
        raise InputError(
            f"drafter: {folder} has rope_theta {theta}, but {new.get('rope_theta')} in "
            "rope_parameters; make both the target's"
        )
    base = new.get("rope_theta", 1)
    if type(base) not in (int, float) or base <= 0:
        raise InputError(
            f"drafter: {folder} has rope_theta {base!r}, which is not a positive number; copy the "
            "target's"
        )
    return dict(new)


def check_same_target(
    config: dict[str, Any], dims: LayerDims, target: FrozenTarget, folder: Path
) -> None:
    """Refuse a drafter that was trained for another target."""
    ours = config.get("dflow_config") or {}
    if ours.get("format_version", FORMAT_VERSION) > FORMAT_VERSION:
        raise InputError(
            f"drafter: {folder} has format version {ours['format_version']}, newer than "
            f"{FORMAT_VERSION}; update dflow-lightning"
        )
    layout = LAYOUT if isinstance(dims, DrafterDims) else CHAIN
    if ours.get("layout", layout) != layout:
        raise InputError(
            f"drafter: {folder} has block layout {ours['layout']}; only {layout} can be decoded"
        )
    pairs = {
        "hidden_size": (dims.hidden_size, target.hidden_size),
        "vocab_size": (dims.vocab_size, target.vocab_size),
        "num_target_layers": (dims.num_target_layers, target.num_layers),
    }
    for key, (drafter_value, target_value) in pairs.items():
        if drafter_value != target_value:
            raise InputError(
                f"drafter: {folder} is for a target with {key} {drafter_value}, but {target.name} "
                f"has {target_value}; give the target it was trained for"
            )
    if isinstance(dims, DrafterDims):
        check_mask_token_id(dims.mask_token_id, target)
    trained_for = ours.get("target") or {}
    if trained_for.get("fingerprint", target.fingerprint) != target.fingerprint:
        raise InputError(
            f"drafter: {folder} was trained for {trained_for.get('name')}, whose weights "
            f"are not those of {target.name}; give that target"
        )
