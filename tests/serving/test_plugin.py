"""What the plug-in does at start: versions, damaged folders, settings that do not fit."""

import json
import shutil
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

from dflow_lightning.errors import InputError
from dflow_lightning.models.target import FrozenTarget
from dflow_lightning.serving import vllm as plugin
from dflow_lightning.serving.vllm import cpu_fixes, preflight
from dflow_lightning.serving.vllm.folder import local_folder, read_folder
from dflow_lightning.serving.vllm.versions import release, unsupported

ROOT = Path(__file__).resolve().parents[2]
TARGET = ROOT / "data/tiny-qwen3"
DFLOW, DFLASH = ROOT / "data/tiny-drafters/dflow", ROOT / "data/tiny-drafters/dflash"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(shutil.copytree(DFLOW, tmp_path / "dflow"))


def engine_config(model: Path, **changes) -> SimpleNamespace:
    """What the checks read of vLLM's configuration."""
    text = SimpleNamespace(hidden_size=160, vocab_size=2048, num_hidden_layers=8)
    speculative = SimpleNamespace(
        method="dflash", num_speculative_tokens=7, disable_padded_drafter_batch=False,
        draft_model_config=SimpleNamespace(model=str(model), revision=None),
    )  # fmt: skip
    config = SimpleNamespace(
        additional_config={}, speculative_config=speculative,
        model_config=SimpleNamespace(model=str(TARGET), hf_text_config=text),
    )  # fmt: skip
    for path, value in changes.items():
        *places, name = path.split("__")
        owner = config
        for place in places:
            owner = getattr(owner, place)
        setattr(owner, name, value)
    return config


def test_the_entry_point_is_this_plugin() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    assert '[project.entry-points."vllm.general_plugins"]' in text
    assert 'dflow_relay = "dflow_lightning.serving.vllm:register"' in text
    for one in entry_points(group="vllm.general_plugins", name="dflow_relay"):
        assert one.value == "dflow_lightning.serving.vllm:register"


def test_registers_and_mends_and_may_be_called_again(vllm) -> None:
    for _ in range(2):
        plugin.register()
    assert vllm.registered == {
        "DFlashDraftModel": "dflow_lightning.serving.vllm.drafter:DFlashDrafter"
    }
    sampler = vllm.modules["vllm.v1.sample.rejection_sampler"]
    assert sampler.expand_batch_to_tokens is cpu_fixes.expand_batch_to_tokens
    vllm.engine_args.config = engine_config(DFLASH)
    assert vllm.engine_args().create_engine_config() is vllm.engine_args.config


def test_an_unknown_release_is_left_as_it_is(vllm, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm.modules["vllm"], "__version__", "0.99.1+cu130")
    plugin.register()
    assert vllm.registered == {}
    assert len(vllm.logger.said) == 1
    assert "vLLM 0.99.1+cu130" in vllm.logger.said[0]
    monkeypatch.setenv("DFLOW_VLLM_UNTESTED", "1")
    plugin.register()
    assert vllm.registered


def test_releases() -> None:
    assert release("0.32.0+cpu") == "0.32"
    assert release("dev") == "dev"
    assert unsupported("0.32.1") is None
    assert "0.9.2" in str(unsupported("0.9.2"))


def test_the_plugin_needs_torch_and_safetensors_alone() -> None:
    """Imported in an interpreter where everything else of ours is missing."""
    blocked = [
        "transformers",
        "lightning",
        "mlflow",
        "jsonargparse",
        "omegaconf",
        "rich",
        "datasets",
    ]
    code = f"""
import sys
for name in {blocked}: sys.modules[name] = None
import dflow_lightning.serving.vllm.hooks, dflow_lightning.serving.vllm.preflight
from dflow_lightning.serving.vllm.folder import local_folder, read_folder
from pathlib import Path
assert read_folder(Path({str(DFLOW)!r})).relay.first_rejected
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_folders_without_relay_are_dflash() -> None:
    assert read_folder(DFLASH) is None


def test_somebody_elses_folder_is_not_looked_into(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "pytorch_model.bin").write_text("whatever")
    assert read_folder(tmp_path) is None


def test_a_hub_id_is_fetched_for_what_the_relay_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def fetch(model: str, revision: str | None, allow_patterns: list[str]) -> str:
        asked.append((model, revision, allow_patterns))
        return str(DFLOW)

    monkeypatch.setattr("huggingface_hub.snapshot_download", fetch)
    assert local_folder("someone/drafter", "v1") == DFLOW
    assert asked == [("someone/drafter", "v1", ["config.json", "relay/*"])]


@pytest.mark.parametrize("model", ["someone/not-in-the-cache", "no/such/folder"])
def test_what_cannot_be_reached_is_left_to_vllm(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert local_folder(model, None) is None


def relay_tensors(folder: Path, change) -> None:
    path = folder / "relay/relay.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


def narrow(tensors: dict) -> None:
    tensors["relay_mlp.0.weight"] = tensors["relay_mlp.0.weight"][:, :300].contiguous()


def poison(tensors: dict) -> None:
    tensors["relay_mlp.2.bias"][7] = float("nan")


def set_relay_flag(folder: Path, *, everywhere: bool) -> None:
    for name in ("relay/config.json", "config.json") if everywhere else ("relay/config.json",):
        content = json.loads((folder / name).read_text())
        (content if name.startswith("relay") else content["dflow_config"]["relay"])[
            "first_rejected"
        ] = False
        (folder / name).write_text(json.dumps(content))


DAMAGE = {
    "no relay folder": (lambda f: shutil.rmtree(f / "relay"), "lacks its relay folder"),
    "no relay weights": (
        lambda f: (f / "relay/relay.safetensors").unlink(), "holds no relay.safetensors"),
    "wrong hidden size": (lambda f: relay_tensors(f, narrow), "has shape [320, 300]"),
    "NaN": (lambda f: relay_tensors(f, poison), "values that are not finite"),
    "flag in relay/config.json": (
        lambda f: set_relay_flag(f, everywhere=False), "differs from dflow_config"),
    "flag in both": (lambda f: set_relay_flag(f, everywhere=True), "was changed after the export"),
    "relay beside the body": (
        lambda f: (f / "relay/relay.safetensors").rename(f / "relay.safetensors"),
        "which no export wrote and engines would read"),
    "other weights": (
        lambda f: relay_tensors(f, lambda t: t["relay_norm.bias"].add_(1)), "the checksum of"),
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_one_sentence_with_a_way_out(vllm, folder: Path, name: str) -> None:
    damage, wanted = DAMAGE[name]
    damage(folder)
    with pytest.raises(InputError) as error:
        preflight.check(engine_config(folder))
    text = str(error.value)
    assert wanted in text
    assert text.endswith("""--additional-config '{"dflow_relay": false}'""")
    assert "\n" not in text
    preflight.check(engine_config(folder, additional_config={"dflow_relay": False}))


@pytest.mark.parametrize(
    ("change", "wanted"),
    [
        ({"model_config__hf_text_config__hidden_size": 256}, "hidden_size 160, but"),
        ({"model_config__hf_text_config__num_hidden_layers": 9}, "num_target_layers 8, but"),
        ({"speculative_config__disable_padded_drafter_batch": True}, "drops the rows"),
        ({"additional_config": {"dflow_relay": "no"}}, "give true or false"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(vllm, change: dict, wanted: str) -> None:
    with pytest.raises(InputError, match=wanted):
        preflight.check(engine_config(DFLOW, **change))


def test_the_shipped_drafter_passes_without_a_word(vllm) -> None:
    preflight.check(engine_config(DFLOW))
    assert vllm.logger.said == []


def test_another_number_of_drafts_is_warned_of(vllm) -> None:
    preflight.check(engine_config(DFLOW, speculative_config__num_speculative_tokens=8))
    assert len(vllm.logger.said) == 1
    assert "num_speculative_tokens is 8" in vllm.logger.said[0]
    assert "draft 7" in vllm.logger.said[0]


def test_a_target_with_other_weights_is_warned_of(vllm, tmp_path: Path) -> None:
    tensors = load_file(TARGET / "model.safetensors")
    tensors["model.norm.weight"] += 1
    save_file(tensors, tmp_path / "model.safetensors")
    preflight.check(engine_config(DFLOW, model_config__model=str(tmp_path)))
    assert len(vllm.logger.said) == 1
    assert "whose weights are not those of" in vllm.logger.said[0]


def test_the_fingerprint_of_files_is_that_of_the_loaded_target() -> None:
    loaded = FrozenTarget.load(str(TARGET), dtype="float32").fingerprint
    assert preflight.folder_fingerprint(TARGET) == loaded


@pytest.mark.parametrize("method", [None, "eagle"])
def test_other_methods_are_not_looked_at(vllm, method: str | None) -> None:
    config = engine_config(Path("nowhere"), additional_config={"dflow_relay": "no"})
    config.speculative_config = SimpleNamespace(method=method) if method else None
    preflight.check(config)


def test_expanding_is_a_loop_over_requests() -> None:
    x, sums = torch.tensor([0.0, 0.7, 2.0]), torch.tensor([3, 3, 5], dtype=torch.int32)
    found = cpu_fixes.expand_batch_to_tokens(x, sums, 5, replace_from=0, replace_to=1)
    assert found.tolist() == [1, 1, 1, 2, 2]
    assert found.dtype == x.dtype
    assert cpu_fixes.expand_batch_to_tokens(x, sums, 5).tolist() == [0, 0, 0, 2, 2]
