"""What a tree of drafts gains and costs beside a chain, by its number of nodes.

    python scripts/tree_cost.py

One request at a time, eager, one thread, held-out prompts; the ways to decode take turns prompt by
prompt. Rounds are timed in processor time, prefill left out, because a shared machine's wall time
says little. Beside the ratio that this machine gives stands that of tau, which is the gain where a
forward costs the same for any of these numbers of tokens. Exit status 1 when an answer is not that
of the target alone.
"""

import argparse
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch

from dflow_lightning.data.prompts import read_prompts
from dflow_lightning.decode import Completion, Engine, Request, SpeculativeDecoder
from dflow_lightning.decode.equality import EqualityCheck
from dflow_lightning.models.target import FrozenTarget

SUITE = "prompts/test.jsonl"


@dataclass
class Arm:
    """One way to decode, and what came of it."""

    name: str
    nodes: str
    engine: Engine
    completions: list[Completion] = field(default_factory=list)
    seconds: float = 0.0
    rounds: int = 0

    def decode(self, request: Request) -> None:
        """Answer one prompt; its rounds are timed."""
        self.engine.submit(request)
        self.engine.admit()
        found = self.engine.prefill()
        start = time.process_time()
        while self.engine.busy:
            found += self.engine.round()
            self.rounds += 1
        self.seconds += time.process_time() - start
        self.completions += [one.completion for one in found if one.completion]

    @property
    def tokens(self) -> int:
        """Tokens that rounds gave: all but the first of each answer."""
        return sum(len(one.token_ids) - 1 for one in self.completions)


def arms_of(folders: list[Path], target: FrozenTarget, nodes: list[int], length: int) -> list[Arm]:
    """Plain decoding, then each drafter with and without relay, as a chain and as trees."""
    decoders = {one.name: SpeculativeDecoder.from_export(one, target) for one in folders}
    first = next(iter(decoders.values()))
    plain = Engine(first.models(speculative=False), num_slots=1, max_length=length)
    arms = [Arm("plain", "-", plain)]
    for name, decoder in decoders.items():
        for relay in (True, False) if decoder.keeps_rejected else (False,):
            for size in (None, *nodes):
                engine = Engine(
                    decoder.models(use_rejected=relay),
                    num_slots=1,
                    max_length=length,
                    tree_nodes=size,
                )
                label = "chain" if size is None else str(size)
                arms.append(Arm(f"{name}, relay {'on' if relay else 'off'}", label, engine))
    return arms


def main(
    target: str, drafter: list[Path], nodes: list[int], per_family: int, max_new_tokens: int,
    temperature: list[float],
) -> int:  # fmt: skip
    """Print the table; returns the exit status."""
    torch.set_num_threads(1)
    frozen = FrozenTarget.load(target)
    limit = frozen.config.max_position_embeddings
    prompts = read_prompts(
        frozen.tokenizer, Path(target) / SUITE, per_family=per_family, max_length=limit - 1,
        field="suite",
    )  # fmt: skip
    longest = min(limit, max(len(one.token_ids) for one in prompts) + max_new_tokens)
    check, failed = EqualityCheck(frozen), 0
    print(f"{len(prompts)} prompts, up to {max_new_tokens} tokens, {frozen.dtype}")
    print(
        "T  drafter            nodes  tau  forwards/token  round ms  tau and tok/s against chain  "
        "tok/s against plain  differ"
    )
    for degree in temperature:
        arms = arms_of(drafter, frozen, nodes, longest)
        for arm in arms:
            arm.decode(Request(prompt_ids=prompts[0].token_ids, max_new_tokens=8))
            arm.completions, arm.seconds, arm.rounds = [], 0.0, 0
        for seed, prompt in enumerate(prompts):
            request = Request(
                prompt_ids=prompt.token_ids, max_new_tokens=max_new_tokens, temperature=degree,
                seed=seed,
            )  # fmt: skip
            for arm in arms:
                arm.decode(request)
        plain = chain = arms[0]
        for arm in arms:
            chain = arm if arm.nodes in ("chain", "-") else chain
            found = check.differences(
                prompts, [one.token_ids for one in arm.completions],
                [one.token_ids for one in plain.completions], temperature=degree,
                seeds=range(len(prompts)),
            )  # fmt: skip
            wrong = sum(not one.excused for one in found)
            failed += wrong
            tau, rate = arm.tokens / arm.rounds, arm.tokens / arm.seconds
            print(
                f"{degree:g}  {arm.name:<17}  {arm.nodes:>5}  {tau:.3f}  {1 / tau:.3f}  "
                f"{1e3 * arm.seconds / arm.rounds:6.2f}  {tau * chain.rounds / chain.tokens:.3f}  "
                f"{rate * chain.seconds / chain.tokens:.3f}  "
                f"{rate * plain.seconds / plain.tokens:.3f}  {wrong}",
                flush=True,
            )
    return int(failed > 0)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--target", default="data/tiny-qwen3")
    parser.add_argument(
        "--drafter", type=Path, nargs="+",
        default=[Path("data/tiny-drafters/dflash"), Path("data/tiny-drafters/dflow")],
    )  # fmt: skip
    parser.add_argument("--nodes", type=int, nargs="+", default=[8, 12, 16, 24])
    parser.add_argument("--per-family", type=int, default=3)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--temperature", type=float, nargs="+", default=[0.0, 1.0])
    sys.exit(main(**vars(parser.parse_args())))
