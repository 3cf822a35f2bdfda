"""What tests plant into a `dflow-train` process before its command runs."""

import json
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from dflow_lightning.training.module import DrafterModule


def before_objective(then: Callable[[DrafterModule, Any], None]) -> None:
    """Calls `then` before every training batch's loss."""
    original = DrafterModule.objective

    def objective(self: DrafterModule, inputs: Any, *args: Any) -> Any:
        if self.training:
            then(self, inputs)
        return original(self, inputs, *args)

    DrafterModule.objective = objective  # type: ignore[method-assign]


def record(path: str) -> None:
    """Appends what each training batch saw: sample ids, anchors of all rounds, loss bit for bit."""
    original = DrafterModule.objective
    file = Path(f"{path}-rank{os.environ['DFLOW_RANK']}.jsonl").open("a", buffering=1)  # noqa: SIM115

    def objective(self: DrafterModule, inputs: Any, *args: Any) -> Any:
        loss, sums = original(self, inputs, *args)
        if self.training:
            seen = {
                "ids": inputs.batch.sample_ids_B.tolist(),
                "anchors": [
                    [one.anchors.positions_BN.tolist(), one.anchors.valid_BN.tolist()]
                    for one in inputs.rounds
                ],
                "loss": float(loss).hex(),
            }
            file.write(
                json.dumps({"pid": os.getpid(), "step": self.global_step, "seen": seen}) + "\n"
            )
        return loss, sums

    DrafterModule.objective = objective  # type: ignore[method-assign]


class Counter:
    """True at the n-th batch of a step."""

    def __init__(self, step: int, batch: int) -> None:
        self.step, self.batch, self.seen = step, batch, 0

    def due(self, module: DrafterModule) -> bool:
        if module.global_step != self.step:
            return False
        self.seen += 1
        return self.seen == self.batch + 1


def signal_at(signum: int, step: int, batch: int = 0) -> None:
    """The process gets a signal in the middle of a batch."""
    counter = Counter(step, batch)

    def then(module: DrafterModule, inputs: Any) -> None:
        if counter.due(module):
            os.kill(os.getpid(), signum)

    before_objective(then)


def fail_at(step: int, batch: int = 0) -> None:
    """A defect in the middle of a batch."""
    counter = Counter(step, batch)

    def then(module: DrafterModule, inputs: Any) -> None:
        if counter.due(module):
            raise ZeroDivisionError("planted")

    before_objective(then)


def out_of_memory(step: int, kind: str) -> None:
    """No memory in the middle of a batch: on a `gpu`, in Python (`host`) or in torch's `cpu`."""
    counter = Counter(step, 0)
    errors = {
        "gpu": torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has"),
        "host": MemoryError(),
        "cpu": RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried"),
    }

    def then(module: DrafterModule, inputs: Any) -> None:
        if counter.due(module):
            raise errors[kind]

    before_objective(then)


def tracking_seconds(path: str) -> None:
    """Writes how long the training's own thread was in the record's calls, and in its end."""
    from dflow_lightning.tracking.logger import RunLogger

    spent = {"record": 0.0, "end": 0.0}

    def timed(owner: type, name: str, kind: str) -> None:
        original = getattr(owner, name)

        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return original(self, *args, **kwargs)
            finally:
                spent[kind] += time.perf_counter() - start
                Path(path).write_text(json.dumps(spent))

        setattr(owner, name, call)

    timed(RunLogger, "record", "record")
    timed(RunLogger, "finalize", "end")


def hang_at(step: int, end_within: float) -> None:
    """A batch that never ends, as when another process is gone; and a shorter time limit."""
    from dflow_lightning.run.signals import Signals

    Signals.end_within = end_within
    counter = Counter(step, 0)

    def then(module: DrafterModule, inputs: Any) -> None:
        if counter.due(module):
            Path("hanging").touch()
            hold = threading.Lock()
            hold.acquire()
            hold.acquire()

    before_objective(then)


def fail_in_validation() -> None:
    """Decoding fails on this rank alone."""
    from dflow_lightning.decode import SpeculativeDecoder

    def generate(*args: Any, **kwargs: Any) -> Any:
        raise ZeroDivisionError("planted")

    SpeculativeDecoder.generate = generate  # type: ignore[method-assign]


def nan_loss(step: int, batch: int = 0) -> None:
    """A loss that is not a number."""
    original, counter = DrafterModule.objective, Counter(step, batch)

    def objective(self: DrafterModule, inputs: Any, *args: Any) -> Any:
        loss, sums = original(self, inputs, *args)
        return (loss * torch.nan if self.training and counter.due(self) else loss), sums

    DrafterModule.objective = objective  # type: ignore[method-assign]


def slow(seconds: float) -> None:
    """Every batch takes at least so long."""
    before_objective(lambda module, inputs: time.sleep(seconds))


def kill_in_save(number: int, share: float) -> None:
    """kill -9 when a share of the `number`-th checkpoint's bytes is on the disk.

    A share of 1 kills between the last byte and the new name, 2 right after that.
    """
    from dflow_lightning.run import checkpoint

    saves, staged_path = 0, Path()
    write, take_place, save = checkpoint.Checkpointing._write, checkpoint.take_place, torch.save

    def end() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def written(self: Any, trainer: Any, path: Path) -> None:
        nonlocal saves, staged_path
        saves, staged_path = saves + 1, path.with_name(f".{path.name}.partial")
        write(self, trainer, path)

    def saved(content: Any, file: Any, *args: Any, **kwargs: Any) -> None:
        save(content, file, *args, **kwargs)
        if saves == number and share < 1:
            whole = file.getvalue()  # Lightning writes what a buffer holds
            staged_path.write_bytes(whole[: int(share * len(whole))])
            end()

    def placed(staged: Path, out: Path) -> None:
        if saves == number and share == 1:
            end()
        take_place(staged, out)
        if saves == number and share == 2:
            end()

    checkpoint.Checkpointing._write = written  # type: ignore[method-assign]
    checkpoint.take_place = placed
    torch.save = saved


PLANTS: dict[str, Callable[..., None]] = {
    plant.__name__: plant
    for plant in (
        *(record, signal_at, fail_at, hang_at, slow, kill_in_save, fail_in_validation, nan_loss),
        *(out_of_memory, tracking_seconds),
    )
}
