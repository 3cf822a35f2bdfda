"""The export in the layout of `speculators`: keys, tensors, card, and that it is written safely.

Whether the library itself loads it is `make interop`.
"""

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file
from test_export import checkpoint, edit_json, edit_tensors  # noqa: F401 (a fixture)

from dflow_lightning.__main__ import main
from dflow_lightning.errors import InputError
from dflow_lightning.export.command import export_command
from dflow_lightning.export.speculators import convert_export, export_speculators
from dflow_lightning.export.write import export_drafter
from dflow_lightning.formats import integrity
from dflow_lightning.formats.drafter_folder import load_export


@pytest.fixture
def exported(tmp_path, tiny_drafter, tiny_relay, tiny_target) -> Path:
    """The same drafter in both layouts: `dflash` and `speculators`."""
    for write, name in ((export_drafter, "dflash"), (export_speculators, "speculators")):
        write(tiny_drafter, tiny_relay, tiny_target, tmp_path / name, dtype="float32")
    return tmp_path


def read(folder: Path) -> dict:
    return json.loads((folder / "config.json").read_text())


def test_config_has_the_keys_of_speculators(exported, tiny_target):
    config = read(exported / "speculators")
    assert config["speculators_model_type"] == "dflash"
    assert config["aux_hidden_state_layer_ids"] == [1, 2, 3]  # taps 0, 1, 2 and the embedding
    assert config["mask_token_id"] == len(tiny_target.tokenizer)
    assert config["block_size"] == 4
    assert config["draft_vocab_size"] == tiny_target.vocab_size
    assert config["sample_from_anchor"] is False
    assert config["sliding_window_non_causal"] is True
    settings = config["speculators_config"]
    assert settings["verifier"]["name_or_path"] == tiny_target.name
    assert settings["verifier"]["architectures"] == ["Qwen3ForCausalLM"]
    assert settings["proposal_methods"] == [{"proposal_type": "greedy", "speculative_tokens": 3}]
    assert settings["default_proposal_method"] == "greedy"


def test_layer_config_describes_the_same_layers(exported):
    layer = read(exported / "speculators")["transformer_layer_config"]
    dflash = read(exported / "dflash")
    assert layer == {key: dflash[key] for key in layer}
    left_out = dflash.keys() - layer.keys()
    assert left_out == {
        *("architectures", "auto_map", "block_size", "dflash_config", "dflow_config"),
        *("num_target_layers", "torch_dtype"),
    }


def test_body_and_relay_are_the_same_files(exported):
    for name in ("model.safetensors", "relay/config.json", "relay/relay.safetensors"):
        here, there = exported / "speculators" / name, exported / "dflash" / name
        assert here.read_bytes() == there.read_bytes(), name
    assert sorted(p.name for p in (exported / "speculators").iterdir()) == [
        *("README.md", "config.json", "model.safetensors", "relay"),
    ]


def test_it_records_itself(exported):
    integrity.check_export_unchanged(exported / "speculators", read(exported / "speculators"))
    edit_json(exported / "speculators/config.json", mask_token_id=1)
    with pytest.raises(InputError, match="has mask_token_id 1"):
        integrity.check_export_unchanged(exported / "speculators", read(exported / "speculators"))


def test_card_gives_the_commands_of_this_layout(exported):
    card = (exported / "speculators/README.md").read_text()
    assert "vllm serve <this folder>" in card
    assert '"model": "<this folder>", "num_speculative_tokens": 3' in card
    assert "sglang.launch_server" not in card
    assert "dflow-train decode --target" not in card
    assert "# DFlow drafter for" in card
    assert "## Licence" in card


def test_our_reader_names_the_layout(exported, tiny_target):
    with pytest.raises(InputError, match="DFlashSpeculator"):
        load_export(exported / "speculators", tiny_target)


def test_a_drafter_without_relay(tmp_path, tiny_drafter, tiny_target):
    export_speculators(tiny_drafter, None, tiny_target, tmp_path / "out")
    assert not (tmp_path / "out/relay").exists()
    assert read(tmp_path / "out")["dflow_config"]["relay"] is None


def test_an_export_can_be_replaced_by_either(exported, tiny_drafter, tiny_target):
    export_drafter(tiny_drafter, None, tiny_target, exported / "speculators")
    assert load_export(exported / "speculators", tiny_target).relay is None
    export_speculators(tiny_drafter, None, tiny_target, exported / "dflash")
    assert read(exported / "dflash")["architectures"] == ["DFlashSpeculator"]


def test_a_damaged_export_is_not_converted(exported, tiny_target):
    edit_tensors(exported / "dflash/model.safetensors", lambda tensors: tensors.pop("fc.weight"))
    before = read(exported / "speculators")
    with pytest.raises(InputError, match=r"lacks tensor fc\.weight"):
        convert_export(exported / "dflash", tiny_target, exported / "speculators")
    assert read(exported / "speculators") == before


def test_what_is_no_export_is_not_replaced(exported, tiny_drafter, tiny_target):
    (exported / "speculators/thesis.tex").write_text("years of work")
    with pytest.raises(InputError, match=r"thesis\.tex"):
        convert_export(exported / "dflash", tiny_target, exported / "speculators")
    with pytest.raises(InputError, match=r"thesis\.tex"):
        export_speculators(tiny_drafter, None, tiny_target, exported / "speculators")


def test_export_command(checkpoint, tmp_path, capsys):  # noqa: F811
    options = {"checkpoint": checkpoint, "dtype": "float32"}
    export_command(out=tmp_path / "dflash", **options)
    export_command(out=tmp_path / "speculators", format="speculators", **options)
    assert capsys.readouterr().out.count("num_speculative_tokens is 3") == 2
    bodies = [
        load_file(tmp_path / name / "model.safetensors") for name in ("dflash", "speculators")
    ]
    assert bodies[0].keys() == bodies[1].keys()
    assert all((bodies[0][name] == bodies[1][name]).all() for name in bodies[0])
    assert "lr: 0.125" in (tmp_path / "speculators/README.md").read_text()


def test_an_unknown_format_is_one_sentence(checkpoint, tmp_path, capsys):  # noqa: F811
    args = ["export", "--checkpoint", str(checkpoint), "--out", str(tmp_path / "out")]
    assert main([*args, "--format", "gguf"]) == 2
    message = capsys.readouterr().err
    assert message.startswith("error: ")
    assert "format" in message
    assert "speculators" in message
    assert message.count("\n") == 1
    assert not (tmp_path / "out").exists()
