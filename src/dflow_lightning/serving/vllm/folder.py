"""The relay of the drafter that vLLM serves: where it lies, whether it may be used, its weights.

Needs torch and safetensors alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflow_lightning.errors import InputError
from dflow_lightning.formats import integrity
from dflow_lightning.formats.relay_folder import load_relay, read_config
from dflow_lightning.models.relay import Relay


@dataclass(frozen=True)
class FoundRelay:
    """A relay as its folder has it, on the CPU."""

    folder: Path
    relay: Relay


def local_folder(model: str, revision: str | None) -> Path | None:
    """Where the drafter lies; of a hub id, a snapshot of what the relay needs.

    None for a hub id that cannot be reached: vLLM says so itself.
    """
    if Path(model).is_dir():
        return Path(model)
    from huggingface_hub import snapshot_download  # comes with vLLM
    from huggingface_hub.errors import (
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
    )

    wanted = ["config.json", "relay/*"]
    try:
        return Path(snapshot_download(model, revision=revision, allow_patterns=wanted))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError):
        return None


def read_folder(folder: Path) -> FoundRelay | None:
    """The relay of a folder, None for a DFlash drafter of any origin.

    Raises:
        InputError: the folder is damaged, is not what it was when it was exported, or is of a
            drafter with carryover.
    """
    if not (folder / "config.json").is_file():
        return None  # vLLM says so itself
    config = read_config(folder / "config.json")
    ours = "dflow_config" in config
    if not ours and not (folder / "relay").is_dir():
        return None
    if (config.get("dflow_config") or {}).get("carryover"):
        raise InputError(
            f"drafter: {folder} was trained with carryover, which is not built into vLLM; serve "
            "a drafter without it, or decode this one with dflow-train"
        )
    if ours:
        integrity.check_files(folder)
    relay = load_relay(folder, config, _hidden_size(folder, config))
    integrity.check_export_unchanged(folder, config)
    if relay is None:
        return None
    return FoundRelay(folder, relay.eval().requires_grad_(False))


def _hidden_size(folder: Path, config: dict[str, Any]) -> int:
    """The drafter's width, in either layout."""
    layers = config.get("transformer_layer_config") or config
    hidden_size = layers.get("hidden_size")
    if type(hidden_size) is not int:
        raise InputError(
            f"drafter: {folder}/config.json has hidden_size {hidden_size!r}; export the drafter "
            "again"
        )
    return hidden_size
