"""The module: loss by brute force, gradients over processes, checkpoints, learning rate."""

import copy
import math
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from targets import random_target
from training import make_module

from dflow_lightning.data.datamodule import Batch
from dflow_lightning.errors import InputError
from dflow_lightning.models.dims import DrafterConfig
from dflow_lightning.models.relay import RelayConfig
from dflow_lightning.tensors.loss import LossConfig, LossWindow
from dflow_lightning.training.module import CHECKPOINT_KEY, DrafterModule, TargetConfig
from dflow_lightning.training.optimizer import OptimizerConfig
from dflow_lightning.training.rollout import OnlineRollout
from dflow_lightning.training.saved import load_trained, open_checkpoint
from dflow_lightning.training.step_inputs import RolloutConfig

K = 4


def uneven_batch(rows: int = 4, width: int = 30) -> Batch:
    """Random rows: two with long answers, then two with next to none."""
    generator = torch.Generator().manual_seed(8)
    ids = torch.randint(0, 256, (rows, width), generator=generator)
    mask = torch.zeros(rows, width, dtype=torch.bool)
    for row, (start, stop) in enumerate([(3, 29), (2, 28), (20, 24), (26, 28)][:rows]):
        mask[row, start:stop] = True
    return Batch(ids, mask, torch.arange(rows))


def wake_relay(module: DrafterModule) -> DrafterModule:
    """A relay that adds something: it starts at exactly zero."""
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in module.relay.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
    return module


def with_rounds(module: DrafterModule, batch: Batch, num_rounds: int = 2, num_anchors: int = 4):
    return module.step_inputs(batch, RolloutConfig(num_rounds=num_rounds, num_anchors=num_anchors))


def gradients(module: DrafterModule) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in module.named_parameters()}


@pytest.fixture
def module(tiny_target_dir) -> DrafterModule:
    return wake_relay(make_module(tiny_target_dir))


# ---------------------------------------------------------------- the loss


@torch.no_grad()
def test_loss_equals_loops_over_blocks_and_slots(module):
    """Every block drafted alone, every slot's plain cross-entropy, weighed and counted by hand."""
    module.loss_config = LossConfig(round_weights=[1.0, 0.5, 0.25], chunk_blocks=3)
    batch = uneven_batch()
    inputs = with_rounds(module, batch)
    loss, sums = module.objective(inputs)
    drafter, losses, weights = module.drafter, 0.0, 0.0
    gamma = max(1.0, 4.0 + (K - 8) * 3 / 8)
    for number, current in enumerate(inputs.rounds):
        x = module.round_inputs(batch, current)
        total, weight, accepted, blocks = 0.0, 0.0, 0, 0
        for b in range(4):
            for n in range(x.shape[1]):
                if not current.anchors.valid_BN[b, n]:
                    continue
                anchor = int(current.anchors.positions_BN[b, n])
                context = drafter.context_kv(
                    drafter.project(inputs.taps_BSC[b : b + 1, :anchor]),
                    torch.arange(anchor).unsqueeze(0),
                )
                hidden = drafter(x[b : b + 1, n : n + 1], context, torch.tensor([[anchor]]))
                logits = module.target.head(hidden[0, 0]).double()
                unbroken = True
                for k in range(1, K):
                    position = anchor + k
                    if position >= 30 or not batch.loss_mask_BS[b, position]:
                        unbroken = False
                        continue
                    label = int(batch.input_ids_BS[b, position])
                    share = math.exp(-(k - 1) / gamma)
                    total -= share * float(logits[k].log_softmax(-1)[label])
                    weight += share
                    unbroken = unbroken and int(logits[k].argmax()) == label
                    accepted += unbroken
                blocks += 1
        assert sums[number].tolist() == pytest.approx([total, weight, accepted, blocks], rel=1e-5)
        share = [1.0, 0.5, 0.25][number] / x.shape[1]  # of each of the round's blocks
        losses, weights = losses + share * total, weights + share * weight
    assert loss.item() == pytest.approx(losses / weights, rel=1e-5)
    assert all(r.anchors.valid_BN.any() for r in inputs.rounds)


@pytest.mark.parametrize("world_size", [None, 2])
def test_two_processes_with_uneven_rows_give_the_gradient_of_one(module, monkeypatch, world_size):
    """2 + 2 rows with one denominator over both, summed; or averaged, as data parallelism does."""
    batch = uneven_batch()
    module.objective(with_rounds(module, batch))[0].backward()
    whole = gradients(module)
    halves = [Batch(*(part[rows] for part in batch[:3])) for rows in (slice(0, 2), slice(2, 4))]
    steps = [with_rounds(module, half) for half in halves]
    with torch.no_grad():
        own = [module.objective(step)[1] for step in steps]
    assert own[0][0, 1] > 3 * own[1][0, 1]  # uneven, so that a mean of means would be wrong
    monkeypatch.setattr(module, "_all_reduce", lambda sums: own[0] + own[1])
    if world_size is not None:
        monkeypatch.setattr(module, "_trainer", SimpleNamespace(world_size=world_size))
    module.zero_grad()
    for step in steps:
        module.objective(step)[0].backward()
    for name, gradient in gradients(module).items():
        shared = gradient / (world_size or 1)
        torch.testing.assert_close(shared, whole[name], atol=1e-6, rtol=1e-4, msg=name)


@pytest.mark.parametrize("splits", [[2, 2], [1, 3], [3, 1], [1, 1, 1, 1]])
@pytest.mark.parametrize("weights", [None, [1.0, 0.5, 0.25]])
def test_micro_batches_give_the_gradient_of_one_batch(module, splits, weights):
    """Uneven rows, split in any way: one mean over all their slots."""
    module.loss_config = LossConfig(round_weights=weights)
    batch, window, start = uneven_batch(), LossWindow(), 0
    whole_loss, _ = module.objective(with_rounds(module, batch))
    whole_loss.backward()
    whole = gradients(module)
    module.zero_grad()
    for size in splits:
        rows = slice(start, start + size)
        part = Batch.from_tensors({name: value[rows] for name, value in batch.tensors().items()})
        module.objective(with_rounds(module, part), window)[0].backward()
        start += size
    assert window.loss().item() == pytest.approx(whole_loss.item(), rel=1e-5)
    for name, gradient in gradients(module).items():
        corrected = gradient * window.correction()
        torch.testing.assert_close(corrected, whole[name], atol=1e-6, rtol=1e-4, msg=name)


@pytest.mark.parametrize("relay", [True, False])
@pytest.mark.parametrize("num_rounds", [0, 2])
def test_a_batch_without_anchors_touches_every_parameter_with_zero(
    tiny_target_dir, relay, num_rounds
):
    module = make_module(tiny_target_dir, relay=relay)
    batch = uneven_batch()
    batch = batch._replace(loss_mask_BS=torch.zeros_like(batch.loss_mask_BS))
    loss, sums = module.objective(with_rounds(module, batch, num_rounds))
    assert loss.item() == 0.0
    assert not sums.any()
    loss.backward()
    for name, parameter in module.named_parameters():
        assert parameter.grad is not None, name
        assert not parameter.grad.any(), name


def test_held_out_loss_is_of_the_mask_round_whatever_the_weights(module):
    module.loss_config = LossConfig(round_weights=[0.0, 1.0, 1.0])
    module.eval()
    loss, _ = module.objective(with_rounds(module, uneven_batch(), num_rounds=0))
    assert 0 < loss.item() < 100


def test_the_relay_trains_the_projection_unless_it_is_detached(module):
    batch = uneven_batch()
    rounds = with_rounds(module, batch).rounds
    for detach in (False, True):
        module.relay_config = RelayConfig(enabled=True, hidden_size=96, detach_features=detach)
        for current in rounds[1:]:
            x = module.round_inputs(batch, current)
            fc, relay = torch.autograd.grad(
                x.square().sum(),
                [module.drafter.fc.weight, module.relay.relay_mlp[0].weight],
                allow_unused=True,
            )
            assert relay.any()
            assert (fc is None) == detach
            assert detach or fc.any()


# ---------------------------------------------------------------- fit


class Batches:
    """A loader of the same rows, again and again."""

    def __len__(self) -> int:
        return 2

    def __iter__(self):
        return iter([uneven_batch(2), uneven_batch(3)])


def fit(module: DrafterModule, folder, num_rounds: int, *more: Callback, start=0.0) -> Trainer:
    trainer = Trainer(
        max_steps=2,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        log_every_n_steps=1,
        num_sanity_val_steps=0,
        default_root_dir=folder,
        callbacks=[OnlineRollout(num_rounds=num_rounds, num_anchors=4, start=start), *more],
    )
    trainer.fit(module, Batches(), Batches())
    return trainer


@pytest.mark.parametrize("num_rounds", [0, 2])
def test_two_steps_with_and_without_rollouts(tiny_target_dir, tmp_path, num_rounds):
    module = make_module(tiny_target_dir, relay=num_rounds > 0)
    before = copy.deepcopy(module.state_dict())
    logged = fit(module, tmp_path, num_rounds).callback_metrics
    rounds = [name for name in logged if name.startswith("train/tau_round")]
    assert rounds == [f"train/tau_round{n}" for n in range(num_rounds + 1)]
    assert {"train/loss", "train/lr", "train/tokens", "train/blocks"} <= logged.keys()
    assert all(torch.isfinite(value) for value in logged.values())
    assert 1 <= logged["train/tau_round0"] <= K
    assert logged["train/tokens"] == 3 * 30
    changed = {name for name, t in module.state_dict().items() if not torch.equal(t, before[name])}
    trained = {"drafter", "relay"} if num_rounds else {"drafter"}
    assert {name.split(".")[0] for name in changed} == trained


def test_rollouts_begin_late(tiny_target_dir, tmp_path):
    """Until then a step has the mask round alone."""
    rounds = []

    class Watch(Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            names = [n for n in trainer.callback_metrics if n.startswith("train/tau_round")]
            rounds.append(len(names))

    losses = []
    for start in (0.5, 0.0):
        module = wake_relay(make_module(tiny_target_dir))
        module.loss_config = LossConfig(round_weights=[1.0, 0.5, 0.25])
        trainer = fit(module, tmp_path, 2, Watch(), start=start)
        losses.append(trainer.callback_metrics["train/loss"])
    assert rounds == [1, 3, 3, 3]
    assert losses[0] != losses[1]


@pytest.fixture(scope="module")
def fitted(tiny_target_dir, tmp_path_factory):
    """A module after two steps, its trainer, its checkpoint, and the target as it was before."""
    module = make_module(tiny_target_dir)
    target = {name: t.clone() for name, t in module.target.model.state_dict().items()}
    folder = tmp_path_factory.mktemp("fitted")
    trainer = fit(module, folder, 2)
    trainer.save_checkpoint(folder / "two.ckpt")
    return module, trainer, folder / "two.ckpt", target


def test_the_target_is_bit_identical_after_training(fitted):
    module, _, _, before = fitted
    after = module.target.model.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_the_optimizer_holds_the_drafter_and_the_relay_and_nothing_else(fitted):
    module, trainer, _, _ = fitted
    held = [p for group in trainer.optimizers[0].param_groups for p in group["params"]]
    owned = [*module.drafter.parameters(), *module.relay.parameters()]
    assert {id(p) for p in held} == {id(p) for p in owned}
    assert len(held) == len(owned)
    assert all(p.dtype == torch.float32 for p in held)


def test_a_checkpoint_holds_no_tensor_of_the_target(fitted):
    module, _, path, target = fitted
    checkpoint = torch.load(path, weights_only=True)
    names = set(checkpoint["state_dict"])
    assert names == set(module.state_dict())
    assert {name.split(".")[0] for name in names} == {"drafter", "relay"}
    trainable = sum(p.numel() * p.element_size() for p in module.parameters())
    assert path.stat().st_size < 1.3 * 3 * trainable  # the weights and two moments
    stored = checkpoint["state_dict"].values()
    head = target["lm_head.weight"]
    assert not any(t.shape == head.shape for t in stored)
    assert checkpoint[CHECKPOINT_KEY]["target_fingerprint"] == module.target.fingerprint


@torch.no_grad()
def test_from_checkpoint_gives_the_same_logits(fitted):
    module, _, path, _ = fitted
    again = load_trained(open_checkpoint(path))
    assert not again.training
    assert again.relay_config == module.relay_config
    assert again.drafter.dims == module.drafter.dims
    inputs = with_rounds(module, uneven_batch())
    assert torch.equal(again.objective(inputs)[0], module.objective(inputs)[0])
    for name, tensor in module.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor)


@pytest.mark.parametrize(
    ("section", "name", "value"),
    [
        ("drafter", "mask_token_id", 300),
        ("drafter", "block_size", 8),
        ("drafter", "target_layer_ids", [0, 1]),
        ("drafter", "num_layers", 3),
        ("relay", "first_rejected", False),
        ("relay", "hidden_size", 64),
        ("relay", "enabled", False),
    ],
)
def test_a_checkpoint_of_another_drafter_is_named_with_both_values(fitted, section, name, value):
    module, _, path, _ = fitted
    checkpoint = torch.load(path, weights_only=True)
    here = checkpoint[CHECKPOINT_KEY][section][name]
    checkpoint[CHECKPOINT_KEY][section][name] = value
    with pytest.raises(InputError) as caught:
        module.on_load_checkpoint(checkpoint)
    assert f"{section}.{name} is {here} but the checkpoint has {value}" in str(caught.value)


def test_a_checkpoint_of_another_target_or_program_is_refused(fitted, tmp_path):
    module, _, path, _ = fitted
    other = random_target(tmp_path / "other", seed=9)
    with pytest.raises(InputError, match="not the target of the checkpoint") as caught:
        load_trained(open_checkpoint(path), target=str(other))
    assert str(other) in str(caught.value)
    assert module.target.fingerprint[:12] in str(caught.value)
    with pytest.raises(InputError, match="not written by dflow-train"):
        module.on_load_checkpoint({"state_dict": {}})


def test_lightning_loads_a_checkpoint_into_a_fresh_module(fitted, tiny_target_dir, tmp_path):
    """Resume through the trainer: moments and step count come back with the weights."""
    module, trainer, path, _ = fitted
    fresh = make_module(tiny_target_dir)
    resumed = Trainer(
        max_steps=2, accelerator="cpu", logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, num_sanity_val_steps=0,
        default_root_dir=tmp_path,
    )  # fmt: skip
    resumed.fit(fresh, Batches(), Batches(), ckpt_path=path, weights_only=True)
    assert resumed.global_step == 2
    for name, tensor in module.state_dict().items():
        assert torch.equal(fresh.state_dict()[name], tensor)
    saved, loaded = trainer.optimizers[0].state_dict(), resumed.optimizers[0].state_dict()
    for index, state in saved["state"].items():
        for key, value in state.items():
            assert torch.equal(loaded["state"][index][key], value)


# ---------------------------------------------------------------- schedule


def test_learning_rate_warms_up_and_decays():
    config = OptimizerConfig(warmup_ratio=0.04, min_lr_ratio=0.1)
    factors = [config.factor(step, 100) for step in range(105)]
    assert factors[:5] == pytest.approx([0.25, 0.5, 0.75, 1.0, 1.0])
    assert factors[52] == pytest.approx(0.55)  # half-way between 1 and 0.1
    assert factors[28] == pytest.approx(0.1 + 0.45 * (1 + math.cos(math.pi / 4)))
    assert factors[100:] == pytest.approx([0.1] * 5)
    assert all(a >= b for a, b in pairwise(factors[4:]))
    assert OptimizerConfig().factor(0, 1) == 1.0


def test_learning_rate_of_a_run(fitted):
    _, trainer, _, _ = fitted
    # Two steps, one of them warm-up: the peak, and then the end of the cosine's first half step.
    assert trainer.callback_metrics["train/lr"] == pytest.approx(6e-4)
    assert trainer.lr_scheduler_configs[0].scheduler.get_last_lr() == [0.0]


def test_warm_start_takes_the_drafter_and_the_relay_of_an_export(module, tiny_target_dir, tmp_path):
    from dflow_lightning.export.write import export_drafter

    parts = (module.drafter, module.relay, module.target)
    export_drafter(*parts, tmp_path / "out", dtype="float32")
    started = DrafterModule(
        target=TargetConfig(path=str(tiny_target_dir)),
        drafter=DrafterConfig(num_layers=2, block_size=4, target_layer_ids=[0, 1, 2]),
        relay=RelayConfig(enabled=True, hidden_size=96),
        init_from=str(tmp_path / "out"),
    )
    for name, tensor in module.state_dict().items():
        assert torch.equal(started.state_dict()[name], tensor)
    assert all(p.requires_grad for p in started.parameters())
