"""EAGLE-3: training against decoding and a naive reference, loss, lossless, export, mistakes."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from eagle3_training import make_eagle3, train_eagle3
from safetensors.torch import load_file, save_file
from test_lossless import chi_square, prompts, small_vocabulary  # noqa: F401
from training import make_module, one_text

from dflow_lightning.commandline.recipe import Recipe
from dflow_lightning.data.datamodule import Batch
from dflow_lightning.decode import Engine, Request, SpeculativeDecoder, rounds
from dflow_lightning.decode.rounds import RoundMode
from dflow_lightning.errors import InputError
from dflow_lightning.export.write import export_drafter
from dflow_lightning.formats.drafter_folder import load_export
from dflow_lightning.formats.engine_contract import check_contract
from dflow_lightning.models.dims import DrafterConfig
from dflow_lightning.models.eagle3 import Eagle3Config, Eagle3Dims, Eagle3Drafter
from dflow_lightning.run.fit import method_of
from dflow_lightning.tensors.blocks import Anchors, Documents, slot_labels
from dflow_lightning.training.base import TargetConfig
from dflow_lightning.training.eagle3_module import Eagle3Module
from dflow_lightning.training.module import DrafterModule
from dflow_lightning.training.step_inputs import Round, clean_forward


@pytest.fixture(scope="module")
def half_trained3(tiny_target_dir):
    """A module that drafts well early in one text and badly later, with the text it saw."""
    module = make_eagle3(tiny_target_dir)
    batch = one_text(module, [3, 5, 7, 9], 60)
    train_eagle3(module, batch, 60)
    return module.eval(), batch


def inputs_at(module, batch, positions, documents=None):
    """The step's inputs with blocks at the given anchors."""
    batch = batch._replace(documents=documents) if documents is not None else batch
    inputs = clean_forward(
        module.target, batch, module.drafter.dims.target_layer_ids, 0, up_to_head=True
    )
    positions = torch.tensor(positions)
    valid = torch.ones_like(positions, dtype=torch.bool)
    spans = ()
    if documents is not None:
        spans = (documents.starts_BS.gather(1, positions), documents.ends_BS.gather(1, positions))
    inputs.rounds.append(Round(Anchors(positions, valid, *spans)))
    return inputs


# ---------------------------------------------------------------- training is decoding


@torch.no_grad()
@pytest.mark.parametrize("prefill_chunk", [512, 7])
def test_the_training_unroll_gives_the_logits_of_cached_decoding(
    half_trained3, monkeypatch, prefill_chunk
):
    module, batch = half_trained3
    target, head = module.target, module.target.head
    text, compared, accepted = batch.input_ids_BS[0].tolist(), 0, []
    for prompt_length in (5, 14, 23, 40):
        engine = Engine(
            module.decoder().models(), num_slots=2, max_length=120, prefill_chunk=prefill_chunk
        )
        engine.submit(
            Request(prompt_ids=text[:prompt_length], max_new_tokens=30, stop_token_ids=())
        )
        while not any(flight.decoding for _, flight in engine._flights()):
            engine.admit()
            engine.prefill()
            engine.backend.round(
                engine.models, engine.state, RoundMode(), engine.timer
            )  # as neighbours do
        for _ in range(5):
            seen: list[torch.Tensor] = []

            def recorded(hidden, seen=seen):
                seen.append(head(hidden))
                return seen[-1]

            monkeypatch.setattr(target, "head", recorded)
            state = engine._in_use([next(engine._flights())])
            drafts = rounds.draft(engine.models, state, RoundMode(), None).tokens_RJ
            monkeypatch.undo()
            anchor = int(state.anchor_R[0])
            ids = state.tokens_RT[0, : anchor + 1].tolist() + drafts[0].tolist()
            row = torch.tensor([ids])
            inputs = inputs_at(
                module, Batch(row, torch.ones_like(row, dtype=torch.bool), torch.tensor([1])),
                [[anchor]],
            )  # fmt: skip
            logits = head(module.unroll(inputs))[0, 0]
            torch.testing.assert_close(torch.cat(seen, dim=1)[0], logits, atol=1e-4, rtol=1e-4)
            compared += 1
            (update,) = engine.round()
            accepted.append(len(update.token_ids) - 1)
    assert compared == 20
    assert {0, 3} <= set(accepted)  # rounds that continue after all, some and no drafts


def naive_unroll(module, batch, anchor, start=0):
    """One block by loops over heads and keys, in float64; positions count from `start`."""
    target, drafter = module.target, module.drafter.double()
    layer, dims = drafter.midlayer, drafter.dims
    taps = inputs_at(module, batch, [[anchor]]).taps_BSC[0]
    if start:
        alone = batch._replace(input_ids_BS=batch.input_ids_BS[:, start:])
        rest = inputs_at(module, alone, [[anchor - start]]).taps_BSC[0]
        taps = torch.cat([taps[:start], rest])
    ids = batch.input_ids_BS[0].tolist()
    features = drafter.fc(taps.double())

    def embed(token):
        return target.embed(torch.tensor(token)).double()

    def turned(x, position):
        half = x.shape[-1] // 2
        angles = position * drafter.rotary.inverse_frequencies.double()
        a, b = x[:half], x[half:]
        return torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()])

    def heads(linear, pair, position=None):
        rows = linear(pair).view(-1, dims.head_dim)
        return rows if position is None else [turned(row, position) for row in rows]

    keys, values = [], []
    for t in range(start, anchor - 1):
        pair = torch.cat([layer.input_layernorm(embed(ids[t + 1])), layer.hidden_norm(features[t])])
        keys.append(heads(layer.self_attn.k_proj, pair, t - start))
        values.append(heads(layer.self_attn.v_proj, pair))
    h, found = features[anchor - 1], []
    group = dims.num_attention_heads // dims.num_key_value_heads
    for step in range(module.ttt_steps):
        position = anchor - 1 - start + step
        pair = torch.cat([layer.input_layernorm(embed(ids[anchor + step])), layer.hidden_norm(h)])
        keys.append(heads(layer.self_attn.k_proj, pair, position))
        values.append(heads(layer.self_attn.v_proj, pair))
        out = []
        for number, query in enumerate(heads(layer.self_attn.q_proj, pair, position)):
            scores = torch.stack([query @ key[number // group] for key in keys])
            weights = (scores / dims.head_dim**0.5).softmax(0)
            out.append(sum(w * v[number // group] for w, v in zip(weights, values, strict=True)))
        h = h + layer.self_attn.o_proj(torch.cat(out))
        h = h + layer.mlp(layer.post_attention_layernorm(h))
        found.append(drafter.norm(h))
    module.drafter.float()
    return torch.stack(found)


@torch.no_grad()
def test_the_unroll_equals_a_naive_reference_block_by_block(half_trained3):
    module, batch = half_trained3
    anchors = [1, 6, 7, 33, 55]
    hidden = module.unroll(inputs_at(module, batch, [anchors]))[0]
    for number, anchor in enumerate(anchors):
        wanted = naive_unroll(module, batch, anchor).float()
        torch.testing.assert_close(hidden[number], wanted, atol=2e-4, rtol=2e-4)


@torch.no_grad()
def test_a_document_of_a_packed_row_is_unrolled_as_if_it_were_alone(half_trained3):
    module, batch = half_trained3
    starts = torch.tensor([[0] * 20 + [20] * 44])
    documents = Documents(starts, torch.tensor([[1] * 20 + [2] * 44]))
    hidden = module.unroll(inputs_at(module, batch, [[9, 21, 40]], documents))[0]
    torch.testing.assert_close(
        hidden[0], naive_unroll(module, batch, 9).float(), atol=2e-4, rtol=2e-4
    )
    for number, anchor in ((1, 21), (2, 40)):
        wanted = naive_unroll(module, batch, anchor, start=20).float()
        torch.testing.assert_close(hidden[number], wanted, atol=2e-4, rtol=2e-4)


@torch.no_grad()
def test_a_block_begins_behind_a_feature_of_its_own_document(half_trained3):
    module, batch = half_trained3
    ids = batch.input_ids_BS
    everything = torch.ones_like(ids, dtype=torch.bool)
    starts = torch.tensor([[0] * 20 + [20] * 44])
    for documents in (None, Documents(starts, torch.tensor([[1] * 20 + [2] * 44]))):
        module.num_anchors = 64
        given = Batch(ids, everything, torch.tensor([1]), documents)
        anchors = module.begin_step(given).rounds[0].anchors
        found = set(anchors.positions_BN[anchors.valid_BN].tolist())
        assert 0 not in found
        assert (20 in found) == (documents is None)
        assert {1, 21} <= found
    module.num_anchors = 12


# ---------------------------------------------------------------- loss


def divergence(log_p, log_q):
    """KL(p || q), by its definition."""
    return float((log_p.exp() * (log_p - log_q)).sum())


def test_loss_is_the_weighted_divergence_from_the_targets_distribution(half_trained3):
    module, batch = half_trained3
    inputs = inputs_at(module, batch, [[8, 30, 61]])  # the last block ends with the row
    loss, sums = module.objective(inputs)
    with torch.no_grad():
        q = module.target.head(module.unroll(inputs)).log_softmax(-1)[0]
        log_p = module.target.model(batch.input_ids_BS).logits[0].log_softmax(-1)
    total = weight = 0.0
    accepted = 0
    for number, anchor in enumerate((8, 30, 61)):
        right = True
        for step in range(3):
            if anchor + step + 1 >= batch.input_ids_BS.shape[1]:
                continue
            total += 0.8**step * divergence(log_p[anchor + step], q[number, step])
            weight += 0.8**step
            right &= int(q[number, step].argmax()) == int(batch.input_ids_BS[0, anchor + step + 1])
            accepted += right
    torch.testing.assert_close(loss.item(), total / weight, atol=1e-4, rtol=1e-4)
    assert sums[0, 2:].tolist() == [accepted, 3]
    torch.testing.assert_close(sums[0, 1].item(), weight)


def test_gradient_checkpointing_changes_no_gradient(tiny_target_dir):
    found = []
    for checkpointing in (False, True):
        module = make_eagle3(tiny_target_dir, gradient_checkpointing=checkpointing)
        batch = one_text(module, [3, 5, 7, 9], 40)
        module.objective(module.begin_step(batch))[0].backward()
        found.append([p.grad for p in module.parameters()])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)


def test_tau_on_the_datas_tokens_is_that_of_decoding(half_trained3):
    """Teacher-forced steps count accepted drafts as decoding does."""
    module, batch = half_trained3
    decoder, text = module.decoder(), batch.input_ids_BS[0].tolist()
    for anchor in (10, 21, 35, 50):
        with torch.no_grad():
            _, sums = module.objective(inputs_at(module, batch, [[anchor]]))
        completion = decoder.generate(
            [text[:anchor]], max_new_tokens=5, stop_token_ids=()
        )[0]  # the first token, then a round  # fmt: skip
        assert completion.token_ids[0] == text[anchor]
        assert completion.accepted[0] == int(sums[0, 2])


# ---------------------------------------------------------------- decoding is lossless


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("batch_size", [1, 3])
def test_same_tokens_as_the_target_alone(half_trained3, temperature, batch_size):
    module, batch = half_trained3
    decoder = module.decoder()
    asked = [batch.input_ids_BS[0, :4].tolist(), batch.input_ids_BS[0, :30].tolist(), *prompts()]
    settings = {"max_new_tokens": 40, "temperature": temperature}
    plain = decoder.generate_plain(asked, **settings)
    fast = decoder.generate(asked, batch_size=batch_size, **settings)
    alone = decoder.generate(asked, **settings)
    for one, other, third in zip(plain, fast, alone, strict=True):
        assert one.token_ids == other.token_ids
        assert other.accepted == third.accepted
    if temperature == 0.0:
        assert max(fast[0].accepted) == 3


@torch.inference_mode()
@pytest.mark.parametrize("acceptance", ["match", "rejection"])
def test_sampled_sequences_have_the_targets_distribution(small_vocabulary, acceptance):  # noqa: F811
    target, _ = small_vocabulary
    torch.manual_seed(0)
    config = Eagle3Config(block_size=3, target_layer_ids=[0, 1])
    drafter = Eagle3Drafter(Eagle3Dims.resolve(config, target)).eval()
    statistic, limit, completions = chi_square(
        target, drafter, samples=2000, batch_size=500, acceptance=acceptance
    )
    assert sum(sum(c.accepted) for c in completions) > 100
    assert statistic < limit


@pytest.mark.slow
@pytest.mark.usefixtures("traced")
def test_compiled_equals_eager_and_never_compiles_again(half_trained3):
    module, batch = half_trained3
    text = batch.input_ids_BS[0].tolist()
    requests = [
        Request(
            prompt_ids=text[i : 2 * i + 3],
            max_new_tokens=10 + 3 * i,
            seed=i,
            stop_token_ids=(),
            temperature=0.9 * (i % 2),
        )
        for i in range(6)
    ]
    settings = {"num_slots": 1, "max_length": 80, "acceptance": "rejection"}
    models = module.decoder().models()
    wanted = Engine(models, **settings).run(requests)
    engine = Engine(models, **settings, backend="compiled")
    engine.warm_up(modes=[RoundMode(), RoundMode(sampled=True)])
    with torch.compiler.set_stance("fail_on_recompile"):
        got = engine.run(requests)
    assert [c.token_ids for c in got] == [c.token_ids for c in wanted]
    assert [c.accepted for c in got] == [c.accepted for c in wanted]
    assert sum(sum(c.accepted) for c in got) > 0


# ---------------------------------------------------------------- export


@pytest.fixture(scope="module")
def exported(half_trained3, tmp_path_factory) -> Path:
    module, _ = half_trained3
    folder = tmp_path_factory.mktemp("eagle3") / "export"
    export_drafter(module.drafter, None, module.target, folder, dtype="float32")
    return folder


def test_the_export_read_back_drafts_the_same(half_trained3, exported, tiny_target):
    module, batch = half_trained3
    asked = [batch.input_ids_BS[0, :9].tolist(), *prompts(3)]
    loaded = SpeculativeDecoder.from_export(exported, tiny_target)
    for one, other in zip(
        module.decoder().generate(asked, max_new_tokens=30),
        loaded.generate(asked, max_new_tokens=30),
        strict=True,
    ):
        assert (one.token_ids, one.accepted) == (other.token_ids, other.accepted)


def test_the_export_is_what_engines_load(exported):
    assert check_contract(exported) == []
    config = json.loads((exported / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [0, 1, 2]
    assert config["eagle_aux_hidden_state_layer_ids"] == [1, 2, 3]
    names = {name.split(".")[0] for name in load_file(exported / "model.safetensors")}
    assert names == {"fc", "midlayer", "norm"}
    assert '"method": "eagle3"' in (exported / "README.md").read_text()


def edited(folder: Path, place: Path, tensors=(), **changes) -> Path:
    """A copy whose config.json has other keys and whose checksums are left out."""
    shutil.copytree(folder, place)
    config = json.loads((place / "config.json").read_text())
    for name, value in changes.items():
        *outer, key = name.split("__")
        inner = config
        for one in outer:
            inner = inner[one]
        inner[key] = value
    config["dflow_config"].pop("checksums")
    (place / "config.json").write_text(json.dumps(config))
    if tensors:
        weights = load_file(place / "model.safetensors")
        for name, value in tensors:
            weights.pop(name, None)
            if value is not None:
                weights[name] = value
        save_file(weights, place / "model.safetensors")
    return place


HEAD = ("lm_head.weight", torch.zeros(320, 64))


@pytest.mark.parametrize(
    ("changes", "sentence", "contract"),
    [
        ({"architectures": ["Eagle3Unknown"]}, "can be decoded", "architectures"),
        ({"draft_vocab_size": 100}, "draft vocabulary of 100 tokens", "draft_vocab_size"),
        ({"eagle_config": None}, "lacks eagle_config", "eagle_config lacks"),
        ({"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}, "count one more", "counts one more"),
        ({"eagle_config__eagle_aux_hidden_state_layer_ids": [0, 3]}, "holds 3", "all but the last"),
        ({"num_attention_heads": 6, "model_type": "llama"}, "has shape", "heads do not divide"),
        ({"norm_before_residual": True}, "norm_before_residual", "norm_before_residual"),
        ({"num_hidden_layers": 2}, "num_hidden_layers", "num_hidden_layers"),
        ({"dflow_config__layout": "anchor_first"}, "block layout", None),
        ({"dflow_config__block_size": None}, "lacks block_size", None),
        ({"tensors": [("midlayer.hidden_norm.weight", None)]}, "lacks tensor", "is missing"),
        ({"tensors": [HEAD]}, "unknown tensor lm_head", "would be used by vLLM"),
    ],
)
def test_a_damaged_export_is_named(exported, tiny_target, tmp_path, changes, sentence, contract):
    folder = edited(exported, tmp_path / "copy", **changes)
    with pytest.raises(InputError, match=sentence):
        load_export(folder, tiny_target)
    problems = check_contract(folder)
    assert contract is None or any(contract in one for one in problems), problems


# ---------------------------------------------------------------- mistakes


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"ttt_steps": 0}, "model.ttt_steps is 0; give 1 or more"),
        ({"step_decay": 0.0}, "model.step_decay is 0.0"),
        ({"step_decay": 1.5}, "model.step_decay is 1.5"),
        ({"num_anchors": 0}, "model.num_anchors is 0"),
        (
            {"drafter": Eagle3Config(target_layer_ids=[0, 1, 2], block_size=1)},
            "drafter.block_size is 1",
        ),
        ({"drafter": Eagle3Config(target_layer_ids=[0, 3])}, "drafter.target_layer_ids holds 3"),
        ({"drafter": Eagle3Config(target_layer_ids=[0, 0])}, "none twice"),
        (
            {"drafter": Eagle3Config(target_layer_ids=[0, 1, 2], num_attention_heads=3)},
            "drafter.num_attention_heads is 3",
        ),
    ],
)
def test_wrong_settings_are_refused(tiny_target_dir, options, sentence):
    with pytest.raises(InputError, match=sentence):
        Eagle3Module(target=TargetConfig(path=str(tiny_target_dir)), **options)


def test_a_start_from_a_drafter_of_another_kind_is_refused(exported, tiny_target_dir, tmp_path):
    block = make_module(tiny_target_dir, relay=False)
    export_drafter(block.drafter, None, block.target, tmp_path / "dflash", dtype="float32")
    with pytest.raises(InputError, match="is no EAGLE-3 drafter"):
        make_eagle3(tiny_target_dir, init_from=str(tmp_path / "dflash"))
    with pytest.raises(InputError, match="is an EAGLE-3 drafter"):
        DrafterModule(
            target=TargetConfig(path=str(tiny_target_dir)),
            drafter=DrafterConfig(num_layers=1, target_layer_ids=[0, 1]),
            init_from=str(exported),
        )
    with pytest.raises(InputError, match=r"drafter\.block_size is 8 but"):
        Eagle3Module(
            target=TargetConfig(path=str(tiny_target_dir)),
            drafter=Eagle3Config(block_size=8, target_layer_ids=[0, 1, 2]),
            init_from=str(exported),
        )


def test_a_start_from_an_export_has_its_weights(half_trained3, exported, tiny_target_dir):
    module, _ = half_trained3
    started = make_eagle3(tiny_target_dir, init_from=str(exported))
    for name, tensor in started.state_dict().items():
        assert torch.equal(tensor, module.state_dict()[name])


def test_the_method_is_the_last_one_named(tmp_path):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("method: eagle3\n")
    assert method_of(Recipe.read(["fit"])) == "block"
    assert method_of(Recipe.read(["fit", "--config", str(recipe)])) == "eagle3"
    assert method_of(Recipe.read(["fit", f"--config={recipe}", "--method", "block"])) == "block"
    (tmp_path / "on-top.yaml").write_text("base: recipe.yaml\nseed_everything: 1\n")
    assert method_of(Recipe.read(["fit", "--config", str(tmp_path / "on-top.yaml")])) == "eagle3"
    with pytest.raises(InputError, match="method is eagle4; choose of block, eagle3"):
        method_of(Recipe.read(["fit", "--method=eagle4"]))


def test_slots_beyond_the_row_are_not_supervised(half_trained3):
    module, batch = half_trained3
    anchors = inputs_at(module, batch, [[62]]).rounds[0].anchors
    _, supervised = slot_labels(batch.input_ids_BS, batch.loss_mask_BS, anchors, 4)
    assert supervised[0, 0].tolist() == [True, False, False]
