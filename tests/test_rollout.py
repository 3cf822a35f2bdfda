"""Rollout rounds against a simulation in plain loops, block by block and without any cache."""

import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from lightning.pytorch.plugins.precision import Precision
from training import make_module

from dflow_lightning.data.datamodule import Batch
from dflow_lightning.tensors.acceptance import accept
from dflow_lightning.training.rollout import OnlineRollout
from dflow_lightning.training.step_inputs import RolloutConfig, StepInputs, clean_forward

ROUNDS, K = 2, 4


# ---------------------------------------------------------------- the simulation


class Text:
    """One row of a batch and what the target says about it, by uncached forwards only."""

    def __init__(self, module, ids: list[int], mask: list[bool]):
        self.module, self.ids, self.mask = module, ids, mask
        self.taps, _ = self.read(ids)

    def read(self, ids: list[int]) -> tuple[torch.Tensor, list[int]]:
        """Taps of every token, and the target's choice after it."""
        output = self.module.target.model(torch.tensor([ids]), output_hidden_states=True)
        layers = self.module.drafter.dims.target_layer_ids
        taps = torch.cat([output.hidden_states[layer + 1] for layer in layers], dim=-1)
        return taps[0], output.logits[0].argmax(-1).tolist()

    def supervised(self, position: int) -> bool:
        return position < len(self.ids) and self.mask[position]


class Block:
    """A block of one round; `rows` maps a position to the verify row that predicts it."""

    def __init__(self, anchor: int, rows: dict[int, torch.Tensor], bonus: int, rejected: int):
        self.anchor, self.rows, self.bonus, self.rejected = anchor, rows, bonus, rejected


def draft_alone(text: Text, block: Block) -> list[int]:
    """Greedy drafts of one block with the rows before its anchor as its only context."""
    module, A = text.module, block.anchor
    drafter, embed = module.drafter, module.target.embed
    slots = [embed(torch.tensor(text.ids[A]))]
    for j in range(1, K):
        slot = embed(torch.tensor(drafter.dims.mask_token_id))
        if A + j in block.rows and module.relay is not None:
            h = drafter.project(block.rows[A + j])
            pair = [embed(torch.tensor(token)) for token in (block.bonus, block.rejected)]
            slot = slot + module.relay(h.unsqueeze(0), *pair, torch.tensor([True]))[0]
        slots.append(slot)
    context = drafter.context_kv(
        drafter.project(text.taps[:A].unsqueeze(0)), torch.arange(A).unsqueeze(0)
    )
    hidden = drafter(torch.stack(slots)[None, None], context, torch.tensor([[A]]))
    return module.target.head(hidden[0, 0, 1:]).argmax(-1).tolist()


def following(
    text: Text, block: Block, *, mode: str, reference: str, first_rejected: bool
) -> tuple[Block | None, int]:
    """The next round's block, or None where the rollout ends, and the accepted drafts."""
    A, drafts = block.anchor, draft_alone(text, block)
    branch_taps, chosen = text.read(text.ids[: A + 1] + drafts)
    accepted = 0
    for j, token in enumerate(drafts, start=1):
        right = chosen[A + j - 1] if reference == "target" else None
        if reference == "data" and text.supervised(A + j):
            right = text.ids[A + j]
        if token != right:
            break
        accepted += 1
    bonus_at = A + accepted + 1
    ended = accepted == K - 1
    if ended or not text.supervised(bonus_at) or not text.supervised(bonus_at + 1):
        return None, accepted
    rows = {}
    for position in range(bonus_at, A + K):  # the rejected suffix: rows S' .. S + K - 1
        if position == bonus_at and not first_rejected:
            continue
        clean = text.taps[min(position, len(text.ids) - 1)]
        rows[position + 1] = clean if mode == "clean_features" else branch_taps[position]
    return Block(bonus_at, rows, text.ids[bonus_at], drafts[accepted]), accepted


# ---------------------------------------------------------------- the comparison


@pytest.fixture(scope="module")
def step(half_trained):
    """The text that was learned, the same without its end, and noise; anchors all over them."""
    module, batch = half_trained
    ids = batch.input_ids_BS.repeat(3, 1)
    ids[2] = torch.randint(0, 256, ids[2].shape, generator=torch.Generator().manual_seed(6))
    mask = batch.loss_mask_BS.repeat(3, 1)
    mask[1, 40:] = False
    mask[1, 22] = False  # a turn ends inside the row
    mask[2, ::9] = False
    return module, Batch(ids, mask, torch.tensor([1, 2, 3]))


def rolled(module, batch, *, mode="online", reference="data", first_rejected=True, num_anchors=14):
    """The rounds that the product makes."""
    module.num_anchors, kept = 20, module.num_anchors
    config = RolloutConfig(
        num_rounds=ROUNDS, num_anchors=num_anchors, mode=mode, reference=reference
    )
    if module.relay is not None:
        module.relay.first_rejected = first_rejected
    inputs = module.step_inputs(batch, config)
    module.num_anchors = kept
    assert len(inputs.rounds) == ROUNDS + 1
    return inputs


def compare_block(now, b: int, n: int, block: Block | None) -> None:
    """One block of a round with the simulated one."""
    assert bool(now.anchors.valid_BN[b, n]) == (block is not None)
    slots = [] if block is None else [j for j in range(K) if block.anchor + j in block.rows]
    if now.rejected is not None:
        assert now.rejected.valid_BNK[b, n].nonzero().flatten().tolist() == slots
    if block is None:
        return
    assert int(now.anchors.positions_BN[b, n]) == block.anchor
    if now.rejected is not None:
        assert int(now.rejected.bonus_BN[b, n]) == block.bonus
        assert int(now.rejected.rejected_BN[b, n]) == block.rejected
        for j in slots:
            torch.testing.assert_close(
                now.rejected.taps_BNKC[b, n, j], block.rows[block.anchor + j], atol=1e-4, rtol=1e-4
            )


@pytest.mark.parametrize(
    ("mode", "reference", "first_rejected"),
    [
        ("online", "data", True),
        ("online", "data", False),
        ("online", "target", True),
        ("clean_features", "data", True),
        ("off", "data", True),
    ],
)
@torch.no_grad()
def test_equals_loops(step, mode, reference, first_rejected):
    module, batch = step
    options = {"mode": mode, "reference": reference, "first_rejected": first_rejected}
    inputs = rolled(module, batch, **options)
    texts = [
        Text(module, ids.tolist(), mask.tolist())
        for ids, mask in zip(batch.input_ids_BS, batch.loss_mask_BS, strict=True)
    ]
    starts = inputs.rounds[0].anchors
    seen = {"accepted": set(), "all accepted": 0, "text ended": 0, "relayed rounds": 0}
    for b, text in enumerate(texts):
        for n in range(14):
            block = None
            if starts.valid_BN[b, n]:
                block = Block(int(starts.positions_BN[b, n]), {}, 0, 0)
            for number in range(1, ROUNDS + 1):
                if block is not None:
                    block, accepted = following(text, block, **options)
                    seen["accepted"].add(accepted)
                    seen["all accepted"] += accepted == K - 1
                    seen["text ended"] += block is None and accepted < K - 1
                    if block is not None and mode == "off":
                        block.rows = {}
                    seen["relayed rounds"] += number == 2 and block is not None
                assert (inputs.rounds[number].rejected is None) == (mode == "off")
                compare_block(inputs.rounds[number], b, n, block)
    assert seen["accepted"] == {0, 1, 2, 3}, seen
    assert min(seen["all accepted"], seen["text ended"], seen["relayed rounds"]) >= 3, seen


@torch.no_grad()
def test_clean_features_never_see_the_branch_and_online_does(step):
    module, batch = step
    online, clean = (rolled(module, batch, mode=mode) for mode in ("online", "clean_features"))
    first, other = online.rounds[1], clean.rounds[1]
    assert torch.equal(first.anchors.positions_BN, other.anchors.positions_BN)
    assert torch.equal(first.rejected.valid_BNK, other.rejected.valid_BNK)
    assert torch.equal(first.rejected.rejected_BN, other.rejected.rejected_BN)
    valid = first.rejected.valid_BNK
    difference = (first.rejected.taps_BNKC - other.rejected.taps_BNKC)[valid].abs().amax(-1)
    assert (difference > 1e-4).all()  # every relayed row stands on a rejected token


@torch.no_grad()
def test_teacher_forced_equals_online_without_a_causal_head(step):
    module, batch = step
    online, forced = (rolled(module, batch, mode=mode) for mode in ("online", "teacher_forced"))
    for one, other in zip(online.rounds[1:], forced.rounds[1:], strict=True):
        assert torch.equal(one.anchors.positions_BN, other.anchors.positions_BN)
        assert torch.equal(one.rejected.taps_BNKC, other.rejected.taps_BNKC)


@torch.no_grad()
def test_without_a_relay_rounds_go_on_and_nothing_is_relayed(step, tiny_target_dir):
    trained, batch = step
    module = make_module(tiny_target_dir, relay=False)
    module.drafter.load_state_dict(trained.drafter.state_dict())
    module.seed = trained.seed
    rounds = rolled(module, batch).rounds
    assert all(r.rejected is None for r in rounds)
    with_relay = rolled(trained, batch).rounds  # round 1 starts from drafts without relay
    assert torch.equal(rounds[1].anchors.positions_BN, with_relay[1].anchors.positions_BN)
    assert not torch.equal(rounds[2].anchors.valid_BN, torch.zeros_like(rounds[2].anchors.valid_BN))


# ---------------------------------------------------------------- shapes and state


def shapes(inputs: StepInputs) -> list:
    tensors = []
    for r in inputs.rounds:
        tensors += [r.anchors.positions_BN, r.anchors.valid_BN]
        if r.rejected is not None:
            rows = r.rejected
            tensors += [rows.taps_BNKC, rows.valid_BNK, rows.bonus_BN, rows.rejected_BN]
    return [(t.shape, t.dtype) for t in tensors]


@torch.no_grad()
def test_shapes_do_not_depend_on_the_data(step, monkeypatch):
    """No anchors at all, everything accepted, nothing accepted: the same tensors."""
    module, batch = step
    usual = shapes(rolled(module, batch))
    nothing = batch._replace(loss_mask_BS=torch.zeros_like(batch.loss_mask_BS))
    empty = rolled(module, nothing)
    assert shapes(empty) == usual
    assert not any(r.anchors.valid_BN.any() for r in empty.rounds)
    for always in (K - 1, 0):

        def fixed(drafts, chosen, always=always):
            return torch.full_like(accept(drafts, chosen), always)

        monkeypatch.setattr("dflow_lightning.training.step_inputs.accept", fixed)
        inputs = rolled(module, batch)
        assert shapes(inputs) == usual
        assert inputs.rounds[1].anchors.valid_BN.any() == (always == 0)


def test_rolled_out_blocks_are_the_first_of_the_mask_round(step):
    module, batch = step
    inputs = rolled(module, batch, num_anchors=5)
    assert inputs.rounds[0].anchors.positions_BN.shape == (3, 20)
    assert all(r.anchors.positions_BN.shape == (3, 5) for r in inputs.rounds[1:])


def global_state() -> list:
    return [torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()]


@pytest.mark.parametrize("reference", ["data", "target"])
def test_the_callback_prepares_the_step_and_leaves_the_global_generators_alone(step, reference):
    module, batch = step
    callback = OnlineRollout(num_rounds=2, num_anchors=4, reference=reference)
    trainer = SimpleNamespace(precision_plugin=Precision())
    before = global_state()
    callback.on_train_batch_start(trainer, module, batch, 0)
    after = global_state()
    assert torch.equal(before[0], after[0])
    assert before[1:] == after[1:]
    prepared, module.prepared = module.prepared, None
    assert prepared.batch is batch
    assert len(prepared.rounds) == 3
    assert not prepared.taps_BSC.requires_grad
    by_hand = rolled(module, batch, reference=reference, num_anchors=4)
    for one, other in zip(prepared.rounds[1:], by_hand.rounds[1:], strict=True):
        assert not one.rejected.taps_BNKC.requires_grad
        assert torch.equal(one.anchors.positions_BN, other.anchors.positions_BN)
        assert torch.equal(one.rejected.valid_BNK, other.rejected.valid_BNK)


def test_no_rounds_leave_the_step_to_the_module(step):
    module, batch = step
    module.prepared = None
    callback = OnlineRollout(num_rounds=0)
    callback.on_train_batch_start(SimpleNamespace(), module, batch, 0)
    assert module.prepared is None


@torch.no_grad()
def test_a_rollout_leaves_the_clean_features_as_they_are(step, monkeypatch):
    """Blocks are written behind the text in the cache, so a second rollout gives the same."""
    module, batch = step
    monkeypatch.setattr(module, "num_anchors", 20)
    config = RolloutConfig(num_rounds=ROUNDS, num_anchors=14)
    inputs = module.begin_step(batch, extra_slots=config.slots(K))
    module.rollout(config).extend(inputs)
    alone = clean_forward(module.target, batch, module.drafter.dims.target_layer_ids, 0)
    assert torch.equal(inputs.taps_BSC, alone.taps_BSC)
    first = inputs.rounds[1:]
    del inputs.rounds[1:]
    module.rollout(config).extend(inputs)
    for one, other in zip(first, inputs.rounds[1:], strict=True):
        assert torch.equal(one.rejected.taps_BNKC, other.rejected.taps_BNKC)
