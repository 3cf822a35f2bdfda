"""Reads the files of an export, strictly, with torch and safetensors alone.

The decoder reads a drafter through this, and so does the plug-in inside a serving engine, whose
environment has none of our other dependencies.
"""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from dflow_lightning.errors import InputError
from dflow_lightning.models.relay import TERMS, Relay

# What is a JSON object in config.json, or not there: with the one that it stands in, outer first.
OBJECTS = (
    (None, "dflash_config"), (None, "dflow_config"), (None, "eagle_config"),
    (None, "rope_parameters"), (None, "rope_scaling"),
    ("dflow_config", "target"), ("dflow_config", "relay"), ("dflow_config", "carryover"),
    ("dflow_config", "training"),
)  # fmt: skip
STORED_DTYPES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}


def read_config(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise InputError(f"drafter: {path.parent} holds no {path.name}; export the drafter again")
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise InputError(
            f"drafter: {path} is not JSON ({error}); export the drafter again"
        ) from None
    if not isinstance(config, dict):
        raise InputError(f"drafter: {path} is not a JSON object; export the drafter again")
    for outer, inner in OBJECTS:
        place = config if outer is None else config.get(outer) or {}
        if not isinstance(place.get(inner, {}), dict | None):
            name = inner if outer is None else f"{outer}.{inner}"
            raise InputError(
                f"drafter: {name} in {path} is not a JSON object; export the drafter again"
            )
    version = (config.get("dflow_config") or {}).get("format_version", 1)
    if type(version) is not int:
        raise InputError(
            f"drafter: dflow_config.format_version in {path} is {version!r}, which is no number; "
            "export the drafter again"
        )
    return config


def load_tensors(part: nn.Module, path: Path, dtype: str | None, *, inner: str = "") -> None:
    """Fill a module from one safetensors file whose names, shapes and dtypes fit exactly.

    Args:
        inner: prefix of a submodule's parameter names that the file leaves out.
    """
    if not path.is_file():
        raise InputError(
            f"drafter: {path.parent} holds no {path.name}; only safetensors files are read"
        )
    own = {name.removeprefix(inner): name for name in part.state_dict()}
    expected = {stored: part.state_dict()[name] for stored, name in own.items()}
    tensors: dict[str, Tensor] = {}
    try:
        with safe_open(path, framework="pt") as file:
            names = set(file.keys())
            _check_names(names, set(expected), path)
            for name in sorted(names):
                stored = file.get_slice(name)
                _check_tensor(name, stored.get_shape(), list(expected[name].shape), path)
                kind = STORED_DTYPES.get(stored.get_dtype())
                if kind is None or (dtype and kind != dtype):
                    raise InputError(
                        f"drafter: tensor {name} of {path} is {kind or stored.get_dtype()}, not "
                        f"{dtype or 'a floating-point type'}; export the drafter again"
                    )
                tensors[name] = file.get_tensor(name)
    except SafetensorError as error:
        raise InputError(
            f"drafter: {path} is damaged ({error}); export the drafter again"
        ) from None
    for name, tensor in tensors.items():
        if not tensor.isfinite().all():
            raise InputError(
                f"drafter: tensor {name} of {path} holds values that are not finite; export an "
                "earlier checkpoint"
            )
    with torch.no_grad():
        part.load_state_dict({own[name]: tensor for name, tensor in tensors.items()})


def _check_names(names: set[str], expected: set[str], path: Path) -> None:
    missing, unknown = sorted(expected - names), sorted(names - expected)
    if missing:
        others = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise InputError(
            f"drafter: {path} lacks tensor {missing[0]}{others}; export the drafter again"
        )
    if unknown:
        others = f" and {len(unknown) - 1} more" if len(unknown) > 1 else ""
        raise InputError(
            f"drafter: {path} holds the unknown tensor {unknown[0]}{others}; export the drafter "
            "again"
        )


def _check_tensor(name: str, stored: list[int], expected: list[int], path: Path) -> None:
    if list(stored) != expected:
        raise InputError(
            f"drafter: tensor {name} of {path} has shape {list(stored)}, but config.json asks for "
            f"{expected}; export the drafter again"
        )


def load_relay(folder: Path, config: dict[str, Any], hidden_size: int) -> Relay | None:
    """The relay; a folder without one is a DFlash drafter.

    Args:
        config: config.json of the folder.
        hidden_size: of the drafter.

    Raises:
        InputError: the relay is missing, damaged or not the one that config.json promises.
    """
    promised = (config.get("dflow_config") or {}).get("relay")
    present = (folder / "relay").is_dir()
    if promised and not present:
        raise InputError(f"drafter: {folder} lacks its relay folder; export the drafter again")
    if not present:
        return None
    if "dflow_config" in config and not promised:
        raise InputError(
            f"drafter: {folder} has a relay folder that its config.json does not know; export it "
            "again"
        )
    settings = read_config(folder / "relay/config.json")
    if promised and settings != promised:
        raise InputError(
            f"drafter: {folder}/relay/config.json differs from dflow_config in config.json; "
            "export it again"
        )
    missing = [key for key in ("hidden_size", "first_rejected", "norm_eps") if key not in settings]
    if missing:
        raise InputError(f"drafter: {folder}/relay/config.json lacks {missing[0]}; export it again")
    terms = settings.get("terms", "both")  # older exports have no such key
    if terms not in TERMS:
        raise InputError(
            f"drafter: {folder}/relay/config.json has terms {terms!r}, which is none of "
            f"{', '.join(TERMS)}; update dflow-lightning or export it again"
        )
    relay = Relay(
        hidden_size,
        settings["hidden_size"],
        norm_eps=settings["norm_eps"],
        normalize_boundary=settings.get("normalize_boundary", False),  # older exports did not
        terms=terms,
        first_rejected=bool(settings["first_rejected"]),
    )
    load_tensors(relay, folder / "relay/relay.safetensors", None)
    return relay
