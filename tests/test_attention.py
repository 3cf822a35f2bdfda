"""Block attention: both formulations against loops, forward and gradient, and no leak."""

import math

import pytest
import torch

from dflow_lightning.attention import block_attention


def brute_force(q, k_block, v_block, k_context, v_context, anchors):
    """Attention of one query at a time to exactly the rows it may see."""
    out = torch.zeros_like(q)
    B, H, N, K, E = q.shape
    for b in range(B):
        for h in range(H):
            for n in range(N):
                seen = int(anchors[b, n])
                keys = torch.cat([k_context[b, h, :seen], k_block[b, h, n]])
                values = torch.cat([v_context[b, h, :seen], v_block[b, h, n]])
                for k in range(K):
                    weights = (keys @ q[b, h, n, k] / math.sqrt(E)).softmax(0)
                    out[b, h, n, k] = weights @ values
    return out


def tensors(N=3, seed=0):
    """Random q, k_block, v_block, k_context and v_context."""
    torch.manual_seed(seed)
    blocks = [torch.randn(2, 2, N, 4, 16, requires_grad=True) for _ in range(3)]
    context = [torch.randn(2, 2, 11, 16, requires_grad=True) for _ in range(2)]
    return [*blocks, *context]


@pytest.mark.parametrize("backend", ["dense", "split"])
@pytest.mark.parametrize("anchors", [[[3, 7, 11], [1, 1, 5]], [[0, 0, 0], [0, 4, 11]]])
def test_equals_brute_force(backend, anchors):
    anchors = torch.tensor(anchors)
    inputs = tensors()
    out = block_attention(*inputs, anchors, backend)
    reference = brute_force(*[t.double() for t in inputs], anchors)
    torch.testing.assert_close(out, reference.float(), atol=1e-5, rtol=1e-5)
    gradient = torch.randn_like(out)
    got = torch.autograd.grad(out, inputs, gradient)
    wanted = torch.autograd.grad(reference, inputs, gradient.double())
    for one, other in zip(got, wanted, strict=True):
        assert torch.isfinite(one).all()
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("backend", ["dense", "split"])
def test_context_at_and_after_the_anchor_and_other_blocks_are_invisible(backend):
    anchors = torch.tensor([[3, 7, 11], [1, 1, 5]])
    q, k_block, v_block, k_context, v_context = (t.detach() for t in tensors())
    before = block_attention(q, k_block, v_block, k_context, v_context, anchors, backend)
    for n in range(3):
        changed = [t.clone() for t in (k_block, v_block, k_context, v_context)]
        for b in range(2):
            for t in changed[2:]:
                t[b, :, anchors[b, n] :] = 1e4
        for t in changed[:2]:
            t[:, :, [m for m in range(3) if m != n]] = -1e4
        after = block_attention(q, *changed, anchors, backend)
        assert torch.equal(before[:, :, n], after[:, :, n])
