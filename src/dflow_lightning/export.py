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
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from dflow_lightning import atomic, integrity
from dflow_lightning.decode.state import Models
from dflow_lightning.drafter import Drafter
from dflow_lightning.drafter_folder import (
    HEAD_PREFIX,
    LoadedDrafter,
    load_export,
)
from dflow_lightning.eagle3 import AnyDrafter, Eagle3Drafter
from dflow_lightning.eagle3_export import eagle3_card, eagle3_config, step_logits
from dflow_lightning.errors import InputError
from dflow_lightning.export_config import carryover_config, drafter_config, relay_config
from dflow_lightning.model_card import model_card
from dflow_lightning.relay import Relay
from dflow_lightning.tap_fingerprint import tap_fingerprint
from dflow_lightning.target import FrozenTarget
from dflow_lightning.terminal import labelled, print_json

KNOWN_NAMES = {"config.json", "model.safetensors", "relay", "carryover", "README.md", "decode"}


def export_command(
    *,
    checkpoint: Path,
    out: Path,
    format: Literal["dflash", "speculators"] = "dflash",
    dtype: Literal["bfloat16", "float32"] = "bfloat16",
    compile: bool = False,
    target: str | None = None,
    register: bool = True,
    register_as: str | None = None,
    json: bool = False,
) -> None:
    """Write the folder that SGLang, vLLM and `dflow-train decode` load.

    Args:
        checkpoint: a checkpoint file written by `dflow-train fit`.
        out: folder to write; an earlier export there is replaced in one step.
        format: `dflash` is the layout of published DFlash drafters; `speculators` that of the
            library of this name, which vLLM reads too, but not `dflow-train decode` and SGLang.
        dtype: how the weights are stored.
        compile: add `decode/draft.pt2`, the draft step with relay compiled for this kind of device
            (`dflow-train decode --backend package`); about a minute.
        target: where the target is now, if not where it was trained with.
        register: add it to the tracking store of its run, as a version of a model.
        register_as: the model's name there; by default the experiment's and the target's.
        json: print one JSON object instead of a line.
    """
    check_replaceable(out)
    recipe = read_recipe(checkpoint)
    from dflow_lightning.trained import load_trained  # Lightning, which reading never needs

    write: Any = partial(export_drafter, compile=compile)
    if format == "speculators":
        if compile:
            raise InputError("compile: only the format dflash holds a package; leave one out")
        from dflow_lightning.export_speculators import export_speculators

        write = export_speculators
    module = load_trained(checkpoint, target=target)
    if isinstance(module.drafter, Eagle3Drafter) and (compile or format != "dflash"):
        option = "compile" if compile else f"format {format}"
        raise InputError(
            f"{option}: an EAGLE-3 drafter has one format and no package; leave it out"
        )
    write(
        module.drafter,
        module.relay,
        module.target,
        out,
        first_rejected=module.first_rejected,
        dtype=dtype,
        recipe=recipe,
    )
    size = sum(path.stat().st_size for path in out.rglob("*.safetensors"))
    drafts = module.drafter.dims.block_size - 1
    if json:
        facts = {"out": str(out), "format": format, "dtype": dtype, "weight_bytes": size}
        print_json(facts | {"relay": module.relay is not None, "num_speculative_tokens": drafts})
    else:
        relay = "with relay" if module.relay else "no relay"
        relay += ", with carryover" if module.drafter.carryover is not None else ""
        said = f"{dtype}, {size / 1e6:.1f} MB, {relay}; num_speculative_tokens is {drafts}"
        print(labelled("", f"exported to {out}: {said}"))
    if register:  # last: the export is good whatever becomes of its record
        from dflow_lightning.registry import register_export

        register_export(checkpoint, out, register_as, paper=sys.stderr if json else sys.stdout)


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


def export_drafter(
    drafter: AnyDrafter,
    relay: Relay | None,
    target: FrozenTarget,
    out: Path,
    *,
    first_rejected: bool = True,
    dtype: Literal["bfloat16", "float32"] = "bfloat16",
    compile: bool = False,
    recipe: dict[str, Any] | None = None,
) -> None:
    """Write an export, read it back, compare, and only then let it take its place.

    Args:
        compile: add the compiled draft step (`decode.package`).
        recipe: of the run (`read_recipe`), for the model card and the tau of its validation.

    Raises:
        InputError: `out` holds something else, or a weight is not finite.
    """
    check_replaceable(out)
    weights = _weights(drafter, dtype)
    if isinstance(drafter, Eagle3Drafter):
        config, card = eagle3_config(drafter.dims, target, dtype), eagle3_card
    else:
        config = drafter_config(drafter.dims, relay, target, first_rejected, dtype)
        card = model_card
    config["dflow_config"] |= {
        "training": (recipe or {}).get("training"),
        "tap_fingerprint": tap_fingerprint(target, drafter.dims.target_layer_ids),
    }
    with atomic.staged_folder(out) as folder:
        body = {name: t for name, t in weights.items() if not name.startswith("carryover.")}
        _save(body, folder / "model.safetensors")
        if relay is not None:
            (folder / "relay").mkdir()
            _write_json(folder / "relay/config.json", relay_config(relay, first_rejected))
            _save(_weights(relay, dtype), folder / "relay/relay.safetensors")
        if isinstance(drafter, Drafter) and drafter.carryover is not None:
            (folder / "carryover").mkdir()
            _write_json(folder / "carryover/config.json", carryover_config(first_rejected))
            _save(_weights(drafter.carryover, dtype), folder / integrity.CARRYOVER)
        integrity.record(folder, config)
        (folder / "README.md").write_text(card(config, recipe or {}), encoding="utf-8")
        _write_json(folder / "config.json", config)  # last: without it a folder is no export
        loaded = load_export(folder, target)
        _compare(loaded, drafter, relay, target, getattr(torch, dtype))
        if compile:
            from dflow_lightning.decode.package import FOLDER, compile_package

            models = Models(target, loaded.drafter, loaded.relay, first_rejected)
            compile_package(models, folder / FOLDER)
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
        return step_logits(target, drafter, [0, 1, 2, 3])
    dims = drafter.dims
    noise = torch.Generator().manual_seed(0)
    shape = (1, 4, len(dims.target_layer_ids) * dims.hidden_size)
    taps_BSC = torch.randn(shape, generator=noise).to(target.device, target.dtype)
    x_BNKD = torch.randn(1, 1, dims.block_size, dims.hidden_size, generator=noise).to(taps_BSC)
    positions_BS = torch.arange(4, device=target.device).unsqueeze(0)
    anchors_BN = torch.full((1, 1), 4, device=target.device)
    context = drafter.context_kv(drafter.project(taps_BSC), positions_BS)
    return drafter(x_BNKD, context, anchors_BN)
