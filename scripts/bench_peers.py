"""Our engine against z-lab's `dflash_generate` and against real vLLM on this CPU, in one run.

    python scripts/bench_peers.py --drafter data/tiny-drafters/dflash

All decode the same export and prompts, greedily, in float32 on one thread, one after the other;
each in a process of its own, after a pass over all prompts that does not count (it compiles, too).
The time is the median of the passes, prompts read included. Each answer is compared with plain
decoding as `equality` has it, and the rounds show that all have the same drafts accepted. The
ratio is their time over that of our engine with as many requests in flight. Relay off, since no
other package has one. Exit status 1 when any answer differs.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from dflow_lightning.data.prompts import read_prompts
from dflow_lightning.decode import SpeculativeDecoder
from dflow_lightning.decode.equality import EqualityCheck
from dflow_lightning.decode.rounds import Backend
from dflow_lightning.models.target import FrozenTarget

ROOT = Path(__file__).resolve().parents[1]
INTEROP = ROOT / "tests/interop"
OURS = ("eager", "compiled")


@dataclass
class Entry:
    """One decoder at one number of requests in flight."""

    name: str
    concurrency: int
    seconds: list[float]
    answers: list[list[int]]
    rounds: int | None = None

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)


def ours(
    drafter: Path, target: Path, asked: list[list[int]], limit: int, passes: int,
    backend: Backend, concurrency: int,
) -> dict:  # fmt: skip
    """Time our engine in this process."""
    torch.set_num_threads(1)
    decoder = SpeculativeDecoder.from_export(drafter, str(target))
    seconds, found = [], []
    for _ in range(1 + passes):
        start = time.perf_counter()
        found = decoder.generate(
            asked, max_new_tokens=limit, use_rejected=False, batch_size=concurrency, backend=backend
        )
        seconds.append(time.perf_counter() - start)
    return {
        "seconds": seconds[1:],
        "answers": [one.token_ids for one in found],
        "rounds": sum(len(one.accepted) for one in found),
    }


def measure(name: str, concurrency: int, python: Path, script: Path, *arguments: object) -> Entry:
    """Run one decoder in its own environment; the last line of its output is JSON."""
    done = subprocess.run(
        [python, script, *map(str, arguments)],
        cwd=ROOT, capture_output=True, text=True, check=False,
        env=os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
    )  # fmt: skip
    if done.returncode:
        raise SystemExit(f"error: {name} failed\n{done.stderr[-2000:]}")
    found = json.loads(done.stdout.splitlines()[-1])
    return Entry(name, concurrency, found["seconds"], found["answers"], found.get("rounds"))


def entries(arguments: list, concurrency: list[int]):
    """All measurements, in the order of the table; ours first at each number of requests."""
    zlab, vllm = ROOT / ".venv-interop/bin/python", ROOT / ".venv-vllm/bin/python"
    for count in concurrency:
        for backend in OURS:
            yield measure(
                f"ours, {backend}", count, Path(sys.executable), Path(__file__),
                *arguments, "--concurrency", count, "--backend", backend,
            )  # fmt: skip
        if count == 1:  # it decodes one prompt at a time
            yield measure("z-lab", count, zlab, INTEROP / "zlab_speed.py", *arguments)
        for title, more in (("vLLM, eager", []), ("vLLM, compiled", ["--compile"])):
            yield measure(
                title, count, vllm, INTEROP / "vllm_decode.py",
                *arguments, "--concurrency", count, *more,
            )  # fmt: skip


def main(
    target: Path, drafter: Path, per_family: int, max_new_tokens: int, passes: int,
    concurrency: list[int],
) -> int:  # fmt: skip
    """Print the table; returns the exit status."""
    torch.set_num_threads(1)
    frozen = FrozenTarget.load(str(target), dtype="float32")
    prompts = read_prompts(
        frozen.tokenizer, target / "prompts/test.jsonl", per_family=per_family, field="suite"
    )
    asked = [one.token_ids for one in prompts]
    decoder = SpeculativeDecoder.from_export(drafter, frozen)
    plain = [one.token_ids for one in decoder.generate_plain(asked, max_new_tokens=max_new_tokens)]
    check, failed = EqualityCheck(frozen), 0
    tokens = sum(map(len, plain))
    print(f"{len(asked)} prompts, {tokens} tokens, greedy, float32, one thread, {passes} passes")
    print(
        "in flight  decoder         seconds  tokens/s  / ours eager  / compiled rounds differ ties"
    )
    base: dict[tuple[str, int], float] = {}
    with tempfile.TemporaryDirectory() as place:
        file = Path(place) / "prompts.json"
        file.write_text(json.dumps(asked))
        arguments = [
            "--target", target.resolve(), "--drafter", drafter.resolve(), "--prompts", file,
            "--max-new-tokens", max_new_tokens, "--passes", passes,
        ]  # fmt: skip
        for one in entries(arguments, concurrency):
            if one.name.startswith("ours"):
                base[one.name, one.concurrency] = one.median
            found = check.differences(
                prompts, one.answers, plain, temperature=0.0, seeds=range(len(prompts))
            )
            ties = sum(difference.excused for difference in found)
            wrong = len(found) - ties
            eager, compiled = (base.get((f"ours, {backend}", one.concurrency)) for backend in OURS)
            print(
                f"{one.concurrency:>9}  {one.name:<14} {one.median:>8.2f} "
                f"{sum(map(len, one.answers)) / one.median:>9.0f} "
                f"{over(one.median, eager):>13} {over(one.median, compiled):>11} "
                f"{'-' if one.rounds is None else one.rounds:>6} {wrong:>6} {ties:>4}",
                flush=True,
            )
            failed += wrong
    print("all equal to plain decoding" if not failed else f"{failed} ANSWERS DIFFER")
    return int(failed > 0)


def over(seconds: float, base: float | None) -> str:
    """A time as a multiple of ours."""
    return "-" if base is None else f"{seconds / base:.2f}x"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--target", type=Path, default=ROOT / "data/tiny-qwen3")
    parser.add_argument("--drafter", type=Path, required=True)
    parser.add_argument("--per-family", type=int, default=8)
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--passes", type=int, default=3)
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--prompts", type=Path, help=argparse.SUPPRESS)  # of one measurement
    parser.add_argument("--backend", help=argparse.SUPPRESS)
    args = vars(parser.parse_args())
    file, backend = args.pop("prompts"), args.pop("backend")
    if file:
        one = ours(
            args["drafter"], args["target"], json.loads(file.read_text()), args["max_new_tokens"],
            args["passes"], backend, args["concurrency"][0],
        )  # fmt: skip
        print(json.dumps(one))
        sys.exit(0)
    sys.exit(main(**args))
