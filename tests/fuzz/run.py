"""`make fuzz`: the fuzz tests with other examples again and again, until the time is over.

    python tests/fuzz/run.py [--minutes 10] [--seed N]

A failure ends it, with the smallest example that was found and the command that finds it again.
What was found and mended is kept as an `@example` of its test, so that `make test` tries it always.
"""

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).parent
FACTOR = 5  # times as many examples a round as in `make test`


def round_of(seed: int) -> int:
    """One round of all fuzz tests; pytest's exit status."""
    environment = os.environ | {"FUZZ_PROFILE": "long", "FUZZ_FACTOR": str(FACTOR)}
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"]
    command += [f"--hypothesis-seed={seed}", str(HERE)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        print(done.stdout)
    return done.returncode


def main() -> int:
    """Exit status 1 if a round failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--seed", type=int, default=int(time.time()), help="of the first round")
    options = parser.parse_args()
    start, seed = time.monotonic(), options.seed
    while time.monotonic() - start < 60 * options.minutes:
        if round_of(seed):
            print(f"failed: python tests/fuzz/run.py --seed {seed}")
            return 1
        seed += 1
        minutes = (time.monotonic() - start) / 60
        print(f"seed {seed - 1}: passed ({minutes:.1f} minutes)", flush=True)
    print(f"{seed - options.seed} rounds, none failed")
    return 0


if __name__ == "__main__":
    sys.exit(main())
