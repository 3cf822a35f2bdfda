"""config.json of an export and of the folders in it.

What is written twice is read from different places by different engines. Folders have the layout of
published drafters: DFlash's under the architecture `DFlashDraftModel`, EAGLE-3's under
`LlamaForCausalLMEagle3`, where SGLang and vLLM take embedding and head from the target if the file
has none and `draft_vocab_size` is null.
"""

from typing import Any

from dflow_lightning.formats.config_keys import (
    CAUSAL_HEAD,
    DFLASH_ARCHITECTURE,
    EAGLE3_ARCHITECTURE,
    EAGLE3_SECTION,
    EAGLE3_TAPS,
)
from dflow_lightning.formats.drafter_folder import CHAIN, FORMAT_VERSION, LAYOUT
from dflow_lightning.models.carryover import Carryover
from dflow_lightning.models.dims import HEAD, DrafterDims, LayerDims
from dflow_lightning.models.eagle3 import Eagle3Dims
from dflow_lightning.models.relay import Relay
from dflow_lightning.models.target import FrozenTarget


def drafter_config(
    dims: DrafterDims,
    relay: Relay | None,
    target: FrozenTarget,
    dtype: str,
    carryover: Carryover | None,
) -> dict[str, Any]:
    """config.json of a block drafter, with or without a causal head."""
    return {
        "architectures": [DFLASH_ARCHITECTURE],
        "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
        "model_type": "qwen3",
        "block_size": dims.block_size,
        "dflash_config": {
            "block_size": dims.block_size,
            "mask_token_id": dims.mask_token_id,
            "target_layer_ids": list(dims.target_layer_ids),
            **_head_config(dims),
        },
        **layer_config(dims, target, dtype),
        "layer_types": ["full_attention"] * dims.num_layers,
        "sliding_window": None,
        "use_sliding_window": False,
        "max_window_layers": dims.num_layers,
        "dflow_config": {
            "format_version": FORMAT_VERSION,
            "layout": LAYOUT,
            "num_draft_tokens": dims.block_size - 1,
            "target": {"name": target.name, "fingerprint": target.fingerprint},
            "relay": None if relay is None else relay_config(relay),
            **({} if carryover is None else {"carryover": carryover_config(carryover)}),
        },
    }


def _head_config(dims: DrafterDims) -> dict[str, Any]:
    """What SGLang builds a causal head from; the slots stand as in DFlash, `shift_label` false."""
    if dims.gru_hidden_dim is None:
        return {}
    sizes = {name: getattr(dims, name) for name in HEAD}
    return {"projector_type": CAUSAL_HEAD, "shift_label": False, **sizes}


def relay_config(relay: Relay) -> dict[str, Any]:
    """relay/config.json; `hidden_size` is the width of the relay's own hidden layer."""
    return {
        "format_version": FORMAT_VERSION,
        "hidden_size": relay.hidden_size,
        "first_rejected": relay.first_rejected,
        "normalize_boundary": relay.normalize_boundary,
        "terms": relay.terms,
        "norm_eps": relay.norm_eps,
    }


def carryover_config(carryover: Carryover) -> dict[str, Any]:
    """carryover/config.json."""
    return {"format_version": FORMAT_VERSION, "first_rejected": carryover.first_rejected}


def layer_config(dims: LayerDims, target: FrozenTarget, dtype: str) -> dict[str, Any]:
    """The layers of either kind of drafter, under the keys of Qwen3 and Llama."""
    kind = dims.rope_parameters.get("rope_type", "default")
    rope = {"rope_type": "default", "rope_theta": dims.rope_parameters["rope_theta"]}
    if kind != "default":
        rope = dict(dims.rope_parameters)
    return {
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
    }


def eagle3_config(dims: Eagle3Dims, target: FrozenTarget, dtype: str) -> dict[str, Any]:
    """config.json of an EAGLE-3 drafter whose head and embedding are the target's."""
    layer_ids = list(dims.target_layer_ids)
    return {
        "architectures": [EAGLE3_ARCHITECTURE],
        # Engines go by the architecture. The type only says how the file is read, and transformers
        # reads no Llama whose heads do not divide the hidden size, whatever its head_dim.
        "model_type": "qwen3" if dims.hidden_size % dims.num_attention_heads else "llama",
        EAGLE3_SECTION: {EAGLE3_TAPS: layer_ids, "use_aux_hidden_state": True},
        EAGLE3_TAPS: [index + 1 for index in layer_ids],
        "num_aux_hidden_states": len(layer_ids),
        "draft_vocab_size": None,
        **layer_config(dims, target, dtype),
        "mlp_bias": False,
        "dflow_config": {
            "format_version": FORMAT_VERSION,
            "layout": CHAIN,
            "block_size": dims.block_size,
            "num_draft_tokens": dims.block_size - 1,
            "target": {"name": target.name, "fingerprint": target.fingerprint},
            "relay": None,
        },
    }
