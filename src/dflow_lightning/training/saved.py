"""The one place that opens a checkpoint of `fit`: its recipe, its scores, its trained module."""

import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch

from dflow_lightning.errors import InputError
from dflow_lightning.formats import integrity
from dflow_lightning.models.device import run_on
from dflow_lightning.training.base import BLOCK, CHECKPOINT_KEY, TargetConfig
from dflow_lightning.training.eagle3_module import Eagle3Module
from dflow_lightning.training.module import DrafterModule

CPU = torch.device("cpu")
ZIP_START = b"PK\x03\x04"


@dataclass(frozen=True)
class Checkpoint:
    """An opened checkpoint.

    Its tensors are mapped from the file, not read: whoever needs only the recipe does not wait for
    gigabytes of optimizer state, and a file that is replaced meanwhile changes nothing here.
    """

    path: Path
    content: dict[str, Any]

    def require_identity(self) -> dict[str, Any]:
        """What the module was built from.

        Raises:
            InputError: a run of another program wrote the checkpoint.
        """
        if CHECKPOINT_KEY not in self.content:
            raise InputError(
                f"checkpoint: {self.path} was not written by dflow-train; "
                "give the .ckpt file of a run"
            )
        return self.content[CHECKPOINT_KEY]

    def recipe_and_scores(self) -> dict[str, Any]:
        """The recipe of the run, with the steps it had made and the tau it had measured."""
        return dict(self.content.get("recipe") or {}) | {
            "steps": self.content.get("global_step"),
            "training": training_record(self.path.name, self.content),
        }


def open_checkpoint(path: Path, field: str = "checkpoint") -> Checkpoint:
    """Open the checkpoint of a run; no pickled code is run.

    Args:
        field: the option that named it, for the message.

    Raises:
        InputError: the file is missing, damaged or something else.
    """
    content = read_torch_file(path, field, advice="give the .ckpt file of a run")
    if "state_dict" not in content:
        raise InputError(f"{field}: {path} is not of a run; give the .ckpt file of a run")
    return Checkpoint(path, content)


def read_torch_file(path: Path, field: str, *, advice: str) -> dict[str, Any]:
    """The dictionary in a file of `torch.save`, its tensors mapped from the file.

    Raises:
        InputError: the file is missing, damaged or something else.
    """
    if not path.is_file():
        kind = "is a folder" if path.is_dir() else "does not exist"
        raise InputError(f"{field}: {path} {kind}; {advice}")
    try:
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # whatever a damaged zip, pickle or tensor raises
        reason = _why_unreadable(path, error)
        raise InputError(f"{field}: {path} cannot be read ({reason}); {advice}") from error
    if not isinstance(content, dict):
        raise InputError(f"{field}: {path} is not of a run; {advice}")
    return content


def _why_unreadable(path: Path, error: Exception) -> str:
    """The reason in a few words; torch's own run over paragraphs and propose to unpickle."""
    try:
        with path.open("rb") as file:
            start = file.read(len(ZIP_START))
    except OSError as denied:
        return denied.strerror or str(denied)
    if not start:
        return "it is empty"
    if start != ZIP_START:
        return "it is not a checkpoint"
    if not zipfile.is_zipfile(path):  # the table of contents of a zip is its last part
        return "it is truncated"
    if isinstance(error, UnpicklingError):
        return "it holds pickled code, which is never run"
    return next(iter(str(error).strip().splitlines()), type(error).__name__).rstrip(".")


def load_trained(
    checkpoint: Checkpoint,
    *,
    target: str | None = None,
    device: torch.device = CPU,
    **training: Any,
) -> DrafterModule | Eagle3Module:
    """Rebuild the module of a checkpoint, on the target it was trained with or a given one.

    Args:
        target: hub id or folder of the target, where it is no longer that of the run.
        device: where module and target go; it also decides on a target dtype of `auto`.
        training: arguments of the module that only a training step needs, such as its loss.

    Raises:
        InputError: `dflow-train` did not write it, or it is of another target.
    """
    saved = checkpoint.require_identity()
    config = TargetConfig(**saved["target_config"])
    config.path = config.path if target is None else target
    kind: type[DrafterModule | Eagle3Module] = (
        DrafterModule if saved.get("method", BLOCK) == BLOCK else Eagle3Module
    )
    with run_on(device):
        module = kind.from_checkpoint(checkpoint.content, config, **training)
    module.target.to(device)  # which is no part of the module
    return module.to(device)


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
    tau_names = {
        "val/tau": f"val_tau_relay_{'on' if relay else 'off'}",
        "val/tau_relay_off": "val_tau_relay_off",
    }
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
