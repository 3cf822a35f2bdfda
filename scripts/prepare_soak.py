"""100,000 rows from a server that fails, by a run that is killed: does anything get lost?

    python scripts/prepare_soak.py --rows 100000 --kills 5

A stub server answers; 3 % of its answers are errors, time-outs or nonsense, and a few prompts never
get one. One run is left alone. Another is killed again and again (SIGKILL and Ctrl-C in turn) and
started with the same command. Exit status 0 only if both folders are the same byte by byte, every
row is in them once, and memory stays flat.
"""

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections import Counter
from pathlib import Path
from random import Random

from dflow_lightning.data.prepared import check_unchanged, open_prepared, read_manifest

ROOT = Path(__file__).resolve().parents[1]
STUB = ROOT / "tests/data/stub_server.py"
WORDS = ["red", "blue", "one", "two", "sum", "of", "the", "and"]
BROKEN = 2000  # one prompt in so many never gets an answer
MORE_MEMORY = 32  # MiB that ten times the rows may take


def start_stub(fail: float, broken: float) -> tuple[subprocess.Popen, str]:
    """The server and its address."""
    stub = subprocess.Popen(
        [sys.executable, STUB, "--fail", str(fail), "--broken", str(broken), "--slow", "6"],
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
    )  # fmt: skip
    assert stub.stdout is not None
    return stub, f"http://127.0.0.1:{int(stub.stdout.readline())}"


def write_prompts(path: Path, rows: int) -> None:
    """Prompts of different lengths, some with two turns."""
    with path.open("w") as file:
        for number in range(rows):
            random = Random(number)
            words = " ".join(random.choice(WORDS) for _ in range(random.randint(3, 40)))
            messages = [{"role": "user", "content": f"Row {number}: {words}?"}]
            if number % 20 == 0:
                messages += [
                    {"role": "assistant", "content": "?"},
                    {"role": "user", "content": "And then?"},
                ]
            file.write(json.dumps({"id": f"row-{number}", "messages": messages}) + "\n")


class Run:
    """One `dflow-train prepare`, whose memory is watched."""

    def __init__(self, data: Path, out: Path, target: Path, url: str) -> None:
        self.command = [
            sys.executable, "-m", "dflow_lightning", "prepare", "--data", data, "--out", out,
            "--target", target, "--server", f"{url}/v1", "--timeout", "3", "--retries", "8",
            "--concurrency", "64", "--max_new_tokens", "64", "--temperature", "0.7",
        ]  # fmt: skip
        self.out = out
        self.most_memory = 0  # KiB

    def start(self) -> None:
        self.process = subprocess.Popen(self.command, start_new_session=True)
        threading.Thread(target=self._watch, args=(self.process,), daemon=True).start()

    def _watch(self, process: subprocess.Popen) -> None:
        while process.poll() is None:
            try:
                status = Path(f"/proc/{process.pid}/status").read_text()
            except OSError:
                return
            peak = [int(line.split()[1]) for line in status.splitlines() if "VmHWM" in line]
            self.most_memory = max([self.most_memory, *peak])
            time.sleep(0.1)

    def finish(self) -> float:
        """Wait for it; seconds it took."""
        start = time.monotonic()
        self.start()
        if self.process.wait():
            raise SystemExit(f"prepare ended with status {self.process.returncode}")
        return time.monotonic() - start


def same(a: Path, b: Path) -> list[str]:
    """Names of files that differ."""
    names = sorted({path.name for folder in (a, b) for path in folder.iterdir()})
    return [
        name
        for name in names
        if not all((one / name).is_file() for one in (a, b))
        or (a / name).read_bytes() != (b / name).read_bytes()
    ]


def check_rows(out: Path, rows: int) -> list[str]:
    """What is missing, or there twice."""
    check_unchanged(out)
    names = open_prepared(out)["id"]
    twice = len(names) - len(set(names))
    found = Counter({name.partition("#")[0] for name in names})
    with (out / "rejects.jsonl").open() as file:
        found.update(f"row-{json.loads(line)['line'] - 1}" for line in file)
    wrong = [number for number in range(rows) if found[f"row-{number}"] != 1]
    if not twice and not wrong and len(found) == rows:
        return []
    return [f"{len(wrong)} rows lost or both written and rejected, {twice} ids twice"]


def kill(run: Run, number: int, kills: int, seconds: float) -> None:
    """Start the run and end it: the last time while it writes the folder, else anywhere before."""
    run.start()
    if number == kills:
        pattern = f".{run.out.name}.*.partial/data-*.arrow"
        while run.process.poll() is None and not list(run.out.parent.glob(pattern)):
            time.sleep(0.05)
    else:
        with contextlib.suppress(subprocess.TimeoutExpired):
            run.process.wait(seconds)
    kind = signal.SIGKILL if number % 2 else signal.SIGINT
    where = "the folder was being written" if number == kills else f"{seconds:.0f} s"
    if run.process.poll() is not None:
        raise SystemExit(f"the run ended with status {run.process.returncode} before kill {number}")
    os.kill(run.process.pid, kind)
    print(f"kill {number}: {kind.name} after {where}, status {run.process.wait()}", flush=True)


def main(rows: int, kills: int, target: Path, fail: float, seed: int) -> int:
    """Print what happened; returns the exit status."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        data, part = folder / "prompts.jsonl", folder / "part.jsonl"
        write_prompts(data, rows)
        write_prompts(part, rows // 10)
        stub, url = start_stub(fail, BROKEN)
        try:
            short = Run(part, folder / "short", target, url)
            short.finish()
            calm = Run(data, folder / "calm", target, url)
            seconds = calm.finish()
            with urllib.request.urlopen(f"{url}/counts") as response:
                print(f"stub: {json.load(response)}")
            print(f"left alone: {seconds:.0f} s, {rows / seconds:,.0f} rows/s over all", flush=True)
        finally:
            stub.terminate()
        stub, url = start_stub(fail, BROKEN)  # it forgets how often it was asked
        killed = Run(data, folder / "killed", target, url)
        random = Random(seed)
        try:
            for number in range(1, kills + 1):
                kill(killed, number, kills, random.uniform(0.1, 0.9) * seconds / (kills + 1))
            killed.finish()
        finally:
            stub.terminate()
        failures = [f"{name} differs" for name in same(calm.out, killed.out)]
        failures += check_rows(killed.out, rows)
        print(f"counts: {read_manifest(killed.out)['counts']}")
        growth = (calm.most_memory - short.most_memory) / 1024
        print(
            f"memory: at most {calm.most_memory / 1024:.0f} MiB, {growth:.0f} more than for a tenth"
        )
        if growth > MORE_MEMORY:
            failures.append("memory grows with the rows")
        names = {path.name for path in folder.iterdir()}
        if extra := names - {"calm", "killed", "short", "prompts.jsonl", "part.jsonl"}:
            failures.append(f"left behind: {sorted(extra)}")
    print("\n".join(failures) or "byte-identical, every row once, memory flat")
    return int(bool(failures))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--kills", type=int, default=5)
    parser.add_argument("--target", type=Path, default=ROOT / "data/tiny-qwen3")
    parser.add_argument("--fail", type=float, default=0.03)
    parser.add_argument("--seed", type=int, default=0)
    sys.exit(main(**vars(parser.parse_args())))
