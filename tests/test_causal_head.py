"""Domino's causal head: against loops and nn.GRU, in training, in rollouts and in decoding."""

import copy
from pathlib import Path

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from test_lossless import chi_square, prompts
from test_lossless import small_vocabulary as small_vocabulary  # a fixture
from training import make_module, one_text, roll_out, train

from dflow_lightning.decode import Engine, Request, rounds
from dflow_lightning.decode.engine import ROUND_MODES
from dflow_lightning.errors import InputError
from dflow_lightning.models.causal_head import (
    CausalHead,
    CausalHeadConfig,
    PrefixGRU,
    corrected_losses,
)
from dflow_lightning.models.dims import DrafterConfig, DrafterDims
from dflow_lightning.models.drafter import Drafter, chained_tokens
from dflow_lightning.tensors.acceptance import accept
from dflow_lightning.tensors.blocks import Anchors, slot_labels
from dflow_lightning.tensors.loss import LossConfig
from dflow_lightning.training.base import TargetConfig
from dflow_lightning.training.module import DrafterModule
from dflow_lightning.training.rollout import OnlineRollout
from dflow_lightning.training.step_inputs import Rollout, Round, clean_forward

K, J = 4, 3


def wake(head: CausalHead, seed: int = 2) -> CausalHead:
    """A head that corrects something: its last layer starts at exactly zero."""
    generator = torch.Generator().manual_seed(seed)
    last = head.embed_proj[2].weight
    with torch.no_grad():
        last.copy_(3.0 * torch.randn(last.shape, generator=generator))
    return head


@pytest.fixture(scope="module")
def domino(tiny_target_dir):
    """A Domino+DFlow module that has learned one text in part, and the text."""
    module = make_module(tiny_target_dir, causal_head=True)
    batch = one_text(module, [3, 5, 7, 9], 60)
    train(module, batch, 40)
    return module.eval(), batch


@pytest.fixture(params=[0, 1, 2])
def head(request) -> CausalHead:
    torch.manual_seed(5)
    sizes = {"gru_hidden_dim": 6, "emb_dim": 5, "pure_draft_prefix_len": request.param}
    return wake(CausalHead(8, 31, **sizes))


# ---------------------------------------------------------------- the head alone


@torch.no_grad()
def test_the_gru_is_the_one_of_torch():
    ours, theirs = PrefixGRU(8, 6), torch.nn.GRU(8, 6, batch_first=True, bias=False)
    theirs.load_state_dict(ours.state_dict())
    tokens = torch.randn(5, 7, 8)
    state = ours.start(tokens[:, 0])
    states = []
    for each in tokens.unbind(1):
        state = ours(each, state)
        states.append(state)
    torch.testing.assert_close(torch.stack(states, 1), theirs(tokens)[0])


@torch.no_grad()
def test_unroll_equals_loops_over_rows_and_slots(head):
    """One row and one slot at a time, torch's own GRU read anew from the anchor for each slot."""
    logits, hidden, embedding_VD = torch.randn(3, J, 31), torch.randn(3, J, 8), torch.randn(31, 8)
    anchors = torch.tensor([4, 9, 30])
    seen: list[torch.Tensor] = []

    def choose(logits_RV, slot):
        seen.append(logits_RV)
        return logits_RV.argmax(-1)

    drafts = head.unroll(logits, hidden, lambda ids: embedding_VD[ids], choose, anchors)
    gru = torch.nn.GRU(8, 6, batch_first=True, bias=False)
    gru.load_state_dict(head.prefix_gru.state_dict())
    inner, outer = head.embed_proj[0].weight, head.embed_proj[2].weight
    corrected = 0
    for row in range(3):
        read = [int(anchors[row])]
        for slot in range(J):
            wanted = logits[row, slot].clone()
            if slot >= head.pure_draft_prefix_len:
                state = gru(embedding_VD[read].unsqueeze(0))[1][0, 0]
                low = torch.nn.functional.silu(inner @ torch.cat([hidden[row, slot], state]))
                wanted += outer @ low
                corrected += int(wanted.argmax() != logits[row, slot].argmax())
            torch.testing.assert_close(seen[slot][row], wanted)
            read.append(int(wanted.argmax()))
        assert drafts[row].tolist() == read[1:]
    assert corrected > 0


@torch.no_grad()
def test_all_slots_at_once_are_the_slots_one_by_one(head):
    """`features` on given tokens against `unroll` reading the same ones."""
    logits, hidden, embedding_VD = torch.randn(3, J, 31), torch.randn(3, J, 8), torch.randn(31, 8)
    anchors, gold = torch.tensor([4, 9, 30]), torch.randint(0, 31, (3, J))
    seen = []

    def choose(logits_RV, slot):
        seen.append(logits_RV)
        return logits_RV.argmax(-1)

    head.unroll(logits, hidden, lambda ids: embedding_VD[ids], choose, anchors, gold)
    before = torch.cat([anchors.unsqueeze(1), gold[:, :-1]], dim=1)
    features = head.features(hidden, embedding_VD[before])
    torch.testing.assert_close(logits + head.embed_proj[2](features), torch.stack(seen, 1))
    assert torch.equal(
        features[:, : head.pure_draft_prefix_len],
        torch.zeros_like(features[:, : head.pure_draft_prefix_len]),
    )


def test_losses_equal_plain_cross_entropy(head):
    """Values and gradients, with chunks of two blocks, for every share of the body's own loss."""
    hidden = torch.randn(2, 3, J, 8, requires_grad=True)
    before, labels, W = torch.randn(2, 3, J, 8), torch.randint(0, 31, (2, 3, J)), torch.randn(31, 8)
    for share in (0.0, 0.3, 1.0):
        arguments = (hidden, before, labels, lambda h: h @ W.T)
        losses, predicted = corrected_losses(head, *arguments, 2, share)
        base = hidden @ W.T
        final = base + head.embed_proj[2](head.features(hidden, before))
        entropy = [
            torch.nn.functional.cross_entropy(x.flatten(0, 2), labels.flatten(), reduction="none")
            for x in (final, base)
        ]
        wanted = ((1 - share) * entropy[0] + share * entropy[1]).view_as(labels)
        torch.testing.assert_close(losses, wanted)
        assert torch.equal(predicted, final.argmax(-1))
        weights = torch.rand(labels.shape)
        inputs = [hidden, *head.parameters()]
        ours, theirs = (torch.autograd.grad((x * weights).sum(), inputs) for x in (losses, wanted))
        for one, other in zip(ours, theirs, strict=True):
            torch.testing.assert_close(one, other)
        # With a share of 1 the head has a gradient all the same: zero.
        assert all(one.eq(0).all() for one in ours[1:]) == (share == 1.0)


def test_the_share_falls_linearly_to_zero():
    config = CausalHeadConfig(base_start=0.8, decay_ratio=0.5)
    assert [config.base_share(step, 100) for step in (0, 25, 50, 99)] == pytest.approx(
        [0.8, 0.4, 0.0, 0.0]
    )
    assert CausalHeadConfig().base_share(0, 1) == 1.0


# ---------------------------------------------------------------- training


def test_an_untrained_head_changes_nothing(tiny_target_dir):
    """Step 0 of Domino is DFlash: the same body, drafts and loss, bit for bit."""
    domino, dflash = (
        make_module(tiny_target_dir, relay=False, causal_head=head) for head in (True, False)
    )
    for name, weight in dflash.drafter.state_dict().items():
        assert torch.equal(domino.drafter.state_dict()[name], weight)
    batch = one_text(dflash, [3, 5, 7, 9], 40)
    pairs = []
    for module in (domino, dflash):
        inputs = module.begin_step(batch, extra_slots=24)
        roll_out(module, inputs, 2, 6)
        pairs.append((inputs, module.objective(inputs)[0]))
    (ours, our_loss), (theirs, their_loss) = pairs
    torch.testing.assert_close(our_loss, their_loss, atol=1e-6, rtol=1e-6)
    for one, other in zip(ours.rounds, theirs.rounds, strict=True):
        assert torch.equal(one.anchors.positions_BN, other.anchors.positions_BN)
    completions = [m.decoder().generate(prompts(), max_new_tokens=20) for m in (domino, dflash)]
    assert [c.accepted for c in completions[0]] == [c.accepted for c in completions[1]]


class Repeated:
    """A loader of one batch a few times."""

    def __init__(self, batch):
        self.batch = batch

    def __iter__(self):
        return iter([self.batch] * 4)


class Shares(Callback):
    """The share of the body's loss and the head's largest gradient of each step."""

    def __init__(self):
        self.seen, self.untouched = [], []

    def on_before_optimizer_step(self, trainer, module, optimizer):
        self.seen.append(module.base_share)
        self.untouched += [n for n, p in module.named_parameters() if p.grad is None]


def fit(module, batch, folder, *callbacks: Callback, ckpt_path=None) -> None:
    trainer = Trainer(
        max_steps=4, limit_val_batches=0, accelerator="cpu", logger=False, callbacks=[*callbacks],
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        default_root_dir=folder,
    )  # fmt: skip
    trainer.fit(module, Repeated(batch), Repeated(batch), ckpt_path=ckpt_path, weights_only=True)


def test_the_trainer_turns_the_share_down_and_touches_every_parameter(tiny_target_dir, tmp_path):
    module = make_module(tiny_target_dir, relay=False, causal_head=True)
    batch, shares = one_text(module, [3, 5, 7, 9], 40), Shares()
    fit(module, batch, tmp_path, shares)
    assert shares.seen == pytest.approx([1.0, 0.75, 0.5, 0.25])
    assert shares.untouched == []
    inputs = module.eval().begin_step(batch)
    held_out, _ = module.objective(inputs)
    module.base_share = 0.0
    assert held_out.item() == module.objective(inputs)[0].item()


class SavedAtTwo(Callback):
    """Writes a checkpoint after the second step."""

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if trainer.global_step == 2:
            trainer.save_checkpoint(Path(trainer.default_root_dir) / "two.ckpt")


def test_a_resumed_training_ends_with_the_same_head(tiny_target_dir, tmp_path):
    """The schedule of the body's loss goes on where it was, bit for bit."""
    whole = make_module(tiny_target_dir, causal_head=True)
    batch, rollout = one_text(whole, [3, 5, 7, 9], 40), {"num_rounds": 1, "num_anchors": 4}
    fit(whole, batch, tmp_path, OnlineRollout(**rollout), SavedAtTwo())
    resumed, shares = make_module(tiny_target_dir, causal_head=True), Shares()
    path = str(tmp_path / "two.ckpt")
    fit(resumed, batch, tmp_path, OnlineRollout(**rollout), shares, ckpt_path=path)
    assert shares.seen == pytest.approx([0.5, 0.25])
    for name, weight in whole.state_dict().items():
        assert torch.equal(resumed.state_dict()[name], weight)


def training_logits(module, inputs):
    """Corrected logits of each round's blocks, `[B, N, J, V]`, as a training step has them."""
    head, hidden = module.drafter.causal_head, module._forward_blocks(inputs)[..., 1:, :]
    anchors = torch.cat([r.anchors.positions_BN for r in inputs.rounds], dim=1)
    before = anchors.unsqueeze(-1) + torch.arange(J)
    embeds = module.target.embed(inputs.batch.input_ids_BS[0][before])
    logits = module.target.head(hidden) + head.embed_proj[2](head.features(hidden, embeds))
    return logits.split([r.anchors.positions_BN.shape[1] for r in inputs.rounds], dim=1)


@torch.no_grad()
def test_packed_training_forward_equals_cached_decoding(domino, monkeypatch):
    """Slot by slot, as far as decoding has drafted what training reads: the data's tokens."""
    module, batch = domino
    models = module.decoder().models()
    seen: list[torch.Tensor] = []
    original = rounds.pick

    def pick(state, mode, logits, first=0):
        seen.append(logits)
        return original(state, mode, logits, first)

    monkeypatch.setattr(rounds, "pick", pick)
    compared = [0, 0, 0]
    ids = batch.input_ids_BS[0].tolist()
    for prompt_length in range(5, 45, 2):
        engine = Engine(models, num_slots=1, max_length=80)
        engine.submit(Request(prompt_ids=ids[:prompt_length], max_new_tokens=30, stop_token_ids=()))
        engine.admit()
        engine.prefill()
        anchors = Anchors(torch.tensor([[prompt_length]]), torch.tensor([[True]]))
        inputs = clean_forward(module.target, batch, module.drafter.dims.target_layer_ids, K)
        inputs.rounds.append(Round(anchors))
        roll_out(module, inputs, 2, 1)
        for number, logits in enumerate(training_logits(module, inputs)):
            current = inputs.rounds[number].anchors
            if not current.valid_BN.item():
                break  # all accepted: the rollout ends here, decoding goes on without relay
            anchor = int(engine.state.anchor_R)
            assert current.positions_BN.item() == anchor
            seen.clear()
            engine.round()
            for slot in range(J):
                difference = (seen[slot] - logits[:, 0, slot]).abs().max()
                assert difference <= 1e-4, (prompt_length, number, slot, difference)
                compared[slot] += number > 0
                if int(seen[slot].argmax()) != ids[anchor + 1 + slot]:
                    break
    assert min(compared) >= 2, compared  # relay rounds, and slots behind accepted ones


# ---------------------------------------------------------------- rollouts


@torch.no_grad()
def test_teacher_forced_drafts_leave_online_ones_behind_the_first_rejected(domino):
    """Gold prefixes are the drafts' own as far as those were accepted, and never after."""
    module, batch = domino
    inputs = module.begin_step(batch, extra_slots=0)
    anchors, head = inputs.rounds[0].anchors, wake(copy.deepcopy(module.drafter.causal_head))
    anchor_ids = batch.input_ids_BS.gather(1, anchors.positions_BN)
    gold, _ = slot_labels(batch.input_ids_BS, batch.loss_mask_BS, anchors, K)
    hidden = module._forward_blocks(inputs)[..., 1:, :]
    arguments = (module.target, head, hidden, anchor_ids)
    online, forced = chained_tokens(*arguments), chained_tokens(*arguments, gold)
    accepted = accept(online, gold)
    assert torch.equal(accept(forced, gold), accepted)
    same = torch.arange(J) <= accepted.unsqueeze(-1)
    assert torch.equal(online[same], forced[same])
    assert not torch.equal(online, forced)


@torch.no_grad()
@pytest.mark.parametrize("mode", ["online", "teacher_forced"])
def test_rollouts_verify_the_drafts_of_their_mode(domino, mode, monkeypatch):
    module, batch = domino
    verified = []
    original = Rollout.verify

    def verify(self, inputs, ids, anchors):
        verified.append(ids)
        return original(self, inputs, ids, anchors)

    monkeypatch.setattr(Rollout, "verify", verify)
    inputs = module.begin_step(batch, extra_slots=6 * K)
    hidden = module._forward_blocks(inputs)[..., 1:, :]
    roll_out(module, inputs, 1, 6, mode)
    anchors = inputs.rounds[0].anchors
    gold, _ = slot_labels(batch.input_ids_BS, batch.loss_mask_BS, anchors, K)
    anchor_ids = batch.input_ids_BS.gather(1, anchors.positions_BN)
    given = gold if mode == "teacher_forced" else None
    drafts = chained_tokens(module.target, module.drafter.causal_head, hidden, anchor_ids, given)
    assert torch.equal(verified[0], torch.cat([anchor_ids.unsqueeze(-1), drafts], dim=-1))


# ---------------------------------------------------------------- decoding


@pytest.mark.parametrize("relay", [True, False])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_same_tokens_as_the_target_alone(domino, relay, temperature):
    module, batch = domino
    decoder = module.decoder()
    asked = [batch.input_ids_BS[0, :4].tolist(), batch.input_ids_BS[0, :30].tolist(), *prompts(2)]
    options = {"max_new_tokens": 20, "temperature": temperature}
    plain = decoder.generate_plain(asked, **options)
    alone, batched = (
        decoder.generate(asked, use_rejected=relay, batch_size=size, **options) for size in (1, 3)
    )
    for one, other, third in zip(plain, alone, batched, strict=True):
        assert one.token_ids == other.token_ids == third.token_ids
        assert other.accepted == third.accepted
    if temperature == 0.0:
        assert max(alone[0].accepted) > 0


@pytest.mark.slow
@pytest.mark.usefixtures("traced")
def test_a_compiled_round_drafts_what_the_eager_one_does(domino):
    """One graph with the serial part in it: greedy drafts, and drawn ones."""
    module, batch = domino
    text = batch.input_ids_BS[0].tolist()
    requests = [
        Request(prompt_ids=text[i : 2 * i + 3], max_new_tokens=16, seed=i, temperature=i % 2)
        for i in range(3)
    ]
    arguments = {"num_slots": 1, "max_length": 60, "acceptance": "rejection"}
    models = module.decoder().models()
    wanted = Engine(models, **arguments).run(requests)
    engine = Engine(models, backend="compiled", **arguments)
    engine.warm_up(ROUND_MODES[:2])
    with torch.compiler.set_stance("fail_on_recompile"):
        got = engine.run(requests)
    for one, other in zip(got, wanted, strict=True):
        assert (one.token_ids, one.accepted) == (other.token_ids, other.accepted)
    assert sum(sum(c.accepted) for c in got) > 0


@pytest.mark.parametrize("acceptance", ["match", "rejection"])
@torch.inference_mode()
def test_sampled_sequences_have_the_targets_distribution(small_vocabulary, acceptance):
    """Drafts that depend on the drafts before them: their distribution must be conditional."""
    target, _ = small_vocabulary
    statistic, limit, completions = chi_square(
        target, sharp(target), samples=2000, acceptance=acceptance
    )
    assert sum(sum(c.accepted) for c in completions) > 100
    assert statistic < limit


@torch.inference_mode()
def test_a_distribution_that_forgets_the_drafts_before_is_noticed(small_vocabulary, monkeypatch):
    """Rejection sampling with what the slots would draft after other drafts must fail."""
    target, _ = small_vocabulary
    original = rounds.draft

    def draft(models, state, mode, correction):
        drafts = original(models, state, mode, correction)
        return rounds.Drafts(drafts.tokens_RJ, drafts.probabilities_RJV.roll(1, dims=0))

    monkeypatch.setattr(rounds, "draft", draft)
    statistic, limit, _ = chi_square(target, sharp(target), samples=2000, acceptance="rejection")
    assert statistic > limit


def sharp(target) -> Drafter:
    """A random drafter whose second draft depends on the first one."""
    torch.manual_seed(0)
    config = DrafterConfig(num_layers=1, block_size=3, target_layer_ids=[0, 1])
    head = CausalHeadConfig(enabled=True, gru_hidden_dim=24, emb_dim=20)
    drafter = Drafter(DrafterDims.resolve(config, target, head)).eval()
    wake(drafter.causal_head)
    return drafter


def test_the_divergence_from_the_target_is_refused(tiny_target_dir):
    with pytest.raises(InputError, match=r"loss\.kind is kl but causal_head\.enabled is true"):
        DrafterModule(
            target=TargetConfig(path=str(tiny_target_dir)),
            drafter=DrafterConfig(num_layers=1, block_size=4, target_layer_ids=[1]),
            causal_head=CausalHeadConfig(enabled=True),
            loss=LossConfig(kind="kl"),
        )
