"""`prepare` against a real vLLM server: the same rows as by the target in this process?

    python scripts/prepare_vllm.py --rows 200

Both answer the same prompts greedily in float32 on the CPU. Rows that differ are compared token by
token: a first difference counts as a tie where the target cannot tell both tokens apart in float64
(`equality`). Exit status 1 for any other difference.
"""

import argparse
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from itertools import islice
from pathlib import Path

from dflow_lightning.data.prepared import open_prepared, read_manifest
from dflow_lightning.decode.equality import EqualityCheck
from dflow_lightning.models.target import FrozenTarget

ROOT = Path(__file__).resolve().parents[1]
VLLM = ROOT / ".venv-vllm/bin/python"
PATIENCE = 400  # seconds until the server must answer
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1", "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_PLUGINS": "",
    "VLLM_CPU_OMP_THREADS_BIND": "0", "VLLM_CPU_KVCACHE_SPACE": "1", "OMP_NUM_THREADS": "1",
}  # fmt: skip


def start_server(python: Path, target: Path, log: Path) -> tuple[subprocess.Popen, str]:
    """vLLM with the target in float32, and its address."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command: list[str | Path] = [
        python, "-m", "vllm.entrypoints.openai.api_server", "--model", target, "--host",
        "127.0.0.1", "--port", str(port), "--dtype", "float32", "--max-model-len", "1024",
        "--max-num-seqs", "8", "--enforce-eager", "--served-model-name", "tiny",
    ]  # fmt: skip
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    with log.open("w") as file:
        server = subprocess.Popen(command, stdout=file, stderr=file, env=environment | ENVIRONMENT)
    url, start = f"http://127.0.0.1:{port}", time.monotonic()
    while time.monotonic() - start < PATIENCE and server.poll() is None:
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=5):
                print(f"vLLM answers after {time.monotonic() - start:.0f} s", flush=True)
                return server, f"{url}/v1"
        except (urllib.error.URLError, OSError):
            time.sleep(1)
    server.kill()
    raise SystemExit(f"error: vLLM did not start\n{log.read_text()[-3000:]}")


def prepare(data: Path, out: Path, target: Path, *more: str) -> float:
    """Run the command; seconds it took."""
    start = time.monotonic()
    command: list[str | Path] = [
        sys.executable, "-m", "dflow_lightning", "prepare", "--data", data, "--out", out,
        "--target", target, "--max_new_tokens", "160", "--max_length", "1024", *more,
    ]  # fmt: skip
    if subprocess.run(command, check=False).returncode:
        raise SystemExit("error: prepare failed")
    return time.monotonic() - start


def compare(ours: Path, theirs: Path, target: Path) -> int:
    """Print what differs; returns the number of differences that are no ties."""
    a, b = open_prepared(ours), open_prepared(theirs)
    check = EqualityCheck(FrozenTarget.load(str(target), dtype="float32"))
    ties = wrong = 0
    if a["id"] != b["id"]:
        print("error: other rows")
        return 1
    for one, other in zip(a, b, strict=True):
        if one == other:
            continue
        start = one["loss_mask"].index(True)
        found = check.compare(
            one["id"], one["input_ids"][:start], other["input_ids"][start:],
            one["input_ids"][start:], temperature=0.0, seed=0,
        )  # fmt: skip
        excused = (
            found is not None
            and found.excused
            and one["input_ids"][:start] == other["input_ids"][:start]
        )
        ties, wrong = ties + excused, wrong + (not excused)
        print(f"  {one['id']}: {found}")
    equal = len(a) - ties - wrong
    tokens = read_manifest(ours)["counts"]["supervised_tokens"]
    print(f"{equal} of {len(a)} rows equal ({tokens} answer tokens), {ties} ties, {wrong} WRONG")
    return wrong


def main(rows: int, target: Path, data: Path | None, python: Path) -> int:
    """Print the comparison; returns the exit status."""
    data = data or target / "prompts/train.jsonl"
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        prompts = folder / "prompts.jsonl"
        with data.open() as file:
            prompts.write_text("".join(islice(file, rows)))
        server, url = start_server(python, target.resolve(), folder / "server.log")
        try:
            seconds = prepare(
                prompts, folder / "server", target, "--server", url, "--concurrency", "8"
            )
        finally:
            server.terminate()
            server.wait()
        print(f"vLLM: {seconds:.0f} s")
        seconds = prepare(prompts, folder / "engine", target, "--device", "cpu", "--verify")
        print(f"in process: {seconds:.0f} s")
        counts = read_manifest(folder / "server")["counts"]
        if counts["from_text"]:
            print("error: vLLM returned no token ids")
            return 1
        return int(compare(folder / "engine", folder / "server", target) > 0)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=200)
    parser.add_argument("--target", type=Path, default=ROOT / "data/tiny-qwen3")
    parser.add_argument("--data", type=Path, help="prompts; by default those of the target")
    parser.add_argument("--python", type=Path, default=VLLM, help="of vLLM's environment")
    sys.exit(main(**vars(parser.parse_args())))
