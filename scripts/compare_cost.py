"""What the rows of `compare.py` cost: a training step, its rollouts, and a round of decoding.

All steps are timed in one process, one method after the other; all rounds in one bench, in which
the drafters take turns.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from compare_rows import BASE, Variant, rolls_out
from compare_tables import header, line

TARGET = "data/tiny-qwen3"
# A relay learns in rollout rounds alone, so it goes with them.
NO_ROLLOUT = ("--rollout.num_rounds", "0", "--model.relay.enabled", "false")
PARTS = ("draft", "verify", "relay", "commit")


def cost_tables(
    chosen: list[Variant], drafters: dict[str, Path], out: Path, *, quick: bool
) -> list[str]:
    """Time what is asked for and tabulate it; the numbers are kept in `out/cost.json`.

    Args:
        drafters: the export of each row; those that are not there have no decoding columns.
    """
    out.mkdir(parents=True, exist_ok=True)
    steps = (5, 10) if quick else (10, 30)
    asked = {one.name: arguments(one, sum(steps)) for one in chosen if not one.equal_time_to}
    for one in chosen:
        if rolls_out(one) and one.name in asked:
            asked[f"{one.name} without rollouts"] = [*asked[one.name], *NO_ROLLOUT]
    times = timed_steps(asked, out, warm_up=steps[0])
    there = {name: path for name, path in drafters.items() if (path / "config.json").exists()}
    rows = bench_rows(list(there.values()), out, per_family=2 if quick else 8) if there else []
    (out / "cost.json").write_text(json.dumps({"step_milliseconds": times, "rows": rows}, indent=1))
    return [
        f"A training step: processor ms of one thread, median of {steps[1]} steps after {steps[0]}",
        "",
        *step_table(times),
        "",
        "A round of decoding at T=0, one request at a time, eager, all families: medians in ms",
        "",
        *round_table(rows, there),
    ]


def arguments(variant: Variant, steps: int) -> list[str]:
    """The command line of a training that only steps."""
    return [
        "fit", "--config", str(variant.path), *variant.changes,
        "--trainer.max_steps", str(steps), "--trainer.limit_val_batches", "0",
        "--trainer.num_sanity_val_steps", "0", "--trainer.enable_checkpointing", "false",
        "--trainer.enable_progress_bar", "false", "--tracking.enabled", "false",
        "--trainer.callbacks+=step_timer.StepTimer",
    ]  # fmt: skip


def timed_steps(asked: dict[str, list[str]], out: Path, *, warm_up: int) -> dict[str, float]:
    """Median milliseconds of a step of each command line, all in one process of one thread."""
    log = out / "cost.log"
    with tempfile.TemporaryDirectory() as folder, log.open("w") as file:
        result = Path(folder) / "times.json"
        job = {"asked": asked, "folder": folder, "warm_up": warm_up, "result": str(result)}
        done = subprocess.run(
            [sys.executable, __file__, json.dumps(job)],
            stdout=file, stderr=file, env=os.environ | {"OMP_NUM_THREADS": "1"}, check=False,
        )  # fmt: skip
        if done.returncode:
            raise SystemExit(f"timing the steps failed, see {log}")
        return json.loads(result.read_text())


def time_all(job: dict) -> None:
    """In the process of its own: the trainings, one after the other."""
    from step_timer import StepTimer

    from dflow_lightning.run import fit

    times = {}
    for name, command in job["asked"].items():
        run_dir = Path(job["folder"]) / name.replace(" ", "-")
        status = fit.run([*command, "--run_dir", str(run_dir)])
        if status:
            raise SystemExit(f"{name} ended with status {status}")
        times[name] = statistics.median(StepTimer.milliseconds[job["warm_up"] :])
        print(f"{name}: {times[name]:.1f} ms", flush=True)
    Path(job["result"]).write_text(json.dumps(times))


def bench_rows(drafters: list[Path], out: Path, *, per_family: int) -> list[dict]:
    """The bench's pooled rows of all drafters, one request at a time."""
    result = out / "cost-bench.json"
    command = [sys.executable, "-m", "dflow_lightning", "bench", "--target", TARGET]
    command += ["--suite", "tiny", "--per_family", str(per_family), "--json", str(result)]
    for drafter in drafters:
        command += ["--drafter", str(drafter)]
    with (out / "cost-bench.log").open("w") as file:
        done = subprocess.run(
            command, stdout=file, stderr=file, env=os.environ | {"OMP_NUM_THREADS": "1"},
            check=False,
        )  # fmt: skip
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed, see {out / 'cost-bench.log'}")
    return [row for row in json.loads(result.read_text())["rows"] if row["family"] == "pooled"]


def step_table(times: dict[str, float]) -> list[str]:
    """A line a method; what its rollouts add, beside the same step without them."""
    lines = header(["drafter", "step, ms", f"over {BASE}", "without rollouts, ms", "rollouts add"])
    for name, time in times.items():
        if name.endswith(" without rollouts"):
            continue
        bare = times.get(f"{name} without rollouts")
        over = f"{time / times[BASE]:.2f}x" if BASE in times else "-"
        added = ["-", "-"] if bare is None else [f"{bare:.0f}", f"{100 * (time / bare - 1):.0f} %"]
        lines.append(line([name, f"{time:.0f}", over, *added]))
    return lines


def round_table(rows: list[dict], drafters: dict[str, Path]) -> list[str]:
    """A line a drafter and relay setting; speed is relative to plain decoding in the same run."""
    if not rows:
        return ["No exported drafter is there yet."]
    names = {str(path): name for name, path in drafters.items()}
    lines = header(
        ["drafter", "relay", "round", *PARTS, "tau", "tokens/s", "plain tokens/s", "over plain"]
    )
    for row in rows:
        parts = row["round_milliseconds"] or {}
        split = [f"{parts[part]:.2f}" if part in parts else "-" for part in ("whole", *PARTS)]
        speed = ["-", "-", "-"]
        if row["speedup"] is not None:
            rates = [row["tokens_per_second"], row["plain_tokens_per_second"]]
            speed = [*(f"{rate:.0f}" for rate in rates), f"{row['speedup']:.2f}x"]
        tau = f"{row['tau']:.2f}"
        lines.append(line([names[row["drafter"]], row["relay"], *split, tau, *speed]))
    return lines


if __name__ == "__main__":
    time_all(json.loads(sys.argv[1]))
