"""Real runs of two processes, DeepSpeed and DDP, beside one process on the same micro-batches."""

from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import Arm, run_arm, run_ranks
from targets import random_target

from dflow_lightning.errors import InputError
from dflow_lightning.run.strategy import ZeroStrategy, check_name, check_precision
from dflow_lightning.training.saved import load_trained, open_checkpoint

pytest.importorskip("deepspeed")

STRATEGIES = ("ddp", "zero1", "zero2", "zero3")
ACCUMULATED = ("ddp", "zero2", "zero3")
RESUMED = ("zero2", "zero3")
STEPS = 5
ARMS = [
    *(Arm(name, name, world=2, steps=STEPS, save_at=3) for name in STRATEGIES),
    *(Arm(f"{name}-accumulated", name, world=2, accumulate=2, steps=3) for name in ACCUMULATED),
    *(Arm(f"{name}-resumed", name, world=2, steps=STEPS, resume=f"{name}-3") for name in RESUMED),
    Arm("zero2-from-ddp", "zero2", world=2, steps=STEPS, resume="ddp-3"),
    Arm("zero3-sharded", "zero3", world=2, steps=STEPS, shard=True),
    *(Arm(f"{name}-domino", name, world=2, steps=3, causal_head=True) for name in ("ddp", "zero3")),
]


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> tuple[Path, dict[str, dict[str, Any]]]:
    """Every arm in one pair of processes, and the same micro-batches in this process."""
    folder = tmp_path_factory.mktemp("ranks")
    target = random_target(folder / "target")
    results = run_ranks(ARMS, target, folder, timeout=600)
    alone = [
        Arm("alone", accumulate=2, steps=STEPS),
        Arm("alone-accumulated", accumulate=4, steps=3),
        Arm("alone-domino", accumulate=2, steps=3, causal_head=True),
    ]
    results |= {arm.name: run_arm(arm, target, folder) for arm in alone}
    return folder, results


def saved(folder: Path, name: str) -> dict[str, Any]:
    return torch.load(folder / f"{name}.ckpt", weights_only=True)


@pytest.mark.slow
@pytest.mark.parametrize("arm", [arm.name for arm in ARMS if arm.resume is None])
def test_two_processes_equal_one(runs, arm):
    """One process accepts every draft and the other none, and some micro-batches have no anchor."""
    folder, results = runs
    kind = arm.partition("-")[2]
    alone = f"alone-{kind}" if kind in ("accumulated", "domino") else "alone"
    ours, reference = results[arm], results[alone]
    assert ours["losses"][0] == pytest.approx(reference["losses"][0], rel=1e-6)
    assert ours["losses"] == pytest.approx(reference["losses"], rel=1e-4)
    assert ours["blocks"] == reference["blocks"]
    assert len(set(reference["blocks"])) > 1  # uneven
    weights = saved(folder, alone)["state_dict"]
    for name, weight in saved(folder, arm)["state_dict"].items():
        torch.testing.assert_close(weight, weights[name], atol=1e-4, rtol=0, msg=name)


@pytest.mark.slow
@pytest.mark.parametrize("arm", RESUMED)
def test_a_resumed_run_ends_with_the_same_bits(runs, arm):
    folder, results = runs
    whole, resumed = saved(folder, arm), saved(folder, f"{arm}-resumed")
    assert results[f"{arm}-resumed"]["losses"] == results[arm]["losses"][3:]
    for name, weight in whole["state_dict"].items():
        assert torch.equal(weight, resumed["state_dict"][name]), name
    for index, state in whole["optimizer_states"][0]["state"].items():
        for key, value in state.items():
            assert torch.equal(value, resumed["optimizer_states"][0]["state"][index][key]), key


@pytest.mark.slow
def test_another_strategy_continues_a_checkpoint(runs):
    _, results = runs
    wanted = results["ddp"]["losses"][3:]
    assert results["zero2-from-ddp"]["losses"] == pytest.approx(wanted, rel=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("arm", STRATEGIES)
def test_a_checkpoint_holds_the_drafter_alone_and_can_be_used(runs, arm):
    folder, results = runs
    content = saved(folder, arm)
    module = load_trained(open_checkpoint(folder / f"{arm}.ckpt"))
    names = set(dict(module.named_parameters()))
    assert set(content["state_dict"]) == names
    assert len(content["optimizer_states"][0]["state"]) == len(names)
    factor = 3  # weight and two moments
    size = (folder / f"{arm}.ckpt").stat().st_size
    assert size <= 1.3 * factor * 4 * results[arm]["parameters"]
    assert results[arm]["target_unchanged"]
    share = results[arm]["optimized"] / results[arm]["parameters"]
    assert share == pytest.approx(1.0 if arm == "ddp" else 0.5, abs=0.01)


@pytest.mark.slow
def test_a_sharded_target_has_half_of_its_layers_on_each_process(runs):
    _, results = runs
    sharded, whole = results["zero3-sharded"], results["zero3"]
    assert sharded["target_unchanged"]
    assert sharded["losses"][0] == pytest.approx(whole["losses"][0], rel=1e-6)
    ends = 2 * 320 * 64 + 64  # embedding, head and final norm
    assert sharded["target_here"] - ends == (whole["target_here"] - ends) / 2


def test_unknown_strategies_are_refused():
    for name in ("zero4", "deepspeed_stage_2"):
        with pytest.raises(InputError, match="zero2"):
            check_name(name)
    for name in ("auto", "ddp", "zero1", "zero2", "zero3", "zero3_offload", ZeroStrategy):
        check_name(name)


@pytest.mark.parametrize("strategy", ["zero2", "zero3_offload", ZeroStrategy()])
def test_zero_refuses_what_it_does_not_train_in(strategy):
    for name in (None, "32-true", "32", 32, "bf16-mixed", "bf16"):
        check_precision(strategy, name)
    for name in ("bf16-true", "16-mixed", "64-true", 64):
        with pytest.raises(InputError, match=f"trainer.precision is {name}, which ZeRO"):
            check_precision(strategy, name)


@pytest.mark.parametrize("strategy", ["auto", "ddp"])
def test_float16_weights_are_refused(strategy):
    for name in ("32-true", "bf16-mixed", "bf16-true", "64-true"):
        check_precision(strategy, name)
    with pytest.raises(InputError, match="overflow"):
        check_precision(strategy, "16-true")


def test_settings_are_checked():
    with pytest.raises(InputError, match="bucket_elements is 0"):
        ZeroStrategy(bucket_elements=0)
    with pytest.raises(TypeError):
        ZeroStrategy(level=2)
