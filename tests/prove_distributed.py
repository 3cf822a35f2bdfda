"""What distributed training promises, measured with two CPU processes: four tables.

    python tests/prove_distributed.py equality checkpoints bf16 precision

equality     every strategy beside one process: losses of 20 steps, rollouts on, one process
             accepting every draft and the other none, micro-batches without any anchor
checkpoints  `dflow-train fit` under every strategy, what its checkpoint holds, and its export
bf16         500 steps of bf16-mixed, ZeRO-2 and gradient checkpointing at lr 6e-4, beside float32
precision    every dtype of the target by every trainer.precision and strategy: fit, resume,
             validate and test work with losses near float32's, or the run is refused at its start

Exit status 1 when a promise is broken.
"""

import logging
import math
import os
import shutil
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from ranks import Arm, run_arm, run_ranks
from targets import ROOT, random_target

from dflow_lightning.models.target import FrozenTarget

STRATEGIES = ("ddp", "zero1", "zero2", "zero3")
OUT = ROOT / "runs/distributed"
TARGET = ROOT / "data/tiny-qwen3"
STEPS = 20
BF16_STEPS = 500
LOG_EVERY = 5
NEAR = 0.02  # losses of bfloat16 beside float32's
USUAL = {"32-true": False, "bf16-mixed": False, "bf16-true": True}  # whether it may be refused
TAIL = 100  # steps at the end whose mean logged loss is compared


def verdict(good: bool) -> str:
    return "ok" if good else "FAILED"


def equality() -> bool:
    """Losses of two processes beside those of one on the same micro-batches."""
    folder = fresh("equality")
    target = random_target(folder / "target")
    arms = [
        Arm(f"{name} x{accumulate}", name, world=2, accumulate=accumulate, steps=STEPS)
        for accumulate in (1, 2)
        for name in (*STRATEGIES, "zero2_offload")
    ]
    seconds = time.perf_counter()
    results = run_ranks(arms, target, folder, timeout=900)
    seconds = time.perf_counter() - seconds
    print(f"\n{STEPS} steps, 2 processes, {seconds:.0f} s for {len(arms)} runs; none hung")
    print("strategy, accumulated    first step   largest     weights   blocks a step")
    good = True
    for accumulate in (1, 2):
        alone = f"alone x{2 * accumulate}"
        one = run_arm(Arm(alone, accumulate=2 * accumulate, steps=STEPS), target, folder)
        for arm in (arm for arm in arms if arm.accumulate == accumulate):
            two = results[arm.name]
            off = [abs(a - b) / b for a, b in zip(two["losses"], one["losses"], strict=True)]
            weights = weight_difference(folder, arm.name, alone)
            same = two["blocks"] == one["blocks"] and len(two["losses"]) == STEPS
            fine = off[0] <= 1e-6 and max(off) <= 1e-4 and same
            blocks = f"{min(two['blocks']):.0f} to {max(two['blocks']):.0f}"
            print(f"{arm.name:<23} {off[0]:>11.1e} {max(off):>9.1e} {weights:>11.1e}   "
                  f"{blocks:<10} {verdict(fine)}")  # fmt: skip
            good &= fine
    return good


def weight_difference(folder: Path, one: str, other: str) -> float:
    first, second = (
        torch.load(folder / f"{name}.ckpt", weights_only=True)["state_dict"]
        for name in (one, other)
    )
    return max(float((first[name] - second[name]).abs().max()) for name in second)


def checkpoints() -> bool:
    """Real runs through the command line, and what they leave on disk."""
    target = FrozenTarget.load(str(TARGET))
    shapes = {tuple(p.shape) for name, p in target.model.named_parameters() if "embed" in name}
    before = file_checksums()
    print("\nstrategy        MB  /(3 x drafter)  tensors  of target  weights_only  export")
    good = True
    for name in ("auto", *STRATEGIES, "zero2_offload"):
        folder = fresh(f"checkpoint-{name}")
        devices = [] if name != "auto" else ["--trainer.devices", "1"]
        train(folder, name, 6, "--checkpoint.every_n_steps", "3", *devices)
        path = folder / "checkpoints/last.ckpt"
        content = torch.load(path, weights_only=True)
        weights = content["state_dict"]
        trained = 4 * sum(weight.numel() for weight in weights.values())
        ratio = path.stat().st_size / (3 * trained)
        foreign = [n for n in weights if not n.startswith(("drafter.", "relay."))]
        foreign += [n for n, weight in weights.items() if tuple(weight.shape) in shapes]
        whole = len(content["optimizer_states"][0]["state"]) == len(weights)
        exported = run("export", "--checkpoint", path, "--out", folder / "export").returncode == 0
        fine = ratio <= 1.3 and not foreign and whole and exported and path.is_file()
        print(f"{name:<14} {path.stat().st_size / 1e6:>5.1f} {ratio:>11.3f} {len(weights):>11} "
              f"{len(foreign):>8}    yes        {verdict(exported)}   {verdict(fine)}")  # fmt: skip
        good &= fine
    same = file_checksums() == before
    print(f"the target's files are as they were: {verdict(same)}")
    return good and same


def file_checksums() -> dict[str, str]:
    from dflow_lightning.formats.integrity import file_sha256

    return {path.name: file_sha256(path) for path in sorted(TARGET.glob("*.safetensors"))}


def bf16() -> bool:
    """The losses of the last steps in bf16-mixed and in float32, same data and anchors."""
    common = ["--model.optimizer.lr", "6e-4", "--model.gradient_checkpointing", "true",
              "--model.drafter.num_layers", "2", "--model.num_anchors", "4",
              "--rollout.num_anchors", "2", "--data.batch_size", "1"]  # fmt: skip
    means, seconds = {}, {}
    for precision in ("32-true", "bf16-mixed"):
        folder = fresh(f"precision-{precision}")
        start = time.perf_counter()
        train(folder, "zero2", BF16_STEPS, "--trainer.precision", precision, *common)
        seconds[precision] = time.perf_counter() - start
        losses = logged(folder, "train/loss")
        assert len(losses) == BF16_STEPS // LOG_EVERY
        finite = all(math.isfinite(loss) for loss in losses)
        weights = torch.load(folder / "checkpoints/last.ckpt", weights_only=True)["state_dict"]
        finite &= all(bool(weight.isfinite().all()) for weight in weights.values())
        means[precision] = statistics.fmean(losses[-TAIL // LOG_EVERY :]) if finite else math.nan
        print(f"{precision:<11} first {losses[0]:.4f}, mean of the last {TAIL} "
              f"{means[precision]:.4f}, finite {finite}, {seconds[precision]:.0f} s")  # fmt: skip
    off = abs(means["bf16-mixed"] / means["32-true"] - 1)
    fine = off <= 0.02
    print(f"bf16-mixed beside float32: {off:.2%} off, at most 2 %: {verdict(fine)}")
    return fine


def precision() -> bool:
    """Cells of target dtype, `trainer.precision` and strategy, in one pair of processes."""
    folder = fresh("precision")
    target = random_target(folder / "target")
    cells = [
        (dtype, kind, name, recompute)
        for dtype in ("float32", "bfloat16", "float16")
        for kind in ("32-true", "bf16-mixed", "bf16-true", "16-true", "64-true")
        for name in STRATEGIES
        for recompute in ((False, True) if name in ("ddp", "zero2") else (False,))
        # What is refused for its types alone is tried under two strategies.
        if (kind in USUAL and dtype != "float16") or (name in ("ddp", "zero2") and not recompute)
    ]
    arms = []
    for dtype, kind, name, recompute in cells:
        label = f"{dtype} {kind} {name}{' recomputed' * recompute}"
        arm = Arm(
            label, name, world=2, steps=STEPS, precision=kind, target_dtype=dtype,
            recompute=recompute, save_at=STEPS // 2, held_out=True, may_fail=True,
        )  # fmt: skip
        arms += [arm, replace(arm, name=f"{label} resumed", resume=f"{label}-{STEPS // 2}")]
    results = run_ranks(arms, target, folder, timeout=3600)
    wanted = results["float32 32-true ddp"]
    print(f"\n{'target, precision, strategy':<42}{'losses':>9}{'held out':>10}{'resumed':>10}")
    good = True
    for arm in arms[::2]:
        found, again = results[arm.name], results[f"{arm.name} resumed"]
        if said := found.get("refused"):
            fine = USUAL.get(arm.precision, True) or arm.target_dtype == "float16"
            print(f"{arm.name:<42}refused: {said[:90]}  {verdict(fine)}")
        elif said := found.get("failed") or again.get("failed") or again.get("refused"):
            fine = False
            print(f"{arm.name:<42}{said.splitlines()[0][:100]}  {verdict(fine)}")
        else:
            off = furthest(found["losses"], wanted["losses"])
            held_out = furthest(found["held_out"].values(), wanted["held_out"].values())
            resumed = furthest(again["losses"], found["losses"][STEPS // 2 :])
            fine = max(off, held_out) <= NEAR and resumed <= 1e-6
            print(f"{arm.name:<42}{off:>9.2%}{held_out:>10.2%}{resumed:>10.1e}  {verdict(fine)}")
        good &= fine
    return good


def furthest(found: Iterable[float], wanted: Iterable[float]) -> float:
    """The largest relative difference; infinite where a number is not finite."""
    pairs = [abs(a - b) / abs(b) for a, b in zip(found, wanted, strict=True)]
    return max((one if math.isfinite(one) else math.inf for one in pairs), default=math.inf)


def train(folder: Path, strategy: str, steps: int, *more: str) -> None:
    """`dflow-train fit` on the embedded target, two processes, without validation."""
    done = run(
        "fit", "--config", "recipes/tiny-dflow.yaml", "--config", "recipes/hardware/2xcpu.yaml",
        "--run_dir", folder, "--trainer.strategy", strategy, "--trainer.max_steps", steps,
        "--data.validation", "null", "--trainer.val_check_interval", "null",
        "--trainer.log_every_n_steps", LOG_EVERY, *more,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr


def run(*arguments: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "dflow_lightning", *map(str, arguments)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=1800
    )


def logged(folder: Path, metric: str) -> list[float]:
    """Every value of a metric in the run's own store."""
    from mlflow.tracking import MlflowClient

    client = MlflowClient(f"sqlite:///{folder / 'mlflow.db'}")
    experiment = client.search_experiments(filter_string="name = 'dflow'")[0]
    run = client.search_runs([experiment.experiment_id])[0]
    return [point.value for point in client.get_metric_history(run.info.run_id, metric)]


def fresh(name: str) -> Path:
    folder = OUT / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder


if __name__ == "__main__":
    logging.getLogger("lightning.pytorch").setLevel("ERROR")
    warnings.filterwarnings("ignore", module="lightning")
    proofs = {
        "equality": equality,
        "checkpoints": checkpoints,
        "bf16": bf16,
        "precision": precision,
    }
    chosen = sys.argv[1:] or [name for name in proofs if name != "precision"]
    outcomes = {name: proofs[name]() for name in chosen}
    print("\n" + ", ".join(f"{name} {verdict(good)}" for name, good in outcomes.items()))
    sys.exit(not all(outcomes.values()))
