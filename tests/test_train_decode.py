"""Training sees what decoding sees: packed forward and cached loop agree, round by round."""

import pytest
import torch
from training import make_module, one_text, roll_out, train

from dflow_lightning.decode import Engine, Request
from dflow_lightning.decode.rounds import correct
from dflow_lightning.models.drafter import embed_blocks
from dflow_lightning.tensors.blocks import Anchors
from dflow_lightning.training.step_inputs import RolloutConfig, Round, StepInputs, clean_forward


def packed_logits(module, inputs: StepInputs):
    """Logits of each round's blocks, `[B, N, K, V]`, from the one forward of the training step."""
    drafter = module.drafter
    context = drafter.context_kv(drafter.project(inputs.taps_BSC), inputs.positions_BS)
    x = torch.cat([module.round_inputs(inputs.batch, r) for r in inputs.rounds], dim=1)
    anchors = torch.cat([r.anchors.positions_BN for r in inputs.rounds], dim=1)
    hidden = drafter(x, context, anchors)
    return module.target.head(hidden).split(
        [r.anchors.positions_BN.shape[1] for r in inputs.rounds], dim=1
    )


def decoding_inputs(models, state):
    """Slot inputs of the block that decoding drafts next."""
    correction = correct(models, state)
    anchor_ids = state.tokens_RT.gather(1, state.anchor_R.unsqueeze(1))
    return embed_blocks(models.target, models.drafter, anchor_ids, correction)


@torch.no_grad()
def test_packed_training_forward_equals_cached_decoding(half_trained):
    module, batch = half_trained
    models = module.decoder().models()
    compared = 0
    for prompt_length in range(5, 45, 4):
        ids = batch.input_ids_BS[0].tolist()
        engine = Engine(models, num_slots=1, max_length=80)
        engine.submit(Request(prompt_ids=ids[:prompt_length], max_new_tokens=30, stop_token_ids=()))
        engine.admit()
        engine.prefill()
        state = engine.state
        # The first committed token stands at position `prompt_length`: the first block's anchor.
        anchors = Anchors(torch.tensor([[prompt_length]]), torch.tensor([[True]]))
        inputs = clean_forward(module.target, batch, module.drafter.dims.target_layer_ids, 4)
        inputs.rounds.append(Round(anchors))
        roll_out(module, inputs, 2, 1)
        for number, logits in enumerate(packed_logits(module, inputs)):
            current = inputs.rounds[number].anchors
            if not current.valid_BN.item():
                break  # all accepted: the rollout ends here, decoding goes on without relay
            assert current.positions_BN.item() == state.anchor_R.item()
            x = decoding_inputs(models, state)
            hidden = module.drafter(x, state.context, state.anchor_R.unsqueeze(1))
            difference = (module.target.head(hidden) - logits).abs().max()
            assert difference <= 1e-4, (prompt_length, number, difference)
            compared += number > 0
            engine.round()
    assert compared >= 8  # relay rounds, not only mask rounds


@torch.no_grad()
def test_verify_rows_equal_the_clean_forward_at_the_anchor_and_the_real_branch_after_it(
    half_trained,
):
    module, batch = half_trained
    taps_ids = module.drafter.dims.target_layer_ids
    inputs = clean_forward(module.target, batch, taps_ids, 3 * 4)
    anchors = torch.tensor([[6, 20, 41]])
    drafts = torch.randint(0, 256, (1, 3, 3))
    ids = torch.cat([batch.input_ids_BS[:, anchors[0]].unsqueeze(-1), drafts], dim=-1)
    valid = torch.ones_like(anchors, dtype=torch.bool)
    taps, _ = module.rollout(RolloutConfig()).verify(inputs, ids, Anchors(anchors, valid))
    torch.testing.assert_close(taps[:, :, 0], inputs.taps_BSC[:, anchors[0]], atol=1e-4, rtol=1e-4)
    for n, anchor in enumerate(anchors[0].tolist()):
        branch = torch.cat([batch.input_ids_BS[0, :anchor], ids[0, n]]).unsqueeze(0)
        states = module.target.model(branch, output_hidden_states=True).hidden_states
        wanted = torch.cat([states[layer + 1] for layer in taps_ids], dim=-1)[0, anchor:]
        torch.testing.assert_close(taps[0, n], wanted, atol=1e-4, rtol=1e-4)


@torch.no_grad()
def test_taps_are_the_outputs_of_the_named_layers(half_trained):
    module, batch = half_trained
    states = module.target.model(batch.input_ids_BS, output_hidden_states=True).hidden_states
    for layers in ([0], [0, 2], [2, 1, 0]):
        inputs = clean_forward(module.target, batch, layers, 0)
        wanted = torch.cat([states[layer + 1] for layer in layers], dim=-1)
        torch.testing.assert_close(inputs.taps_BSC, wanted, atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_the_head_of_the_last_hidden_state_gives_the_target_logits(half_trained):
    module, batch = half_trained
    cache = module.target.new_cache(64)
    positions = torch.arange(64).unsqueeze(0)
    visible = torch.ones(64, 64, dtype=torch.bool).tril().unsqueeze(0)
    output = module.target.forward(batch.input_ids_BS, positions, cache, positions, visible, [0])
    wanted = module.target.model(batch.input_ids_BS).logits
    torch.testing.assert_close(module.target.head(output.hidden_BQD), wanted, atol=1e-4, rtol=1e-4)


@torch.no_grad()
@pytest.mark.parametrize("backend", ["dense", "split"])
def test_nothing_at_or_after_the_anchor_reaches_a_block(half_trained, backend):
    module, batch = half_trained
    drafter = module.drafter
    anchors = torch.tensor([[6, 20, 41, 63]])

    def logits(ids):
        features = clean_forward(
            module.target, batch._replace(input_ids_BS=ids), drafter.dims.target_layer_ids, 0
        )
        context = drafter.context_kv(drafter.project(features.taps_BSC), features.positions_BS)
        x = embed_blocks(module.target, drafter, batch.input_ids_BS.gather(1, anchors), None)
        return module.target.head(drafter(x, context, anchors, backend))

    before = logits(batch.input_ids_BS)
    for n, anchor in enumerate(anchors[0].tolist()):
        changed = batch.input_ids_BS.clone()
        changed[:, anchor:] = torch.randint(0, 256, changed[:, anchor:].shape)
        assert torch.equal(before[:, n], logits(changed)[:, n])


def test_the_first_step_of_dflow_is_dflash_bit_for_bit(tiny_target_dir):
    flow, flash = make_module(tiny_target_dir), make_module(tiny_target_dir, relay=False)
    flash.drafter.load_state_dict(flow.drafter.state_dict())
    batch = one_text(flow, [3, 5, 7, 9], 40)
    rounds = []
    for module in (flow, flash):
        inputs = module.begin_step(batch, extra_slots=24)
        roll_out(module, inputs, 2, 6)
        with torch.no_grad():
            rounds.append(packed_logits(module, inputs))
        assert (inputs.rounds[1].rejected is None) == (module is flash)
    for one, other in zip(*rounds, strict=True):
        assert torch.equal(one, other)


def test_one_sentence_learned_by_heart_is_drafted_whole(tiny_target_dir, tmp_path):
    """Trained to 100 % on one text, the saved drafter gives tau = B on it."""
    from dflow_lightning.decode import SpeculativeDecoder
    from dflow_lightning.export.write import export_drafter

    module = make_module(tiny_target_dir, num_anchors=16)
    batch = one_text(module, [3, 5, 7, 9], 40)
    train(module, batch, 300, lr=2e-3)
    parts = (module.drafter, module.relay, module.target)
    export_drafter(*parts, tmp_path / "drafter", dtype="float32")
    decoder = SpeculativeDecoder.from_export(tmp_path / "drafter", str(tiny_target_dir))
    ids = batch.input_ids_BS[0].tolist()
    completion = decoder.generate([ids[:4]], max_new_tokens=37, stop_token_ids=())[0]
    assert completion.token_ids == ids[4:41]
    assert completion.accepted == [3] * 9  # B - 1 drafts a round: 1 + 9 * 4 tokens
