"""Objectives other than decayed cross-entropy, and relays of one term, in the whole module."""

import math

import pytest
import torch
from test_loss import naive_dpace
from test_module import K, gradients, uneven_batch, wake_relay, with_rounds
from training import make_module

from dflow_lightning.data.datamodule import Batch
from dflow_lightning.models.dims import DrafterConfig
from dflow_lightning.models.relay import Relay, RelayConfig
from dflow_lightning.tensors.loss import LossConfig, LossWindow
from dflow_lightning.training.module import DrafterModule, TargetConfig

KINDS = ["dpace", "kl"]


def module_of(target_dir, kind: str) -> DrafterModule:
    module = wake_relay(make_module(target_dir))
    module.loss_config = LossConfig(kind=kind, chunk_blocks=3)
    return module


@torch.no_grad()
@pytest.mark.parametrize("kind", KINDS)
def test_loss_equals_loops_over_blocks_and_slots(tiny_target_dir, kind):
    """Every block drafted alone; the target's distribution from its own forward, row by row."""
    module, batch = module_of(tiny_target_dir, kind), uneven_batch()
    inputs = with_rounds(module, batch)
    loss, sums = module.objective(inputs)
    drafter, total, counted = module.drafter, 0.0, 0.0
    gamma = max(1.0, 4.0 + (K - 8) * 3 / 8)
    target_logits = module.target.model(batch.input_ids_BS).logits.double()
    for current in inputs.rounds:
        x = module.round_inputs(batch, current)
        for b, n in current.anchors.valid_BN.nonzero().tolist():
            anchor = int(current.anchors.positions_BN[b, n])
            context = drafter.context_kv(
                drafter.project(inputs.taps_BSC[b : b + 1, :anchor]),
                torch.arange(anchor).unsqueeze(0),
            )
            hidden = drafter(x[b : b + 1, n : n + 1], context, torch.tensor([[anchor]]))
            log_q = module.target.head(hidden[0, 0]).double().log_softmax(-1)
            losses, supervised = torch.zeros(1, K - 1), torch.zeros(1, K - 1, dtype=torch.bool)
            for k in range(1, K):
                at = anchor + k
                if at < 30 and batch.loss_mask_BS[b, at]:
                    supervised[0, k - 1] = True
                    if kind == "dpace":
                        losses[0, k - 1] = -log_q[k][batch.input_ids_BS[b, at]]
                    else:
                        log_p = target_logits[b, at - 1].log_softmax(-1)
                        losses[0, k - 1] = (log_p.exp() * (log_p - log_q[k])).sum()
            if kind == "dpace":
                weights, counts = naive_dpace(losses, supervised, 0.5), supervised
            else:
                decay = torch.tensor([math.exp(-(k - 1) / gamma) for k in range(1, K)])
                weights = counts = decay * supervised
            total += float((losses * weights).sum())
            counted += float(counts.sum())
    assert loss.item() == pytest.approx(total / counted, rel=1e-4)
    assert sums[:, 1].sum().item() == pytest.approx(counted, rel=1e-5)
    assert all(r.anchors.valid_BN.any() for r in inputs.rounds)


@pytest.mark.parametrize("kind", KINDS)
def test_micro_batches_give_the_gradient_of_one_batch(tiny_target_dir, kind):
    module, batch, window = module_of(tiny_target_dir, kind), uneven_batch(), LossWindow()
    whole_loss, _ = module.objective(with_rounds(module, batch))
    whole_loss.backward()
    whole = gradients(module)
    module.zero_grad()
    for rows in (slice(0, 1), slice(1, 4)):
        part = Batch.from_tensors({name: value[rows] for name, value in batch.tensors().items()})
        module.objective(with_rounds(module, part), window)[0].backward()
    assert window.loss().item() == pytest.approx(whole_loss.item(), rel=1e-5)
    for name, gradient in gradients(module).items():
        corrected = gradient * window.correction()
        torch.testing.assert_close(corrected, whole[name], atol=1e-6, rtol=1e-4, msg=name)


@pytest.mark.parametrize("kind", KINDS)
def test_held_out_rows_are_measured_alike(tiny_target_dir, kind):
    """Validation makes its own clean forward, without a rollout before it."""
    module = module_of(tiny_target_dir, kind).eval()
    loss, sums = module.objective(module.begin_step(uneven_batch()))
    assert 0 < loss.item() < 100
    assert sums.shape == (1, 4)


@pytest.mark.parametrize("terms", ["scale", "shift"])
def test_a_relay_of_one_term_is_the_formula_without_the_other(terms):
    torch.manual_seed(0)
    both, one = (Relay(8, 12, terms=each).double() for each in ("both", terms))
    for parameter in both.parameters():
        torch.nn.init.normal_(parameter)
    state = both.state_dict()
    halves = {"scale": slice(0, 8), "shift": slice(8, 16)}
    dropped = {"scale": slice(8, 16), "shift": slice(0, 8)}
    own = dict(state)
    for name in ("relay_mlp.2.weight", "relay_mlp.2.bias"):
        own[name] = state[name][halves[terms]].clone()
        state[name][dropped[terms]] = 0.0  # the other half, at work in the two-term relay
    if terms == "shift":
        own = {name: tensor for name, tensor in own.items() if "norm" not in name}
    one.load_state_dict(own)
    both.load_state_dict(state)
    h, bonus, rejected = (torch.randn(2, 3, *size, 8).double() for size in ((4,), (), ()))
    valid = torch.rand(2, 3, 4) < 0.5
    wanted = both(h, bonus, rejected, valid)
    assert wanted.any()
    torch.testing.assert_close(one(h, bonus, rejected, valid), wanted)


@pytest.mark.parametrize("terms", ["scale", "shift"])
def test_a_relay_of_one_term_starts_at_zero_and_trains_whole(tiny_target_dir, terms):
    torch.manual_seed(1)
    module = DrafterModule(
        target=TargetConfig(path=str(tiny_target_dir)),
        drafter=DrafterConfig(num_layers=1, block_size=K, target_layer_ids=[0, 1, 2]),
        relay=RelayConfig(enabled=True, terms=terms),
        num_anchors=6,
    )
    inputs = with_rounds(module, uneven_batch())
    plain = [module.round_inputs(inputs.batch, current) for current in inputs.rounds[1:]]
    relay, module.relay = module.relay, None
    for before, current in zip(plain, inputs.rounds[1:], strict=True):
        assert torch.equal(before, module.round_inputs(inputs.batch, current))
    module.relay = wake_relay_of(relay)
    module.objective(with_rounds(module, uneven_batch()))[0].backward()
    for name, parameter in module.relay.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.any(), name


def wake_relay_of(relay: Relay) -> Relay:
    with torch.no_grad():
        for parameter in relay.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return relay
