"""Time real vLLM on prompts with a DFlash or EAGLE-3 drafter: CPU, greedy, float32, one thread.

The whole set is decoded `--passes` times after one pass that does not count, with at most
`--concurrency` requests in flight. One line of JSON on stdout: seconds of each pass, the answers,
and vLLM's own count of rounds and accepted drafts of the last pass.
"""

import json
import os

# Read when vLLM is imported: offline, silent about use, one process, one core, 1 GiB of cache.
os.environ |= {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_PLUGINS": "",  # vLLM as it is, without our relay
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "OMP_NUM_THREADS": "1",
}

from peer import peer_parser, timed
from vllm import LLM, SamplingParams

COUNTERS = {
    "rounds": "vllm:spec_decode_num_drafts",
    "accepted": "vllm:spec_decode_num_accepted_tokens",
}


def counts(engine: LLM) -> dict[str, int]:
    """vLLM's counters since the engine was made."""
    values = {metric.name: metric for metric in engine.get_metrics()}
    return {name: int(values[key].value) for name, key in COUNTERS.items()}


def main() -> None:
    parser = peer_parser(__doc__)
    parser.add_argument("--passes", type=int, required=True)
    parser.add_argument("--concurrency", type=int, required=True)
    parser.add_argument("--compile", action="store_true", help="let vLLM compile the models")
    args = parser.parse_args()
    config = json.loads((args.drafter / "config.json").read_text())
    eagle3 = config["architectures"] == ["LlamaForCausalLMEagle3"]
    block_size = config["dflow_config" if eagle3 else "dflash_config"]["block_size"]
    prompts = json.loads(args.prompts.read_text())
    engine = LLM(
        model=str(args.target),
        dtype="float32",
        # vLLM drafts no more where a block, and one behind it, would not fit.
        max_model_len=max(map(len, prompts)) + args.max_new_tokens + 2 * block_size,
        max_num_seqs=args.concurrency,
        enforce_eager=not args.compile,
        disable_log_stats=False,
        speculative_config={
            "method": "eagle3" if eagle3 else "dflash",
            "model": str(args.drafter),
            "num_speculative_tokens": block_size - 1,
        },
    )
    inputs = [{"prompt_token_ids": one} for one in prompts]
    sampling = SamplingParams(temperature=0.0, max_tokens=args.max_new_tokens)
    before: dict[str, int] = {}

    def decode() -> list:
        before.update(counts(engine))
        engine.reset_prefix_cache()  # each pass reads its prompts anew
        return engine.generate(inputs, sampling, use_tqdm=False)

    seconds, outputs = timed(decode, args.passes)
    print(
        json.dumps(
            {
                "seconds": seconds,
                "answers": [list(one.outputs[0].token_ids) for one in outputs],
            }
            | {name: value - before[name] for name, value in counts(engine).items()}
        )
    )


if __name__ == "__main__":
    main()
