"""Small training runs under every strategy, in one process or in several that are started here.

`python tests/ranks.py SPEC` is one process of several; `run_ranks` starts them. All runs of a
specification share their processes, since starting those costs more than the runs.
"""

import json
import os
import socket
import subprocess
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from lightning.pytorch import Callback, Trainer
from training import make_module

from dflow_lightning.data.datamodule import Batch
from dflow_lightning.errors import InputError
from dflow_lightning.run import strategy  # which registers the names zero1 to zero3
from dflow_lightning.training import step_inputs
from dflow_lightning.training.rollout import OnlineRollout

K = 4  # block size
ROWS = 2  # of a micro-batch
ACCEPT_ALL, ACCEPT_NONE = "all", "none"


@dataclass(frozen=True)
class Arm:
    """One run: `steps` optimizer steps of `world * accumulate` micro-batches each."""

    name: str
    strategy: str = "auto"
    world: int = 1
    accumulate: int = 1
    steps: int = 20
    shard: bool = False  # the target's layers, over the processes
    causal_head: bool = False  # Domino's
    save_at: int | None = None  # also write <name>-<step>.ckpt
    resume: str | None = None  # the name of the checkpoint that is continued
    precision: str = "32-true"
    target_dtype: str = "float32"
    recompute: bool = False  # gradient checkpointing
    may_fail: bool = False  # the error is the result
    held_out: bool = False  # also `validate` and `test` the trained module


def micro_batch(number: int) -> Batch:
    """Rows of uneven length and supervision; every fifth micro-batch has no anchor at all."""
    generator = torch.Generator().manual_seed(number)
    length = 24 + 8 * (number % 3)
    ids_BS = torch.randint(0, 256, (ROWS, length), generator=generator)
    mask_BS = torch.zeros(ROWS, length, dtype=torch.bool)
    if number % 5 != 4:
        mask_BS[0, 4:] = True
        mask_BS[1, length - 2 - number % 7 :] = True
    return Batch(ids_BS, mask_BS, torch.arange(ROWS) + number * ROWS)


class MicroBatches:
    """This process's micro-batches: process r of W takes numbers r, r+W, r+2W, ..."""

    def __init__(self, rank: int, arm: Arm) -> None:
        self.numbers = range(rank, arm.steps * arm.world * arm.accumulate, arm.world)
        self.taken = 0

    def __len__(self) -> int:
        return len(self.numbers)

    def __iter__(self):
        for number in self.numbers[self.taken :]:
            self.taken += 1
            yield micro_batch(number)

    def state_dict(self) -> dict[str, int]:
        return {"taken": self.taken}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.taken = state["taken"]


class Record(Callback):
    """Loss and valid blocks of each optimizer step, and checkpoints while all shards are up."""

    def __init__(self, folder: Path, arm: Arm) -> None:
        self.folder, self.arm = folder, arm
        self.losses: dict[int, float] = {}
        self.blocks: dict[int, float] = {}
        self.optimized = 0

    def on_train_batch_end(self, trainer: Trainer, *args: Any, **kwargs: Any) -> None:
        if trainer.fit_loop._should_accumulate():
            return
        self.losses[trainer.global_step] = float(trainer.callback_metrics["train/loss"])
        self.blocks[trainer.global_step] = float(trainer.callback_metrics["train/blocks"])
        if trainer.global_step == self.arm.save_at:
            trainer.save_checkpoint(self.folder / f"{self.arm.name}-{self.arm.save_at}.ckpt")

    def on_train_end(self, trainer: Trainer, *args: Any) -> None:
        trainer.save_checkpoint(self.folder / f"{self.arm.name}.ckpt")
        shards = getattr(trainer.strategy, "_shards", lambda: trainer.model.parameters())()
        self.optimized = sum(shard.numel() for shard in shards)


def decided_acceptance(sample_ids_B: torch.Tensor):
    """`accept` for micro-batches of this parity: everything or nothing."""
    count = K - 1 if int(sample_ids_B[0]) // ROWS % 2 == 0 else 0
    return lambda drafts, chosen: torch.full_like(drafts[..., 0], count)


class ExtremeRollout(OnlineRollout):
    """Rollouts in which what a block accepts does not depend on its drafts."""

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        with patch.object(step_inputs, "accept", decided_acceptance(batch.sample_ids_B)):
            super().on_train_batch_start(trainer, pl_module, batch, batch_idx)


def checksum(target: Any) -> float:
    """Changes with any bit of the target's weights."""
    weights = [getattr(p, "full_tensor", lambda p=p: p)() for p in target.model.parameters()]
    return sum(float(weight.double().abs().sum()) for weight in weights)


def run_arm(arm: Arm, target_dir: Path, folder: Path) -> dict[str, Any]:
    """Train, write `<folder>/<arm>.ckpt`, and return what the first process saw."""
    strategy.check_precision(arm.strategy, arm.precision)  # as `fit` does
    module = make_module(target_dir, causal_head=arm.causal_head)
    assert module.relay is not None
    torch.manual_seed(2)
    with torch.no_grad():  # a relay that starts at zero would hide its own gradient
        for parameter in module.relay.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    module.target_config.shard = arm.shard
    module.target_config.dtype = arm.target_dtype
    module.target.model.to(getattr(torch, arm.target_dtype))
    module.drafter.gradient_checkpointing = arm.recompute
    before, record = checksum(module.target), Record(folder, arm)
    settings: dict[str, Any] = {
        "strategy": arm.strategy, "devices": arm.world, "accelerator": "cpu",
        "precision": arm.precision, "default_root_dir": folder, "use_distributed_sampler": False,
        **dict.fromkeys(("logger", "enable_checkpointing"), False),
        **dict.fromkeys(("enable_progress_bar", "enable_model_summary"), False),
    }  # fmt: skip
    trainer = Trainer(
        **settings, max_steps=arm.steps, limit_val_batches=0,
        accumulate_grad_batches=arm.accumulate, gradient_clip_val=1.0, log_every_n_steps=1,
        callbacks=[ExtremeRollout(num_rounds=2, num_anchors=4), record],
    )  # fmt: skip
    rank = trainer.strategy.global_rank if arm.world > 1 else 0
    resumed = folder / f"{arm.resume}.ckpt" if arm.resume else None
    loader = MicroBatches(rank, arm)
    trainer.fit(module, loader, MicroBatches(rank, arm), ckpt_path=resumed)
    held_out = {}
    for name in ("validate", "test") if arm.held_out else ():
        evaluation = getattr(Trainer(**settings), name)
        (metrics,) = evaluation(module, MicroBatches(rank, replace(arm, steps=2)), verbose=False)
        held_out[name] = next(value for key, value in metrics.items() if key.endswith("/loss"))
    return {
        "held_out": held_out,
        "losses": [*record.losses.values()],
        "blocks": [*record.blocks.values()],
        "target_unchanged": checksum(module.target) == before,
        "parameters": sum(
            p.numel() for p in make_module(target_dir, causal_head=arm.causal_head).parameters()
        ),
        "optimized": record.optimized,
        "target_here": sum(
            getattr(p, "to_local", lambda p=p: p)().numel()
            for p in module.target.model.parameters()
        ),
    }


def run_ranks(
    arms: list[Arm], target_dir: Path, folder: Path, *, timeout: float
) -> dict[str, dict[str, Any]]:
    """Run arms of one world size in as many processes; kills them all when one hangs or fails."""
    world = arms[0].world
    spec = folder / "spec.json"
    spec.write_text(json.dumps({"target": str(target_dir), "arms": [asdict(arm) for arm in arms]}))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "NODE_RANK": "0",
              "WORLD_SIZE": str(world), "OMP_NUM_THREADS": "1"}  # fmt: skip
    logs = [(folder / f"rank{rank}.log").open("w") for rank in range(world)]
    processes = [
        subprocess.Popen(
            [sys.executable, __file__, str(spec)],
            env=os.environ | shared | {"LOCAL_RANK": str(rank)},
            stdout=log,
            stderr=subprocess.STDOUT,
        )
        for rank, log in enumerate(logs)
    ]
    try:
        for process in processes:
            process.wait(timeout)
    finally:
        for process in processes:
            process.kill()
            process.wait()
        for log in logs:
            log.close()
    text = "\n".join((folder / f"rank{rank}.log").read_text() for rank in range(world))
    assert not any(process.returncode for process in processes), text
    return json.loads((folder / "results.json").read_text())


def tried(arm: Arm, target_dir: Path, folder: Path) -> dict[str, Any]:
    """The run, or why there was none; a refusal is the same on every process."""
    if not arm.may_fail:
        return run_arm(arm, target_dir, folder)
    try:
        return run_arm(arm, target_dir, folder)
    except InputError as error:
        return {"refused": str(error)}
    except Exception as error:
        return {"failed": f"{type(error).__name__}: {error}"}


def main() -> None:
    """One process of several."""
    spec = Path(sys.argv[1])
    content = json.loads(spec.read_text())
    arms = [Arm(**arm) for arm in content["arms"]]
    results = {arm.name: tried(arm, Path(content["target"]), spec.parent) for arm in arms}
    if os.environ["LOCAL_RANK"] == "0":
        (spec.parent / "results.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main()
