"""`plan` and `doctor` for EAGLE-3, and `plan` for a CPU."""

import json
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from eagle3_training import make_eagle3
from test_plan import RECIPES, SHAPES, planned
from torch.utils.flop_counter import FlopCounterMode

from dflow_lightning.data.datamodule import Batch
from dflow_lightning.models.eagle3 import Eagle3Drafter
from dflow_lightning.plan.command import memory_table, work
from dflow_lightning.plan.eagle3 import Eagle3Plan, saved_bytes, unrolled
from dflow_lightning.plan.memory import FULL, HALF, MIXED, Plan, Precision
from dflow_lightning.plan.work import work_of

if TYPE_CHECKING:
    from launch import Launcher

pytest_plugins = ["launch"]


@pytest.fixture(scope="module")
def config_8b(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("config") / "8b.json"
    file.write_text(json.dumps(SHAPES["8b"]))
    return file


def small(target_dir: Path, *options: str) -> Plan:
    """Two rows of 24 tokens, 12 positions unrolled for 3 steps, as `make_eagle3` builds it."""
    return planned(
        "--method=eagle3", f"--model.target.path={target_dir}", "--model.drafter.block_size=4",
        "--model.drafter.target_layer_ids=[0,1,2]", "--model.ttt_steps=3", "--model.num_anchors=12",
        "--data.train=none", "--data.max_length=24", "--data.batch_size=2",
        "--trainer.accelerator=cpu", "--trainer.precision=32-true", *options,
    )  # fmt: skip


@pytest.mark.parametrize("precision", [MIXED, FULL, HALF])
def test_a10_fake_tensors_save_what_real_ones_save(
    tiny_target_dir: Path, precision: Precision
) -> None:
    real = Eagle3Drafter(small(tiny_target_dir).drafter.dims)
    fake_bytes = saved_bytes(real, precision, 2, 12, 40, 3)
    real.to(torch.bfloat16 if precision is HALF else torch.float32)
    assert fake_bytes == unrolled(real, precision, 2, 12, 40, 3) > 0


def test_every_unrolled_step_casts_the_layer(config_8b: Path) -> None:
    args = ("--config", RECIPES / "qwen3-8b-eagle3.yaml", "--target_config", config_8b)
    plan = planned(*args)
    layer = sum(p.numel() for p in plan.drafter.midlayer.parameters())
    name = "weights cast in later steps"
    assert plan.activation_parts()[name] == 6 * 2 * layer
    for options in (["--trainer.precision=32-true"], ["--model.gradient_checkpointing=true"]):
        assert planned(*args, *options).activation_parts()[name] == 0


def test_a10_work_is_what_a_counter_counts(tiny_target_dir: Path) -> None:
    module, plan = make_eagle3(tiny_target_dir).train(), small(tiny_target_dir)
    ids = torch.randint(0, module.target.vocab_size, (2, 24))
    batch = Batch(ids, torch.ones_like(ids, dtype=torch.bool), torch.arange(2))
    with FlopCounterMode(display=False) as counter:
        module.objective(module.begin_step(batch))[0].backward()
    assert plan.rows * work_of(plan).row == pytest.approx(counter.get_total_flops(), rel=0.1)


def test_a10_parameters_and_optimizer_are_those_of_the_module(tiny_target_dir: Path) -> None:
    module, plan = make_eagle3(tiny_target_dir), small(tiny_target_dir)
    trained = sum(p.numel() for p in module.parameters())
    assert plan.trained == trained
    assert list(plan.trained_state().values()) == [4 * trained, 4 * trained, 8 * trained]


def test_a10_the_8b_recipe_has_memory_work_and_hours(launch: "Launcher", config_8b: Path) -> None:
    recipe = RECIPES / "qwen3-8b-eagle3.yaml"
    done = launch("plan", "--config", recipe, "--target_config", config_8b, "--gpus", 8)
    assert "relay    none" in done.out
    assert "rollouts" not in done.out
    assert f"drafter  {32 * 512 * 7:,} slots" in done.out
    plan = planned("--config", recipe, "--target_config", config_8b, "--gpus", "8")
    assert isinstance(plan, Eagle3Plan)
    D, F, C = 4096, 12288, len(plan.drafter.dims.target_layer_ids) * 4096
    layer = 2 * D * (4096 + 2 * 1024) + 4096 * D + 3 * D * F + 3 * D
    assert plan.trained == layer + C * D + D
    shards = planned("--config", recipe, "--target_config", config_8b, "--gpus", "8",
                     "--model.gradient_checkpointing=true")  # fmt: skip
    assert shards.total < plan.total


def test_a10_the_tiny_recipe_is_planned(
    launch: "Launcher", monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(RECIPES.parent)
    done = launch("plan", "--config", "recipes/tiny-eagle3.yaml")
    assert (done.status, done.err) == (0, "")
    assert "steps    5,000" in done.out
    refused = launch("plan", "--config", "recipes/tiny-eagle3.yaml", "--measure")
    assert refused.status == 2
    assert "measure" in refused.err


def test_f23_a_plan_for_a_cpu_speaks_of_this_machine(tiny_target_dir: Path) -> None:
    mixed = small(tiny_target_dir, "--trainer.precision=bf16-mixed")
    text = "\n".join([*memory_table(mixed, mixed.recipe.gpu_memory), *work(mixed)])
    assert "of this machine" in text
    assert "GPU" not in text
    assert ", float32" in text  # what `target.dtype auto` chose
    assert 0 < mixed.recipe.gpu_tflops < 50
    gpu = small(tiny_target_dir, "--trainer.accelerator=gpu")
    assert (gpu.recipe.gpu_memory, gpu.recipe.gpu_tflops) == (80.0, 125.0)
    assert ", bfloat16" in "\n".join(work(gpu))


@pytest.mark.slow
def test_a10_doctor_passes_the_tiny_recipe_and_finds_a_wrong_learning_rate(
    launch: "Launcher", monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(RECIPES.parent)
    done = launch("doctor", "--config", "recipes/tiny-eagle3.yaml", "--json")
    assert done.status == 0, done.err
    statuses = {check["name"]: check["status"] for check in json.loads(done.out)["checks"]}
    assert len(statuses) == 25
    skipped = {name for name, status in statuses.items() if status == "skip"}
    assert skipped == {"positions", "attention"}
    lr = "--model.optimizer.lr=1e-9"
    done = launch("doctor", "--config", "recipes/tiny-eagle3.yaml", lr, "--json")
    assert done.status == 1
    statuses = {check["name"]: check["status"] for check in json.loads(done.out)["checks"]}
    assert [name for name, status in statuses.items() if status == "FAIL"] == ["overfit"]
