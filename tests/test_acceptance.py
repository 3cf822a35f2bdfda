"""Acceptance and sampling rules."""

import torch

from dflow_lightning.tensors.acceptance import (
    TokenSampling,
    accept,
    accept_or_resample,
    choose,
    draw,
    position_uniforms,
    probabilities,
)
from dflow_lightning.tensors.metrics import acceptance_summary


def sampling(*temperatures, top_k=0, top_p=1.0):
    """Settings of one request per temperature."""
    count = len(temperatures)
    return TokenSampling(
        torch.tensor(temperatures), torch.full((count,), top_k), torch.full((count,), top_p)
    )


def test_accept_counts_leading_matches_only():
    chosen = torch.tensor([1, 2, 3, 4])
    drafts = torch.tensor([[1, 2, 3, 4], [1, 2, 9, 4], [9, 2, 3, 4], [1, 9, 9, 9]])
    assert accept(drafts, chosen.expand(4, -1)).tolist() == [4, 2, 0, 1]


def test_choose_is_greedy_at_zero_and_mixes_per_request():
    logits = torch.randn(2, 3, 7)
    uniforms = torch.rand(2, 3, dtype=torch.float64)
    assert torch.equal(choose(logits, sampling(0.0, 0.0), uniforms), logits.argmax(-1))
    mixed = choose(logits, sampling(0.0, 1.0), uniforms)
    assert torch.equal(mixed[0], logits[0].argmax(-1))
    assert torch.equal(mixed[1], choose(logits[1:], sampling(1.0), uniforms[1:])[0])


def test_choose_samples_the_softmax():
    logits = torch.randn(1, 1, 5).expand(1, 200_000, 5)
    uniforms = torch.rand(
        1, 200_000, generator=torch.Generator().manual_seed(3), dtype=torch.float64
    )
    for temperature in (0.5, 1.0, 2.0):
        tokens = choose(logits, sampling(temperature), uniforms)
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


def test_rounds_by_what_the_round_before_accepted():
    joint = acceptance_summary([[0, 2, 0], [3], [0, 2, 2]], num_draft_tokens=3).joint_histogram
    assert joint == [[0, 0, 2, 0], [0] * 4, [1, 0, 1, 0], [0] * 4]


def test_summary_of_nothing():
    assert acceptance_summary([[]], num_draft_tokens=3).tau == 1.0


def test_top_k_and_top_p_keep_what_transformers_keeps():
    from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    logits = torch.randn(5, 1, 40, generator=torch.Generator().manual_seed(1)) * 3
    for temperature, top_k, top_p in ((0.7, 5, 1.0), (1.0, 0, 0.8), (1.5, 10, 0.6), (1.0, 1, 0.1)):
        settings = sampling(*[temperature] * 5, top_k=top_k, top_p=top_p)
        wanted = TemperatureLogitsWarper(temperature)(None, logits[:, 0].double())
        if top_k:
            wanted = TopKLogitsWarper(top_k)(None, wanted)
        if top_p < 1:
            wanted = TopPLogitsWarper(top_p)(None, wanted)
        torch.testing.assert_close(probabilities(logits, settings)[:, 0], wanted.softmax(-1))


def test_greedy_requests_have_one_possible_token():
    logits = torch.randn(2, 3, 9)
    one_hot = probabilities(logits, sampling(0.0, 1.0, top_k=2))[0]
    assert torch.equal(one_hot.argmax(-1), logits[0].argmax(-1))
    assert torch.equal(one_hot.sum(-1), torch.ones(3, dtype=torch.float64))


def test_a_draw_never_takes_an_impossible_token():
    chances = torch.tensor([[0.0, 0.5, 0.0, 0.5, 0.0]], dtype=torch.float64).expand(4, -1)
    edges = torch.tensor([0.0, 0.4999, 0.5, 1 - 1e-16], dtype=torch.float64)
    assert draw(chances, edges).tolist() == [1, 1, 3, 3]


def test_noise_of_a_position_does_not_depend_on_the_length():
    for columns in (1, 4):
        assert torch.equal(
            position_uniforms(3, 7, columns), position_uniforms(3, 5000, columns)[:7]
        )


def test_rejection_sampling_equals_its_definition_by_loops():
    generator = torch.Generator().manual_seed(2)

    def random(*shape):
        return torch.rand(*shape, generator=generator, dtype=torch.float64)

    p, q = random(300, 4, 6).softmax(-1), (3 * random(300, 3, 6)).softmax(-1)
    drafts, accept_u, choice_u = draw(q, random(300, 3)), random(300, 3), random(300, 4)
    accepted, committed = accept_or_resample(drafts, q, p, accept_u, choice_u)
    for r in range(300):
        j = 0
        while j < 3 and accept_u[r, j] < p[r, j, drafts[r, j]] / q[r, j, drafts[r, j]]:
            j += 1
        left = (p[r, j] - q[r, j]).clamp(min=0) if j < 3 else p[r, j]
        wanted = [*drafts[r, :j].tolist(), draw(left / left.sum(), choice_u[r, j]).item()]
        assert accepted[r] == j
        assert committed[r, : j + 1].tolist() == wanted
    assert len(set(accepted.tolist())) == 4


def test_rejection_sampling_of_equal_distributions_accepts_all():
    p = torch.rand(50, 4, 6, dtype=torch.float64).softmax(-1)
    drafts = draw(p[:, :3], torch.rand(50, 3))
    accepted, _ = accept_or_resample(drafts, p[:, :3], p, torch.rand(50, 3), torch.rand(50, 4))
    assert (accepted == 3).all()
