"""Block attention: both formulations against loops, forward and gradient, and no leak."""

import math
import warnings

import pytest
import torch
from torch._dynamo.exc import FailOnRecompileLimitHit
from torch._dynamo.testing import CompileCounter
from torch.nn.attention.flex_attention import flex_attention

from dflow_lightning.errors import InputError
from dflow_lightning.tensors import attention, attention_flex
from dflow_lightning.tensors.attention import formulation_for
from dflow_lightning.tensors.attention_flex import TILE, tile_mask
from dflow_lightning.tensors.blocks import KV, BlockView


def block_attention(q, k_block, v_block, k_context, v_context, anchors, backend, *view):
    own, context = KV(k_block, v_block), KV(k_context, v_context)
    return attention.block_attention(q, own, context, BlockView(anchors, *view), backend)


def flex_blocks(q, k_block, v_block, k_context, v_context, *view, attend):
    own, context = KV(k_block, v_block), KV(k_context, v_context)
    return attention_flex.flex_blocks(q, own, context, BlockView(*view), attend)


def brute_force(q, k_block, v_block, k_context, v_context, anchors):
    """Attention of one query at a time to exactly the rows it may see."""
    out = torch.zeros_like(q)
    B, H, N, K, E = q.shape
    group = H // k_block.shape[1]
    k_block, v_block, k_context, v_context = (
        t.repeat_interleave(group, dim=1) for t in (k_block, v_block, k_context, v_context)
    )
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


def tensors(N=3, K=4, L=11, group=1, device="cpu", dtype=torch.float32):
    """Random q, k_block, v_block, k_context and v_context of 2 rows; two key heads."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, 2 * group, N, K, 16), *[(2, 2, N, K, 16)] * 2, *[(2, 2, L, 16)] * 2]
    drawn = [torch.randn(shape, generator=generator) for shape in shapes]
    return [t.to(device, dtype).requires_grad_() for t in drawn]


@pytest.mark.parametrize("backend", ["dense", "split"])
@pytest.mark.parametrize("group", [1, 2])
@pytest.mark.parametrize("anchors", [[[3, 7, 11], [1, 1, 5]], [[0, 0, 0], [0, 4, 11]]])
def test_equals_brute_force(backend, group, anchors):
    anchors = torch.tensor(anchors)
    inputs = tensors(group=group)
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


# ---------------------------------------------------------------- flex_attention

CASES = [  # N, K, L, anchors of the first row; the second row's are the first's backwards
    (3, 4, 11, [3, 7, 11]),
    (3, 4, 11, [0, 0, 5]),
    (20, 10, 300, [0, 1, 127, 128, 129, 255, 256, 257, 299, 300, *range(10, 110, 10)]),
    (17, 16, 256, [*range(0, 255, 16), 256]),
]


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@torch.no_grad()
@pytest.mark.parametrize(("N", "K", "L", "anchors"), CASES)
@pytest.mark.parametrize("packed", [False, True])
def test_flex_equals_the_dense_mask(N, K, L, anchors, packed):
    """The kernel's own interpreter: flex_attention has no backward on a CPU, see tests/gpu."""
    anchors = torch.tensor([anchors, anchors[::-1]])
    starts = (anchors - 70).clamp(min=0) if packed else None
    inputs = tensors(N, K, L, group=2)
    wanted = block_attention(*inputs, anchors, "dense", starts)
    got = flex_blocks(*inputs, anchors, starts, attend=flex_attention)
    torch.testing.assert_close(got, wanted, atol=1e-5, rtol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize(("N", "K", "L", "anchors"), CASES)
@pytest.mark.parametrize("packed", [False, True])
def test_tiles_hold_what_is_seen_and_little_else(N, K, L, anchors, packed):
    anchors = torch.tensor([anchors, anchors[::-1]])
    starts = (anchors - 70).clamp(min=0) if packed else None
    context = max(2, -(-L // TILE)) * TILE
    mask = tile_mask(BlockView(anchors, starts), K, context)
    queries, keys = mask.seq_lengths
    at = [torch.arange(n).view(shape) for n, shape in
          ((2, (-1, 1, 1)), (queries, (1, -1, 1)), (keys, (1, 1, -1)))]  # fmt: skip
    seen = mask.mask_mod(at[0], None, at[1], at[2])
    tiles = seen.view(2, queries // TILE, TILE, keys // TILE, TILE).transpose(2, 3).flatten(3)
    part, whole = (torch.zeros(tiles.shape[:3], dtype=torch.bool) for _ in range(2))
    for marked, counts, listed in (
        (part, mask.kv_num_blocks, mask.kv_indices),
        (whole, mask.full_kv_num_blocks, mask.full_kv_indices),
    ):
        for b in range(2):
            for u in range(queries // TILE):
                marked[b, u, listed[b, 0, u, : counts[b, 0, u]].long()] = True
    assert not (part & whole).any()
    assert torch.equal(whole, whole & tiles.all(-1))  # where no mask is applied, all is seen
    assert not (tiles.any(-1) & ~(part | whole)).any()  # nothing that is seen is left out
    if not packed:
        assert torch.equal(part | whole, tiles.any(-1))  # and nothing else is computed


@pytest.mark.slow
@torch.no_grad()
def test_the_compiled_kernel_equals_the_dense_mask():
    """Compiled for this CPU: here the lists of tiles decide what is computed.

    With static shapes, since torch 2.13 writes C++ for dynamic ones that does not compile.
    """
    attend = torch.compile(flex_attention, dynamic=False)
    N, K, L, anchors = CASES[2]
    anchors = torch.tensor([anchors, anchors[::-1]])
    starts = (anchors - 70).clamp(min=0)
    inputs = tensors(N, K, L, group=2)
    wanted = block_attention(*inputs, anchors, "dense", starts)
    got = flex_blocks(*inputs, anchors, starts, attend=attend)
    torch.testing.assert_close(got, wanted, atol=1e-5, rtol=1e-5)


def test_flex_compiles_once_for_all_lengths():
    """Without gradient on this CPU; with gradient it is one kernel more, see tests/gpu."""
    torch._dynamo.reset()
    compiles = CompileCounter()
    attend = torch.compile(flex_attention, backend=compiles, dynamic=True, fullgraph=True)
    with torch.no_grad():
        for N, L in ((40, 300), (3, 11), (17, 700), (64, 1000)):
            anchors = torch.randint(0, L, (2, N))
            inputs = tensors(N, 16, L, group=2)
            got = flex_blocks(*inputs, anchors, None, attend=attend)
            wanted = block_attention(*inputs, anchors, "dense")
            torch.testing.assert_close(got, wanted, atol=1e-5, rtol=1e-5)
    assert compiles.frame_count == 1


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("N", "K", "L", "anchors"), CASES)
@pytest.mark.parametrize("packed", [False, True])
def test_flex_on_a_gpu_equals_the_dense_mask_forward_and_backward(N, K, L, anchors, packed, dtype):
    anchors = torch.tensor([anchors, anchors[::-1]], device="cuda")
    starts = (anchors - 70).clamp(min=0) if packed else None
    inputs = tensors(N, K, L, group=2, device="cuda", dtype=dtype)
    wanted = block_attention(*inputs, anchors, "dense", starts)
    got = block_attention(*inputs, anchors, "flex", starts)
    tolerance = (
        {"atol": 5e-3, "rtol": 5e-3} if dtype == torch.float32 else {"atol": 5e-2, "rtol": 5e-2}
    )
    torch.testing.assert_close(got, wanted, **tolerance)  # float32 products may be TF32
    gradient = torch.randn_like(got)
    pairs = zip(
        torch.autograd.grad(got, inputs, gradient), torch.autograd.grad(wanted, inputs, gradient),
        strict=True,
    )  # fmt: skip
    for one, other in pairs:
        assert torch.isfinite(one).all()
        torch.testing.assert_close(one, other, **tolerance)


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("out of resource: shared memory"),
        FailOnRecompileLimitHit("Hard failure due to fullgraph=True"),
    ],
)
def test_a_kernel_that_does_not_fit_is_said_once_and_replaced(monkeypatch, error):
    def unfit(*arguments):
        raise error

    monkeypatch.setattr("dflow_lightning.tensors.attention.flex_blocks", unfit)
    monkeypatch.setattr(attention, "FLEX", attention.FlexAttention())
    anchors = torch.tensor([[3, 7, 11], [1, 1, 5]])
    inputs = tensors()
    with pytest.warns(UserWarning, match="attention goes on with a dense mask"):
        first = block_attention(*inputs, anchors, "flex")
    again = block_attention(*inputs, anchors, "flex")
    wanted = block_attention(*inputs, anchors, "dense")
    assert torch.equal(first, wanted)
    assert torch.equal(again, wanted)


def test_a_refused_variant_leaves_the_others(monkeypatch):
    """What does not compile for one head size may do for another."""
    asked = []

    def unfit(q, *arguments):
        asked.append(q.shape)
        raise RuntimeError("out of resource: shared memory")

    monkeypatch.setattr("dflow_lightning.tensors.attention.flex_blocks", unfit)
    monkeypatch.setattr(attention, "FLEX", attention.FlexAttention())
    for K in (4, 4, 5):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            block_attention(*tensors(K=K), torch.ones(2, 3, dtype=torch.long), "flex")
    assert [shape[3] for shape in asked] == [4, 5]


def test_more_variants_than_the_compiler_recompiles():
    """Ten shapes in one process; one function for all of them would end at the ninth."""
    torch._dynamo.reset()
    attention_flex.compiled_attention.cache_clear()
    compiles = CompileCounter()
    own_compile = torch.compile
    anchors = torch.tensor([[3, 7, 11], [1, 1, 5]])
    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(torch, "compile", lambda f, **k: own_compile(f, backend=compiles, **k))
        for E in range(16, 16 + 8 * 10, 8):
            inputs = [torch.nn.functional.pad(t, (0, E - 16)) for t in tensors()]
            got = flex_blocks(*inputs, anchors, attend=None)
            torch.testing.assert_close(
                got, block_attention(*inputs, anchors, "dense"), atol=1e-5, rtol=1e-5
            )
    attention_flex.compiled_attention.cache_clear()
    assert compiles.frame_count == 10


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("out of resource, almost"), ValueError("a defect")]
)
def test_other_errors_of_the_kernel_are_not_hidden(monkeypatch, error):
    def fails(*arguments):
        raise error

    monkeypatch.setattr("dflow_lightning.tensors.attention.flex_blocks", fails)
    with pytest.raises(type(error)):
        block_attention(*tensors(), torch.ones(2, 3, dtype=torch.long), "flex")


# ---------------------------------------------------------------- the choice


def test_what_auto_stands_for():
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    assert formulation_for("auto", 5, cpu, torch.float32) == "split"
    assert formulation_for("auto", 5, cpu, torch.float64) == "dense"
    assert formulation_for("auto", 5, gpu, torch.bfloat16) == "flex"
    assert {formulation_for("auto", 1, device, torch.float32) for device in (cpu, gpu)} == {"dense"}
    assert formulation_for("flex", 5, cpu, torch.float32) == "flex"
    with pytest.raises(InputError, match=r"model\.attention is split, which runs on a CPU"):
        formulation_for("split", 5, gpu, torch.float32)


def test_a_dense_mask_above_a_gibibyte_is_refused():
    q, k_block, v_block, k_context, v_context = (
        torch.empty(shape, device="meta")
        for shape in ((4, 2, 512, 16, 8), *[(4, 2, 512, 16, 8)] * 2, *[(4, 2, 3072, 8)] * 2)
    )
    anchors = torch.empty(4, 512, dtype=torch.long, device="meta")
    with pytest.raises(InputError, match=r"a mask of 4 x 512 blocks takes 1\.4 GiB"):
        block_attention(q, k_block, v_block, k_context, v_context, anchors, "dense")
