"""Numbers that are not finite stop a run, in one sentence, before anything is spoilt."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from processes import Plant, Server
from resume_table import Case, write_data
from targets import random_target
from torch import Tensor

from dflow_lightning.decode import SpeculativeDecoder
from dflow_lightning.run.guards import Guards, Ranks, largest
from dflow_lightning.training.module import DrafterModule

if TYPE_CHECKING:
    from launch import Launcher, Result

pytest_plugins = ["launch"]
STEP = 2  # two steps are done when the number comes


class NanGradient(torch.autograd.Function):
    """Hands its input on, and back a gradient with one entry that is not a number."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        gradient = gradient.clone()
        gradient.flatten()[-1] = torch.nan
        return gradient


def plant_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    original = DrafterModule.objective

    def objective(self: DrafterModule, *args: Any) -> Any:
        loss, sums = original(self, *args)
        bad = self.training and self.global_step == STEP
        return (loss + torch.inf if bad else loss), sums

    monkeypatch.setattr(DrafterModule, "objective", objective)


def plant_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    original = DrafterModule.round_inputs

    def round_inputs(self: DrafterModule, batch: Any, current: Any) -> Tensor:
        x = original(self, batch, current)
        bad = self.training and self.global_step == STEP and x.requires_grad
        return NanGradient.apply(x) if bad else x

    monkeypatch.setattr(DrafterModule, "round_inputs", round_inputs)


def plant_parameter(monkeypatch: pytest.MonkeyPatch) -> None:
    original = DrafterModule.optimizer_step

    def optimizer_step(self: DrafterModule, *args: Any, **kwargs: Any) -> None:
        step = self.global_step
        original(self, *args, **kwargs)
        if step == STEP:  # found after the step, since it spoils the next loss at once
            next(self.parameters()).data.flatten()[3] = torch.nan

    monkeypatch.setattr(DrafterModule, "optimizer_step", optimizer_step)


@pytest.fixture
def fit(launch: "Launcher", recipe: Path, run_options: list[str]) -> Any:
    def fit(*options: str) -> "Result":
        every = "--checkpoint.every_n_steps=1"
        return launch("fit", "--config", recipe, *run_options, every, *options)

    return fit


def last_step(launch: "Launcher") -> int:
    """The step of `last.ckpt`, whose weights must be finite."""
    path = launch.folder / "runs/small/checkpoints/last.ckpt"
    content = torch.load(path, weights_only=True)
    assert all(torch.isfinite(weight).all() for weight in content["state_dict"].values())
    return content["global_step"]


def record(launch: "Launcher", step: int) -> tuple[Path, dict[str, Any]]:
    path = launch.folder / f"runs/small/nonfinite/step{step}-rank0.pt"
    return path, torch.load(path, weights_only=True)


@pytest.mark.parametrize(
    ("plant", "tensor"),
    [(plant_loss, "the loss of batch 0"), (plant_gradient, "the gradient of relay.")],
)
def test_loss_and_gradient_stop_before_the_step(
    plant: Any, tensor: str, fit: Any, launch: "Launcher", monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    done = fit()
    assert done.status == 1
    (line,) = done.err.splitlines()
    assert line.startswith(f"error: step {STEP}: {tensor}")
    assert "is not finite on rank 0, samples train-" in line
    path, content = record(launch, STEP)
    assert line.endswith(f"dflow-train replay --file {path.relative_to(launch.folder)}")
    assert (content["step"], content["rank"], content["rounds"]) == (STEP, 0, 2)
    (samples,) = content["samples"]
    assert len(samples) == 4
    assert all(name in line for name in samples)
    assert content["batches"][0]["input_ids_BS"].shape[0] == 4
    assert last_step(launch) == STEP


def test_a_weight_stops_before_it_is_saved(
    fit: Any, launch: "Launcher", monkeypatch: pytest.MonkeyPatch
) -> None:
    plant_parameter(monkeypatch)
    done = fit()  # weights are looked at every 100 steps, and before each checkpoint
    assert done.status == 1
    assert f"error: step {STEP + 1}: the weight drafter." in done.err
    assert record(launch, STEP + 1)[1]["samples"]  # of the step that spoilt it
    assert last_step(launch) == STEP


def test_a_weight_stops_every_so_many_steps(
    fit: Any, launch: "Launcher", monkeypatch: pytest.MonkeyPatch
) -> None:
    plant_parameter(monkeypatch)
    looked = []
    check = Guards.check_parameters
    monkeypatch.setattr(
        Guards, "check_parameters", lambda self, *a: (looked.append(1), check(self, *a))
    )
    rarely = ("--checkpoint.every_n_steps=9", "--trainer.val_check_interval=9")
    done = fit("--guards.parameters_every_n_steps=3", *rarely)
    assert done.status == 1
    assert "error: step 3: the weight drafter." in done.err
    assert looked == [1]


def test_switched_off_it_looks_at_nothing(fit: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    plant_loss(monkeypatch)
    monkeypatch.setattr(Ranks, "gather", lambda *_: pytest.fail("it looked"))
    done = fit("--guards.enabled=false", "--trainer.limit_val_batches=0", "--trainer.max_steps=3")
    assert done.status == 0, done.err


def test_guards_change_no_number(fit: Any, launch: "Launcher") -> None:
    weights = []
    for name in ("true", "false"):
        done = fit(f"--guards.enabled={name}", f"--run_dir={name}")
        assert done.status == 0, done.err
        path = launch.folder / name / "checkpoints/last.ckpt"
        weights.append(torch.load(path, weights_only=True)["state_dict"])
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def test_replay_finds_where_a_real_overflow_begins(fit: Any, launch: "Launcher") -> None:
    done = fit("--model.optimizer.lr=1e30", "--trainer.val_check_interval=9")
    assert done.status == 1
    path, content = record(launch, 1)
    replayed = launch("replay", "--file", path)
    assert replayed.status == 0, replayed.err
    assert "step 1 of rank 0 of 1" in replayed.out
    assert f"batch 0: samples {', '.join(content['samples'][0])}" in replayed.out
    assert "weights        all finite" in replayed.out
    assert "target taps    finite" in replayed.out
    assert "first output   drafter.layers.0.self_attn.q_proj is NOT finite" in replayed.out
    assert "loss           nan" in replayed.out
    assert "NOT finite, first drafter.fc.weight" in replayed.out


@pytest.mark.parametrize("changed", ["loss.gamma=1.5", "causal_head.enabled=true"])
def test_replay_computes_what_the_run_computed(
    changed: str, fit: Any, launch: "Launcher", monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the planted number, it prints the step's own loss."""
    losses = []
    original = DrafterModule.objective

    def objective(self: DrafterModule, *args: Any) -> Any:
        loss, sums = original(self, *args)
        if self.training:
            losses.append(loss.item())
        return loss, sums

    monkeypatch.setattr(DrafterModule, "objective", objective)
    with monkeypatch.context() as planted:
        plant_gradient(planted)
        assert fit(f"--model.{changed}").status == 1
    replayed = launch("replay", "--file", record(launch, STEP)[0])
    assert f"loss           {losses[STEP]:.4g};" in replayed.out
    assert losses[-1] == losses[STEP]
    assert "first output   all finite" in replayed.out


@pytest.mark.parametrize(
    ("file", "sentence"),
    [("nowhere.pt", "file: nowhere.pt does not exist"), ("weights", "holds no batches")],
)
def test_replay_of_another_file(
    file: str, sentence: str, fit: Any, launch: "Launcher", monkeypatch: pytest.MonkeyPatch
) -> None:
    if file == "weights":
        plant_loss(monkeypatch)
        fit()
        file = f"runs/small/nonfinite/step{STEP}-weights.pt"
    done = launch("replay", "--file", file)
    assert done.status == 2
    assert sentence in done.err


def test_an_error_in_validation_is_no_result(
    fit: Any, launch: "Launcher", monkeypatch: pytest.MonkeyPatch
) -> None:
    def generate(*args: Any, **kwargs: Any) -> Any:
        raise ZeroDivisionError("planted")

    monkeypatch.setattr(SpeculativeDecoder, "generate", generate)
    with pytest.raises(ZeroDivisionError, match="planted"):
        fit("--trainer.num_sanity_val_steps=0")
    assert last_step(launch) == 2


@pytest.mark.slow
@pytest.mark.parametrize("name", ["DDP x2", "ZeRO-2 x2", "ZeRO-3 x2"])
def test_all_ranks_end_where_one_has_the_number(name: str, tmp_path: Path) -> None:
    random_target(tmp_path / "target")
    write_data(tmp_path)
    args = Case(name, 0, 2).options(tmp_path, run_dir="run")
    plants = (Plant("nan_loss", {"step": 3, "batch": 1}, rank=1),)
    codes, run = Server()(args, tmp_path, ranks=2, plants=plants)
    assert codes == [1, 1]
    for rank in range(2):
        assert "step 3: the loss of batch 1" in run.output(rank)
        assert "is not finite on rank 1, samples train-" in run.output(rank)
    names = {path.name for path in (tmp_path / "run/nonfinite").iterdir()}
    assert names == {"step3-rank1.pt", "step3-weights.pt"}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_f29_the_largest_value_of_any_type(dtype: torch.dtype) -> None:
    """F29: a float64 training ended in a traceback of the norm, which does not narrow."""
    found = largest(torch.tensor([1.0, -3.0], dtype=dtype))
    assert (found.dtype, float(found)) == (torch.float32, 3.0)
    assert not largest(torch.tensor([1.0, torch.nan], dtype=dtype)).isfinite()
