"""The chunked loss equals the plain one, loss and gradient."""

import itertools
import math

import pytest
import torch
from torch.nn.functional import cross_entropy

from dflow_lightning.errors import InputError
from dflow_lightning.tensors.loss import (
    LossConfig,
    LossWindow,
    dpace_weights,
    slot_weights,
    soft_losses,
    token_losses,
)


@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.parametrize("chunk", [1, 4, 1000])
def test_chunks_change_nothing(chunk, fast):
    torch.manual_seed(0)
    hidden = torch.randn(2, 5, 3, 8, requires_grad=True)
    head = torch.nn.Linear(8, 50, bias=False).requires_grad_(False)
    labels = torch.randint(0, 50, (2, 5, 3))
    losses, predicted = token_losses(hidden, labels, head, chunk, head.weight if fast else None)
    logits = head(hidden)
    wanted = cross_entropy(logits.flatten(0, 2), labels.flatten(), reduction="none").view_as(labels)
    torch.testing.assert_close(losses, wanted)
    assert torch.equal(predicted, logits.argmax(-1))
    weights = torch.rand_like(losses)
    got = torch.autograd.grad((losses * weights).sum(), hidden)[0]
    torch.testing.assert_close(got, torch.autograd.grad((wanted * weights).sum(), hidden)[0])


def in_double(hidden, labels, weight):
    """Losses and their gradients for a loss of 1, in float64."""
    rows = hidden.detach().double().requires_grad_()
    logits = rows @ weight.double().T
    losses = cross_entropy(logits.flatten(0, 2), labels.flatten(), reduction="none")
    return losses.view_as(labels), torch.autograd.grad(losses.sum(), rows)[0]


@pytest.mark.parametrize("scale", [0.1, 1.0, 20.0])
def test_the_softmax_is_float32_also_where_a_drafter_is_sure(scale):
    """Logits up to 100: the gradient is the small rest that the label's softmax lacks to 1."""
    torch.manual_seed(0)
    weight = torch.randn(300, 32) * 0.2
    labels = torch.randint(0, 300, (1, 40, 3))
    hidden = (weight[labels] * scale + 0.1 * torch.randn(1, 40, 3, 32)).requires_grad_()
    wanted, wanted_gradient = in_double(hidden, labels, weight)
    for mixed in (False, True):  # autocast has no say: head and softmax keep the weights' type
        with torch.autocast("cpu", torch.bfloat16, enabled=mixed):
            losses, _ = token_losses(hidden, labels, weight.matmul, 7, weight)
        assert losses.dtype == torch.float32
        torch.testing.assert_close(losses.double(), wanted, rtol=1e-4, atol=2e-6)
        gradient = torch.autograd.grad(losses.sum(), hidden)[0].double()
        assert (gradient - wanted_gradient).norm() < 1e-3 * wanted_gradient.norm()


def test_bfloat16_heads_round_logits_and_nothing_else():
    torch.manual_seed(0)
    weight = (torch.randn(300, 32) * 0.2).bfloat16()
    labels = torch.randint(0, 300, (2, 9, 3))
    hidden = torch.randn(2, 9, 3, 32, dtype=torch.bfloat16, requires_grad=True)
    wanted, wanted_gradient = in_double(hidden, labels, weight)
    losses, _ = token_losses(hidden, labels, weight.matmul, 4, weight)
    assert losses.dtype == torch.float32
    torch.testing.assert_close(losses.double(), wanted, rtol=0, atol=0.02)  # of logits up to 6
    gradient = torch.autograd.grad(losses.sum(), hidden)[0]
    assert gradient.dtype == torch.bfloat16
    assert (gradient.double() - wanted_gradient).norm() < 0.01 * wanted_gradient.norm()


def test_without_gradient_none_is_computed():
    weight = torch.randn(50, 8)
    hidden, labels = torch.randn(1, 5, 3, 8), torch.randint(0, 50, (1, 5, 3))
    losses, _ = token_losses(hidden, labels, weight.matmul, 2, weight)
    assert not losses.requires_grad
    wanted = cross_entropy((hidden @ weight.T).flatten(0, 2), labels.flatten(), reduction="none")
    torch.testing.assert_close(losses.flatten(), wanted)


def test_a_chunk_is_sized_by_the_vocabulary():
    assert LossConfig().blocks_at_once(16, 151936) == 29  # 252 of 256 MiB
    assert LossConfig().blocks_at_once(16, 10**9) == 1
    assert LossConfig(chunk_blocks=5).blocks_at_once(16, 151936) == 5
    assert LossConfig(kind="kl").blocks_at_once(16, 151936) == 14  # two distributions each


def test_decay_of_published_block_sizes():
    assert [LossConfig().decay(size) for size in (8, 16)] == [4.0, 7.0]
    torch.testing.assert_close(slot_weights(4, 4.0), torch.tensor([1.0, 0.7788008, 0.6065307]))


def test_bad_values_are_named():
    with pytest.raises(InputError, match=r"loss\.gamma is -1"):
        LossConfig(gamma=-1)
    with pytest.raises(InputError, match=r"loss\.chunk_blocks is 0"):
        LossConfig(chunk_blocks=0)
    with pytest.raises(InputError, match=r"loss\.gamma is 4\.0 but loss\.kind is dpace"):
        LossConfig(kind="dpace", gamma=4.0)
    for alpha in (0, 1.5):
        with pytest.raises(InputError, match=rf"loss\.dpace_alpha is {alpha}"):
            LossConfig(dpace_alpha=alpha)


def test_a_window_that_begins_with_nothing_still_counts_what_follows():
    """The first micro-batch has no weight to divide by."""
    window, shares = LossWindow(), torch.tensor([1.0, 0.5])
    nothing = torch.zeros(2, 4)
    some = torch.tensor([[6.0, 3.0, 1.0, 2.0], [8.0, 4.0, 0.0, 1.0]])
    assert window.add(nothing, nothing, shares).item() == 0.0
    assert window.correction().item() == 1.0
    assert window.loss().item() == 0.0
    last = window.add(some, some, shares)
    wanted = (6.0 + 4.0) / (3.0 + 2.0)
    assert (last * window.correction()).item() == pytest.approx(wanted)
    assert window.loss().item() == pytest.approx(wanted)


def naive_dpace(losses, supervised, alpha):
    """Equation 8 slot by slot: the smoothed chance of reaching each later slot, added up."""
    weights = torch.zeros_like(losses)
    for block in range(losses.shape[0]):
        for j in range(losses.shape[1]):
            if not supervised[block, j]:
                continue
            for m in range(j, losses.shape[1]):
                chance = 1.0
                for i in range(m + 1):
                    if supervised[block, i]:
                        chance *= (1 - alpha) * math.exp(-losses[block, i].item()) + alpha
                weights[block, j] += chance if supervised[block, m] else 0.0
    return weights


@pytest.mark.parametrize("alpha", [0.1, 0.5, 1.0])
def test_dpace_weights_equal_loops(alpha):
    torch.manual_seed(0)
    losses = (torch.rand(20, 7) * 6).requires_grad_()
    supervised = torch.rand(20, 7) < 0.8
    supervised[0], supervised[1] = True, False
    weights = dpace_weights(losses.unsqueeze(0), supervised.unsqueeze(0), alpha).squeeze(0)
    assert not weights.requires_grad
    torch.testing.assert_close(weights, naive_dpace(losses, supervised, alpha))
    assert (weights[0, :-1] > weights[0, 1:]).all()  # an earlier slot carries all that follow


def test_dpace_weighs_what_holds_acceptance_back():
    """Sure up to a doubtful slot: what follows it counts less than where the doubt is last."""
    supervised = torch.ones(1, 1, 4, dtype=torch.bool)
    early, late = torch.tensor([[[9.0, 0, 0, 0]]]), torch.tensor([[[0.0, 0, 0, 9]]])
    weights = [dpace_weights(losses, supervised, 0.5)[0, 0] for losses in (early, late)]
    assert weights[0][1] < weights[1][1]
    torch.testing.assert_close(weights[1], torch.tensor([3.5, 2.5, 1.5, 0.5]), atol=1e-3, rtol=0)


@pytest.mark.parametrize("kind", ["cross_entropy", "dpace", "kl"])
def test_the_loss_is_its_weighted_sum_over_what_it_counts(kind):
    torch.manual_seed(0)
    config = LossConfig(kind=kind)
    losses, supervised = torch.rand(2, 3, 4), torch.rand(2, 3, 4) < 0.7
    decaying = slot_weights(5, 4.0)
    weights, counted = config.weigh(losses, supervised, decaying)
    if kind == "dpace":
        assert torch.equal(weights, dpace_weights(losses, supervised, 0.5))
        assert torch.equal(counted, supervised.float())
    else:
        assert torch.equal(weights, supervised * decaying)
        assert counted is weights


@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.parametrize("chunk", [1, 4, 1000])
def test_soft_losses_equal_the_divergence_of_whole_distributions(chunk, fast):
    torch.manual_seed(0)
    hidden = torch.randn(2, 5, 3, 8, requires_grad=True)
    clean, rows = torch.randn(2, 9, 8), torch.randint(0, 12, (2, 5, 3))  # some behind the end
    head = torch.nn.Linear(8, 50, bias=False).requires_grad_(False)
    losses, predicted = soft_losses(hidden, clean, rows, head, chunk, head.weight if fast else None)
    wanted = torch.zeros(2, 5, 3)
    logits = head(hidden)
    for b, n, k in itertools.product(range(2), range(5), range(3)):
        p = head(clean[b, min(int(rows[b, n, k]), 8)]).softmax(-1)
        q = logits[b, n, k].softmax(-1)
        wanted = wanted + torch.zeros_like(wanted).index_put(
            tuple(torch.tensor([i]) for i in (b, n, k)), (p * (p / q).log()).sum().unsqueeze(0)
        )
    torch.testing.assert_close(losses, wanted)
    assert losses.dtype == torch.float32
    assert torch.equal(predicted, logits.argmax(-1))
    weights = torch.rand_like(losses)
    got = torch.autograd.grad((losses * weights).sum(), hidden)[0]
    torch.testing.assert_close(got, torch.autograd.grad((wanted * weights).sum(), hidden)[0])


def test_soft_losses_vanish_where_the_drafter_is_the_target():
    torch.manual_seed(0)
    weight, clean = torch.randn(50, 8), torch.randn(1, 9, 8)
    rows = torch.randint(0, 9, (1, 5, 3))
    hidden = clean[0, rows].requires_grad_()
    losses, _ = soft_losses(hidden, clean, rows, weight.matmul, 2, weight)
    torch.testing.assert_close(losses, torch.zeros(1, 5, 3), atol=1e-6, rtol=0)
    gradient = torch.autograd.grad(losses.sum(), hidden)[0]
    torch.testing.assert_close(gradient, torch.zeros_like(gradient), atol=1e-5, rtol=0)


def test_soft_losses_are_float32_in_bfloat16_too():
    torch.manual_seed(0)
    weight = (torch.randn(300, 32) * 0.2).bfloat16()
    clean, rows = torch.randn(1, 9, 32).bfloat16(), torch.randint(0, 9, (1, 5, 3))
    hidden = torch.randn(1, 5, 3, 32, dtype=torch.bfloat16, requires_grad=True)
    losses, _ = soft_losses(hidden, clean, rows, weight.matmul, 2, weight)
    double = hidden.detach().double().requires_grad_()
    wide = weight.double()
    exact, _ = soft_losses(double, clean.double(), rows, wide.matmul, 2, wide)
    assert losses.dtype == torch.float32
    torch.testing.assert_close(losses, exact, rtol=0, atol=0.05)
    gradient = torch.autograd.grad(losses.sum(), hidden)[0]
    wanted = torch.autograd.grad(exact.sum(), double)[0]
    assert gradient.dtype == torch.bfloat16
    assert (gradient.double() - wanted).norm() < 0.02 * wanted.norm()
