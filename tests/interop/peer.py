"""What the scripts that run other people's packages have in common; needs none of them."""

import argparse
import time
from collections.abc import Callable
from pathlib import Path


def peer_parser(description: str) -> argparse.ArgumentParser:
    """A parser of the options that every decoding script has."""
    parser = argparse.ArgumentParser(description=description.split("\n")[0])
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--drafter", type=Path, required=True)
    parser.add_argument("--prompts", type=Path, required=True, help="JSON: lists of token ids")
    parser.add_argument("--max-new-tokens", type=int, required=True)
    return parser


def timed(decode: Callable[[], list], passes: int) -> tuple[list[float], list]:
    """Seconds of each pass after one that does not count, and what the last one gave."""
    seconds, found = [], []
    for _ in range(1 + passes):
        start = time.perf_counter()
        found = decode()
        seconds.append(time.perf_counter() - start)
    return seconds[1:], found
