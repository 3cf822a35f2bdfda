"""`make serving`: the relay inside real vLLM on this CPU, section by section.

    python tests/serving/run.py [SECTION ...] [--per-family 32]

Exit status 1 when a check failed. Needs the environment of `make env-vllm`.
"""

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path

import clients
import equal
import life
import torch
from bench import ROOT, VLLM, Bench

SECTIONS = {
    "offline": equal.offline,
    "sampled": equal.sampled,
    "http": equal.http,
    "fixes": equal.fixes,
    "soak": life.soak,
    "damage": life.damage,
    "overhead": life.overhead,
    "clients": clients.clients,
    "releases": life.releases,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("section", nargs="*", help=f"of {', '.join(SECTIONS)}; all by default")
    parser.add_argument("--per-family", type=int, default=32, help="prompts of each family")
    parser.add_argument("--requests", type=int, default=300, help="of the section soak")
    args = parser.parse_args()
    unknown = [name for name in args.section if name not in SECTIONS]
    if unknown:
        sys.exit(f"error: no section {unknown[0]}; there are {', '.join(SECTIONS)}")
    if not VLLM.exists():
        sys.exit("error: .venv-vllm is missing; run `make serving`, which creates it")
    os.chdir(ROOT)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="serving-") as scratch:
        bench = Bench(Path(scratch), per_family=args.per_family, num_requests=args.requests)
        for name in args.section or SECTIONS:
            start = time.monotonic()
            print(f"== {name}: {str(SECTIONS[name].__doc__).splitlines()[0]}", flush=True)
            try:
                SECTIONS[name](bench)
            except Exception as error:
                print(f"FAILED  {type(error).__name__}: {error}", flush=True)
                bench.failures.append(name)
            print(f"-- {name}: {time.monotonic() - start:.0f} s\n", flush=True)
    print(f"FAILED: {', '.join(bench.failures)}" if bench.failures else "all as it should be")
    return int(bool(bench.failures))


if __name__ == "__main__":
    sys.exit(main())
