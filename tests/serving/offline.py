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
from collections import Counter
from collections.abc import Callable
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
PARTS: Counter = Counter()  # seconds of a pass


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


def time_parts(relay: bool) -> None:
    """Count the seconds of vLLM's draft call and of the relay inside it."""
    from vllm.v1.spec_decode.dflash import DFlashProposer

    owners = [(DFlashProposer, "propose", "draft")]
    if relay:
        from dflow_lightning.serving.vllm.model import RelayDFlashForCausalLM

        owners.append((RelayDFlashForCausalLM, "prepare_correction", "relay"))
    for owner, name, part in owners:
        setattr(owner, name, timed(getattr(owner, name), part))


def timed(method: Callable, part: str) -> Callable:
    """A method that adds its seconds to `PARTS`."""

    def wrapper(*args, **kwargs):
        start = time.perf_counter()
        result = method(*args, **kwargs)
        PARTS[part] += time.perf_counter() - start
        return result

    return wrapper


def settings(args: argparse.Namespace) -> dict:
    """vLLM's settings for the options."""
    speculative = None
    if args.drafter:
        block_size = json.loads((args.drafter / "config.json").read_text())["block_size"]
        speculative = {
            "method": "dflash",
            "model": str(args.drafter),
            "num_speculative_tokens": block_size - 1,
        }
    found = {
        "model": str(args.target),
        "dtype": "float32",
        "max_model_len": 512,
        "max_num_seqs": args.concurrency,
        "enforce_eager": True,
        "disable_log_stats": False,
        "speculative_config": speculative,
        "additional_config": {"dflow_relay": args.relay == "on"},
    }
    return found | json.loads(args.engine)


def parser() -> argparse.ArgumentParser:
    """The options, which other scripts of this folder share."""
    found = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    found.add_argument("--target", type=Path, required=True)
    found.add_argument("--drafter", type=Path, help="none: the target alone")
    found.add_argument("--relay", choices=["on", "off"], default="on")
    found.add_argument("--concurrency", type=int, default=8)
    found.add_argument("--engine", default="{}", help="JSON: more settings of vLLM")
    found.add_argument("--prompts", type=Path, required=True, help="JSON: lists of token ids")
    found.add_argument("--out", type=Path, required=True)
    return found


def main() -> None:
    options = parser()
    options.add_argument("--max-new-tokens", type=int, default=128)
    options.add_argument("--temperature", type=float, default=0.0)
    options.add_argument("--record", action="store_true")
    options.add_argument("--passes", type=int, default=1, help="the last one is reported")
    options.add_argument("--time", action="store_true", help="time drafting and the relay")
    args = options.parse_args()
    from vllm import LLM, SamplingParams, __version__

    prompts = json.loads(args.prompts.read_text())
    engine = LLM(**settings(args))
    if args.record:
        record_blocks()
    if args.time:
        time_parts(args.relay == "on")
    sampling = [
        SamplingParams(temperature=args.temperature, max_tokens=args.max_new_tokens, seed=seed)
        for seed in range(len(prompts))
    ]
    seconds = []
    for _ in range(args.passes):
        PARTS.clear()
        before = counts(engine) if args.drafter else {}
        engine.reset_prefix_cache()  # each pass reads its prompts anew
        start = time.perf_counter()
        outputs = engine.generate(
            [{"prompt_token_ids": one} for one in prompts], sampling, use_tqdm=False
        )
        seconds.append(time.perf_counter() - start)
    after = counts(engine) if args.drafter else {}
    result = {
        "seconds": seconds,
        "parts": dict(PARTS),
        "version": __version__,
        "answers": [list(one.outputs[0].token_ids) for one in outputs],
        "requests": [one.request_id for one in outputs],
        "blocks": BLOCKS,
    }
    result |= {name: value - before[name] for name, value in after.items()}
    args.out.write_text(json.dumps(result))


if __name__ == "__main__":
    main()
