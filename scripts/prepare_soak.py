"""100,000 rows from a server that fails, by a run that is killed: does anything get lost?

    python scripts/prepare_soak.py --rows 100000 --kills 5

A stub server answers; 3 % of its answers are errors, time-outs or nonsense, and a few prompts never
get one. One run is left alone. Another is killed again and again (SIGKILL and Ctrl-C in turn) and
started with the same command. Exit status 0 only if both folders are the same byte by byte, every
row is in them once, and memory stays flat.
"""

import argparse
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
FLAT = 1.15  # memory near the end over memory at a fifth of the answers


def start_stub(fail: float, broken: float) -> tuple[subprocess.Popen, str]:
    """The server and its address."""
    stub = subprocess.Popen(
        [sys.executable, STUB, "--fail", str(fail), "--broken", str(broken), "--slow", "6"],
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert stub.stdout is not None
    return stub, f"http://127.0.0.1:{int(stub.stdout.readline())}"


def write_prompts(path: Path, rows: int) -> None:
    """Prompts of different lengths, some with two turns."""
    with path.open("w") as file:
        for number in range(rows):
            random = Random(number)
            words = " ".join(
                random.choice("red blue one two sum of the and".split())
                for _ in range(random.randint(3, 40))
            )
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
        self.memory: list[tuple[float, int]] = []

    def start(self) -> None:
        self.process = subprocess.Popen(self.command, start_new_session=True)
        threading.Thread(target=self._watch, args=(self.process,), daemon=True).start()

    def _watch(self, process: subprocess.Popen) -> None:
        while process.poll() is None:
            try:
                status = Path(f"/proc/{process.pid}/status").read_text()
            except OSError:
                return
            resident = [line for line in status.splitlines() if line.startswith("VmRSS")]
            if resident:
                self.memory.append((time.monotonic(), int(resident[0].split()[1])))
            time.sleep(0.5)

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
    """What is missing or there twice."""
    check_unchanged(out)
    ids = Counter(name.partition("#")[0] for name in open_prepared(out)["id"])
    names = Counter(open_prepared(out)["id"])
    rejected = [json.loads(line)["line"] for line in (out / "rejects.jsonl").open()]
    lost = (
        [n for n in range(rows) if (f"row-{n}" in ids) + (n + 1 in rejected) != 1]
        if len(rejected) < 5000
        else ["too many rejects"]
    )
    twice = [name for name, count in names.items() if count > 1]
    return [f"{len(lost)} rows lost or doubled, {len(twice)} ids twice"] if lost or twice else []


def main(rows: int, kills: int, target: Path, fail: float, seed: int) -> int:
    """Print what happened; returns the exit status."""
    failures: list[str] = []
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        data = folder / "prompts.jsonl"
        write_prompts(data, rows)
        stub, url = start_stub(fail, broken=2000)
        try:
            calm = Run(data, folder / "calm", target, url)
            seconds = calm.finish()
            with urllib.request.urlopen(f"{url}/counts") as response:
                print(f"stub: {json.load(response)}")
            print(f"calm: {rows / seconds:,.0f} rows/s over all ({seconds:.0f} s)")
        finally:
            stub.terminate()
        stub, url = start_stub(fail, broken=2000)
        killed = Run(data, folder / "killed", target, url)
        random = Random(seed)
        try:
            for number in range(kills):
                killed.start()
                # Anywhere: while it loads, answers or writes.
                wait = random.uniform(0.05, 0.95) * seconds / (kills if number < kills - 1 else 2)
                try:
                    status = killed.process.wait(max(wait, 2.0))
                    print(f"start {number + 1}: finished before it was killed, status {status}")
                    continue
                except subprocess.TimeoutExpired:
                    kind = signal.SIGKILL if number % 2 == 0 else signal.SIGINT
                    os.kill(killed.process.pid, kind)
                    status = killed.process.wait()
                print(f"kill {number + 1}: {kind.name} after {wait:.0f} s, status {status}")
            killed.finish()
        finally:
            stub.terminate()
        a, b = folder / "calm", folder / "killed"
        failures += [f"{name} differs" for name in same(a, b)]
        failures += check_rows(b, rows)
        counts = read_manifest(b)["counts"]
        print(f"counts: {counts}")
        start = calm.memory[0][0]
        whole = calm.memory[-1][0] - start
        part = [kb for at, kb in calm.memory if 0.2 <= (at - start) / whole <= 0.3]
        early, late = max(part), max(kb for at, kb in calm.memory if (at - start) / whole > 0.3)
        print(f"memory: {early / 1024:.0f} MiB at a fifth, at most {late / 1024:.0f} MiB after")
        if late > FLAT * early:
            failures.append("memory grows")
        left = sorted(path.name for path in folder.iterdir())
        if left != ["calm", "killed", "prompts.jsonl"]:
            failures.append(f"left behind: {left}")
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
