"""Carryover by brute force, in training as in decoding, for one round, and lossless."""

import json
import shutil

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from test_attention import CASES, block_attention, flex_blocks, tensors
from test_module import gradients, uneven_batch, wake_relay, with_rounds
from torch.nn.attention.flex_attention import flex_attention
from training import make_module, one_text, roll_out, train

from dflow_lightning.decode import Engine, Request, SpeculativeDecoder
from dflow_lightning.decode import rounds as decode_rounds
from dflow_lightning.errors import InputError
from dflow_lightning.export.write import export_drafter, load_export
from dflow_lightning.formats import integrity
from dflow_lightning.models.carryover import CarriedRows, side_by_side
from dflow_lightning.models.dims import DrafterConfig, DrafterDims
from dflow_lightning.models.drafter import Drafter
from dflow_lightning.models.relay import ProjectedRows, RelayConfig, align
from dflow_lightning.tensors.blocks import Anchors
from dflow_lightning.tensors.loss import LossWindow
from dflow_lightning.training.module import DrafterModule, TargetConfig
from dflow_lightning.training.rollout import OnlineRollout
from dflow_lightning.training.saved import load_trained, open_checkpoint
from dflow_lightning.training.step_inputs import Round, clean_forward

K = 4


def wake(module: DrafterModule) -> DrafterModule:
    """A flag that says something: it starts at zero."""
    with torch.no_grad():
        flag = module.drafter.carryover.flag
        flag.add_(0.5 * torch.randn(flag.shape, generator=torch.Generator().manual_seed(5)))
    return wake_relay(module) if module.relay is not None else module


@pytest.fixture(scope="module", params=[True, False], ids=["with relay", "alone"])
def trained(request, tiny_target_dir):
    """A module that drafts well early in one text and badly later, with the text it saw."""
    module = wake(make_module(tiny_target_dir, relay=request.param, carryover=True))
    batch = one_text(module, [3, 5, 7, 9], 60)
    train(module, batch, 40)
    return module.eval(), batch


# ---------------------------------------------------------------- attention


def with_carried(N, K, L, **options):
    """Random tensors whose blocks have K-1 carried rows each, and which of them are there."""
    q, k_block, v_block, k_context, v_context = tensors(N, K, L, **options)
    more = [torch.randn(*k_block.shape[:3], K - 1, 16) for _ in range(2)]
    k_block, v_block = (
        torch.cat([own.detach(), carried], dim=3).requires_grad_()
        for own, carried in zip((k_block, v_block), more, strict=True)
    )
    carried = torch.rand(2, N, K - 1) < 0.5
    carried[0, 0], carried[1, 0] = True, False
    return (q, k_block, v_block, k_context, v_context), carried


def one_query_at_a_time(q, k_block, v_block, k_context, v_context, anchors, carried):
    out = torch.zeros_like(q)
    group = q.shape[1] // k_block.shape[1]
    for b, h, n, k in torch.cartesian_prod(*(torch.arange(size) for size in q.shape[:4])).tolist():
        seen = [True] * q.shape[3] + carried[b, n].tolist()
        g = h // group
        keys = [*k_context[b, g, : anchors[b, n]], *k_block[b, g, n][torch.tensor(seen)]]
        values = [*v_context[b, g, : anchors[b, n]], *v_block[b, g, n][torch.tensor(seen)]]
        weights = (torch.stack(keys) @ q[b, h, n, k] / 4).softmax(0)
        out[b, h, n, k] = weights @ torch.stack(values)
    return out


@pytest.mark.parametrize("backend", ["dense", "split"])
@pytest.mark.parametrize("anchors", [[[3, 7, 11], [1, 1, 5]], [[0, 0, 0], [0, 4, 11]]])
def test_attention_equals_one_query_at_a_time(backend, anchors):
    torch.manual_seed(3)
    anchors = torch.tensor(anchors)
    inputs, carried = with_carried(3, 4, 11, group=2)
    out = block_attention(*inputs, anchors, backend, None, carried)
    reference = one_query_at_a_time(*[t.double() for t in inputs], anchors, carried)
    torch.testing.assert_close(out, reference.float(), atol=1e-5, rtol=1e-5)
    gradient = torch.randn_like(out)
    got = torch.autograd.grad(out, inputs, gradient)
    wanted = torch.autograd.grad(reference, inputs, gradient.double())
    for one, other in zip(got, wanted, strict=True):
        assert torch.isfinite(one).all()
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-4)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@torch.no_grad()
@pytest.mark.parametrize(("N", "K", "L", "anchors"), CASES)
@pytest.mark.parametrize("packed", [False, True])
def test_flex_equals_the_dense_mask(N, K, L, anchors, packed):
    """The kernel's own interpreter, and its tiles: what is not listed is not computed."""
    from dflow_lightning.tensors.attention_flex import TILE, tile_mask
    from dflow_lightning.tensors.blocks import BlockView

    torch.manual_seed(4)
    anchors = torch.tensor([anchors, anchors[::-1]])
    starts = (anchors - 70).clamp(min=0) if packed else None
    inputs, carried = with_carried(N, K, L, group=2)
    wanted = block_attention(*inputs, anchors, "dense", starts, carried)
    got = flex_blocks(*inputs, anchors, starts, carried, attend=flex_attention)
    torch.testing.assert_close(got, wanted, atol=1e-5, rtol=1e-5)
    mask = tile_mask(BlockView(anchors, starts, carried), K, max(2, -(-L // TILE)) * TILE)
    queries, keys = mask.seq_lengths
    at = [torch.arange(n).view(shape) for n, shape in
          ((2, (-1, 1, 1)), (queries, (1, -1, 1)), (keys, (1, 1, -1)))]  # fmt: skip
    seen = mask.mask_mod(at[0], None, at[1], at[2]).view(
        2, queries // TILE, TILE, keys // TILE, TILE
    )
    assert seen.any(dim=(3, 4)).all()  # no row of any tile is without a key
    for b in range(2):
        for u in range(queries // TILE):
            part = mask.kv_indices[b, 0, u, : mask.kv_num_blocks[b, 0, u]].tolist()
            whole = mask.full_kv_indices[b, 0, u, : mask.full_kv_num_blocks[b, 0, u]].tolist()
            tiles = seen[b, u].transpose(0, 1)
            assert {w for w, tile in enumerate(tiles) if tile.any()} <= {*part, *whole}
            assert all(tiles[w].all() for w in whole)


# ---------------------------------------------------------------- which rows, where, how marked


def layer_by_layer(drafter: Drafter, x_KD, anchor: int, rows: list[tuple[int, torch.Tensor]]):
    """A block alone, attending to rows `(position, features)` and itself by a plain softmax."""
    positions = torch.tensor([[at for at, _ in rows]])
    h_1SD = torch.stack([h for _, h in rows]).unsqueeze(0)
    x = x_KD[None, None]
    rope = drafter.rope(anchor + torch.arange(K)[None, None])
    for layer, context in zip(drafter.layers, drafter.context_kv(h_1SD, positions), strict=True):
        out = block_attention_alone(layer.self_attn, layer.input_layernorm(x), rope, context)
        x = x + out
        x = x + layer.mlp(layer.post_attention_layernorm(x))
    return drafter.norm(x)[0, 0]


def block_attention_alone(attention, x, rope, context):
    from dflow_lightning.models.layers import rotate

    q = rotate(
        attention.q_norm(attention.q_proj(x).view(1, 1, K, -1, attention.head_dim)).movedim(-2, 1),
        rope,
    )
    own = attention.keys_values(x, rope)
    keys, values = own.keys, own.values
    group = q.shape[1] // keys.shape[1]
    keys = torch.cat([context.keys, keys[:, :, 0]], dim=2).repeat_interleave(group, dim=1)
    values = torch.cat([context.values, values[:, :, 0]], dim=2).repeat_interleave(group, dim=1)
    weights = (q[:, :, 0] @ keys.transpose(-1, -2) / attention.head_dim**0.5).softmax(-1)
    return attention.o_proj((weights @ values).transpose(1, 2).flatten(-2)).unsqueeze(1)


@torch.no_grad()
@pytest.mark.parametrize("backend", ["dense", "split"])
@pytest.mark.parametrize("first_rejected", [True, False])
@pytest.mark.parametrize("accepted", [[0, 1, 2], [3, 2, 0]])
def test_blocks_see_the_rejected_rows_where_they_stood(
    tiny_target_dir, backend, first_rejected, accepted
):
    """Rows of a dictionary by absolute position: kept ones as context, rejected ones marked."""
    drafter = wake(make_module(tiny_target_dir, carryover=True)).drafter
    torch.manual_seed(0)
    accepted_BN, starts = torch.tensor([accepted]), [5, 9, 12]  # anchors of the round before
    anchors_BN = torch.tensor([starts]) + accepted_BN + 1
    h_BSD, verified_BNKD = torch.randn(1, 30, 64), torch.randn(1, 3, K, 64)
    x_BNKD = torch.randn(1, 3, K, 64)
    rows, valid = align(verified_BNKD, accepted_BN, K, first_rejected=first_rejected)
    carried = drafter.carry(ProjectedRows(rows, valid, anchors_BN, anchors_BN))
    context = drafter.context_kv(h_BSD, torch.arange(30).unsqueeze(0))
    got = drafter(x_BNKD, context, anchors_BN, backend, carried=carried)
    for n in range(3):
        anchor = int(anchors_BN[0, n])
        seen = [(at, h_BSD[0, at]) for at in range(anchor)]
        for row in range(accepted[n] + 1, K):  # wrong from the row of the first rejected token on
            if first_rejected or row > accepted[n] + 1:
                marked = verified_BNKD[0, n, row] + drafter.carryover.flag
                seen.append((starts[n] + row, marked))
        wanted = layer_by_layer(drafter, x_BNKD[0, n], anchor, seen)
        torch.testing.assert_close(got[0, n], wanted, atol=1e-4, rtol=1e-4)


@torch.no_grad()
def test_without_rows_the_drafter_is_dflash(tiny_target_dir):
    module = wake(make_module(tiny_target_dir, carryover=True))
    plain = make_module(tiny_target_dir, relay=False)
    state = module.drafter.state_dict()
    plain.drafter.load_state_dict({n: state[n] for n in plain.drafter.state_dict()})
    batch = uneven_batch()
    alone = [each.begin_step(batch) for each in (module, plain)]
    assert torch.equal(*(m._forward_blocks(s) for m, s in zip((module, plain), alone, strict=True)))
    # Rounds side by side: the mask round's blocks have rows that are not there.
    inputs = with_rounds(module, batch)
    inputs.rounds[1:] = [r for r in inputs.rounds[1:] if r.rejected is not None]
    assert len(inputs.rounds) == 3
    N = inputs.rounds[0].anchors.positions_BN.shape[1]
    got = module._forward_blocks(inputs)[:, :N]
    wanted = plain._forward_blocks(alone[1])
    torch.testing.assert_close(got, wanted, atol=1e-5, rtol=1e-5)


def test_rounds_without_rows_get_some_that_are_not_there():
    rows = CarriedRows(torch.randn(2, 3, 5, 8), torch.ones(2, 3, 5, dtype=torch.bool))
    joined = side_by_side([None, rows, None], [4, 3, 1])
    assert joined.h_BNJD.shape == (2, 8, 5, 8)
    assert joined.valid_BNJ.any(-1).tolist() == [[False] * 4 + [True] * 3 + [False]] * 2
    assert torch.equal(joined.h_BNJD[:, 4:7], rows.h_BNJD)
    assert side_by_side([None, None], [4, 3]) is None


# ---------------------------------------------------------------- training


@torch.no_grad()
def test_packed_training_forward_equals_cached_decoding(trained):
    module, batch = trained
    models = module.decoder().models()
    compared, changed = 0, 0.0
    for prompt_length in range(5, 45, 4):
        ids = batch.input_ids_BS[0].tolist()
        engine = Engine(models, num_slots=1, max_length=80)
        engine.submit(Request(prompt_ids=ids[:prompt_length], max_new_tokens=30, stop_token_ids=()))
        engine.admit()
        engine.prefill()
        state = engine.state
        inputs = clean_forward(module.target, batch, module.drafter.dims.target_layer_ids, K)
        inputs.rounds.append(
            Round(Anchors(torch.tensor([[prompt_length]]), torch.tensor([[True]])))
        )
        roll_out(module, inputs, 2, 1)
        logits = module.target.head(module._forward_blocks(inputs))
        for number, current in enumerate(inputs.rounds):
            if not current.anchors.valid_BN.item():
                break  # all accepted: the rollout ends here, decoding goes on without rows
            assert current.anchors.positions_BN.item() == state.anchor_R.item()
            correction = decode_rounds.correct(models, state)
            ids_R1 = state.tokens_RT.gather(1, state.anchor_R.unsqueeze(1))
            x = decode_rounds.embed_blocks(models.target, models.drafter, ids_R1, correction)
            anchor = state.anchor_R.unsqueeze(1)
            drafted = [
                module.target.head(module.drafter(x, state.context, anchor, carried=carried))
                for carried in (module.drafter.carry(state.rejected), None)
            ]
            difference = (drafted[0][0, 0] - logits[0, number]).abs().max()
            assert difference <= 1e-4, (prompt_length, number, difference)
            changed = max(changed, float((drafted[0] - drafted[1]).abs().max()) * (number > 0))
            compared += number > 0
            engine.round()
    assert compared >= 8  # rounds with rejected rows, not only mask rounds
    assert changed > 0.01  # and the rows matter


@pytest.mark.parametrize("relay", [True, False])
def test_micro_batches_give_the_gradient_of_one_batch(tiny_target_dir, relay):
    module = wake(make_module(tiny_target_dir, relay=relay, carryover=True))
    from dflow_lightning.data.datamodule import Batch

    batch, window = uneven_batch(), LossWindow()
    whole_loss, _ = module.objective(with_rounds(module, batch))
    whole_loss.backward()
    whole = gradients(module)
    assert whole["drafter.carryover.flag"].any()
    module.zero_grad()
    for rows in (slice(0, 1), slice(1, 4)):
        part = Batch.from_tensors({name: value[rows] for name, value in batch.tensors().items()})
        module.objective(with_rounds(module, part), window)[0].backward()
    for name, gradient in gradients(module).items():
        corrected = gradient * window.correction()
        torch.testing.assert_close(corrected, whole[name], atol=1e-6, rtol=1e-4, msg=name)


@pytest.mark.parametrize("num_rounds", [0, 2])
def test_a_batch_without_anchors_touches_every_parameter_with_zero(tiny_target_dir, num_rounds):
    module = make_module(tiny_target_dir, relay=False, carryover=True)
    batch = uneven_batch()
    batch = batch._replace(loss_mask_BS=torch.zeros_like(batch.loss_mask_BS))
    loss, _ = module.objective(with_rounds(module, batch, num_rounds))
    assert loss.item() == 0.0
    loss.backward()
    for name, parameter in module.named_parameters():
        assert parameter.grad is not None, name
        assert not parameter.grad.any(), name


def test_recomputed_layers_give_the_same_gradients(tiny_target_dir):
    found = []
    for recompute in (False, True):
        module = wake(make_module(tiny_target_dir, carryover=True))
        module.drafter.gradient_checkpointing = recompute
        module.objective(with_rounds(module, uneven_batch()))[0].backward()
        found.append(gradients(module))
    for name, gradient in found[0].items():
        torch.testing.assert_close(found[1][name], gradient, atol=1e-7, rtol=1e-5, msg=name)


def test_carryover_without_rollouts_is_refused(tiny_target_dir):
    from types import SimpleNamespace

    module = make_module(tiny_target_dir, relay=False, carryover=True)
    trainer = SimpleNamespace()
    with pytest.raises(InputError, match=r"num_rounds is 0 but drafter\.carryover is true"):
        OnlineRollout(num_rounds=0).setup(trainer, module, "fit")
    with pytest.raises(InputError, match=r"mode is off but drafter\.carryover is true"):
        OnlineRollout(mode="off").setup(trainer, module, "fit")


# ---------------------------------------------------------------- decoding


def prompts_of(batch) -> list[list[int]]:
    text = batch.input_ids_BS[0].tolist()
    return [text[i : 2 * i + 4] for i in range(5)]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("batch_size", [1, 3])
def test_answers_are_those_of_plain_decoding(trained, temperature, batch_size):
    module, batch = trained
    decoder, prompts = module.decoder(), prompts_of(batch)
    options = {"max_new_tokens": 30, "temperature": temperature, "stop_token_ids": ()}
    plain = decoder.generate_plain(prompts, **options)
    found = {
        relay: decoder.generate(prompts, use_rejected=relay, batch_size=batch_size, **options)
        for relay in (True, False)
    }
    for answers in found.values():
        assert [c.token_ids for c in answers] == [c.token_ids for c in plain]
    on, off = ([c.accepted for c in found[relay]] for relay in (True, False))
    # The rows change drafts, and nothing else; at temperature 1 a random target takes none.
    assert temperature or on != off
    alone = SpeculativeDecoder(module.target, body(module)).generate(
        prompts, batch_size=batch_size, **options
    )
    assert off == [c.accepted for c in alone]


def body(module: DrafterModule) -> Drafter:
    """The DFlash drafter inside, as an engine without relay and carryover has it."""
    plain = DrafterConfig(num_layers=2, block_size=K, target_layer_ids=[0, 1, 2])
    drafter = Drafter(DrafterDims.resolve(plain, module.target)).eval()
    state = module.drafter.state_dict()
    drafter.load_state_dict({name: state[name] for name in drafter.state_dict()})
    return drafter


def test_rejection_sampling_runs_and_fills_the_answer(trained):
    module, batch = trained
    answers = module.decoder().generate(
        prompts_of(batch), max_new_tokens=20, temperature=1.0, stop_token_ids=(),
        acceptance="rejection", batch_size=2,
    )  # fmt: skip
    assert all(len(answer.token_ids) == 20 for answer in answers)


def test_rows_live_one_round(trained, monkeypatch):
    """Whatever is not valid is poison before every draft, also all of it in the first round."""
    module, batch = trained
    prompts = prompts_of(batch)
    options = {"max_new_tokens": 30, "stop_token_ids": (), "batch_size": 2}
    wanted = module.decoder().generate(prompts, **options)
    draft, seen = decode_rounds.draft, []

    def poisoned(models, state, mode, correction):
        state.rejected.h_BNKD.masked_fill_(~state.rejected.valid_BNK.unsqueeze(-1), 1e4)
        seen.append(int(state.rejected.valid_BNK.sum()))
        return draft(models, state, mode, correction)

    monkeypatch.setattr(decode_rounds, "draft", poisoned)
    got = module.decoder().generate(prompts, **options)
    assert [c.accepted for c in got] == [c.accepted for c in wanted]
    assert seen[0] == 0
    assert max(seen) > 2


@pytest.mark.slow
@pytest.mark.usefixtures("traced")
def test_compiled_rounds_equal_eager_ones_and_never_compile_again(trained):
    module, batch = trained
    models = module.decoder().models()
    requests = [
        Request(prompt_ids=prompt, max_new_tokens=20, stop_token_ids=())
        for prompt in prompts_of(batch)
    ]
    wanted = Engine(models, num_slots=2, max_length=80).run(requests)
    engine = Engine(models, num_slots=2, max_length=80, backend="compiled")
    engine.warm_up([decode_rounds.RoundMode()])
    with torch.compiler.set_stance("fail_on_recompile"):
        got = engine.run(requests)
    assert [c.token_ids for c in got] == [c.token_ids for c in wanted]
    assert [c.accepted for c in got] == [c.accepted for c in wanted]


# ---------------------------------------------------------------- export


@pytest.fixture(scope="module")
def exported(trained, tmp_path_factory):
    module, _ = trained
    folder = tmp_path_factory.mktemp("carryover") / "drafter"
    export_drafter(module.drafter, module.relay, module.target, folder, dtype="float32")
    return folder


@pytest.fixture
def copied(exported, tmp_path):
    return shutil.copytree(exported, tmp_path / "copy")


def test_the_flag_has_a_folder_of_its_own(trained, exported):
    module, batch = trained
    with safe_open(exported / "model.safetensors", framework="pt") as file:
        assert not any("carryover" in name for name in file.keys())  # noqa: SIM118
    loaded = load_export(exported, module.target)
    assert torch.equal(loaded.drafter.carryover.flag, module.drafter.carryover.flag)
    assert (loaded.relay is None) == (module.relay is None)
    options = {"max_new_tokens": 30, "stop_token_ids": ()}
    decoder = SpeculativeDecoder.from_export(exported, module.target)
    again = decoder.generate(prompts_of(batch), **options)
    wanted = module.decoder().generate(prompts_of(batch), **options)
    assert [c.accepted for c in again] == [c.accepted for c in wanted]
    card = (exported / "README.md").read_text()
    assert "rejected rows also carried over" in card
    assert "plug-in of dflow-lightning refuses this" in card


def test_first_rejected_travels_without_a_relay(tiny_target_dir, tmp_path):
    module = make_module(tiny_target_dir, relay=False, carryover=True)
    module.drafter.carryover.first_rejected = False
    export_drafter(module.drafter, None, module.target, tmp_path / "out")
    loaded = load_export(tmp_path / "out", module.target)
    assert not loaded.drafter.carryover.first_rejected
    decoder = SpeculativeDecoder.from_export(tmp_path / "out", module.target)
    assert not decoder.models().first_rejected


def edit(path, change) -> None:
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def flag_changed(folder) -> None:
    tensors = load_file(folder / integrity.CARRYOVER_FILE)
    save_file({"flag": tensors["flag"] + 1}, folder / integrity.CARRYOVER_FILE)


@pytest.mark.parametrize(
    ("damage", "expected"),
    [
        (lambda f: shutil.rmtree(f / "carryover"), "lacks its carryover folder"),
        (
            lambda f: edit(f / "config.json", lambda c: c["dflow_config"].pop("carryover")),
            "has a carryover folder that its config.json does not know",
        ),
        (
            lambda f: edit(f / "carryover/config.json", lambda c: c.update(first_rejected=False)),
            "carryover/config.json differs from dflow_config",
        ),
        (lambda f: (f / integrity.CARRYOVER_FILE).unlink(), "holds no carryover.safetensors"),
        (flag_changed, "checksum of"),
    ],
)
def test_damage_is_named_in_one_sentence(copied, trained, damage, expected):
    damage(copied)
    with pytest.raises(InputError, match="drafter: ") as caught:
        load_export(copied, trained[0].target)
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_plug_in_refuses_it(exported):
    from dflow_lightning.serving.vllm.folder import read_folder

    with pytest.raises(InputError, match="was trained with carryover, which is not built into"):
        read_folder(exported)


def test_warm_starts_from_and_into_drafters_without_it(exported, trained, tiny_target_dir):
    module, _ = trained
    relay = RelayConfig(enabled=module.relay is not None, hidden_size=96)
    shape = {"num_layers": 2, "block_size": K, "target_layer_ids": [0, 1, 2]}
    made = {
        carryover: DrafterModule(
            target=TargetConfig(path=str(tiny_target_dir)),
            drafter=DrafterConfig(**shape, carryover=carryover),
            relay=relay,
            init_from=str(exported),
        )
        for carryover in (True, False)
    }
    assert torch.equal(made[True].drafter.carryover.flag, module.drafter.carryover.flag)
    assert torch.equal(made[False].drafter.fc.weight, module.drafter.fc.weight)


@pytest.mark.slow
@pytest.mark.codegen
def test_packaged_drafts_equal_eager_ones(trained, tmp_path):
    module, batch = trained
    parts = (module.drafter, module.relay, module.target)
    export_drafter(*parts, tmp_path / "drafter", dtype="float32", compile=True)
    decoder = SpeculativeDecoder.from_export(tmp_path / "drafter", module.target)
    for relay in (True, False):
        options = {"max_new_tokens": 25, "use_rejected": relay, "stop_token_ids": ()}
        wanted = decoder.generate(prompts_of(batch), **options)
        got = decoder.generate(prompts_of(batch), backend="package", **options)
        assert [c.accepted for c in got] == [c.accepted for c in wanted]


def test_checkpoints_travel_and_older_ones_are_still_read(trained, tmp_path):
    module, _ = trained
    content = {"state_dict": module.state_dict(), "pytorch-lightning_version": "2.6.6"}
    module.on_save_checkpoint(content)
    torch.save(content, tmp_path / "new.ckpt")
    again = load_trained(open_checkpoint(tmp_path / "new.ckpt"))
    assert torch.equal(again.drafter.carryover.flag, module.drafter.carryover.flag)
    plain = make_module(module.target.name, relay=False)
    older = {"state_dict": plain.state_dict(), "pytorch-lightning_version": "2.6.6"}
    plain.on_save_checkpoint(older)
    del older["dflow"]["drafter"]["carryover"], older["dflow"]["relay"]["terms"]
    torch.save(older, tmp_path / "old.ckpt")
    assert load_trained(open_checkpoint(tmp_path / "old.ckpt")).drafter.carryover is None
