"""Real `dflow-train` processes, one a rank, that can be killed.

Importing takes ten seconds and a run of ten steps one; so a server process
imports once, and they are its forks.
"""

import contextlib
import json
import multiprocessing
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

PRELOAD = ["dflow_lightning.run.fit", "dflow_lightning.__main__", "mlflow", "deepspeed", "plants"]
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "TOKENIZERS_PARALLELISM": "false"}


@dataclass(frozen=True)
class Plant:
    """A function of `plants.py` to call in a process before its command, on one rank or on all."""

    name: str
    options: dict[str, Any] = field(default_factory=dict)
    rank: int | None = None


@dataclass
class Run:
    """The processes of one command."""

    processes: list[Any]
    logs: list[Path]

    def wait(self, timeout: float = 120) -> list[int]:
        """Exit statuses as a shell has them; what has not ended in time is killed and an error."""
        until = time.monotonic() + timeout
        for process in self.processes:
            process.join(max(0.0, until - time.monotonic()))
        late = [rank for rank, process in enumerate(self.processes) if process.exitcode is None]
        if late:
            self.signal(signal.SIGKILL)
            raise TimeoutError(f"ranks {late} have not ended in {timeout} s\n{self.output()}")
        codes = [process.exitcode for process in self.processes]
        return [128 - code if code < 0 else code for code in codes]

    def signal(self, signum: int, rank: int | None = None) -> None:
        """To one process, or to all of them; none of their loaders' workers."""
        for process in self.processes if rank is None else [self.processes[rank]]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signum)

    def output(self, rank: int = 0) -> str:
        """What a process printed, errors included."""
        return self.logs[rank].read_text() if self.logs[rank].exists() else ""


class Server:
    """Starts commands in forks of a process that has imported everything."""

    def __init__(self) -> None:
        os.environ.update({k: v for k, v in ENVIRONMENT.items() if k != "OMP_NUM_THREADS"})
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        folder = str(Path(__file__).resolve().parent)
        if folder not in sys.path:
            sys.path.insert(0, folder)
        # The server is a new interpreter and finds its modules by this variable alone.
        before = os.environ.get("PYTHONPATH", "").split(os.pathsep)
        os.environ["PYTHONPATH"] = os.pathsep.join([folder, *filter(None, before)])
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(PRELOAD)
        self._number = 0

    def start(
        self, args: list[Any], folder: Path, *, ranks: int = 1, plants: tuple[Plant, ...] = ()
    ) -> Run:
        """`dflow-train` with `folder` as the working directory; ranks get what torchrun sets."""
        self._number += 1
        port = free_port()
        run = Run([], [])
        for rank in range(ranks):
            environment = {"DFLOW_RANK": str(rank)}
            if ranks > 1:
                environment |= {
                    "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks),
                    "LOCAL_WORLD_SIZE": str(ranks), "GROUP_RANK": "0", "NODE_RANK": "0",
                    "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
                    "TORCHELASTIC_RUN_ID": "test",
                }  # fmt: skip
            log = folder / f"log{self._number}-rank{rank}.txt"
            here = [plant for plant in plants if plant.rank in (None, rank)]
            process = self._context.Process(
                target=command,
                args=([str(arg) for arg in args], folder, environment, log, here),
            )
            process.start()
            run.processes.append(process)
            run.logs.append(log)
        return run

    def __call__(self, *args: Any, timeout: float = 120, **options: Any) -> tuple[list[int], Run]:
        """Starts a command and waits for it."""
        run = self.start(*args, **options)
        return run.wait(timeout), run


def command(
    args: list[str], folder: Path, environment: dict[str, str], log: Path, plants: list[Plant]
) -> None:
    """In the new process: become a command line of its own."""
    os.setsid()
    os.chdir(folder)
    os.environ.update(environment)
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(output, stream)
    torch.set_num_threads(1)
    # Or loaders would start their workers as this process was started, by a server of their own.
    multiprocessing.set_start_method("fork", force=True)
    from plants import PLANTS

    from dflow_lightning.__main__ import main

    for plant in plants:
        PLANTS[plant.name](**plant.options)
    status = main(args)
    sys.stdout.flush()
    sys.stderr.flush()
    sys.exit(status)


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def steps_of(record: Path) -> list[dict[int, list[dict]]]:
    """What `plants.record` wrote: for each process in order of time, the batches of each step."""
    runs: list[dict[int, list[dict]]] = []
    pid = None
    for line in record.read_text().splitlines() if record.exists() else []:
        with contextlib.suppress(json.JSONDecodeError):  # the last line of a killed process
            row = json.loads(line)
            if row["pid"] != pid:
                pid = row["pid"]
                runs.append({})
            runs[-1].setdefault(row["step"], []).append(row["seen"])
    return runs


def tensors_of(checkpoint: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint: weights and the optimizer's state."""
    found: dict[str, torch.Tensor] = {}

    def walk(value: Any, name: str) -> None:
        if isinstance(value, torch.Tensor):
            found[name] = value
        elif isinstance(value, dict):
            for key, inner in value.items():
                walk(inner, f"{name}.{key}")
        elif isinstance(value, list | tuple):
            for index, inner in enumerate(value):
                walk(inner, f"{name}.{index}")

    content = torch.load(checkpoint, map_location="cpu", weights_only=True)
    for section in ("state_dict", "optimizer_states"):
        walk(content[section], section)
    return found


def wait_until(true: Callable[[], bool], timeout: float = 60) -> None:
    """Polls; raises `TimeoutError` where it never becomes true."""
    until = time.monotonic() + timeout
    while not true():
        if time.monotonic() > until:
            raise TimeoutError("it never happened")
        time.sleep(0.01)
