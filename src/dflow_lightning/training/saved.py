"""A trained module from its checkpoint, whatever the method of its run."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from dflow_lightning.errors import InputError
from dflow_lightning.formats import integrity
from dflow_lightning.training.base import BLOCK, CHECKPOINT_KEY
from dflow_lightning.training.eagle3_module import Eagle3Module
from dflow_lightning.training.module import DrafterModule


def load_trained(
    path: str | Path, *, target: str | None = None, **training: Any
) -> DrafterModule | Eagle3Module:
    """Rebuild the module of a checkpoint, on the target it was trained with or a given one.

    Args:
        training: arguments of the module that only a training step needs, such as its loss.

    Raises:
        InputError: `dflow-train` did not write it, or it is of another target.
    """
    content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    if CHECKPOINT_KEY not in content:
        raise InputError(
            f"checkpoint: {path} was not written by dflow-train; give a .ckpt file of a run"
        )
    block = content[CHECKPOINT_KEY].get("method", BLOCK) == BLOCK
    module: type[DrafterModule | Eagle3Module] = DrafterModule if block else Eagle3Module
    return module.from_checkpoint(path, target=target, **training)


def read_recipe(checkpoint: Path) -> dict[str, Any]:
    """What the run was started with, how far it came, and what it measured there."""
    content = read_checkpoint(checkpoint)
    return dict(content.get("recipe") or {}) | {
        "steps": content.get("global_step"),
        "training": training_record(checkpoint.name, content),
    }


def read_checkpoint(checkpoint: Path) -> dict[str, Any]:
    """Content of a checkpoint; its tensors stay on disk and no pickled code is run."""
    if not checkpoint.is_file():
        kind = "is a folder" if checkpoint.is_dir() else "does not exist"
        raise InputError(f"checkpoint: {checkpoint} {kind}; give the .ckpt file of a run")
    try:
        content = torch.load(checkpoint, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # whatever a damaged zip, pickle or tensor raises
        reason = str(error).strip().splitlines()[0].rstrip("")
        raise InputError(f"checkpoint: {checkpoint} cannot be read ({reason})") from error
    if not isinstance(content, dict) or "state_dict" not in content:
        raise InputError(f"checkpoint: {checkpoint} is not of a run; give the .ckpt file of one")
    return content


def training_record(name: str, content: Mapping[str, Any]) -> dict[str, Any] | None:
    """The tau that validation measured for the checkpoint of this file name, on which prompts.

    A checkpoint stores the scores of the best files of its run by their names. The last checkpoint
    is not among them, and neither is a file that was renamed: None, since nothing is known of them.

    Returns:
        `step`, `val_tau_relay_on` or `val_tau_relay_off` (what the run monitored), and
        `validation`: the prompts' file name and sha256, how many of each family, and how they were
        decoded.
    """
    sections = content.get("dflow", {})
    relay = sections.get("relay", {}).get("enabled", False)
    relay = relay or sections.get("drafter", {}).get("carryover", False)
    tau_names = {"val/tau": f"val_tau_relay_{'on' if relay else 'off'}",
                 "val/tau_relay_off": "val_tau_relay_off"}  # fmt: skip
    for state in content.get("callbacks", {}).values():
        scores = {Path(path).name: tau for path, tau in state.get("best_k_models", {}).items()}
        tau_name = tau_names.get(state.get("monitor"))
        if tau_name and name in scores and "validation" in content.get("recipe", {}):
            return {
                "step": content.get("global_step"),
                tau_name: round(float(scores[name]), 6),
                "validation": _validation_prompts(content["recipe"]),
            }
    return None


def _validation_prompts(recipe: Mapping[str, Any]) -> dict[str, Any]:
    data, validation = recipe.get("data") or {}, recipe["validation"]
    path = Path(data.get("validation") or "")
    counts = [validation["prompts_per_family"], data.get("limit_validation")]
    return {
        # With tasks beside it no file alone gives the same tau again.
        "file": ", ".join([path.name, *(data.get("validation_tasks") or [])]),
        "sha256": integrity.file_sha256(path) if path.is_file() else None,
        "per_family": min((count for count in counts if count), default=None),
        "enable_thinking": data.get("enable_thinking", False),
        **{key: validation[key] for key in ("max_new_tokens", "temperature", "batch_size")},
    }
