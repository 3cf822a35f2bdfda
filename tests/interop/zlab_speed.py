"""Time z-lab's `dflash_generate` on prompts, one at a time, greedy, float32, one thread.

The whole set is decoded `--passes` times after one pass that does not count. One line of JSON on
stdout: seconds of each pass, and the answers.
"""

import argparse
import json
import time
from pathlib import Path

import torch
from dflash.model import dflash_generate
from zlab_decode import load_drafter, load_target


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--drafter", type=Path, required=True)
    parser.add_argument("--prompts", type=Path, required=True, help="JSON: lists of token ids")
    parser.add_argument("--max-new-tokens", type=int, required=True)
    parser.add_argument("--passes", type=int, required=True)
    args = parser.parse_args()
    torch.set_num_threads(1)
    target, stop_ids = load_target(args.target)
    drafter = load_drafter(args.drafter)
    prompts = json.loads(args.prompts.read_text())

    seconds, answers = [], []
    for _ in range(1 + args.passes):
        start = time.perf_counter()
        with torch.inference_mode():
            found = [
                dflash_generate(drafter, target, torch.tensor([one]), args.max_new_tokens, stop_ids)
                for one in prompts
            ]
        seconds.append(time.perf_counter() - start)
        answers = [out[0, len(one) :].tolist() for out, one in zip(found, prompts, strict=True)]
    print(json.dumps({"seconds": seconds[1:], "answers": answers}))


if __name__ == "__main__":
    main()
