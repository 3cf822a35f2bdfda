"""The export folder: what is written, that it reads back the same, and how it can be wrong."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from dflow_lightning.errors import InputError
from dflow_lightning.export.command import export_command
from dflow_lightning.export.write import export_drafter, load_export
from dflow_lightning.models.dims import DrafterConfig, DrafterDims
from dflow_lightning.models.drafter import Drafter
from dflow_lightning.models.relay import Relay, RelayConfig
from dflow_lightning.models.target import FrozenTarget
from dflow_lightning.training.module import DrafterModule, TargetConfig

PER_LAYER = {
    "input_layernorm",
    "post_attention_layernorm",
    *(f"self_attn.{name}" for name in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")),
    *(f"mlp.{name}" for name in ("gate_proj", "up_proj", "down_proj")),
}


@pytest.fixture
def exported(tmp_path, tiny_drafter, tiny_relay, tiny_target) -> Path:
    folder = tmp_path / "dflow"
    export_drafter(tiny_drafter, tiny_relay, tiny_target, folder, dtype="float32")
    return folder


@pytest.fixture(scope="module")
def pristine(tmp_path_factory, tiny_target) -> Path:
    """An export that is only ever copied."""
    config = DrafterConfig(num_layers=2, block_size=4, target_layer_ids=[0, 1, 2])
    drafter = Drafter(DrafterDims.resolve(config, tiny_target))
    folder = tmp_path_factory.mktemp("pristine") / "dflow"
    export_drafter(drafter, Relay(64, 96), tiny_target, folder, dtype="float32")
    return folder


@pytest.fixture
def copied(pristine, tmp_path) -> Path:
    return Path(shutil.copytree(pristine, tmp_path / "dflow"))


def edit_json(path: Path, **changes) -> None:
    """Set keys of a JSON file; `None` takes one out, `a__b` reaches into an object."""
    content = json.loads(path.read_text())
    for name, value in changes.items():
        *outer, key = name.split("__")
        place = content
        for part in outer:
            place = place[part]
        if value is None:
            place.pop(key, None)
        else:
            place[key] = value
    path.write_text(json.dumps(content))


def edit_tensors(path: Path, change) -> None:
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


def hidden(drafter: Drafter) -> torch.Tensor:
    """Hidden states of one block after three context rows, from fixed noise."""
    noise = torch.Generator().manual_seed(3)
    width = len(drafter.dims.target_layer_ids) * drafter.dims.hidden_size
    taps_BSC = torch.randn(1, 3, width, generator=noise)
    x_BNKD = torch.randn(1, 1, drafter.dims.block_size, drafter.dims.hidden_size, generator=noise)
    context = drafter.context_kv(drafter.project(taps_BSC), torch.arange(3).unsqueeze(0))
    return drafter(x_BNKD, context, torch.tensor([[3]]))


def test_reads_back_exactly(exported, tiny_drafter, tiny_relay, tiny_target):
    loaded = load_export(exported, tiny_target)
    assert torch.equal(hidden(loaded.drafter), hidden(tiny_drafter))
    for name, tensor in tiny_relay.state_dict().items():
        assert torch.equal(loaded.relay.state_dict()[name], tensor)
    assert loaded.relay.first_rejected
    assert not any(p.requires_grad for p in loaded.drafter.parameters())


def test_bfloat16_is_the_rounded_drafter(tmp_path, tiny_drafter, tiny_target):
    export_drafter(tiny_drafter, None, tiny_target, tmp_path / "out")
    loaded = load_export(tmp_path / "out", tiny_target)
    rounded = {name: t.bfloat16().float() for name, t in tiny_drafter.state_dict().items()}
    tiny_drafter.load_state_dict(rounded)
    assert torch.equal(hidden(loaded.drafter), hidden(tiny_drafter))
    assert loaded.relay is None
    assert not (tmp_path / "out/relay").exists()


def test_first_rejected_travels(tmp_path, tiny_drafter, tiny_relay, tiny_target):
    tiny_relay.first_rejected = False
    export_drafter(tiny_drafter, tiny_relay, tiny_target, tmp_path / "out")
    assert not load_export(tmp_path / "out", tiny_target).relay.first_rejected


@pytest.mark.parametrize("terms", ["scale", "shift"])
def test_terms_travel(tmp_path, tiny_drafter, tiny_target, terms):
    """To the decoder and to the plug-in inside a serving engine; not into a relay of both terms."""
    from dflow_lightning.serving.vllm.folder import read_folder

    relay = Relay(tiny_drafter.dims.hidden_size, 96, terms=terms)
    with torch.no_grad():
        for parameter in relay.parameters():
            parameter.add_(0.5 * torch.randn_like(parameter))
    out = tmp_path / "out"
    export_drafter(tiny_drafter, relay, tiny_target, out, dtype="float32")
    assert json.loads((out / "relay/config.json").read_text())["terms"] == terms
    noise = torch.randn(4, 64)
    rows = (noise, noise[0], noise[1], torch.ones(4, dtype=torch.bool))
    for found in (load_export(out, tiny_target).relay, read_folder(out).relay):
        assert found.terms == terms
        assert torch.equal(found(*rows), relay(*rows))
    settings = {"num_layers": 2, "block_size": 4, "target_layer_ids": [0, 1, 2]}
    with pytest.raises(InputError, match=rf"relay\.terms is both but .* has {terms}"):
        DrafterModule(
            target=TargetConfig(path=tiny_target.name),
            drafter=DrafterConfig(**settings),
            relay=RelayConfig(enabled=True, hidden_size=96),
            init_from=str(out),
        )


def test_tensor_names_are_the_published_ones(tmp_path, tiny_target):
    config = DrafterConfig(num_layers=5, block_size=4, target_layer_ids=[0, 1, 2])
    drafter = Drafter(DrafterDims.resolve(config, tiny_target))
    export_drafter(drafter, None, tiny_target, tmp_path / "out")
    with safe_open(tmp_path / "out/model.safetensors", framework="pt") as file:
        names = set(file.keys())
        kinds = {file.get_slice(name).get_dtype() for name in names}
    expected = {"fc.weight", "hidden_norm.weight", "norm.weight"}
    expected |= {f"layers.{n}.{part}.weight" for n in range(5) for part in PER_LAYER}
    assert names == expected
    assert len(names) == 58
    assert kinds == {"BF16"}


def test_config_says_everything_twice_that_is_read_twice(copied, tiny_target):
    config = json.loads((copied / "config.json").read_text())
    assert config["architectures"] == ["DFlashDraftModel"]
    assert config["block_size"] == config["dflash_config"]["block_size"] == 4
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"] == 1e6
    assert config["rope_scaling"] is None
    assert config["dtype"] == config["torch_dtype"] == "float32"
    assert config["dflash_config"]["target_layer_ids"] == [0, 1, 2]
    assert config["dflash_config"]["mask_token_id"] == len(tiny_target.tokenizer)
    assert config["head_dim"] == 16
    assert config["num_target_layers"] == 4
    assert config["layer_types"] == ["full_attention", "full_attention"]
    assert "is_causal" not in config
    ours = config["dflow_config"]
    assert (ours["layout"], ours["num_draft_tokens"]) == ("anchor_first", 3)
    assert ours["relay"] == json.loads((copied / "relay/config.json").read_text())
    assert ours["relay"]["hidden_size"] == 96
    assert ours["target"]["fingerprint"] == tiny_target.fingerprint


def test_model_card_names_the_number_of_drafts(copied):
    card = (copied / "README.md").read_text()
    assert '"num_speculative_tokens": 3' in card
    assert "--speculative-num-draft-tokens 4" in card
    assert "row of the first rejected token included" in card
    assert "## Licence" in card


def test_transformers_reads_the_config(copied):
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(copied)
    assert config.rope_parameters == {"rope_type": "default", "rope_theta": 1e6}
    assert config.head_dim == 16


def test_a_published_folder_without_our_section_loads(exported, tiny_drafter, tiny_target):
    edit_json(exported / "config.json", dflow_config=None, rope_parameters=None)
    shutil.rmtree(exported / "relay")
    loaded = load_export(exported, tiny_target)
    assert loaded.relay is None
    assert torch.equal(hidden(loaded.drafter), hidden(tiny_drafter))


def rename(old: str, new: str):
    return lambda tensors: tensors.update({new: tensors.pop(old)})


def reshape(tensors: dict) -> None:
    tensors["fc.weight"] = tensors["fc.weight"][:, :-1].contiguous()


def poison(tensors: dict) -> None:
    tensors["norm.weight"][0] = float("nan")


def halve(tensors: dict) -> None:
    tensors["norm.weight"] = tensors["norm.weight"].half()


def count(tensors: dict) -> None:
    tensors["norm.weight"] = tensors["norm.weight"].long()


BODY, CONFIG = "model.safetensors", "config.json"
DAMAGES = {
    "no folder": (shutil.rmtree, "does not exist"),
    "no config": (lambda d: (d / CONFIG).unlink(), "holds no config.json"),
    "config cut": (lambda d: (d / CONFIG).write_text("{"), "is not JSON"),
    "config a list": (lambda d: (d / CONFIG).write_text("[]"), "not a JSON object"),
    "no weights": (lambda d: (d / BODY).unlink(), "only safetensors files are read"),
    "weights cut": (lambda d: (d / BODY).write_bytes((d / BODY).read_bytes()[:-9]), "is damaged"),
    "weights no file of ours": (lambda d: (d / BODY).write_bytes(b"pickle"), "is damaged"),
    "tensor missing": (
        lambda d: edit_tensors(d / BODY, lambda t: t.pop("fc.weight")),
        "lacks tensor fc.weight",
    ),
    "tensor unknown": (
        lambda d: edit_tensors(d / BODY, lambda t: t.update(extra=torch.ones(1))),
        "unknown tensor extra",
    ),
    "tensor renamed": (
        lambda d: edit_tensors(d / BODY, rename("norm.weight", "model.norm.weight")),
        "lacks tensor norm.weight",
    ),
    "wrong shape": (lambda d: edit_tensors(d / BODY, reshape), "has shape [64, 191]"),
    "not finite": (lambda d: edit_tensors(d / BODY, poison), "not finite"),
    "wrong dtype": (lambda d: edit_tensors(d / BODY, halve), "is float16, not float32"),
    "no float": (lambda d: edit_tensors(d / BODY, count), "is I64"),
    "other architecture": (
        lambda d: edit_json(d / CONFIG, architectures=["Other"]),
        "has architectures ['Other']",
    ),
    "two block sizes": (lambda d: edit_json(d / CONFIG, block_size=15), "has block_size 15"),
    "block size 1": (
        lambda d: edit_json(d / CONFIG, block_size=1, dflash_config__block_size=1),
        "block_size is 1",
    ),
    "no block size": (
        lambda d: edit_json(d / CONFIG, block_size=None, dflash_config__block_size=None),
        "lacks block_size",
    ),
    "no mask": (
        lambda d: edit_json(d / CONFIG, dflash_config__mask_token_id=None),
        "lacks mask_token_id",
    ),
    "mask outside": (
        lambda d: edit_json(d / CONFIG, dflash_config__mask_token_id=320),
        "outside the target's embedding",
    ),
    "mask ends text": (
        lambda d: edit_json(d / CONFIG, dflash_config__mask_token_id=256),
        "the target's eos_token",
    ),
    "no RoPE": (
        lambda d: edit_json(d / CONFIG, rope_theta=None, rope_parameters=None),
        "lacks rope_theta",
    ),
    "two RoPE bases": (lambda d: edit_json(d / CONFIG, rope_theta=1e4), "has rope_theta 10000.0"),
    "no head size": (lambda d: edit_json(d / CONFIG, head_dim=None), "lacks head_dim"),
    "causal": (lambda d: edit_json(d / CONFIG, is_causal=True), "is_causal to True"),
    "sliding": (
        lambda d: edit_json(d / CONFIG, layer_types=["sliding_attention"] * 2),
        "only full_attention",
    ),
    "shifted layout": (
        lambda d: edit_json(d / CONFIG, dflow_config__layout="shifted"),
        "block layout shifted",
    ),
    "newer format": (
        lambda d: edit_json(d / CONFIG, dflow_config__format_version=2),
        "newer than 1",
    ),
    "last layer tapped": (
        lambda d: edit_json(d / CONFIG, dflash_config__target_layer_ids=[0, 1, 3]),
        "holds 3",
    ),
    "negative tap": (
        lambda d: edit_json(d / CONFIG, dflash_config__target_layer_ids=[0, 1, -1]),
        "holds -1",
    ),
    "one tap too few": (
        lambda d: edit_json(d / CONFIG, dflash_config__target_layer_ids=[0, 1]),
        "has shape [64, 192]",
    ),
    "other vocabulary": (lambda d: edit_json(d / CONFIG, vocab_size=321), "vocab_size 321"),
    "other depth": (lambda d: edit_json(d / CONFIG, num_target_layers=6), "num_target_layers 6"),
    "other target": (
        lambda d: edit_json(d / CONFIG, dflow_config__target__fingerprint="0" * 64),
        "was trained for",
    ),
    "relay gone": (lambda d: shutil.rmtree(d / "relay"), "lacks its relay folder"),
    "relay weights gone": (
        lambda d: (d / "relay/relay.safetensors").unlink(),
        "holds no relay.safetensors",
    ),
    "relay changed": (
        lambda d: edit_json(d / "relay/config.json", first_rejected=False),
        "differs from dflow_config",
    ),
    "relay uninvited": (
        lambda d: edit_json(d / CONFIG, dflow_config__relay=None),
        "does not know",
    ),
    "relay tensor missing": (
        lambda d: edit_tensors(d / "relay/relay.safetensors", lambda t: t.pop("relay_mlp.2.bias")),
        "lacks tensor relay_mlp.2.bias",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES, ids=str)
def test_damage_is_named_in_one_sentence(copied, tiny_target, damage):
    change, expected = DAMAGES[damage]
    change(copied)
    with pytest.raises(InputError) as caught:
        load_export(copied, tiny_target)
    message = str(caught.value)
    assert expected in message
    assert "\n" not in message
    assert not message.endswith(".")


def test_pickles_are_never_read(copied, tiny_target):
    shutil.move(copied / "model.safetensors", copied / "pytorch_model.bin")
    with pytest.raises(InputError, match="only safetensors files are read"):
        load_export(copied, tiny_target)


def test_drafter_of_another_target(copied, tmp_path, tiny_target_dir):
    other = shutil.copytree(tiny_target_dir, tmp_path / "other")
    edit_tensors(other / BODY, lambda tensors: tensors["lm_head.weight"].mul_(2))
    with pytest.raises(InputError, match="was trained for"):
        load_export(copied, FrozenTarget.load(str(other)))


def test_second_export_replaces_the_first(exported, tiny_drafter, tiny_target):
    export_drafter(tiny_drafter, None, tiny_target, exported)
    assert load_export(exported, tiny_target).relay is None
    assert sorted(p.name for p in exported.parent.iterdir()) == [exported.name]


def test_a_failed_export_leaves_the_first(exported, tiny_drafter, tiny_target, monkeypatch):
    before = (exported / "model.safetensors").read_bytes()
    monkeypatch.setattr("dflow_lightning.export.write.model_card", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        export_drafter(tiny_drafter, None, tiny_target, exported)
    assert (exported / "model.safetensors").read_bytes() == before
    assert sorted(p.name for p in exported.parent.iterdir()) == [exported.name]


def test_a_wrong_read_back_is_never_announced(exported, tiny_drafter, tiny_target, monkeypatch):
    def careless(folder, target):
        loaded = load_export(folder, target)
        with torch.no_grad():
            loaded.drafter.fc.weight.add_(1.0)
        return loaded

    monkeypatch.setattr("dflow_lightning.export.write.load_export", careless)
    with pytest.raises(RuntimeError, match="read back"):
        export_drafter(tiny_drafter, None, tiny_target, exported)
    monkeypatch.undo()
    assert load_export(exported, tiny_target).relay is not None


def test_what_is_no_export_is_not_replaced(tmp_path, tiny_drafter, tiny_target):
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "thesis.tex").write_text("years of work")
    with pytest.raises(InputError, match=r"thesis\.tex"):
        export_drafter(tiny_drafter, None, tiny_target, folder)
    (folder / "thesis.tex").rename(folder / "config.json")
    with pytest.raises(InputError, match="not an export"):
        export_drafter(tiny_drafter, None, tiny_target, folder)
    with pytest.raises(InputError, match="is a file"):
        export_drafter(tiny_drafter, None, tiny_target, folder / "config.json")


def test_diverged_weights_are_not_exported(tmp_path, tiny_drafter, tiny_target):
    with torch.no_grad():
        tiny_drafter.norm.weight[0] = float("inf")
    with pytest.raises(InputError, match=r"norm\.weight holds values that are not finite"):
        export_drafter(tiny_drafter, None, tiny_target, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.fixture
def checkpoint(tmp_path, tiny_target_dir) -> Path:
    """What a run leaves, made without running one."""
    module = DrafterModule(
        target=TargetConfig(path=str(tiny_target_dir)),
        drafter=DrafterConfig(num_layers=2, block_size=4, target_layer_ids=[0, 1, 2]),
        relay=RelayConfig(enabled=True, first_rejected=False),
    )
    content = {
        "state_dict": module.state_dict(),
        "global_step": 12,
        "recipe": {"model": {"optimizer": {"lr": 0.125}, "init_from": None}, "run_dir": "x"},
        "pytorch-lightning_version": "2.6.6",
    }
    module.on_save_checkpoint(content)
    torch.save(content, tmp_path / "best.ckpt")
    return tmp_path / "best.ckpt"


def test_export_command(checkpoint, tmp_path, tiny_target, capsys):
    export_command(checkpoint=checkpoint, out=tmp_path / "out", dtype="float32")
    assert "num_speculative_tokens is 3" in capsys.readouterr().out
    loaded = load_export(tmp_path / "out", tiny_target)
    saved = torch.load(checkpoint, weights_only=True)["state_dict"]
    for name, tensor in loaded.drafter.state_dict().items():
        assert torch.equal(tensor, saved[f"drafter.{name}"])
    assert not loaded.relay.first_rejected
    card = (tmp_path / "out/README.md").read_text()
    assert "    lr: 0.125\nsteps: 12\n```" in card
    assert "run_dir" not in card


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (None, "does not exist"),
        (b"not a checkpoint", "cannot be read"),
        ({"state_dict": {}}, "not written by dflow-train"),
        ({"weights": 1}, "is not of a run"),
    ],
)
def test_bad_checkpoints(tmp_path, content, expected):
    path = tmp_path / "x.ckpt"
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif content is not None:
        torch.save(content, path)
    with pytest.raises(InputError, match=expected) as caught:
        export_command(checkpoint=path, out=tmp_path / "out")
    assert "\n" not in str(caught.value)


def test_a_checkpoint_folder_is_named(tmp_path):
    with pytest.raises(InputError, match="is a folder"):
        export_command(checkpoint=tmp_path, out=tmp_path / "out")
