"""The folder that serving stacks load: writing it from a checkpoint, and reading it back.

    config.json               keys as z-lab writes them, and `dflow_config`, which engines ignore
    model.safetensors         the DFlash body alone, under its published tensor names
    relay/config.json         a sub-folder: engines read every safetensors file beside the body
    relay/relay.safetensors
    carryover/config.json     the same for carryover, of a drafter that has it
    carryover/carryover.safetensors
    README.md                 model card

`dflow_config` also holds what proves the folder later: checksums (`integrity.py`), what the tapped
layers of the target give (`tap_fingerprint.py`) and the tau of the training (`training_record`).
Only safetensors is ever read. Shapes: B batch, S context rows, N blocks, K block size, D hidden.
"""

import json
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from dflow_lightning import files
from dflow_lightning.decode.state import Models
from dflow_lightning.errors import InputError
from dflow_lightning.export.card import eagle3_card, model_card
from dflow_lightning.export.config import (
    carryover_config,
    drafter_config,
    eagle3_config,
    relay_config,
)
from dflow_lightning.export.draft_logits import eagle3_logits
from dflow_lightning.formats import integrity
from dflow_lightning.formats.drafter_folder import (
    HEAD_PREFIX,
    LoadedDrafter,
    load_export,
)
from dflow_lightning.formats.tap_fingerprint import tap_fingerprint
from dflow_lightning.models.drafter import Drafter
from dflow_lightning.models.eagle3 import AnyDrafter, Eagle3Drafter
from dflow_lightning.models.relay import Relay
from dflow_lightning.models.target import FrozenTarget

KNOWN_NAMES = {"config.json", "model.safetensors", "relay", "carryover", "README.md", "decode"}


def export_drafter(
    drafter: AnyDrafter,
    relay: Relay | None,
    target: FrozenTarget,
    out: Path,
    *,
    dtype: Literal["bfloat16", "float32"] = "bfloat16",
    compile: bool = False,
    recipe: dict[str, Any] | None = None,
) -> None:
    """Write an export, read it back, compare, and only then let it take its place.

    Args:
        compile: add the compiled draft step (`decode.package`).
        recipe: of the run, with its scores (`Checkpoint.recipe_and_scores`), for the model card and
            the tau of its validation.

    Raises:
        InputError: `out` holds something else, or a weight is not finite.
    """
    check_replaceable(out)
    weights = _weights(drafter, dtype)
    if isinstance(drafter, Eagle3Drafter):
        config, card = eagle3_config(drafter.dims, target, dtype), eagle3_card
    else:
        config = drafter_config(drafter.dims, relay, target, dtype, drafter.carryover)
        card = model_card
    config["dflow_config"] |= {
        "training": (recipe or {}).get("training"),
        "tap_fingerprint": tap_fingerprint(target, drafter.dims.target_layer_ids),
    }
    with files.staged_folder(out) as folder:
        body = {name: t for name, t in weights.items() if not name.startswith("carryover.")}
        _save(body, folder / "model.safetensors")
        if relay is not None:
            (folder / "relay").mkdir()
            _write_json(folder / "relay/config.json", relay_config(relay))
            _save(_weights(relay, dtype), folder / "relay/relay.safetensors")
        if isinstance(drafter, Drafter) and drafter.carryover is not None:
            (folder / "carryover").mkdir()
            _write_json(folder / "carryover/config.json", carryover_config(drafter.carryover))
            _save(_weights(drafter.carryover, dtype), folder / integrity.CARRYOVER_FILE)
        integrity.record(folder, config)
        (folder / "README.md").write_text(card(config, recipe or {}), encoding="utf-8")
        _write_json(folder / "config.json", config)  # last: without it a folder is no export
        # Still staged: a folder that does not load, or loads something else, never gets its name.
        loaded = load_export(folder, target)
        _compare(loaded, drafter, relay, target, getattr(torch, dtype))
        if compile:
            from dflow_lightning.decode.package import PACKAGE_FOLDER, compile_package

            models = Models(target, loaded.drafter, loaded.relay)
            compile_package(models, folder / PACKAGE_FOLDER)
            integrity.record(folder, config)  # with the package's checksum
            _write_json(folder / "config.json", config)


def check_replaceable(out: Path) -> None:
    """Refuse to replace anything but an earlier export."""
    if not out.exists():
        return
    if not out.is_dir():
        raise InputError(f"out: {out} is a file; name a folder that does not exist yet")
    names = {path.name for path in out.iterdir()}
    if not names:
        return
    unknown = sorted(names - KNOWN_NAMES)
    if unknown:
        raise InputError(
            f"out: {out} holds {unknown[0]}, which no export wrote; name another folder"
        )
    try:
        ours = "dflow_config" in json.loads((out / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        ours = False
    if not ours:
        raise InputError(f"out: {out} is not an export of dflow-train; name another folder")


def _weights(part: nn.Module, dtype: str) -> dict[str, Tensor]:
    weights = {}
    for name, tensor in part.state_dict().items():
        if not tensor.isfinite().all():
            raise InputError(
                f"checkpoint: {name} holds values that are not finite; export an earlier one"
            )
        # `save_file` takes contiguous tensors only.
        weights[name.removeprefix(HEAD_PREFIX)] = (
            tensor.detach().to("cpu", getattr(torch, dtype)).contiguous()
        )
    return weights


def _save(weights: dict[str, Tensor], path: Path) -> None:
    save_file(weights, path, metadata={"format": "pt"})
    path.chmod(path.parent.stat().st_mode & 0o666)  # the library lets its owner alone read it


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _compare(
    loaded: LoadedDrafter,
    drafter: AnyDrafter,
    relay: Relay | None,
    target: FrozenTarget,
    dtype: torch.dtype,
) -> None:
    """The drafter built from the files drafts what the one in memory does, rounded to `dtype`."""
    ours, theirs = type(drafter)(drafter.dims), loaded.drafter  # type: ignore[arg-type]
    # Rounded as the files are, equality is exact and needs no tolerance.
    rounded = {name: t.to(target.device, dtype) for name, t in drafter.state_dict().items()}
    ours.load_state_dict(rounded)
    ours = ours.to(target.device, target.dtype)
    outputs = [_probe(one, target) for one in (ours, theirs)]
    same = torch.equal(*outputs) and (relay is None) == (loaded.relay is None)
    # A causal head and carryover are not in the probe's way.
    written, read = ours.state_dict(), theirs.state_dict()
    same &= written.keys() == read.keys()
    same = same and all(torch.equal(tensor, read[name]) for name, tensor in written.items())
    if relay is not None and loaded.relay is not None:
        relay_state = loaded.relay.state_dict()
        same &= all(
            torch.equal(t.to(dtype).to(relay_state[name]), relay_state[name])
            for name, t in relay.state_dict().items()
        )
    if not same:
        raise RuntimeError("the export read back is not the drafter that was written")


@torch.inference_mode()
def _probe(drafter: AnyDrafter, target: FrozenTarget) -> Tensor:
    """What a drafter makes of one block, the same block each time."""
    if isinstance(drafter, Eagle3Drafter):
        return eagle3_logits(target, drafter, [0, 1, 2, 3])
    dims = drafter.dims
    noise = torch.Generator().manual_seed(0)
    shape = (1, 4, len(dims.target_layer_ids) * dims.hidden_size)
    taps_BSC = torch.randn(shape, generator=noise).to(target.device, target.dtype)
    x_BNKD = torch.randn(1, 1, dims.block_size, dims.hidden_size, generator=noise).to(taps_BSC)
    positions_BS = torch.arange(4, device=target.device).unsqueeze(0)
    anchors_BN = torch.full((1, 1), 4, device=target.device)
    context = drafter.context_kv(drafter.project(taps_BSC), positions_BS)
    return drafter(x_BNKD, context, anchors_BN)
