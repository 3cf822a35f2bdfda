"""Tensors of published drafters, written by hand: what our modules must come out as.

The program derives names and shapes from its own modules (`engine_contract.expected_shapes`), so
this list is the independent check: a parameter that is renamed there by mistake differs from it.
"""

from typing import Any

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
    taps = len(config["dflash_config"]["target_layer_ids"])
    shapes = {"fc": [hidden, taps * hidden], "hidden_norm": [hidden], "norm": [hidden]}
    for index in range(config["num_hidden_layers"]):
        shapes |= {f"layers.{index}.{name}": shape for name, shape in layer.items()}
    whole = {f"{name}.weight": shape for name, shape in shapes.items()}
    if config["dflash_config"].get("projector_type") != "domino":
        return whole
    state, rank = config["dflash_config"]["gru_hidden_dim"], config["dflash_config"]["emb_dim"]
    head = [[3 * state, hidden], [3 * state, state], [rank, hidden + state]]
    return whole | dict(zip(HEAD_NAMES, [*head, [config["vocab_size"], rank]], strict=True))


def eagle3_shapes(config: dict[str, Any]) -> dict[str, list[int]]:
    """The same for an EAGLE-3 drafter of one layer, whose head and embedding are the target's."""
    hidden, inner, head = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    query, key = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    taps = len(config["eagle_config"]["eagle_aux_hidden_state_layer_ids"])
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
