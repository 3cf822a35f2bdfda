"""What stays float32 under bfloat16: weights, gradients, moments, statistics, angles, losses."""

import copy
from functools import partial

import pytest
import torch
from eagle3_training import make_eagle3
from test_module import uneven_batch, with_rounds
from training import make_module

from dflow_lightning.models.layers import RMSNorm, rotate
from dflow_lightning.training.precision import ComputePrecision

BF16 = torch.bfloat16


def norm_in_double(x, weight, eps):
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * weight


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 1e-6), (BF16, 6e-3)])
def test_norm_and_its_gradient_equal_the_formula(dtype, limit):
    """Also where squares overflow half precision and where a mean of bfloat16 squares is coarse."""
    torch.manual_seed(0)
    norm = RMSNorm(96, 1e-6)
    torch.nn.init.normal_(norm.weight)
    for scale in (1e-3, 1.0, 1e4):
        x = (scale * (1 + torch.randn(2, 5, 96))).to(dtype).requires_grad_()
        gradient = torch.randn(2, 5, 96).to(dtype)
        exact = x.detach().double().requires_grad_()
        weight = norm.weight.detach().double().requires_grad_()
        wanted = norm_in_double(exact, weight, 1e-6)
        got = norm(x)
        assert got.dtype == dtype
        pairs = [(got, wanted)]
        ours = torch.autograd.grad(got, (x, norm.weight), gradient)
        theirs = torch.autograd.grad(wanted, (exact, weight), gradient.double())
        pairs += zip(ours, theirs, strict=True)
        for one, other in pairs:
            assert (one.double() - other).norm() < limit * other.norm()
        assert ours[1].dtype == torch.float32


@torch.no_grad()
def test_norm_is_the_same_with_and_without_gradient():
    norm, x = RMSNorm(96, 1e-6), torch.randn(3, 96)
    with torch.enable_grad():
        assert torch.equal(norm(x), norm(x).detach())
        with_gradient = norm(x)
    assert torch.equal(norm(x), with_gradient)


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 1e-6), (BF16, 6e-3)])
def test_rotation_and_its_gradient_turn_every_pair(dtype, limit):
    torch.manual_seed(0)
    x = torch.randn(2, 3, 5, 8, dtype=dtype, requires_grad=True)
    angles = torch.randn(2, 1, 5, 4)
    rope = tuple(torch.cat([part, part], dim=-1) for part in (angles.cos(), angles.sin()))
    gradient = torch.randn_like(x)
    out = rotate(x, rope)
    assert out.dtype == dtype
    with torch.no_grad():
        torch.testing.assert_close(rotate(x, rope), out.detach())
    (back,) = torch.autograd.grad(out, x, gradient)

    def turned(values, sign):
        pairs = torch.complex(*values.detach().double().chunk(2, dim=-1))
        pairs = pairs * torch.polar(torch.ones_like(angles), sign * angles).to(pairs.dtype)
        return torch.cat([pairs.real, pairs.imag], dim=-1)

    for got, wanted in ((out, turned(x, 1)), (back, turned(gradient, -1))):
        assert (got.double() - wanted).norm() < limit * wanted.norm()


def test_a_mixed_step_keeps_weights_gradients_and_moments_in_float32(tiny_target_dir):
    module = make_module(tiny_target_dir)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
    with torch.autocast("cpu", BF16):
        inputs = with_rounds(module, uneven_batch())
        loss, sums = module.objective(inputs)
    assert loss.dtype == sums.dtype == torch.float32
    loss.backward()
    optimizer.step()
    for parameter in module.parameters():
        assert parameter.dtype == torch.float32
        assert parameter.grad is None or parameter.grad.dtype == torch.float32
    moments = [value for state in optimizer.state.values() for value in state.values()]
    assert {value.dtype for value in moments} == {torch.float32}


MODULES = {
    "dflow": make_module,
    "dflash": partial(make_module, relay=False),
    "domino-dflow": partial(make_module, causal_head=True),
    "carryover": partial(make_module, carryover=True, relay=False),
    "eagle3": make_eagle3,
}


@pytest.mark.parametrize("rolls_out", [True, False])
@pytest.mark.parametrize("method", MODULES)
def test_every_target_type_trains_under_every_precision(method, rolls_out, tiny_target_dir):
    """A step without rollouts too, as before `rollout.start` and in validation (F29)."""
    batch, reference = uneven_batch(), None
    for target in (torch.float32, BF16, torch.float16):
        for name in ("32-true", "64-true", "bf16-mixed", "bf16-true"):
            precision = ComputePrecision.named(name)
            module = MODULES[method](tiny_target_dir).to(precision.parameters)
            module.target.model.to(target)
            torch.manual_seed(3)  # EAGLE-3 samples positions
            with precision.autocast("cpu"):
                rolled = rolls_out and method != "eagle3"
                inputs = with_rounds(module, batch) if rolled else module.step_inputs(batch)
                loss, _ = module.objective(inputs)
            loss.backward()
            assert all(
                p.grad is not None and p.grad.dtype == precision.parameters
                for p in module.parameters()
            )
            reference = loss.item() if reference is None else reference
            assert loss.item() == pytest.approx(reference, rel=0.02), (target, name)


def test_small_updates_survive():
    """1e-4 of a weight a step, which bfloat16 would round away each time."""
    for dtype, moved in ((torch.float32, True), (BF16, False)):
        weight = torch.nn.Parameter(torch.ones(4, dtype=dtype))
        optimizer = torch.optim.AdamW([weight], lr=1e-4, weight_decay=0.0)
        for _ in range(20):
            weight.grad = torch.ones_like(weight)
            optimizer.step()
        assert bool((weight < 0.999).all()) == moved


def test_frequencies_stay_float32_through_every_cast(tiny_drafter):
    exact = tiny_drafter.rotary.inverse_frequencies.clone()
    state = tiny_drafter.state_dict()
    casts = {
        "bfloat16": lambda m: m.bfloat16(), "half": lambda m: m.half(), "to": lambda m: m.to(BF16),
        "double": lambda m: m.double(), "float": lambda m: m.bfloat16().float(),
        "type": lambda m: m.type(BF16), "copy": lambda m: copy.deepcopy(m.bfloat16()),
    }  # fmt: skip
    for name, cast in casts.items():
        drafter = cast(copy.deepcopy(tiny_drafter))
        drafter.load_state_dict(state)
        assert drafter.rotary.inverse_frequencies.dtype == torch.float32, name
        assert torch.equal(drafter.rotary.inverse_frequencies, exact), name
    assert not any("frequencies" in name for name in state)
    with torch.autocast("cpu", BF16):
        cos, _ = tiny_drafter.rotary(torch.tensor([[30_000]]), torch.float32)
    torch.testing.assert_close(cos.flatten()[:8], (30_000 * exact.double()).cos().float(),
                               atol=5e-3, rtol=0)  # fmt: skip
