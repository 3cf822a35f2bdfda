"""Keys of a drafter's config.json, for everyone who judges one.

`drafter_folder.py` asks whether this package can decode a folder, `engine_contract.py` whether
SGLang and vLLM load it as what was trained. Both go by the tables here.
"""

from collections.abc import Iterator, Mapping
from typing import Any

TOP = "config.json"  # the name of the place in messages
DFLASH_SECTION = "dflash_config"
DFLASH_ARCHITECTURE = "DFlashDraftModel"
CAUSAL_HEAD = "domino"  # the `projector_type` of a drafter with a causal head
EAGLE3_SECTION = "eagle_config"
EAGLE3_ARCHITECTURE = "LlamaForCausalLMEagle3"
# Counted in two ways: in `eagle_config` (SGLang) k is the output of layer k, at the top of the file
# (vLLM) its input.
EAGLE3_TAPS = "eagle_aux_hidden_state_layer_ids"

SIZES = (
    "num_hidden_layers",
    "hidden_size",
    "intermediate_size",
    "head_dim",
    "num_attention_heads",
    "num_key_value_heads",
    "vocab_size",
    "max_position_embeddings",
    "num_target_layers",
)
# Keys that make another model than was trained, here or in an engine, and the one value that does
# not. Leaving a key out, or null, is fine too; nothing but that is where the value is None.
SAME_MODEL: Mapping[str, Any] = {
    "is_causal": False,
    "causal": False,
    "use_swa": False,
    "use_sliding_window": False,
    "attention_bias": False,
    "sample_from_anchor": False,
    "attention_value_scale": None,
    EAGLE3_TAPS: None,  # vLLM would tap these layers instead of `target_layer_ids`
    "input_embedding_scale": 1.0,
    "output_multiplier": 1.0,
    "final_logit_softcapping": 0.0,
}
EAGLE3_SAME_MODEL: Mapping[str, Any] = {
    "attention_bias": False,
    "mlp_bias": False,
    "bias": False,
    "norm_before_residual": False,
    "norm_before_fc": False,
    "fc_norm": False,
    "norm_output": False,
    "logit_scale": None,
    "target_hidden_size": None,
    "sliding_window": None,
    "use_aux_hidden_state": True,
}


def other_models(
    same: Mapping[str, Any], places: Mapping[str, Mapping[str, Any]]
) -> Iterator[tuple[str, str, Any]]:
    """Key, place and value wherever a table's key makes another model.

    Args:
        same: one of the tables above.
        places: objects in which the key may stand, by the name they have in messages.
    """
    for key, value in same.items():
        for place, settings in places.items():
            if settings.get(key) not in (None, value):
                yield key, place, settings[key]
