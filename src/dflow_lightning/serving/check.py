"""`dflow-train serve-check`: does an engine reach with an export the tau that we measure here?

A real server of the engine, from its own environment and on loopback, decodes prompts greedily with
the drafter and without; both answers are compared with plain decoding here, and tau with that of
our own engine.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from dflow_lightning.bench.suite import suite_path
from dflow_lightning.data.prompts import Prompt, read_prompts
from dflow_lightning.decode import SpeculativeDecoder
from dflow_lightning.decode.equality import EqualityCheck
from dflow_lightning.decode.request import check_answer_length
from dflow_lightning.errors import InputError, check_counts
from dflow_lightning.export.validate_folder import interleaved
from dflow_lightning.formats.drafter_folder import read_export_config
from dflow_lightning.models.device import choose_device
from dflow_lightning.models.target import FrozenTarget
from dflow_lightning.serving.server import ServerSettings, VllmServer

TOLERANCE = 0.05  # of tau, relative
RELAY_ON = "DFlow relay: on"  # written to the engine's log by the plug-in


@dataclass(frozen=True)
class Counts:
    """Rounds and accepted drafts; those of a round that an answer's end cut are counted whole."""

    rounds: int
    accepted: int

    @property
    def tau(self) -> float:
        """Acceptance length, bonus token included; 1 without a round."""
        return 1 + self.accepted / self.rounds if self.rounds else 1.0


def own_counts(
    decoder: SpeculativeDecoder,
    prompts: Sequence[list[int]],
    answers: Sequence[list[int]],
    *,
    relay: bool,
    batch_size: int = 8,
) -> Counts:
    """What our engine needs for given greedy answers, counted as vLLM counts.

    vLLM counts all accepted drafts of an answer's last round, also those behind its end; so we
    decode on over the end and count the rounds that begin before it.
    """
    block = decoder.drafter.dims.block_size
    longest = max(map(len, answers)) + block
    completions = decoder.generate(
        list(prompts),
        max_new_tokens=longest,
        use_rejected=relay,
        stop_token_ids=(),
        batch_size=batch_size,
    )
    rounds = accepted = 0
    for completion, answer in zip(completions, answers, strict=True):
        length = 1  # the first token comes from the prompt
        for count in completion.accepted:
            if length >= len(answer):
                break
            rounds, accepted, length = rounds + 1, accepted + count, length + count + 1
    return Counts(rounds, accepted)


def serve_check_command(
    *,
    drafter: Path,
    target: str,
    engine: Literal["vllm"] = "vllm",
    python: Path = Path(".venv-vllm/bin/python"),
    suite: str = "tiny",
    num_prompts: int = 24,
    max_new_tokens: int = 96,
    concurrency: int = 4,
    dtype: str = "float32",
    device: str = "auto",
) -> None:
    """Serve an exported drafter with a real engine; exit status 1 if tau or answers differ.

    Args:
        drafter: folder of an exported drafter.
        target: hub id or folder of the target.
        engine: the serving engine.
        python: Python interpreter of the engine's environment.
        suite: `tiny` (the embedded target's test prompts) or a JSONL file of prompts.
        num_prompts: number of prompts taken from the suite.
        max_new_tokens: maximum length of an answer, in tokens.
        concurrency: requests in flight at once.
        dtype: dtype the engine computes in; differing answers fail the check in float32 only.
        device: where our own engine decodes, in float32: `cpu`, `cuda`, or one GPU such as
            `cuda:1`; auto is the GPU where there is one. It leaves the GPU while a server runs.
    """
    check_counts(num_prompts=num_prompts, max_new_tokens=max_new_tokens, concurrency=concurrency)
    check_answer_length(max_new_tokens)
    chosen = choose_device(device)
    if not python.is_file():
        raise InputError(
            f"python: {python} does not exist; make the engine's environment (`make env-vllm`) or "
            "give its interpreter"
        )
    read_export_config(drafter)
    path = suite_path(suite, target)
    frozen = FrozenTarget.load(target, device=chosen, dtype="float32")
    decoder = SpeculativeDecoder.from_export(drafter, frozen)
    limit = frozen.config.max_position_embeddings - max_new_tokens
    limit -= 2 * decoder.drafter.dims.block_size
    found = read_prompts(
        frozen.tokenizer, path, vocab_size=frozen.vocab_size, max_length=limit, field="suite"
    )
    prompts = interleaved(found)
    check = ServeCheck(decoder, prompts[:num_prompts], max_new_tokens, concurrency)
    settings = ServerSettings(
        python=python.absolute(),
        target=target,
        dtype=dtype,
        max_num_seqs=concurrency,
        max_model_len=max_new_tokens + check.longest + 2 * decoder.drafter.dims.block_size,
    )
    if not check.run(settings, drafter):
        raise SystemExit(1)


class ServeCheck:
    """The prompts, our own answers to them, and what an engine makes of them.

    Prints a line for each arm: tau there and here, and answers that differ from plain decoding.
    """

    def __init__(
        self,
        decoder: SpeculativeDecoder,
        prompts: list[Prompt],
        max_new_tokens: int,
        concurrency: int,
    ) -> None:
        self.decoder, self.prompts = decoder, prompts
        self.max_new_tokens, self.concurrency = max_new_tokens, concurrency
        self.ids = [one.token_ids for one in prompts]
        self.longest = max(map(len, self.ids))
        plain = decoder.generate_plain(
            self.ids, max_new_tokens=max_new_tokens, batch_size=concurrency
        )
        self.plain = [one.token_ids for one in plain]

    def run(self, settings: ServerSettings, drafter: Path) -> bool:
        """All arms of an exported drafter; whether every one is as it should be."""
        tokens = sum(map(len, self.plain))
        print(f"{len(self.ids)} prompts, {tokens} tokens, greedy, {settings.dtype}")
        print("engine  arm         tau there  tau here  rounds there  here  differ  ties")
        arms: dict[str, bool | None] = {"plain": None, "relay off": False}
        if self.decoder.relay is not None:
            arms["relay on"] = True
        drafts = self.decoder.drafter.dims.block_size - 1
        failures = []
        for name, relay in arms.items():
            given = vars(settings) | {"drafter": None, "num_draft_tokens": 0, "relay": True}
            if relay is not None:
                given |= {"drafter": drafter.absolute(), "num_draft_tokens": drafts, "relay": relay}
            problem = self.arm(name, relay, ServerSettings(**given))
            failures += [f"{name}: {problem}"] if problem else []
        for failure in failures:
            print(f"FAILED  {failure}")
        return not failures

    @contextmanager
    def _on_the_host(self) -> Iterator[None]:
        """Our models wait on the host while a server runs: engines claim nearly a whole GPU."""
        device = self.decoder.target.device
        models = (self.decoder.target, self.decoder.drafter, self.decoder.relay)
        try:
            for model in models:
                if model is not None:
                    model.to("cpu")
            if device.type == "cuda":
                torch.cuda.empty_cache()
            yield
        finally:
            for model in models:
                if model is not None:
                    model.to(device)

    def arm(self, name: str, relay: bool | None, settings: ServerSettings) -> str | None:
        """One server; what is wrong with it, None if nothing."""
        with self._on_the_host(), VllmServer(settings) as server:
            answers = server.complete_all(
                self.ids,
                concurrency=self.concurrency,
                temperature=0.0,
                max_tokens=self.max_new_tokens,
                stop_token_ids=list(self.decoder.target.stop_token_ids),
            )
            counters, log = server.counters(), server.log
        # A new one for each server: it may keep a copy of the target on the GPU.
        found = EqualityCheck(self.decoder.target).differences(
            self.prompts, answers, self.plain, temperature=0.0, seeds=range(len(answers))
        )
        ties = sum(one.excused for one in found)
        wrong = len(found) - ties
        line = f"vllm    {name:<11}"
        there = Counts(counters["rounds"], counters["accepted"])
        problem = None
        if relay is None:
            line += f" {'-':>9} {'-':>9} {'-':>13} {'-':>5}"
        else:
            here = own_counts(self.decoder, self.ids, answers, relay=relay)
            line += f" {there.tau:>9.3f} {here.tau:>9.3f} {there.rounds:>13} {here.rounds:>5}"
            if abs(there.tau / here.tau - 1) > TOLERANCE:
                problem = f"tau is {there.tau:.3f} there and {here.tau:.3f} here"
            if relay and RELAY_ON not in log:
                problem = (
                    "the engine ran without the relay; install this package there with "
                    "`pip install --no-deps`"
                )
        print(f"{line} {wrong:>7} {ties:>5}", flush=True)
        if wrong and settings.dtype == "float32":
            problem = f"{wrong} answers differ from plain decoding"
        return problem
