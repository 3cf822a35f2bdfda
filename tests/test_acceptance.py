"""Acceptance and sampling rules."""

import torch

from dflow_lightning.acceptance import accept, choose
from dflow_lightning.metrics import acceptance_summary


def test_accept_counts_leading_matches_only():
    chosen = torch.tensor([1, 2, 3, 4])
    drafts = torch.tensor([[1, 2, 3, 4], [1, 2, 9, 4], [9, 2, 3, 4], [1, 9, 9, 9]])
    assert accept(drafts, chosen.expand(4, -1)).tolist() == [4, 2, 0, 1]


def test_choose_is_greedy_at_zero_and_mixes_per_request():
    logits = torch.randn(2, 3, 7)
    uniforms = torch.rand(2, 3, dtype=torch.float64)
    assert torch.equal(choose(logits, torch.zeros(2), uniforms), logits.argmax(-1))
    mixed = choose(logits, torch.tensor([0.0, 1.0]), uniforms)
    assert torch.equal(mixed[0], logits[0].argmax(-1))
    assert torch.equal(mixed[1], choose(logits[1:], torch.ones(1), uniforms[1:])[0])


def test_choose_samples_the_softmax():
    logits = torch.randn(1, 1, 5).expand(1, 200_000, 5)
    uniforms = torch.rand(
        1, 200_000, generator=torch.Generator().manual_seed(3), dtype=torch.float64
    )
    for temperature in (0.5, 1.0, 2.0):
        tokens = choose(logits, torch.tensor([temperature]), uniforms)
        shares = tokens.flatten().bincount(minlength=5) / 200_000
        torch.testing.assert_close(
            shares, (logits[0, 0] / temperature).softmax(-1), atol=5e-3, rtol=0
        )


def test_summary_pools_rounds_and_averages_requests():
    summary = acceptance_summary([[0, 2], [3]], num_draft_tokens=3)
    assert summary.rounds == 3
    assert summary.accepted_drafts == 5 / 3
    assert summary.tau == 5 / 3 + 1
    assert summary.tau_per_request == 3.0
    assert summary.position_acceptance == [2 / 3, 2 / 3, 1 / 3]
    assert summary.histogram == [1, 0, 1, 1]


def test_summary_of_nothing():
    assert acceptance_summary([[]], num_draft_tokens=3).tau == 1.0
