"""Two machines, made on this one: two network namespaces joined by a virtual cable.

    python tests/two_hosts.py      # as root, with iproute2: `make two-hosts`

Each host has a working folder of its own with copies of recipe, data and target, and reaches the
other through the cable alone. The run folder is shared, as docs/distributed.md demands. torchrun
starts one process on each. Shown: equal losses with two processes on one host; that the run ends
when a host dies; that it resumes from the checkpoint with the losses of a run that nothing stopped.
Exit status 1 when one of them fails.
"""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

from prove_distributed import OUT, logged, verdict
from targets import ROOT

HOSTS = {"a": "10.77.0.1", "b": "10.77.0.2"}
PORT, STEPS, SAVED = 29577, 24, 8
BASE = OUT / "two-hosts"


def namespace(host: str) -> str:
    return f"dflow-{os.getpid()}-{host}"


def cable(host: str) -> str:
    """The network device at this end, named as `GLOO_SOCKET_IFNAME` must say."""
    return f"dflow{host}"


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)


def connect() -> None:
    """Two namespaces, each with a loopback of its own and one end of the cable."""
    for host in HOSTS:
        ip("netns", "add", namespace(host))
    ends = [word for host in HOSTS for word in (cable(host), "netns", namespace(host))]
    ip("link", "add", *ends[:3], "type", "veth", "peer", "name", *ends[3:])
    for host, address in HOSTS.items():
        ip("-n", namespace(host), "addr", "add", f"{address}/24", "dev", cable(host))
        for device in ("lo", cable(host)):
            ip("-n", namespace(host), "link", "set", device, "up")


def disconnect() -> None:
    for host in HOSTS:
        cut_power(host)
        subprocess.run(["ip", "netns", "del", namespace(host)], check=False)


def working_folder(host: str) -> Path:
    """Copies of what a run reads."""
    folder = BASE / host
    for name in ("recipes", "data/tiny-qwen3"):
        shutil.copytree(ROOT / name, folder / name)
    return folder


def fit(run_dir: Path, steps: int, *more: str) -> list[str]:
    """`dflow-train fit` of the tiny recipe with two processes in all."""
    options = {
        "run_dir": run_dir, "trainer.max_steps": steps, "trainer.log_every_n_steps": 1,
        "trainer.val_check_interval": "null", "data.validation": "null",
        "checkpoint.every_n_steps": SAVED,
    }  # fmt: skip
    return [
        "-m", "dflow_lightning", "fit", "--config", "recipes/tiny-dflow.yaml",
        "--config", "recipes/hardware/2xcpu.yaml",
        *(f"--{name}={value}" for name, value in options.items()), *more,
    ]  # fmt: skip


def torchrun(processes: int, *options: str) -> list[str]:
    return [
        sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(processes), *options
    ]  # fmt: skip


def start(host: str, command: list[str], log: str) -> subprocess.Popen[bytes]:
    """A command on a host, in a process group of its own; its output goes to `<host>-<log>.log`."""
    environment = os.environ | {
        "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": cable(host), "PYTHONPATH": str(ROOT / "src"),
        "HF_HUB_OFFLINE": "1",
    }  # fmt: skip
    with (BASE / f"{host}-{log}.log").open("w") as out:
        return subprocess.Popen(
            ["ip", "netns", "exec", namespace(host), *command], cwd=BASE / host, env=environment,
            stdout=out, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip


def both(run_dir: Path, steps: int, log: str, *more: str) -> list[subprocess.Popen[bytes]]:
    """One run over both hosts, a process on each."""
    words = fit(run_dir, steps, "--trainer.num_nodes=2", "--trainer.devices=1", *more)
    nodes = ["--nnodes", "2", "--master-addr", HOSTS["a"], "--master-port", str(PORT)]
    return [
        start(host, [*torchrun(1, *nodes, "--node-rank", str(rank)), *words], log)
        for rank, host in enumerate(HOSTS)
    ]


def ended(processes: list[subprocess.Popen[bytes]], seconds: float) -> list[int | None]:
    """Exit statuses; None for a process that is still there at the time limit, and is killed."""
    found: list[int | None] = []
    limit = time.monotonic() + seconds
    for process in processes:
        try:
            found.append(process.wait(max(1.0, limit - time.monotonic())))
        except subprocess.TimeoutExpired:
            found.append(None)
            process.kill()
    return found


def cut_power(host: str) -> None:
    """End all processes of a host at once; torchrun's workers are in sessions of their own."""
    listed = subprocess.run(
        ["ip", "netns", "pids", namespace(host)], check=True, capture_output=True, text=True
    )
    for pid in listed.stdout.split():
        os.kill(int(pid), signal.SIGKILL)


def one_host() -> list[float]:
    """The reference: two processes in one namespace."""
    words = fit(BASE / "one", STEPS, "--trainer.devices=2")
    statuses = ended([start("a", [*torchrun(2, "--standalone"), *words], "one")], 900)
    assert statuses == [0], (BASE / "a-one.log").read_text()[-3000:]
    return logged(BASE / "one", "train/loss")


def interrupted(run_dir: Path) -> tuple[bool, list[float]]:
    """Kill host b behind a checkpoint, see host a end, and resume on both."""
    processes = both(run_dir, STEPS, "killed")
    last = run_dir / "checkpoints/last.ckpt"
    limit = time.monotonic() + 900
    while not last.exists() and time.monotonic() < limit:
        time.sleep(0.05)
    cut_power("b")
    processes[1].wait()
    (status,) = ended(processes[:1], 300)
    gave_up = status not in (0, None)
    print(f"host b killed behind a checkpoint: host a exits {status} {verdict(gave_up)}")
    resumed = both(run_dir, STEPS, "resumed", "--ckpt_path=last")
    assert ended(resumed, 900) == [0, 0], (BASE / "a-resumed.log").read_text()[-3000:]
    return gave_up, logged(run_dir, "train/loss")


def furthest(found: list[float], wanted: list[float]) -> float:
    return max(abs(a - b) / abs(b) for a, b in zip(found, wanted, strict=True))


def main() -> int:
    shutil.rmtree(BASE, ignore_errors=True)
    BASE.mkdir(parents=True)
    for host in HOSTS:
        working_folder(host)
    connect()
    try:
        wanted = one_host()
        assert ended(both(BASE / "two", STEPS, "two"), 900) == [0, 0], (
            BASE / "a-two.log"
        ).read_text()[-3000:]
        apart = furthest(logged(BASE / "two", "train/loss"), wanted)
        equal = apart <= 1e-6
        print(f"{STEPS} losses of two hosts beside one: {apart:.1e} apart {verdict(equal)}")
        gave_up, losses = interrupted(BASE / "killed")
        # The steps behind the checkpoint were logged twice.
        tail = STEPS - SAVED
        apart = furthest(losses[-tail:], wanted[-tail:])
        resumed = apart <= 1e-6
        print(f"{tail} losses after resuming: {apart:.1e} apart {verdict(resumed)}")
    finally:
        disconnect()
    return int(not (equal and gave_up and resumed))


if __name__ == "__main__":
    sys.exit(main())
