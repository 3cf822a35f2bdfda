"""The folder that serving stacks load: writing it from a checkpoint, and reading it back.

    config.json               keys as z-lab writes them, and `dflow_config`, which engines ignore
    model.safetensors         the DFlash body alone, under its published tensor names
    relay/config.json         a sub-folder: engines read every safetensors file beside the body
    relay/relay.safetensors
    README.md                 model card

Only safetensors is ever read. Shapes: B batch, S context rows, N blocks, K block size, D hidden.
"""

import json
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from dflow_lightning import atomic
from dflow_lightning.dims import DrafterDims
from dflow_lightning.drafter import Drafter
from dflow_lightning.drafter_folder import (
    ARCHITECTURE,
    FORMAT_VERSION,
    LAYOUT,
    LoadedDrafter,
    load_export,
)
from dflow_lightning.errors import InputError
from dflow_lightning.model_card import model_card
from dflow_lightning.relay import Relay
from dflow_lightning.target import FrozenTarget

KNOWN_NAMES = {"config.json", "model.safetensors", "relay", "README.md", "decode"}


def export_command(
    *,
    checkpoint: Path,
    out: Path,
    dtype: Literal["bfloat16", "float32"] = "bfloat16",
    target: str | None = None,
) -> None:
    """Write the folder that SGLang, vLLM and `dflow-train decode` load.

    Args:
        checkpoint: a checkpoint file written by `dflow-train fit`.
        out: folder to write; an earlier export there is replaced in one step.
        dtype: how the weights are stored.
        target: where the target is now, if not where it was trained with.
    """
    check_replaceable(out)
    recipe = read_recipe(checkpoint)
    from dflow_lightning.module import (
        DrafterModule,
    )  # Lightning, which reading an export never needs

    module = DrafterModule.from_checkpoint(checkpoint, target=target)
    export_drafter(
        module.drafter,
        module.relay,
        module.target,
        out,
        first_rejected=module.relay_config.first_rejected,
        dtype=dtype,
        recipe=recipe,
    )
    size = sum(path.stat().st_size for path in out.rglob("*.safetensors"))
    relay = "with relay" if module.relay else "no relay"
    print(
        f"exported to {out}: {dtype}, {size / 1e6:.1f} MB, {relay}; "
        f"num_speculative_tokens is {module.drafter.dims.block_size - 1}"
    )


def read_recipe(checkpoint: Path) -> dict[str, Any]:
    """What the run was started with and how far it came; no pickled code is run."""
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
    return dict(content.get("recipe") or {}) | {"steps": content.get("global_step")}


def export_drafter(
    drafter: Drafter,
    relay: Relay | None,
    target: FrozenTarget,
    out: Path,
    *,
    first_rejected: bool = True,
    dtype: Literal["bfloat16", "float32"] = "bfloat16",
    recipe: dict[str, Any] | None = None,
) -> None:
    """Write an export, read it back, compare, and only then let it take its place.

    Args:
        recipe: settings of the run for the model card.

    Raises:
        InputError: `out` holds something else, or a weight is not finite.
    """
    check_replaceable(out)
    weights = _weights(drafter, dtype)
    config = drafter_config(drafter.dims, relay, target, first_rejected, dtype)
    with atomic.staged_folder(out) as folder:
        _write_json(folder / "config.json", config)
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        if relay is not None:
            (folder / "relay").mkdir()
            _write_json(folder / "relay/config.json", relay_config(relay, first_rejected))
            save_file(
                _weights(relay, dtype),
                folder / "relay/relay.safetensors",
                metadata={"format": "pt"},
            )
        (folder / "README.md").write_text(model_card(config, recipe or {}), encoding="utf-8")
        _compare(load_export(folder, target), drafter, relay, target, getattr(torch, dtype))


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
        weights[name] = tensor.detach().to("cpu", getattr(torch, dtype)).contiguous()
    return weights


def drafter_config(
    dims: DrafterDims, relay: Relay | None, target: FrozenTarget, first_rejected: bool, dtype: str
) -> dict[str, Any]:
    """config.json: what is written twice is read from different places by different engines."""
    kind = dims.rope_parameters.get("rope_type", "default")
    rope = {"rope_type": "default", "rope_theta": dims.rope_parameters["rope_theta"]}
    if kind != "default":
        rope = dict(dims.rope_parameters)
    return {
        "architectures": [ARCHITECTURE],
        "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
        "model_type": "qwen3",
        "block_size": dims.block_size,
        "dflash_config": {
            "block_size": dims.block_size,
            "mask_token_id": dims.mask_token_id,
            "target_layer_ids": list(dims.target_layer_ids),
        },
        "num_target_layers": dims.num_target_layers,
        "num_hidden_layers": dims.num_layers,
        "hidden_size": dims.hidden_size,
        "intermediate_size": dims.intermediate_size,
        "head_dim": dims.head_dim,
        "num_attention_heads": dims.num_attention_heads,
        "num_key_value_heads": dims.num_key_value_heads,
        "hidden_act": "silu",
        "rms_norm_eps": dims.rms_norm_eps,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "layer_types": ["full_attention"] * dims.num_layers,
        "sliding_window": None,
        "use_sliding_window": False,
        "max_window_layers": dims.num_layers,
        "rope_theta": rope["rope_theta"],
        "rope_scaling": None if kind == "default" else rope,
        "rope_parameters": rope,
        "max_position_embeddings": dims.max_position_embeddings,
        "vocab_size": dims.vocab_size,
        "tie_word_embeddings": False,
        "initializer_range": dims.initializer_range,
        "bos_token_id": getattr(target.config, "bos_token_id", None),
        "eos_token_id": getattr(target.config, "eos_token_id", None),
        "dtype": dtype,
        "torch_dtype": dtype,
        "dflow_config": {
            "format_version": FORMAT_VERSION,
            "layout": LAYOUT,
            "num_draft_tokens": dims.block_size - 1,
            "target": {"name": target.name, "fingerprint": target.fingerprint},
            "relay": None if relay is None else relay_config(relay, first_rejected),
        },
    }


def relay_config(relay: Relay, first_rejected: bool) -> dict[str, Any]:
    """relay/config.json; `hidden_size` is the width of the relay's own hidden layer."""
    return {
        "format_version": FORMAT_VERSION,
        "hidden_size": relay.hidden_size,
        "first_rejected": first_rejected,
        "norm_eps": relay.relay_norm.eps,
    }


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _compare(
    loaded: LoadedDrafter,
    drafter: Drafter,
    relay: Relay | None,
    target: FrozenTarget,
    dtype: torch.dtype,
) -> None:
    """The drafter built from the files drafts what the one in memory does, rounded to `dtype`."""
    ours, theirs = Drafter(drafter.dims), loaded.drafter
    rounded = {name: t.to(target.device, dtype) for name, t in drafter.state_dict().items()}
    ours.load_state_dict(rounded)
    ours = ours.to(target.device, target.dtype)
    dims = drafter.dims
    noise = torch.Generator().manual_seed(0)
    shape = (1, 4, len(dims.target_layer_ids) * dims.hidden_size)
    taps_BSC = torch.randn(shape, generator=noise).to(target.device, target.dtype)
    x_BNKD = torch.randn(1, 1, dims.block_size, dims.hidden_size, generator=noise).to(taps_BSC)
    positions_BS = torch.arange(4, device=target.device).unsqueeze(0)
    anchors_BN = torch.full((1, 1), 4, device=target.device)
    with torch.inference_mode():
        outputs = [
            one(x_BNKD, one.context_kv(one.project(taps_BSC), positions_BS), anchors_BN)
            for one in (ours, theirs)
        ]
    same = torch.equal(*outputs) and (relay is None) == (loaded.relay is None)
    if relay is not None and loaded.relay is not None:
        relay_state = loaded.relay.state_dict()
        same &= all(
            torch.equal(t.to(dtype).to(relay_state[name]), relay_state[name])
            for name, t in relay.state_dict().items()
        )
    if not same:
        raise RuntimeError("the export read back is not the drafter that was written")
