"""`dflow-train demo`: train, export and measure the tiny drafter, by four commands it shows."""

import shlex
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from dflow_lightning.embedded import write_out
from dflow_lightning.errors import InputError, check_counts

TARGET = "data/tiny-qwen3"
VALIDATED_EVERY = 1000  # steps, by the recipe; the best checkpoint is written there
STEPS = 3000  # fewer than the recipe has: this is about minutes, not about the best tau


def demo_command(
    *,
    out: Path = Path("dflow-demo"),
    run_dir: Path = Path("runs/demo"),
    steps: int = STEPS,
    per_family: int = 32,
) -> None:
    """Write the embedded default, train a DFlow drafter on it, export and measure it.

    Needs no GPU, no account and no network; takes a few minutes on two CPU cores.

    Args:
        out: working folder; missing files of the embedded default are written there.
        run_dir: run folder inside `out`; it must not exist.
        steps: training steps.
        per_family: prompts per family to measure with.
    """
    check_counts(steps=steps, per_family=per_family)
    if (out / run_dir).exists():
        raise InputError(
            f"run_dir: {out / run_dir} exists; remove it or name another with --run_dir"
        )
    write_out(out)
    for command in commands(run_dir, steps, per_family):
        print(f"$ {shlex.join(['dflow-train', *command])}", flush=True)
        if status := run_command(command, out):
            raise SystemExit(status)
    enter = "" if out.resolve() == Path.cwd() else f"cd {shlex.quote(str(out))} && "
    print(f"\ndrafter    {out / run_dir / 'export'}")
    print(f"report     {out / run_dir / 'report.html'}")
    print(f"dashboard  {enter}dflow-train ui --run {run_dir}")


def commands(run_dir: Path, steps: int, per_family: int) -> list[list[str]]:
    """What `dflow-train` is called with, one after the other."""
    run, export, bench = str(run_dir), str(run_dir / "export"), str(run_dir / "bench.json")
    recipe, best = "recipes/tiny-dflow.yaml", str(run_dir / "checkpoints/best.ckpt")
    suite = ("--suite", "tiny", "--per_family", str(per_family), "--temperature", "0,1")
    fit = ["fit", "--config", recipe, "--run_dir", run, "--trainer.max_steps", str(steps)]
    if steps < VALIDATED_EVERY:
        fit += ["--trainer.val_check_interval", str(steps)]
    return [
        fit,
        ["export", "--checkpoint", best, "--out", export],
        ["bench", "--target", TARGET, "--drafter", export, *suite, "--json", bench],
        ["report", "--bench", bench, "--out", str(run_dir / "report.html")],
    ]


def run_command(command: Sequence[str], folder: Path) -> int:
    """One command in a process of its own, as a user would run it; returns its exit status.

    Ctrl-C reaches it from the terminal; SIGTERM is handed on. It writes its checkpoint and ends.
    """
    arguments = [sys.executable, "-m", "dflow_lightning", *command]
    with subprocess.Popen(arguments, cwd=folder) as process:
        before = signal.signal(signal.SIGTERM, lambda signum, frame: process.terminate())
        try:
            while True:
                try:
                    status = process.wait()
                    return 128 - status if status < 0 else status
                except KeyboardInterrupt:
                    continue
        finally:
            signal.signal(signal.SIGTERM, before)
