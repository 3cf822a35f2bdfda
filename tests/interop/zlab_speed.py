"""Time z-lab's `dflash_generate` on prompts, one at a time, greedy, float32, one thread.

The whole set is decoded `--passes` times after one pass that does not count. One line of JSON on
stdout: seconds of each pass, and the answers.
"""

import json

import torch
from dflash.model import dflash_generate
from peer import peer_parser, timed
from zlab_decode import load_drafter, load_target


def main() -> None:
    parser = peer_parser(__doc__)
    parser.add_argument("--passes", type=int, required=True)
    args = parser.parse_args()
    torch.set_num_threads(1)
    target, stop_ids = load_target(args.target)
    drafter = load_drafter(args.drafter)
    prompts = json.loads(args.prompts.read_text())

    @torch.inference_mode()
    def decode() -> list:
        return [
            dflash_generate(drafter, target, torch.tensor([one]), args.max_new_tokens, stop_ids)
            for one in prompts
        ]

    seconds, found = timed(decode, args.passes)
    answers = [out[0, len(one) :].tolist() for out, one in zip(found, prompts, strict=True)]
    print(json.dumps({"seconds": seconds, "answers": answers}))


if __name__ == "__main__":
    main()
