"""Run vLLM in this process, on the CPU, and say what it did: for `make serving`.

Needs no more than vLLM's environment with our plug-in. One line of JSON on stdout: answers, vLLM's
counters, preemptions, seconds, and with `--record` every block that was drafted: its request, the
position and id of its anchor, the drafts, how many drafts the step before had verified and how many
of them it had rejected.
"""

import argparse
import json
import os
import time
from pathlib import Path

# Read when vLLM is imported: offline, silent about use, one process, one core, 1 GiB of cache.
DEFAULTS = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "OMP_NUM_THREADS": "1",
}
for _name, _value in DEFAULTS.items():
    os.environ.setdefault(_name, _value)

COUNTERS = {
    "rounds": "vllm:spec_decode_num_drafts",
    "accepted": "vllm:spec_decode_num_accepted_tokens",
    "preemptions": "vllm:num_preemptions",
    "prefix_hits": "vllm:prefix_cache_hits",
}
BLOCKS: list[dict] = []


def counts(engine) -> dict[str, int]:
    """vLLM's counters since the engine was made."""
    values = {metric.name: metric for metric in engine.get_metrics()}
    return {name: int(values[key].value) for name, key in COUNTERS.items() if key in values}


def record_blocks() -> None:
    """Note every block that vLLM's V1 runner drafts."""
    from vllm.v1.spec_decode.dflash import DFlashProposer
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    propose, step = DFlashProposer.propose, GPUModelRunner.propose_draft_token_ids
    batch: list[str] = []

    def noted(self, *args, **kwargs):
        batch[:] = self.input_batch.req_ids
        return step(self, *args, **kwargs)

    def recorded(self, *args, **kwargs):
        drafts = propose(self, *args, **kwargs)
        metadata = kwargs["common_attn_metadata"]
        count, block = metadata.batch_size(), 1 + self.num_speculative_tokens
        rejected = kwargs.get("num_rejected_tokens_gpu")
        rejected = [0] * count if rejected is None else rejected[:count].tolist()
        starts = metadata.query_start_loc[: count + 1].tolist()
        positions = self.positions[: count * block].view(count, block)[:, 0].tolist()
        anchors = self.input_ids[: count * block].view(count, block)[:, 0].tolist()
        for i, (request, row) in enumerate(zip(batch, drafts.tolist(), strict=True)):
            BLOCKS.append(
                {
                    "request": request,
                    "anchor": positions[i],
                    "anchor_id": anchors[i],
                    "drafts": row,
                    "rows": starts[i + 1] - starts[i],
                    "rejected": rejected[i],
                }
            )
        return drafts

    DFlashProposer.propose = recorded
    GPUModelRunner.propose_draft_token_ids = noted


def make_engine(args: argparse.Namespace):
    """The `LLM` that the options ask for."""
    from vllm import LLM

    speculative = None
    if args.drafter:
        block_size = json.loads((args.drafter / "config.json").read_text())["block_size"]
        speculative = {
            "method": "dflash",
            "model": str(args.drafter),
            "num_speculative_tokens": block_size - 1,
        }
    settings = {
        "model": str(args.target),
        "dtype": "float32",
        "max_model_len": 512,
        "max_num_seqs": args.concurrency,
        "enforce_eager": True,
        "disable_log_stats": False,
        "speculative_config": speculative,
        "additional_config": {"dflow_relay": args.relay == "on"},
    }
    return LLM(**settings | json.loads(args.engine))


def parser() -> argparse.ArgumentParser:
    """The options, which other scripts of this folder share."""
    found = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    found.add_argument("--target", type=Path, required=True)
    found.add_argument("--drafter", type=Path, help="none: the target alone")
    found.add_argument("--relay", choices=["on", "off"], default="on")
    found.add_argument("--concurrency", type=int, default=8)
    found.add_argument("--engine", default="{}", help="JSON: more arguments of vLLM's LLM")
    return found


def main() -> None:
    options = parser()
    options.add_argument("--prompts", type=Path, required=True, help="JSON: lists of token ids")
    options.add_argument("--max-new-tokens", type=int, default=128)
    options.add_argument("--temperature", type=float, default=0.0)
    options.add_argument("--record", action="store_true")
    options.add_argument("--out", type=Path, required=True)
    args = options.parse_args()
    from vllm import SamplingParams

    prompts = json.loads(args.prompts.read_text())
    engine = make_engine(args)
    if args.record:
        record_blocks()
    sampling = [
        SamplingParams(temperature=args.temperature, max_tokens=args.max_new_tokens, seed=seed)
        for seed in range(len(prompts))
    ]
    start = time.perf_counter()
    outputs = engine.generate(
        [{"prompt_token_ids": one} for one in prompts], sampling, use_tqdm=False
    )
    result = {
        "seconds": time.perf_counter() - start,
        "answers": [list(one.outputs[0].token_ids) for one in outputs],
        "requests": [one.request_id for one in outputs],
        "blocks": BLOCKS,
    }
    args.out.write_text(json.dumps(result | (counts(engine) if args.drafter else {})))


if __name__ == "__main__":
    main()
