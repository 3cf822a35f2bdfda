"""The relay's indices against a dictionary keyed by absolute position, and its formula."""

import random

import pytest
import torch

from dflow_lightning.models.relay import Relay, align, relay_rows


def slots_by_position(start, block_size, accepted, *, first_rejected):
    """Which verify row each slot of the next block gets, by loops over absolute positions."""
    boundary = start + accepted + 1  # where the bonus token goes: slot 0 of the next block
    row_that_predicts = {}
    for row in range(block_size):
        position = start + row
        if position > boundary or (position == boundary and first_rejected):
            row_that_predicts[position + 1] = row
    found = {}
    for slot in range(1, block_size):
        predicted = boundary + slot
        if predicted in row_that_predicts:
            found[slot] = row_that_predicts[predicted]
    return found


@pytest.mark.parametrize("first_rejected", [True, False])
def test_alignment_equals_brute_force(first_rejected):
    rng = random.Random(0)
    for trial in range(1000):
        block_size = rng.choice([2, 3, 4, 8, 16])
        accepted = (0, block_size - 1)[trial] if trial < 2 else rng.randint(0, block_size - 1)
        start = rng.randint(0, 10_000)
        features = torch.arange(block_size, dtype=torch.float32).unsqueeze(-1) + start
        moved, valid = align(
            features, torch.tensor(accepted), block_size, first_rejected=first_rejected
        )
        wanted = slots_by_position(start, block_size, accepted, first_rejected=first_rejected)
        got = {slot: int(moved[slot, 0]) - start for slot in range(block_size) if valid[slot]}
        assert got == wanted, (block_size, accepted, start)


def test_batched_alignment_equals_single():
    accepted = torch.randint(0, 8, (3, 5))
    features = torch.randn(3, 5, 8, 6)
    moved, valid = align(features, accepted, 8)
    for b in range(3):
        for n in range(5):
            alone, alone_valid = align(features[b, n], accepted[b, n], 8)
            assert torch.equal(valid[b, n], alone_valid)
            assert torch.equal(moved[b, n][alone_valid], alone[alone_valid])


def test_everything_accepted_relays_nothing():
    _, valid = relay_rows(torch.tensor([15]), 16)
    assert not valid.any()


def test_nothing_accepted_fills_every_mask_slot():
    rows, valid = relay_rows(torch.tensor([0]), 16)
    assert valid[0].tolist() == [False] + [True] * 15
    assert rows[0, 1:].tolist() == list(range(1, 16))


def test_untrained_relay_adds_exactly_zero():
    relay = Relay(8, 16)
    out = relay(
        torch.randn(2, 3, 4, 8),
        torch.randn(2, 3, 8),
        torch.randn(2, 3, 8),
        torch.ones(2, 3, 4, dtype=torch.bool),
    )
    assert torch.equal(out, torch.zeros_like(out))


@pytest.mark.parametrize("normalize", [True, False])
def test_formula(tiny_relay, normalize):
    tiny_relay.normalize_boundary = normalize
    h, bonus, rejected = torch.randn(5, 64), torch.randn(64), torch.randn(64)
    valid = torch.tensor([False, True, True, False, True])
    out = tiny_relay(h, bonus, rejected, valid)
    if normalize:
        bonus, rejected = (e / (e.square().mean() + 1e-6).sqrt() for e in (bonus, rejected))
    for slot in range(5):
        hidden = torch.nn.functional.silu(
            tiny_relay.relay_mlp[0](torch.cat([bonus, rejected, h[slot]]))
        )
        beta, gamma = tiny_relay.relay_mlp[2](hidden).split(64)
        centred = h[slot] - h[slot].mean()
        normed = centred / (centred.square().mean() + 1e-6).sqrt()
        normed = normed * tiny_relay.relay_norm.weight + tiny_relay.relay_norm.bias
        wanted = beta * normed + gamma if valid[slot] else torch.zeros(64)
        torch.testing.assert_close(out[slot], wanted, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("normalize", [True, False])
def test_the_correction_is_the_papers_formula(normalize):
    """Equations 4 and 5 with boundary and row side by side, as they are written."""
    torch.manual_seed(0)
    relay = Relay(8, 12, normalize_boundary=normalize).double()
    torch.nn.init.normal_(relay.relay_mlp[2].weight)
    h, bonus, rejected = (torch.randn(2, 3, *size, 8).double() for size in ((4,), (), ()))
    valid = torch.rand(2, 3, 4) < 0.5
    if normalize:
        scaled = [e / (e.square().mean(-1, keepdim=True) + 1e-6).sqrt() for e in (bonus, rejected)]
    else:
        scaled = [bonus, rejected]
    sides = [e.unsqueeze(-2).expand_as(h) for e in scaled]
    beta, gamma = relay.relay_mlp(torch.cat([*sides, h], dim=-1)).chunk(2, dim=-1)
    wanted = (beta * relay.relay_norm(h) + gamma) * valid.unsqueeze(-1)
    # The scale's statistics are taken in float32.
    torch.testing.assert_close(relay(h, bonus, rejected, valid), wanted, rtol=1e-5, atol=1e-6)
