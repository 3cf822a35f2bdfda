"""The tensors of a drafter folder: those its config.json asks for, and those its files have.

From JSON and the headers of safetensors files alone; nothing is loaded.
"""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

DOMINO = "domino"
NESTED = "dflash_config"
EAGLE3_TAPS = "eagle_aux_hidden_state_layer_ids"
HEAD_NAMES = [f"prefix_gru.weight_{part}_l0" for part in ("ih", "hh")]
HEAD_NAMES += [f"embed_proj.{layer}.weight" for layer in (0, 2)]


def tensor_shapes(config: dict[str, Any]) -> dict[str, list[int]]:
    """Name and shape of every tensor that config.json asks for: 3, 11 a layer, 4 a causal head."""
    hidden, inner, head = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    query, key = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    layer = {
        **{"self_attn.q_proj": [query, hidden], "self_attn.o_proj": [hidden, query]},
        **{"self_attn.k_proj": [key, hidden], "self_attn.v_proj": [key, hidden]},
        **{"self_attn.q_norm": [head], "self_attn.k_norm": [head]},
        **{"mlp.gate_proj": [inner, hidden], "mlp.up_proj": [inner, hidden]},
        "mlp.down_proj": [hidden, inner],
        **{"input_layernorm": [hidden], "post_attention_layernorm": [hidden]},
    }
    taps = len(config[NESTED]["target_layer_ids"])
    shapes = {"fc": [hidden, taps * hidden], "hidden_norm": [hidden], "norm": [hidden]}
    for index in range(config["num_hidden_layers"]):
        shapes |= {f"layers.{index}.{name}": shape for name, shape in layer.items()}
    whole = {f"{name}.weight": shape for name, shape in shapes.items()}
    if config[NESTED].get("projector_type") != DOMINO:
        return whole
    state, rank = config[NESTED]["gru_hidden_dim"], config[NESTED]["emb_dim"]
    head = [[3 * state, hidden], [3 * state, state], [rank, hidden + state]]
    return whole | dict(zip(HEAD_NAMES, [*head, [config["vocab_size"], rank]], strict=True))


def eagle3_shapes(config: dict[str, Any]) -> dict[str, list[int]]:
    """The same for an EAGLE-3 drafter of one layer, whose head and embedding are the target's."""
    hidden, inner, head = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    query, key = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    taps = len(config["eagle_config"][EAGLE3_TAPS])
    layer = {
        **{"self_attn.q_proj": [query, 2 * hidden], "self_attn.o_proj": [hidden, query]},
        **{"self_attn.k_proj": [key, 2 * hidden], "self_attn.v_proj": [key, 2 * hidden]},
        **{"mlp.gate_proj": [inner, hidden], "mlp.up_proj": [inner, hidden]},
        "mlp.down_proj": [hidden, inner],
        **{"input_layernorm": [hidden], "post_attention_layernorm": [hidden]},
        "hidden_norm": [hidden],
    }
    shapes = {"fc": [hidden, taps * hidden], "norm": [hidden]}
    shapes |= {f"midlayer.{name}": shape for name, shape in layer.items()}
    return {f"{name}.weight": shape for name, shape in shapes.items()}


def stored_tensors(folder: Path) -> dict[str, tuple[str, list[int]]]:
    """Dtype and shape of the tensors that an engine reads: all of the folder's own files.

    Engines look for `*.safetensors` beside config.json, not in sub-folders, and where there is an
    index they read the files it names.

    Raises:
        ValueError: there is no such file, or one is damaged.
    """
    paths = sorted(folder.glob("*.safetensors"))
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        names = (read_object(index) or {}).get("weight_map")
        if not isinstance(names, dict):
            raise ValueError(f"{index} has no weight_map")
        paths = [folder / name for name in sorted(set(names.values()))]
    if not paths:
        raise ValueError(f"{folder} holds no safetensors file; engines read no other kind")
    tensors: dict[str, tuple[str, list[int]]] = {}
    for path in paths:
        tensors |= _header(path)
    return tensors


def read_object(path: Path) -> dict[str, Any] | None:
    """The JSON object of a file; None where it is missing or holds none."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return content if isinstance(content, dict) else None


def _header(path: Path) -> dict[str, tuple[str, list[int]]]:
    """The file's own list of tensors: a length of 8 bytes, JSON, then the data without a gap."""
    try:
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(length))
        header.pop("__metadata__", None)
        tensors = {name: (entry["dtype"], entry["shape"]) for name, entry in header.items()}
        end = 8 + length + max(entry["data_offsets"][1] for entry in header.values())
    except (OSError, ValueError, LookupError, TypeError, AttributeError, struct.error):
        raise ValueError(f"{path} is missing or damaged") from None
    if path.stat().st_size != end:
        raise ValueError(f"{path} is {path.stat().st_size} bytes long; its header says {end}")
    return tensors
