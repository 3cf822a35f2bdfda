"""The frozen target: its cache, taps and fingerprint, and which models it can be."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from targets import random_target
from transformers import (
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from dflow_lightning.data.tokenizer import load_tokenizer, stop_token_ids
from dflow_lightning.decode import SpeculativeDecoder
from dflow_lightning.errors import InputError
from dflow_lightning.models.dims import DrafterConfig, DrafterDims
from dflow_lightning.models.drafter import Drafter, start_from_target
from dflow_lightning.models.fingerprint import weights_fingerprint
from dflow_lightning.models.target import FrozenTarget
from dflow_lightning.plan.command import empty_target

SHAPE = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
}


@pytest.fixture
def save(tiny_target_dir: Path, tmp_path: Path):
    """Saves a model with the tokenizer of the tiny target, and returns its folder."""

    def save_model(model) -> Path:
        model.save_pretrained(tmp_path / "saved")
        AutoTokenizer.from_pretrained(tiny_target_dir).save_pretrained(tmp_path / "saved")
        return tmp_path / "saved"

    return save_model


def random_ids(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 256, shape, generator=torch.Generator().manual_seed(seed))


def causal(positions_BQ: torch.Tensor, capacity: int) -> torch.Tensor:
    return torch.arange(capacity) <= positions_BQ.unsqueeze(-1)


def uncached(target: FrozenTarget, ids: list[int], layers: list[int]) -> tuple:
    """Logits and taps of one row by one plain forward, `[S, V]` and `[S, C]`."""
    output = target.model(torch.tensor([ids]), output_hidden_states=True)
    taps = torch.cat([output.hidden_states[layer + 1] for layer in layers], dim=-1)
    return output.logits[0], taps[0]


# ---------------------------------------------------------------- cache and taps


@torch.no_grad()
def test_rows_of_different_length_share_a_cache(tiny_target):
    """Four prompts, then a rejected and a real block behind each: as if each were alone."""
    layers, lengths, capacity, width = [0, 2], [3, 7, 12, 20], 32, 4
    rows = [random_ids(length + width, seed=length).tolist() for length in lengths]
    cache = tiny_target.new_cache(capacity)
    padded = torch.zeros(4, max(lengths), dtype=torch.long)
    for b, (row, length) in enumerate(zip(rows, lengths, strict=True)):
        padded[b, :length] = torch.tensor(row[:length])
    positions = torch.arange(max(lengths)).expand(4, -1)
    prefill = tiny_target.forward(
        padded, positions, cache, positions, causal(positions, capacity), layers
    )
    positions = torch.tensor(lengths).unsqueeze(1) + torch.arange(width)
    for block in (random_ids(4, width), torch.tensor([row[-width:] for row in rows])):
        step = tiny_target.forward(
            block, positions, cache, positions, causal(positions, capacity), layers
        )
    for b, (row, length) in enumerate(zip(rows, lengths, strict=True)):
        logits, taps = uncached(tiny_target, row, layers)
        for output, part in ((prefill, slice(0, length)), (step, slice(length, length + width))):
            rows_of_output = slice(0, part.stop - part.start)
            got = tiny_target.head(output.hidden_BQD)[b, rows_of_output]
            torch.testing.assert_close(got, logits[part], atol=1e-4, rtol=1e-4)
            torch.testing.assert_close(
                output.taps_BQC[b, rows_of_output], taps[part], atol=1e-4, rtol=1e-4
            )


@torch.no_grad()
@pytest.mark.parametrize("layers", [[0], [0, 1, 2], [2, 0], [3]])
def test_features_are_the_taps_of_the_whole_forward(tiny_target, layers):
    ids, positions = random_ids(2, 9), torch.arange(9).expand(2, -1)
    visible = causal(positions, 9)
    whole, short = tiny_target.new_cache(9), tiny_target.new_cache(9)
    output = tiny_target.forward(ids, positions, whole, positions, visible, layers)
    taps = tiny_target.features(ids, positions, short, positions, visible, layers)
    assert torch.equal(taps, output.taps_BQC)
    for b in range(2):
        wanted = uncached(tiny_target, ids[b].tolist(), layers)[1]
        if 3 not in layers:  # the last layer's output is normed in Hugging Face's list
            torch.testing.assert_close(taps[b], wanted, atol=1e-5, rtol=1e-5)
    assert [layer.is_initialized for layer in short.layers] == [
        index <= max(layers) for index in range(4)
    ]


@torch.no_grad()
def test_features_leave_the_target_whole(tiny_target):
    ids, positions = random_ids(1, 5), torch.arange(5).unsqueeze(0)
    before = tiny_target.model(ids).logits
    cache = tiny_target.new_cache(5)
    tiny_target.features(ids, positions, cache, positions, causal(positions, 5), [0])
    assert torch.equal(tiny_target.model(ids).logits, before)
    assert tiny_target.num_layers == 4


def test_no_gradient_reaches_the_target(tiny_target):
    assert not any(p.requires_grad for p in tiny_target.model.parameters())
    assert not tiny_target.model.training
    assert not isinstance(tiny_target, torch.nn.Module)
    hidden = torch.randn(2, 64, requires_grad=True)
    tiny_target.head(hidden).sum().backward()
    assert hidden.grad is not None
    assert tiny_target.model.lm_head.weight.grad is None


# ---------------------------------------------------------------- identity


def test_fingerprint_follows_every_tensor(tiny_target, tiny_target_dir):
    again = FrozenTarget.load(str(tiny_target_dir))
    assert again.fingerprint == tiny_target.fingerprint
    for name, parameter in list(again.model.named_parameters())[::7]:
        with torch.no_grad():
            kept = parameter.view(-1)[0].clone()
            parameter.view(-1)[0] += 0.5
            changed = FrozenTarget(again.model, again.tokenizer, again.name)
            assert changed.fingerprint != tiny_target.fingerprint, name
            parameter.view(-1)[0] = kept


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float32])
def test_fingerprint_does_not_depend_on_the_loaded_precision(stored, tiny_target, save):
    """Stored in bfloat16, as models are published, and with numbers that float16 cannot hold."""
    model = Qwen3ForCausalLM(Qwen3Config(**SHAPE))
    with torch.no_grad():
        model.lm_head.weight.mul_(1e-5)
    folder = str(save(model.to(stored)))
    names = ("bfloat16", "float32", "float16")
    found = [FrozenTarget.load(folder, dtype=name) for name in names]
    assert [str(one.dtype) for one in found] == [f"torch.{name}" for name in names]
    (fingerprint,) = {one.fingerprint for one in found}
    assert fingerprint == weights_fingerprint(model.state_dict().items())
    assert fingerprint != tiny_target.fingerprint


def test_stop_ids_of_all_sources_together(tiny_target_dir, tiny_target):
    eos = tiny_target.tokenizer.eos_token_id
    assert tiny_target.stop_token_ids == (eos,)
    target = FrozenTarget.load(str(tiny_target_dir))
    target.model.generation_config.eos_token_id = [7, 3]
    target.config.eos_token_id = 5
    assert target.stop_token_ids == tuple(sorted({3, 5, 7, eos}))
    target.model.generation_config.eos_token_id = target.config.eos_token_id = None
    assert target.stop_token_ids == (eos,)


# ---------------------------------------------------------------- which models


@pytest.mark.parametrize(
    "config",
    [
        Qwen3Config(**SHAPE, use_sliding_window=True, sliding_window=8, max_window_layers=2),
        MistralConfig(**SHAPE, sliding_window=8),
    ],
    ids=["some layers", "all layers, unnamed"],
)
def test_sliding_windows_are_refused(config, save):
    kind = MistralForCausalLM if isinstance(config, MistralConfig) else Qwen3ForCausalLM
    with pytest.raises(InputError, match=r"layers of type .*sliding_attention"):
        FrozenTarget.load(str(save(kind(config))))


def test_a_window_that_is_switched_off_is_none(save):
    model = MistralForCausalLM(MistralConfig(**SHAPE, sliding_window=None))
    assert FrozenTarget.load(str(save(model))).num_layers == 4


def test_missing_weights_are_never_random(tmp_path):
    folder = random_target(tmp_path / "target")
    config = json.loads((folder / "config.json").read_text())
    config |= {"num_hidden_layers": 5, "layer_types": ["full_attention"] * 5}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(InputError, match=r"lacks 11 tensors, first model\.layers\.4\."):
        FrozenTarget.load(str(folder))


@torch.no_grad()
@pytest.mark.parametrize("tied", [False, True])
def test_a_llama_target_is_tapped_and_decoded_without_loss(save, tied):
    torch.manual_seed(4)
    config = LlamaConfig(
        **SHAPE, tie_word_embeddings=tied, bos_token_id=None, eos_token_id=256, pad_token_id=257
    )
    model = LlamaForCausalLM(config)
    model.lm_head.weight.mul_(8.0)
    target = FrozenTarget.load(str(save(model)))
    shape = DrafterConfig(num_layers=2, block_size=4, target_layer_ids=[0, 2])
    drafter = Drafter(DrafterDims.resolve(shape, target)).eval()
    start_from_target(drafter, target)
    prompts = [random_ids(size, seed=size).tolist() for size in (3, 11, 6)]
    decoder = SpeculativeDecoder(target, drafter)
    fast = decoder.generate(prompts, max_new_tokens=24, stop_token_ids=(), batch_size=3)
    plain = decoder.generate_plain(prompts, max_new_tokens=24, stop_token_ids=())
    assert [c.token_ids for c in fast] == [c.token_ids for c in plain]
    wanted = list(prompts[0])
    for _ in range(24):
        wanted.append(int(model(torch.tensor([wanted])).logits[0, -1].argmax()))
    assert fast[0].token_ids == wanted[3:]
    ids, positions = torch.tensor([wanted]), torch.arange(27).unsqueeze(0)
    taps = target.features(
        ids, positions, target.new_cache(27), positions, causal(positions, 27), [0, 2]
    )
    torch.testing.assert_close(taps[0], uncached(target, wanted, [0, 2])[1], atol=1e-5, rtol=1e-5)


def plan_target(path: str) -> None:
    empty_target(path, None)


def served(path: str) -> None:
    """What `prepare --server` reads of a target whose weights are elsewhere."""
    stop_token_ids(path, load_tokenizer(path, "target"))


@pytest.mark.parametrize("model_type", ["qwen3_vl", "llava", "mistral3"])
@pytest.mark.parametrize("load", [FrozenTarget.load, plan_target, load_tokenizer, served])
def test_f16_a_vision_language_target_is_named_before_anything_is_read(tmp_path, model_type, load):
    """F16: in every command that takes a target, also where its weights are not needed."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    with pytest.raises(InputError, match=f"is a {model_type} model.*choose a text-only target"):
        load(str(tmp_path))


@pytest.mark.parametrize("load", [FrozenTarget.load, plan_target, load_tokenizer, served])
def test_f43_a_relative_target_seen_from_another_folder_is_said_to_be_missing(
    tmp_path, monkeypatch, load
):
    """F43: the hub's reason alone misleads; one sentence for all who look for a target."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match=r"there is no folder elsewhere/tiny in .*whole path"):
        load("elsewhere/tiny")


@pytest.mark.parametrize("content", [b"", b"[]", b"null", b'{"model": 3}', bytes(range(256))])
@pytest.mark.parametrize("file", ["config.json", "tokenizer.json", "generation_config.json"])
def test_f43_a_damaged_file_is_one_sentence(tiny_target_dir, tmp_path, file, content):
    """F43: libraries raise whatever comes; without its generation config a target went on without
    its stop tokens.
    """
    folder = shutil.copytree(tiny_target_dir, tmp_path / "target")
    (folder / file).write_bytes(content)
    for load in (FrozenTarget.load, served):
        if file != "tokenizer.json" and b"model" in content:
            continue  # a config of an unknown type; a generation config without a setting
        with pytest.raises(
            InputError, match=r"of .*/target could not be loaded \(.*again"
        ) as found:
            load(str(folder))
        assert "\n" not in str(found.value)


def test_f43_stop_tokens_that_are_none_are_refused(tiny_target_dir, tmp_path):
    """F43: a text here ended in a traceback of a comparison."""
    folder = shutil.copytree(tiny_target_dir, tmp_path / "target")
    (folder / "generation_config.json").write_text('{"eos_token_id": ["x"]}')
    for load in (lambda path: FrozenTarget.load(path).stop_token_ids, served):
        with pytest.raises(InputError, match=r"eos_token_id \['x'\] in a GenerationConfig; give"):
            load(str(folder))


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="Linux tells what is mapped")
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_weights_of_the_stored_type_are_mapped_so_that_processes_share_them(
    dtype: str,
) -> None:
    folder = Path(__file__).parents[1] / "data/tiny-qwen3"  # in bfloat16
    target = FrozenTarget.load(str(folder), dtype=dtype)
    mapped = [
        range(*(int(end, 16) for end in line.split()[0].split("-")))
        for line in Path("/proc/self/maps").read_text().splitlines()
        if str(folder) in line
    ]
    weights = target.layer_weights(0).values()
    found = [any(weight.data_ptr() in part for part in mapped) for weight in weights]
    assert found == [dtype == "bfloat16"] * len(found)
