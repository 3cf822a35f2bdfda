"""Anchors, labels and the next round's anchors, against plain loops."""

import torch

from dflow_lightning.tensors.blocks import (
    Anchors,
    draw_anchors,
    next_anchors,
    rows_at,
    slot_inputs,
    slot_labels,
)  # fmt: skip


def random_mask(rows=4, width=20, seed=0):
    """A loss mask with 60 % of its positions supervised."""
    torch.manual_seed(seed)
    return torch.rand(rows, width) < 0.6


def test_anchors_are_eligible_distinct_and_random():
    mask, ids = random_mask(), torch.arange(4)
    anchors = draw_anchors(mask, ids, 8, seed=1, step=5)
    for b in range(4):
        chosen = anchors.positions_BN[b][anchors.valid_BN[b]].tolist()
        eligible = [p for p in range(19) if mask[b, p] and mask[b, p + 1]]
        assert len(chosen) == len(set(chosen)) == min(8, len(eligible))
        assert set(chosen) <= set(eligible)
    again = draw_anchors(mask, ids, 8, seed=1, step=5)
    assert torch.equal(anchors.positions_BN, again.positions_BN)
    other = draw_anchors(mask, ids, 8, seed=1, step=6)
    assert not torch.equal(anchors.positions_BN, other.positions_BN)


def test_anchors_do_not_depend_on_the_batch_or_the_global_random_state():
    mask, ids = random_mask(), torch.tensor([7, 8, 9, 10])
    whole = draw_anchors(mask, ids, 6, seed=1, step=0)
    torch.manual_seed(99)
    part = draw_anchors(mask[2:], ids[2:], 6, seed=1, step=0)
    assert torch.equal(whole.positions_BN[2:], part.positions_BN)


def test_more_anchors_than_positions_are_padded_as_invalid():
    anchors = draw_anchors(torch.ones(1, 5, dtype=torch.bool), torch.tensor([0]), 9, seed=0, step=0)
    assert anchors.positions_BN.shape == (1, 9)
    assert int(anchors.valid_BN.sum()) == 4


def test_labels_stop_at_the_mask_and_the_end():
    ids = torch.arange(100, 110).unsqueeze(0)
    mask = torch.tensor([[0, 1, 1, 1, 1, 0, 1, 1, 1, 1]], dtype=torch.bool)
    anchors = Anchors(torch.tensor([[1, 8, 2]]), torch.tensor([[True, True, False]]))
    labels, supervised = slot_labels(ids, mask, anchors, 4)
    assert labels[0, 0].tolist() == [102, 103, 104]
    assert supervised[0].tolist() == [
        [True, True, True],
        [True, False, False],
        [False, False, False],
    ]


def test_next_anchors_equal_loops():
    torch.manual_seed(0)
    for _ in range(1000):
        mask = torch.rand(2, 12) < 0.8
        anchors = Anchors(torch.randint(0, 12, (2, 3)), torch.rand(2, 3) < 0.9)
        accepted = torch.randint(0, 4, (2, 3))
        moved = next_anchors(anchors, accepted, mask, block_size=4)
        for b in range(2):
            for n in range(3):
                position = int(anchors.positions_BN[b, n] + accepted[b, n]) + 1
                alive = bool(anchors.valid_BN[b, n]) and int(accepted[b, n]) < 3
                alive = (
                    alive
                    and position + 1 < 12
                    and bool(mask[b, position])
                    and bool(mask[b, position + 1])
                )
                assert bool(moved.valid_BN[b, n]) == alive
                assert int(moved.positions_BN[b, n]) == (position if alive else 0)


def test_slot_inputs_put_the_anchor_first_and_never_relay_it():
    anchor, mask = torch.randn(1, 2, 8), torch.randn(8)
    relay = torch.randn(1, 2, 4, 8)
    plain = slot_inputs(anchor, mask, 4)
    assert torch.equal(plain[..., 0, :], anchor)
    assert torch.equal(plain[..., 1:, :], mask.expand(1, 2, 3, 8))
    relayed = slot_inputs(anchor, mask, 4, relay)
    assert torch.equal(relayed[..., 0, :], anchor)
    assert torch.equal(relayed[..., 1:, :], mask + relay[..., 1:, :])


def test_rows_in_another_order_keep_no_index_for_each_number():
    order_BN = torch.stack([torch.randperm(6) for _ in range(2)])
    x_BNKD = torch.randn(2, 6, 4, 8, requires_grad=True)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        found_BNKD = rows_at(x_BNKD, order_BN)
    assert sum(t.untyped_storage().nbytes() for t in kept) <= 8 * (2 + 12)
    weights_BNKD = torch.randn(2, 6, 4, 8)
    (weights_BNKD * found_BNKD).sum().backward()
    expected_BNKD = x_BNKD.detach().take_along_dim(order_BN[..., None, None], dim=1)
    assert torch.equal(found_BNKD, expected_BNKD)
    back_BN11 = order_BN.argsort(dim=1)[..., None, None]
    assert torch.equal(x_BNKD.grad, weights_BNKD.take_along_dim(back_BN11, dim=1))
