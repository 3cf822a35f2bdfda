"""300 requests that live as requests do, in one vLLM engine on the CPU: for `make serving`.

They come at random steps, share prefixes, differ in length, temperature and priority, are cancelled
at random, and fit the small cache badly, so that many are preempted. Before each draft pass the
buffer of corrections is filled with a marker (NaN); what the plug-in leaves of it is an error, and
so is a correction where nothing was rejected. `--broken` plants a fault that the checks must find:
`mixed` exchanges the rows of requests, `stale` keeps corrections that are not written anew.
"""

import json
import random

import offline  # sets the environment before vLLM is imported
import torch

KINDS = (  # most are greedy, whose answers can be compared
    {"temperature": 0.0},
    {"temperature": 0.0},
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.7, "top_k": 20},
    {"temperature": 1.2, "top_p": 0.8},
)


def plan(prompts: list[list[int]], count: int, seed: int) -> list[dict]:
    """What each request is and when it comes and goes, in engine steps."""
    draw = random.Random(seed)
    requests, step = [], 0
    for _ in range(count):
        step += draw.choice((0, 0, 0, 1, 2, 4))
        index = draw.randrange(len(prompts))
        limit = draw.choice((1, 3, 8, 20, 40, 80))
        # No seeds: with one, a prompt that is read in chunks ends this CPU backend.
        sampling = draw.choice(KINDS) | {"max_tokens": limit}
        cancelled = step + draw.randint(1, 15) if draw.random() < 0.15 else None
        requests.append(
            {
                "prompt": index,
                "arrives": step,
                "cancelled": cancelled,
                "priority": draw.randint(0, 3),
                "sampling": sampling,
            }
        )
    return requests


def plant_marker(errors: list[str]) -> None:
    """Poison the buffer before each correction and look at what is left of it."""
    from dflow_lightning.serving.vllm.model import RelayDFlashForCausalLM

    prepare = RelayDFlashForCausalLM.prepare_correction

    def checked(self, verified, num_requests, block):
        # Only what no correction has been written to in this step may keep the marker.
        self.model.correction_QD.fill_(float("nan"))
        prepare(self, verified, num_requests, block)
        used = self.model.correction_QD[: num_requests * block].view(num_requests, block, -1)
        if not used.isfinite().all():
            errors.append("the marker of an earlier step is in a correction")
        rejected = [0] * num_requests if verified is None else verified.num_rejected_R.tolist()
        for row, count in zip(used, rejected, strict=True):
            if row[0].any() or row[count + 1 :].any():
                errors.append("a slot without a row is corrected")

    RelayDFlashForCausalLM.prepare_correction = checked


def break_plugin(fault: str) -> None:
    """Plant a fault in the plug-in."""
    from dataclasses import replace

    from dflow_lightning.serving.vllm import model

    right = model.correction
    if fault == "mixed":

        def wrong(relay, verified, block, **options):
            mixed = replace(verified, ends_R=verified.ends_R.roll(1))
            return right(relay, mixed, block, **options)

        model.correction = wrong
    elif fault == "stale":
        prepare = model.RelayDFlashForCausalLM.prepare_correction

        def kept(self, verified, num_requests, block):
            old = self.model.correction_QD.clone()
            prepare(self, verified, num_requests, block)
            now = self.model.correction_QD
            now.copy_(torch.where(now == 0, old, now))

        model.RelayDFlashForCausalLM.prepare_correction = kept


def live(engine, prompts: list[list[int]], requests: list[dict]) -> tuple[dict, list[str]]:
    """Run all requests to their end; the answers so far of all, and the cancelled ones."""
    from vllm import SamplingParams

    answers: dict[str, list[int]] = {}
    waiting = sorted(range(len(requests)), key=lambda number: requests[number]["arrives"])
    cancelled, step = [], 0
    while waiting or engine.has_unfinished_requests():
        while waiting and requests[waiting[0]]["arrives"] <= step:
            number = waiting.pop(0)
            request = requests[number]
            engine.add_request(
                str(number),
                {"prompt_token_ids": prompts[request["prompt"]]},
                SamplingParams(**request["sampling"]),
                priority=request["priority"],
            )
            answers[str(number)] = []
        for output in engine.step():
            answers[output.request_id] = list(output.outputs[0].token_ids)
        step += 1
        for number, request in enumerate(requests):
            if request["cancelled"] == step and number not in waiting:
                engine.abort_request([str(number)])
                cancelled.append(str(number))
    return answers, cancelled


def main() -> None:
    options = offline.parser()
    options.add_argument("--count", type=int, default=300)
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--broken", choices=["mixed", "stale"])
    args = options.parse_args()
    from vllm import EngineArgs, LLMEngine

    prompts = json.loads(args.prompts.read_text())
    settings = offline.settings(args) | {
        "max_model_len": 320,
        "max_num_batched_tokens": 160,  # prompts come in chunks
        "block_size": 32,
        "num_gpu_blocks_override": 24,  # some four requests
        "enable_prefix_caching": True,
        "scheduling_policy": "priority",
    }
    engine = LLMEngine.from_engine_args(EngineArgs(**settings))
    errors: list[str] = []
    offline.record_blocks()
    if args.broken:
        break_plugin(args.broken)
    plant_marker(errors)
    requests = plan(prompts, args.count, args.seed)
    answers, cancelled = live(engine, prompts, requests)
    result = {
        "plan": requests,
        "answers": answers,
        "cancelled": cancelled,
        "blocks": offline.BLOCKS,
        "errors": sorted(set(errors)),
    }
    args.out.write_text(json.dumps(result | offline.counts(engine)))


if __name__ == "__main__":
    main()
