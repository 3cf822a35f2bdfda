"""What engines ask of a drafter folder: ours give it, and each fault is named."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from published_shapes import eagle3_shapes, tensor_shapes
from safetensors.torch import load_file, save_file
from test_export import edit_json, edit_tensors, rename

from dflow_lightning.export.write import export_drafter
from dflow_lightning.formats.engine_contract import ENGINES, check_contract, expected_shapes
from dflow_lightning.models.dims import DrafterConfig, DrafterDims
from dflow_lightning.models.drafter import Drafter

SHIPPED = Path(__file__).resolve().parents[1] / "data/tiny-drafters"
BODY, CONFIG = "model.safetensors", "config.json"


@pytest.mark.parametrize("name", ["dflash", "dflow", "domino-dflow", "eagle3"])
def test_shipped_drafters_fulfil_it(name):
    assert check_contract(SHIPPED / name) == []


def test_a_fresh_export_fulfils_it(tmp_path, tiny_drafter, tiny_relay, tiny_target):
    export_drafter(tiny_drafter, tiny_relay, tiny_target, tmp_path / "out")
    assert check_contract(tmp_path / "out") == []


def test_the_drafter_has_just_these_tensors(tiny_target):
    config = DrafterConfig(num_layers=5, block_size=4, target_layer_ids=[0, 1, 2])
    drafter = Drafter(DrafterDims.resolve(config, tiny_target))
    dims = drafter.dims
    names = "hidden_size intermediate_size head_dim num_attention_heads num_key_value_heads"
    shapes = tensor_shapes(
        {name: getattr(dims, name) for name in names.split()}
        | {"num_hidden_layers": 5, "dflash_config": {"target_layer_ids": dims.target_layer_ids}}
    )
    assert shapes == {name: list(t.shape) for name, t in drafter.state_dict().items()}
    assert len(shapes) == 58


@pytest.mark.parametrize("name", ["dflash", "dflow", "domino-dflow", "eagle3"])
def test_expected_shapes_are_those_of_published_drafters(name):
    """The program's list comes from its own modules, the other one was written by hand."""
    config = json.loads((SHIPPED / name / CONFIG).read_text())
    published = eagle3_shapes(config) if name == "eagle3" else tensor_shapes(config)
    assert expected_shapes(config) == published


def test_bytes_after_the_last_tensor_are_damage(tmp_path):
    folder = Path(shutil.copytree(SHIPPED / "dflash", tmp_path / "dflash"))
    with (folder / BODY).open("ab") as file:
        file.write(b"more")
    (problem,) = check_contract(folder)
    assert "model.safetensors is damaged (" in problem


def test_fused_parts_are_tensors_of_the_drafter():
    config = json.loads((SHIPPED / "dflash/config.json").read_text())
    for engine in ENGINES:
        for parts in engine.fused.values():
            assert {f"layers.0.{part}.weight" for part in parts} <= tensor_shapes(config).keys()


def fuse(tensors: dict) -> None:
    parts = [tensors.pop(f"layers.0.mlp.{name}_proj.weight") for name in ("gate", "up")]
    tensors["layers.0.mlp.gate_up_proj.weight"] = torch.cat(parts)


def add_prefix(tensors: dict) -> None:
    for name in list(tensors):
        tensors[f"model.{name}"] = tensors.pop(name)


def narrow(tensors: dict) -> None:
    tensors["fc.weight"] = tensors["fc.weight"][:, :-160].contiguous()


def to_integers(tensors: dict) -> None:
    tensors["norm.weight"] = tensors["norm.weight"].to(torch.int8)


def write_index(folder: Path) -> None:
    index = {"weight_map": {"fc.weight": "model-00001-of-00001.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def tensors(change):
    return lambda d: edit_tensors(d / BODY, change)


def config(**changes):
    return lambda d: edit_json(d / CONFIG, **changes)


FAULTS = {
    "no config": (lambda d: (d / CONFIG).unlink(), "no config.json"),
    "config a list": (lambda d: (d / CONFIG).write_text("[]"), "no config.json with a JSON object"),
    "no weights": (lambda d: (d / BODY).unlink(), "no safetensors file"),
    "weights cut": (
        lambda d: (d / BODY).write_bytes((d / BODY).read_bytes()[:-9]),
        f"{BODY} is damaged (",
    ),
    "no weights file": (lambda d: (d / BODY).write_bytes(b"pickle"), f"{BODY} is damaged ("),
    "index of a missing file": (write_index, "00001.safetensors is missing"),
    "index without a map": (
        lambda d: (d / "model.safetensors.index.json").write_text("{}"),
        "has no weight_map",
    ),
    "relay beside the body": (
        lambda d: shutil.move(d / "relay/relay.safetensors", d / "relay.safetensors"),
        "relay_mlp.0.bias (and 5 more) is unknown: skipped by SGLang and refused by vLLM",
    ),
    "mask embedding": (lambda d: (d / "mask_embedding.pt").touch(), "mask_embedding.pt"),
    "unknown tensor": (
        tensors(lambda t: t.update(extra=torch.ones(1))),
        "extra is unknown: skipped by SGLang and refused by vLLM",
    ),
    "missing tensor": (
        tensors(lambda t: t.pop("hidden_norm.weight")),
        "hidden_norm.weight is missing: not noticed by SGLang and not noticed by vLLM",
    ),
    "prefixed names": (tensors(add_prefix), "begins with `model.`"),
    "fused": (tensors(fuse), "layers.0.mlp.gate_up_proj.weight is stored fused"),
    "own head": (
        tensors(lambda t: t.update({"lm_head.weight": torch.ones(2048, 160)})),
        "lm_head.weight would be used by vLLM instead of the target's",
    ),
    "wrong shape": (tensors(narrow), "fc.weight has shape [160, 320]; config.json asks for"),
    "integers": (tensors(to_integers), "norm.weight is stored as I8"),
    "architecture": (config(architectures=["DFlowDraftModel"]), "engines ask for"),
    "model type": (config(model_type="llama"), "model_type is llama"),
    "no head size": (config(head_dim=None), "head_dim is None"),
    "no target depth": (config(num_target_layers=None), "num_target_layers is None"),
    "no block size": (
        config(block_size=None, dflash_config__block_size=None),
        "block_size is in neither",
    ),
    "two block sizes": (config(block_size=16), "block_size is 8 in dflash_config"),
    "block size 1": (config(block_size=1, dflash_config__block_size=1), "block_size is 1"),
    "no mask": (config(dflash_config__mask_token_id=None), "lacks mask_token_id"),
    "mask outside": (config(dflash_config__mask_token_id=2048), "mask_token_id is 2048"),
    "no taps": (config(dflash_config__target_layer_ids=None), "lacks target_layer_ids"),
    "tap twice": (config(dflash_config__target_layer_ids=[1, 4, 4]), "a layer named twice"),
    "last layer tapped": (config(dflash_config__target_layer_ids=[1, 4, 7]), "all but the last"),
    "taps counted from the embedding": (
        config(eagle_aux_hidden_state_layer_ids=[2, 5, 7]),
        "eagle_aux_hidden_state_layer_ids is [2, 5, 7]",
    ),
    "no RoPE base": (config(rope_theta=None, rope_parameters=None), "rope_theta is missing"),
    "two RoPE bases": (config(rope_theta=1e4), "rope_theta is 10000.0, but 1000000.0"),
    "sliding": (config(layer_types=["sliding_attention"]), "engines make sliding ones causal"),
    "too many layer types": (config(layer_types=["full_attention"] * 2), "once a layer"),
    "causal": (config(is_causal=True), "is_causal is True in config.json"),
    "causal in vLLM": (config(dflash_config__causal=True), "causal is True in dflash_config"),
    "shifted layout": (config(dflash_config__sample_from_anchor=True), "sample_from_anchor"),
    "shifted without a head": (config(dflash_config__shift_label=True), "shift_label is True"),
    "unknown projector": (config(dflash_config__projector_type="p"), "projector_type is p; give"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_is_one_sentence(tmp_path, fault):
    change, expected = FAULTS[fault]
    folder = Path(shutil.copytree(SHIPPED / "dflow", tmp_path / "dflow"))
    change(folder)
    problems = check_contract(folder)
    assert len(problems) == 1, problems
    assert expected in problems[0]
    assert "\n" not in problems[0]
    assert not problems[0].endswith(".")


def test_faults_add_up(tmp_path):
    folder = Path(shutil.copytree(SHIPPED / "dflow", tmp_path / "dflow"))
    edit_json(folder / CONFIG, is_causal=True, rope_theta=None, rope_parameters=None)
    edit_tensors(folder / BODY, rename("norm.weight", "final_norm.weight"))
    found = " / ".join(check_contract(folder))
    for expected in (
        "is_causal",
        "rope_theta",
        "final_norm.weight is unknown",
        "norm.weight is miss",
    ):
        assert expected in found


def test_an_index_hides_other_files(tmp_path):
    """The one other way to keep a relay's tensors from engines; exports use a sub-folder."""
    folder = Path(shutil.copytree(SHIPPED / "dflow", tmp_path / "dflow"))
    names = load_file(folder / BODY)
    shutil.move(folder / "relay/relay.safetensors", folder / "relay.safetensors")
    index = {"weight_map": dict.fromkeys(names, BODY)}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert check_contract(folder) == []


def test_a_body_in_two_files(tmp_path):
    folder = Path(shutil.copytree(SHIPPED / "dflash", tmp_path / "dflash"))
    names = sorted(load_file(folder / BODY).items())
    (folder / BODY).unlink()
    save_file(dict(names[:9]), folder / "model-00001-of-00002.safetensors")
    save_file(dict(names[9:]), folder / "model-00002-of-00002.safetensors")
    assert check_contract(folder) == []
