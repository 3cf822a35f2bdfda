"""The chunked loss equals the plain one, loss and gradient."""

import pytest
import torch
from torch.nn.functional import cross_entropy

from dflow_lightning.errors import InputError
from dflow_lightning.loss import LossConfig, LossWindow, slot_weights, token_losses


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


def test_decay_of_published_block_sizes():
    assert [LossConfig().decay(size) for size in (8, 16)] == [4.0, 7.0]
    torch.testing.assert_close(slot_weights(4, 4.0), torch.tensor([1.0, 0.7788008, 0.6065307]))


def test_bad_values_are_named():
    with pytest.raises(InputError, match=r"loss\.gamma is -1"):
        LossConfig(gamma=-1)
    with pytest.raises(InputError, match=r"loss\.chunk_blocks is 0"):
        LossConfig(chunk_blocks=0)


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
