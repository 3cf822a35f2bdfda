"""A drafter with a causal head in files: checkpoints, exports, their damages, and warm starts."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from published_shapes import tensor_shapes
from safetensors.torch import load_file
from test_causal_head import wake
from test_export import edit_json, edit_tensors
from training import make_module

from dflow_lightning.data.prompts import Prompt
from dflow_lightning.decode import SpeculativeDecoder
from dflow_lightning.errors import InputError
from dflow_lightning.export.speculators import export_speculators
from dflow_lightning.export.validate import validate_export
from dflow_lightning.export.validate_folder import Subject, checkpoint_check, engine_contract_check
from dflow_lightning.export.write import export_drafter
from dflow_lightning.formats.drafter_folder import load_export
from dflow_lightning.formats.engine_contract import check_contract
from dflow_lightning.models.causal_head import CausalHeadConfig
from dflow_lightning.models.dims import DrafterConfig
from dflow_lightning.models.relay import RelayConfig
from dflow_lightning.training.module import DrafterModule, TargetConfig
from dflow_lightning.training.saved import load_trained, open_checkpoint

BODY, CONFIG = "model.safetensors", "config.json"
HEAD = ["embed_proj.0.weight", "embed_proj.2.weight"]
HEAD += ["prefix_gru.weight_hh_l0", "prefix_gru.weight_ih_l0"]


@pytest.fixture(scope="module")
def module(tiny_target_dir) -> DrafterModule:
    """Domino+DFlow whose head and relay correct something."""
    module = make_module(tiny_target_dir, causal_head=True).eval()
    wake(module.drafter.causal_head)
    with torch.no_grad():
        for parameter in module.relay.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return module


@pytest.fixture(scope="module")
def pristine(module, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("pristine") / "domino"
    export_drafter(module.drafter, module.relay, module.target, folder, dtype="float32")
    return folder


@pytest.fixture
def folder(pristine, tmp_path) -> Path:
    return Path(shutil.copytree(pristine, tmp_path / "domino"))


# ---------------------------------------------------------------- the layout


def test_the_export_has_the_published_names_and_keys(pristine):
    """SGLang's four tensors beside the body's, and its keys in dflash_config."""
    shapes = {name: list(tensor.shape) for name, tensor in load_file(pristine / BODY).items()}
    config = json.loads((pristine / CONFIG).read_text())
    assert (
        sorted(name for name in shapes if name.split(".")[0] in ("embed_proj", "prefix_gru"))
        == HEAD
    )
    assert len(shapes) == 3 + 11 * 2 + 4
    assert shapes == tensor_shapes(config)
    wanted = {"projector_type": "domino", "shift_label": False, "pure_draft_prefix_len": 1}
    wanted |= {"gru_hidden_dim": 24, "emb_dim": 20}
    assert config["dflash_config"] | wanted == config["dflash_config"]
    assert check_contract(pristine) == []
    assert "# Domino + DFlow drafter" in (pristine / "README.md").read_text()


def test_an_export_without_a_head_is_as_before(tiny_drafter, tiny_target, tmp_path):
    export_drafter(tiny_drafter, None, tiny_target, tmp_path / "out")
    config = json.loads((tmp_path / "out" / CONFIG).read_text())
    assert sorted(config["dflash_config"]) == ["block_size", "mask_token_id", "target_layer_ids"]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_what_is_loaded_drafts_what_was_exported(module, pristine, temperature):
    ours, theirs = module.decoder(), SpeculativeDecoder.from_export(pristine, module.target)
    asked = [[3, 5, 7, 9], [200, 31, 4]]
    pair = [
        one.generate(asked, max_new_tokens=24, temperature=temperature) for one in (ours, theirs)
    ]
    for one, other in zip(*pair, strict=True):
        assert (one.token_ids, one.accepted) == (other.token_ids, other.accepted)
    head, read = module.drafter.causal_head, theirs.drafter.causal_head
    for name, tensor in head.state_dict().items():
        assert torch.equal(read.state_dict()[name], tensor)


@pytest.mark.slow
def test_the_package_drafts_what_eager_drafting_does(module, tmp_path):
    export_drafter(
        module.drafter, module.relay, module.target, tmp_path / "out", dtype="float32", compile=True
    )
    decoder = SpeculativeDecoder.from_export(tmp_path / "out", module.target)
    asked = [[3, 5, 7, 9], [200, 31, 4], [17]]
    for relay in (True, False):
        eager, packaged = (
            decoder.generate(
                asked, max_new_tokens=24, batch_size=2, use_rejected=relay, backend=backend
            )
            for backend in ("eager", "package")
        )
        for one, other in zip(eager, packaged, strict=True):
            assert (one.token_ids, one.accepted) == (other.token_ids, other.accepted)


def test_speculators_has_no_causal_head(module, tmp_path):
    with pytest.raises(InputError, match="speculators knows no drafter with a causal head"):
        export_speculators(module.drafter, module.relay, module.target, tmp_path / "out")
    assert not (tmp_path / "out").exists()


# ---------------------------------------------------------------- damage


def without(name):
    return lambda folder: edit_tensors(folder / BODY, lambda tensors: tensors.pop(name))


def shortened(name):
    def change(tensors):
        tensors[name] = tensors[name][:, :-1].contiguous()

    return lambda folder: edit_tensors(folder / BODY, change)


def config(**changes):
    return lambda folder: edit_json(folder / CONFIG, **changes)


DAMAGES = {
    **{f"{name} missing": (without(name), f"lacks tensor {name}") for name in HEAD},
    **{f"{name} of another shape": (shortened(name), f"tensor {name} of") for name in HEAD},
    "no projector": (config(dflash_config__projector_type=None), "unknown tensor embed_proj.0"),
    "other projector": (
        config(dflash_config__projector_type="linear"),
        "sets projector_type to linear, which is not supported",
    ),
    "shifted": (
        config(dflash_config__shift_label=True),
        "sets shift_label to True, which is not supported",
    ),
    "no width": (config(dflash_config__gru_hidden_dim=None), "lacks gru_hidden_dim"),
    "another rank": (config(dflash_config__emb_dim=21), "but config.json asks for"),
    "rank a text": (config(dflash_config__emb_dim="20"), "emb_dim '20', which is of"),
    "no prefix": (config(dflash_config__pure_draft_prefix_len=None), "lacks pure_draft_prefix_len"),
    "prefix too long": (
        config(dflash_config__pure_draft_prefix_len=3),
        "pure_draft_prefix_len is 3, but a block of 4 has 3 drafts",
    ),
    "another prefix": (
        config(dflash_config__pure_draft_prefix_len=2),
        "has dflash_config.pure_draft_prefix_len 2, which was exported as 1",
    ),
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_named_in_one_sentence(module, folder, damage):
    change, expected = DAMAGES[damage]
    change(folder)
    with pytest.raises(InputError) as caught:
        load_export(folder, module.target)
    message = str(caught.value)
    assert expected in message
    assert "\n" not in message
    prompts = [Prompt("p", "default", [3, 5, 7], [])]
    first = next(iter(validate_export(Subject(folder, module.target, prompts, 4, Path("x"), None))))
    assert (first.name, first.status, first.detail) == ("files", "FAIL", message)


FAULTS = {
    "prefix": (config(dflash_config__pure_draft_prefix_len=2), "SGLang takes 1 alone"),
    "no shift": (config(dflash_config__shift_label=None), "SGLang asks for true or false"),
    "missing": (without("embed_proj.2.weight"), "2.weight is missing: refused by SGLang"),
    "shape": (shortened("prefix_gru.weight_hh_l0"), "prefix_gru.weight_hh_l0 has shape"),
    "width": (config(dflash_config__gru_hidden_dim=0), "gru_hidden_dim is 0"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_what_sglang_would_refuse_is_named(folder, fault):
    change, expected = FAULTS[fault]
    change(folder)
    problems = check_contract(folder)
    assert any(expected in problem for problem in problems), problems


# ---------------------------------------------------------------- checkpoints and warm starts


@pytest.fixture
def saved(module, tmp_path) -> Path:
    content = {"state_dict": module.state_dict(), "pytorch-lightning_version": "2.6.6"}
    module.on_save_checkpoint(content)
    torch.save(content, tmp_path / "one.ckpt")
    return tmp_path / "one.ckpt"


def test_a_checkpoint_comes_back_with_its_head(module, saved, pristine):
    again = load_trained(open_checkpoint(saved))
    assert again.causal_head_config == module.causal_head_config
    for name, tensor in module.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor)
    content = torch.load(saved, weights_only=True)
    prompts = [Prompt("p", "default", [3, 5, 7], [])]
    subject = Subject(pristine, module.target, prompts, 4, Path("x"), content)
    assert "bit for bit" in checkpoint_check(subject)[0]
    assert "vLLM has no causal head" in engine_contract_check(subject)[0]
    content["state_dict"]["drafter.causal_head.embed_proj.2.weight"] += 1
    with pytest.raises(Exception, match=r"embed_proj.2.weight is not that of the checkpoint"):
        checkpoint_check(subject)


def test_resuming_needs_the_same_head(module, saved, tiny_target_dir):
    content = torch.load(saved, weights_only=True)
    plain = make_module(tiny_target_dir)
    with pytest.raises(
        InputError, match=r"causal_head.enabled is False but the checkpoint has True"
    ):
        plain.on_load_checkpoint(content)
    older = {"state_dict": plain.state_dict()}
    plain.on_save_checkpoint(older)
    del older["dflow"]["causal_head"]  # what was written before there was a head
    for name in ("gru_hidden_dim", "emb_dim", "pure_draft_prefix_len"):
        del older["dflow"]["drafter"][name]
    plain.on_load_checkpoint(older)
    with pytest.raises(
        InputError, match=r"causal_head.enabled is True but the checkpoint has False"
    ):
        module.on_load_checkpoint(older)


def begun_with(folder, tiny_target_dir, **head) -> DrafterModule:
    torch.manual_seed(7)
    return DrafterModule(
        target=TargetConfig(path=str(tiny_target_dir)),
        drafter=DrafterConfig(num_layers=2, block_size=4, target_layer_ids=[0, 1, 2]),
        relay=RelayConfig(enabled=True, hidden_size=96),
        causal_head=CausalHeadConfig(**head),
        init_from=str(folder),
    )


def test_a_drafter_begins_with_a_head_or_without(module, pristine, tiny_target_dir, tmp_path):
    sizes = {"gru_hidden_dim": 24, "emb_dim": 20}
    begun = begun_with(pristine, tiny_target_dir, enabled=True, **sizes)
    for name, tensor in module.drafter.state_dict().items():
        assert torch.equal(begun.drafter.state_dict()[name], tensor)
    with pytest.raises(InputError, match=r"causal_head.enabled is False but model.init_from"):
        begun_with(pristine, tiny_target_dir)
    with pytest.raises(InputError, match=r"causal_head.emb_dim is 21 but model.init_from"):
        begun_with(pristine, tiny_target_dir, enabled=True, gru_hidden_dim=24, emb_dim=21)
    plain = make_module(tiny_target_dir, relay=False)
    export_drafter(plain.drafter, None, plain.target, tmp_path / "dflash", dtype="float32")
    warm = begun_with(tmp_path / "dflash", tiny_target_dir, enabled=True, **sizes)
    for name, tensor in plain.drafter.state_dict().items():
        assert torch.equal(warm.drafter.state_dict()[name], tensor)
    assert not warm.drafter.causal_head.embed_proj[2].weight.any()  # drafts as DFlash at first


@pytest.mark.parametrize(
    ("head", "sentence"),
    [
        ({"gru_hidden_dim": 0}, "causal_head.gru_hidden_dim is 0; give 1 or more"),
        ({"emb_dim": 0}, "causal_head.emb_dim is 0; give 1 or more"),
        ({"pure_draft_prefix_len": 3}, "causal_head.pure_draft_prefix_len is 3, but a block of 4"),
        ({"pure_draft_prefix_len": -1}, "causal_head.pure_draft_prefix_len is -1, but"),
        ({"base_start": 1.5}, "causal_head.base_start is 1.5; give a number from 0 to 1"),
        ({"decay_ratio": 0.0}, "causal_head.decay_ratio is 0.0; give a share above 0"),
    ],
)
def test_mistakes_in_a_recipe(head, sentence, tiny_target_dir, pristine):
    with pytest.raises(InputError) as caught:
        begun_with(pristine, tiny_target_dir, enabled=True, **head)
    assert sentence in str(caught.value)
