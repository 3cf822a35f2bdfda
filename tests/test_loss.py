"""The chunked loss equals the plain one, loss and gradient."""

import pytest
import torch
from torch.nn.functional import cross_entropy

from dflow_lightning.errors import InputError
from dflow_lightning.loss import LossConfig, LossWindow, slot_weights, token_losses


@pytest.mark.parametrize("chunk", [1, 4, 1000])
def test_chunks_change_nothing(chunk):
    torch.manual_seed(0)
    hidden = torch.randn(2, 5, 3, 8, requires_grad=True)
    head = torch.nn.Linear(8, 50)
    labels = torch.randint(0, 50, (2, 5, 3))
    losses, predicted = token_losses(hidden, labels, head, chunk)
    logits = head(hidden)
    wanted = cross_entropy(logits.flatten(0, 2), labels.flatten(), reduction="none").view_as(labels)
    torch.testing.assert_close(losses, wanted)
    assert torch.equal(predicted, logits.argmax(-1))
    weights = torch.rand_like(losses)
    got = torch.autograd.grad((losses * weights).sum(), hidden)[0]
    torch.testing.assert_close(got, torch.autograd.grad((wanted * weights).sum(), hidden)[0])


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
