"""What the DFlash loaders of SGLang and vLLM ask of a drafter folder, and whether it gives that.

A drafter with a causal head (Domino, `projector_type` in `dflash_config`) is for SGLang alone.

Both engines are silent about faults: a missing tensor keeps its uninitialised memory, a missing key
gets a default, and the only symptom is low acceptance. So a folder is checked here, from JSON and
the headers of safetensors files alone; nothing is loaded.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeGuard

import torch
from safetensors import SafetensorError, safe_open

from dflow_lightning.errors import InputError
from dflow_lightning.formats.config_keys import (
    CAUSAL_HEAD,
    DFLASH_ARCHITECTURE,
    DFLASH_SECTION,
    EAGLE3_ARCHITECTURE,
    EAGLE3_SAME_MODEL,
    EAGLE3_SECTION,
    EAGLE3_TAPS,
    SAME_MODEL,
    SIZES,
    TOP,
    other_models,
)
from dflow_lightning.formats.drafter_folder import HEAD_PREFIX
from dflow_lightning.formats.relay_folder import STORED_DTYPES
from dflow_lightning.models.dims import DrafterDims
from dflow_lightning.models.drafter import Drafter
from dflow_lightning.models.eagle3 import AnyDrafter, Eagle3Dims, Eagle3Drafter

BLOCK_TAPS = "target_layer_ids"
HEAD_PARTS = ("prefix_gru.", "embed_proj.")  # how names of a causal head's tensors begin


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
    """Dtype and shape of a file's tensors, without reading them.

    The library compares the file's length with that of all tensors: a file that was cut short, or
    has bytes after its end, is damaged.
    """
    if not path.is_file():
        raise ValueError(f"{path} is missing")
    try:
        with safe_open(path, framework="pt") as file:
            names = list(file.keys())
            slices = {name: file.get_slice(name) for name in names}
            return {name: (part.get_dtype(), part.get_shape()) for name, part in slices.items()}
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{path} is damaged ({error})") from None


def expected_shapes(config: dict[str, Any]) -> dict[str, list[int]]:
    """Name and shape of every tensor that config.json asks for: those of our own drafter.

    Raises:
        KeyError, TypeError, InputError: a size is missing or makes no drafter.
    """
    eagle3 = config.get("architectures") == [EAGLE3_ARCHITECTURE]
    taps = config[EAGLE3_SECTION][EAGLE3_TAPS] if eagle3 else config[DFLASH_SECTION][BLOCK_TAPS]
    draft = {} if eagle3 else config[DFLASH_SECTION]
    sizes = {
        "num_layers": config["num_hidden_layers"],
        "hidden_size": config["hidden_size"],
        "intermediate_size": config["intermediate_size"],
        "head_dim": config["head_dim"],
        "num_attention_heads": config["num_attention_heads"],
        "num_key_value_heads": config["num_key_value_heads"],
        "vocab_size": config["vocab_size"],
    }
    if draft.get("projector_type") == CAUSAL_HEAD:
        sizes |= {"gru_hidden_dim": draft["gru_hidden_dim"], "emb_dim": draft["emb_dim"]}
    for name, size in sizes.items():
        if not _is_positive(size):
            raise InputError(f"{name} is {size}; give a whole number above 0")
    numbers = {
        **sizes,
        # Shapes depend on none of the rest, which may be at fault by itself.
        "target_layer_ids": list(range(len(taps))),
        "num_target_layers": len(taps) + 1,
        "block_size": 16,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
        "max_position_embeddings": 4096,
        "initializer_range": 0.02,
    }
    drafter: AnyDrafter
    with torch.device("meta"):
        if eagle3:
            drafter = Eagle3Drafter(Eagle3Dims(**numbers))
        else:
            drafter = Drafter(DrafterDims(mask_token_id=0, **numbers))
    state = drafter.state_dict()
    return {name.removeprefix(HEAD_PREFIX): list(part.shape) for name, part in state.items()}


@dataclass(frozen=True)
class EngineContract:
    """One engine's DFlash loader, as read in the source of one version.

    Args:
        source: the files of the engine that say so.
        architectures: strings in `architectures` that lead to this loader for Qwen3 layers.
        prefix: what names in the file may or must start with.
        fused: parameters of the engine that are filled from several tensors of the file.
        unknown: what happens to a tensor that the loader has no place for.
        missing: what happens when a parameter of the engine is in no file.
        own: tensors that are used instead of the target's, if a file has them.
        block_size: places it is read from, the first that has it; none: from the command alone.
        target_layer_ids: the same for the tapped layers, by their own numbers, counted from 0.
        mask_token_id: the same for the mask token.
        num_draft_tokens: the setting for the number of drafts, and what it counts.
        causal_head: values of `pure_draft_prefix_len` that a causal head may have; none: it knows
            no such head.
    """

    engine: str
    version: str
    source: tuple[str, ...]
    architectures: tuple[str, ...]
    prefix: str
    fused: dict[str, tuple[str, ...]]
    unknown: Literal["refused", "skipped"]
    missing: Literal["refused", "not noticed"]
    own: tuple[str, ...]
    block_size: tuple[str, ...]
    target_layer_ids: tuple[str, ...]
    mask_token_id: tuple[str, ...]
    num_draft_tokens: str
    causal_head: tuple[int, ...] = ()


FUSED = {
    "self_attn.qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
}
SGLANG = EngineContract(
    engine="SGLang",
    version="0.5.23",
    source=("srt/models/dflash.py", "srt/speculative/{dflash,domino}_utils.py"),
    architectures=(DFLASH_ARCHITECTURE,),
    prefix="none; `model.` is accepted",
    fused=FUSED,
    unknown="skipped",
    missing="not noticed",
    own=(),
    block_size=(DFLASH_SECTION, TOP),
    target_layer_ids=(DFLASH_SECTION, TOP),
    mask_token_id=(DFLASH_SECTION, TOP),
    num_draft_tokens="--speculative-num-draft-tokens, the block size: the anchor and its drafts",
    causal_head=(1,),
)
VLLM = EngineContract(
    engine="vLLM",
    version="0.32.0",
    source=(
        "model_executor/models/qwen3_dflash.py",
        "v1/worker/gpu/spec_decode/eagle/eagle3_utils.py",
    ),
    architectures=(DFLASH_ARCHITECTURE,),
    prefix="none; the loader puts `model.` before every name itself",
    fused=FUSED,
    unknown="refused",
    missing="not noticed",
    own=("embed_tokens.weight", "lm_head.weight"),
    block_size=(),
    target_layer_ids=(DFLASH_SECTION, TOP),
    mask_token_id=(DFLASH_SECTION, TOP),
    num_draft_tokens="num_speculative_tokens, the drafts alone: block size less one",
)
ENGINES = (SGLANG, VLLM)


def check_contract(folder: Path) -> list[str]:
    """One sentence for each thing in a drafter's folder that an engine refuses or would misread.

    The folder has the layout of published DFlash or EAGLE-3 drafters, as `dflow-train export`
    writes it. With an empty list its engines (`engines_of`) load it and draft as it was trained to.
    """
    config = read_object(folder / TOP)
    if config is None:
        return [f"{folder} holds no config.json with a JSON object"]
    draft = config.get(DFLASH_SECTION)
    eagle3 = config.get("architectures") == [EAGLE3_ARCHITECTURE]
    if eagle3:
        problems = list(_check_eagle3(config))
    else:
        problems = list(_check_config(config, draft if isinstance(draft, dict) else {}))
    if (folder / "mask_embedding.pt").exists():
        problems.append(
            "mask_embedding.pt lies beside the weights; it replaces the mask's embedding"
        )
    try:
        stored = stored_tensors(folder)
    except ValueError as error:
        return [*problems, str(error)]
    try:
        expected = expected_shapes(config)
    except (KeyError, TypeError, InputError):
        return problems  # they say which size or list is missing
    return [*problems, *_check_tensors(stored, expected)]


def _check_config(config: dict[str, Any], draft: dict[str, Any]) -> Iterator[str]:
    engines = engines_of(draft)
    served = set.intersection(*(set(engine.architectures) for engine in engines))
    if config.get("architectures") not in [[name] for name in served]:
        yield f"architectures is {config.get('architectures')}; engines ask for {sorted(served)}"
    if config.get("model_type") != "qwen3":
        yield f"model_type is {config.get('model_type')}; the layers of a DFlash drafter are qwen3"
    for key in SIZES:
        if not _is_positive(config.get(key)):
            yield f"{key} is {config.get(key)}; give a whole number above 0"
    yield from _check_block(config, draft)
    yield from _check_head(draft)
    yield from _check_rope(config)
    kinds = config.get("layer_types") or []
    if set(kinds) - {"full_attention"} or len(kinds) not in (0, config.get("num_hidden_layers")):
        yield (
            f"layer_types is {kinds}; give full_attention once a layer, engines make sliding ones "
            "causal"
        )
    yield from _check_same_model(SAME_MODEL, {TOP: config, DFLASH_SECTION: draft})


def _check_same_model(same: Mapping[str, Any], places: dict[str, dict[str, Any]]) -> Iterator[str]:
    for key, place, value in other_models(same, places):
        yield f"{key} is {value} in {place}; with it an engine drafts otherwise than in training"


def _check_block(config: dict[str, Any], draft: dict[str, Any]) -> Iterator[str]:
    sizes = {place.get("block_size") for place in (draft, config)} - {None}
    if not sizes:
        yield "block_size is in neither dflash_config nor config.json; SGLang would take 16"
    elif len(sizes) > 1:
        yield (
            f"block_size is {draft['block_size']} in dflash_config, which SGLang reads first, and "
            f"{config['block_size']} in config.json, which others do"
        )
    elif not _is_positive(size := sizes.pop()) or size < 2:
        yield f"block_size is {size}; a block is an anchor and one draft at least"
    mask, vocabulary = draft.get("mask_token_id"), config.get("vocab_size")
    if mask is None:
        yield "dflash_config lacks mask_token_id; SGLang would add a token of its own"
    elif _is_positive(vocabulary) and mask not in range(vocabulary):
        yield f"mask_token_id is {mask}; the vocabulary's ids end at {vocabulary - 1}"
    taps, depth = draft.get("target_layer_ids"), config.get("num_target_layers")
    if not isinstance(taps, list) or not taps:
        yield "dflash_config lacks target_layer_ids; engines would tap other layers"
    elif len(set(taps)) < len(taps):
        yield f"target_layer_ids is {taps}, with a layer named twice"
    elif _is_positive(depth) and not all(tap in range(depth - 1) for tap in taps):
        yield (
            f"target_layer_ids is {taps}; of {depth} target layers all but the last can be tapped, "
            "numbered from 0"
        )


def engines_of(draft: dict[str, Any]) -> tuple[EngineContract, ...]:
    """The engines that can draft with a folder of this `dflash_config`."""
    if draft.get("projector_type") != CAUSAL_HEAD:
        return ENGINES
    return tuple(engine for engine in ENGINES if engine.causal_head)


def _check_head(draft: dict[str, Any]) -> Iterator[str]:
    kind, shifted = draft.get("projector_type"), draft.get("shift_label")
    if kind is None:
        if shifted:
            yield f"shift_label is {shifted}, but only a drafter with a causal head has it"
        return
    if kind != CAUSAL_HEAD:
        yield f"projector_type is {kind}; give {CAUSAL_HEAD} for a causal head, or leave it out"
        return
    if type(shifted) is not bool:
        yield f"shift_label is {shifted}; with a causal head SGLang asks for true or false"
    for key in ("gru_hidden_dim", "emb_dim"):
        if not _is_positive(draft.get(key)):
            yield f"{key} is {draft.get(key)} in {DFLASH_SECTION}; give a whole number above 0"
    prefix = draft.get("pure_draft_prefix_len")
    for engine in engines_of(draft):
        if prefix not in engine.causal_head:
            allowed = ", ".join(map(str, engine.causal_head))
            yield f"pure_draft_prefix_len is {prefix}; {engine.engine} takes {allowed} alone"


def _check_eagle3(config: dict[str, Any]) -> Iterator[str]:
    """What `LlamaForCausalLMEagle3` of both engines reads of config.json.

    SGLang 0.5.23: srt/models/llama_eagle3.py, srt/model_executor/model_runner.py. vLLM 0.32.0:
    model_executor/models/llama_eagle3.py, v1/worker/gpu/spec_decode/eagle/eagle3_utils.py.
    """
    if config.get("model_type") not in ("llama", "qwen3"):
        yield f"model_type is {config.get('model_type')}; give llama, as published drafters have"
    for key in SIZES:
        if not _is_positive(config.get(key)):
            yield f"{key} is {config.get(key)}; give a whole number above 0"
    hidden, heads = config.get("hidden_size"), config.get("num_attention_heads")
    whole = not (_is_positive(hidden) and _is_positive(heads)) or hidden % heads == 0
    if config.get("model_type") == "llama" and not whole:
        yield (
            f"hidden_size is {hidden}, which {heads} heads do not divide: transformers reads no "
            "such llama; make model_type qwen3"
        )
    if config.get("num_hidden_layers") != 1:
        yield f"num_hidden_layers is {config.get('num_hidden_layers')}; an EAGLE-3 drafter has 1"
    if config.get("draft_vocab_size", 0) is not None:
        yield (
            "draft_vocab_size is not null; engines take the target's head only where it is written "
            "and null"
        )
    if config.get("tie_word_embeddings") is not False:
        yield "tie_word_embeddings is not false; SGLang would make the drafter's embedding its head"
    taps = (config.get(EAGLE3_SECTION) or {}).get(EAGLE3_TAPS)
    depth = config.get("num_target_layers")
    if not isinstance(taps, list) or not taps:
        yield f"eagle_config lacks {EAGLE3_TAPS}; SGLang would tap other layers"
    elif _is_positive(depth) and not all(tap in range(depth - 1) for tap in taps):
        yield (
            f"{EAGLE3_TAPS} is {taps}; of {depth} target layers all but the last can be tapped, "
            "numbered from 0"
        )
    elif config.get(EAGLE3_TAPS) != [tap + 1 for tap in taps]:
        yield (
            f"{EAGLE3_TAPS} is {config.get(EAGLE3_TAPS)} at the top of config.json; vLLM counts "
            f"one more than the {taps} that SGLang reads in eagle_config"
        )
    eagle = config.get(EAGLE3_SECTION) or {}
    yield from _check_same_model(EAGLE3_SAME_MODEL, {TOP: config, EAGLE3_SECTION: eagle})
    yield from _check_rope(config)


def _check_rope(config: dict[str, Any]) -> Iterator[str]:
    parameters = config.get("rope_parameters") or {}
    old, new = config.get("rope_theta"), parameters.get("rope_theta")
    if old is None and new is None:
        yield "rope_theta is missing; transformers, which both engines read it with, takes 10000"
    elif None not in (old, new) and old != new:
        yield f"rope_theta is {old}, but {new} in rope_parameters; make both the target's"


def _check_tensors(
    stored: dict[str, tuple[str, list[int]]], expected: dict[str, list[int]]
) -> Iterator[str]:
    if prefixed := sorted(name for name in stored if name.startswith("model.")):
        yield f"{_some(prefixed)} begins with `model.`, which vLLM puts before every name itself"
        stored = {name.removeprefix("model."): entry for name, entry in stored.items()}
    fused: dict[str, list[str]] = {}  # a tensor of the file, and those it should be
    for whole, parts in FUSED.items():
        for name in stored:
            if f".{whole}." in name:
                fused[name] = [name.replace(whole, part) for part in parts]
    if fused:
        yield f"{_some(sorted(fused))} is stored fused; published drafters store its parts apart"
    for engine in ENGINES:
        if own := sorted(stored.keys() & set(engine.own)):
            yield f"{_some(own)} would be used by {engine.engine} instead of the target's"
    known = expected.keys() | fused.keys() | {name for engine in ENGINES for name in engine.own}
    if unknown := sorted(stored.keys() - known):
        rules = " and ".join(f"{engine.unknown} by {engine.engine}" for engine in ENGINES)
        yield f"{_some(unknown)} is unknown: {rules}"
    given = {part for parts in fused.values() for part in parts}
    if missing := sorted(expected.keys() - stored.keys() - given):
        rules = " and ".join(f"{engine.missing} by {engine.engine}" for engine in ENGINES)
        rules = "refused by SGLang" if missing[0].startswith(HEAD_PARTS) else rules
        yield f"{_some(missing)} is missing: {rules}"
    for name in sorted(stored.keys() & expected.keys()):
        dtype, shape = stored[name]
        if shape != expected[name]:
            yield f"{name} has shape {shape}; config.json asks for {expected[name]}"
        if dtype not in STORED_DTYPES:
            yield f"{name} is stored as {dtype}; give one of {', '.join(STORED_DTYPES)}"


def _some(names: list[str]) -> str:
    return names[0] + (f" (and {len(names) - 1} more)" if len(names) > 1 else "")


def _is_positive(value: Any) -> TypeGuard[int]:
    return type(value) is int and value > 0
