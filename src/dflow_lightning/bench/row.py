"""What the bench reports of one drafter, and how it follows from decoded prompts."""

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch

from dflow_lightning.data.prompts import Prompt
from dflow_lightning.decode import Completion
from dflow_lightning.decode.equality import Difference
from dflow_lightning.stopwatch import ROUND_PARTS, RoundTimer


def template_hash(tokenizer: Any) -> str:
    """What tells chat templates apart: numbers measured with different ones are not compared."""
    template = getattr(tokenizer, "chat_template", None) or ""
    return hashlib.sha256(str(template).encode()).hexdigest()[:16]


@dataclass(frozen=True, kw_only=True)
class Row:
    """One drafter, relay setting, temperature, concurrency and family; a row of the JSON contract.

    Rates and times are None where no round ran: every answer ended with its first token, which
    comes with the prompt.

    Args:
        drafter: folder of the export as given, or the name given to `bench`.
        relay: "on" or "off"; a drafter without a relay is "off".
        acceptance: the rule: "greedy" (temperature 0), "sample_match" or "rejection".
        backend: how the steps ran.
        tree_nodes: tokens of a verified tree; None is a chain.
        concurrency: most requests in flight at the same time.
        requests_in_flight: their mean over the rounds; fewer where a family's last ones finish.
        family: one of the suite's, or "pooled" over all of them.
        tau: accepted drafts + 1 per round, pooled over rounds.
        tau_per_request: the same, averaged per prompt first.
        position_acceptance: share of rounds that accept at least draft j, j from 1.
        histogram: number of rounds with 0, 1, ... accepted drafts.
        rounds: summed over requests.
        joint_histogram: number of rounds by accepted drafts of the round before (first index) and
            of the round itself; a request's first round is in none.
        seconds: wall time of all rounds, prefill left out.
        tokens_per_second: of all requests in flight together.
        plain_tokens_per_second: plain decoding in the same engine, at the same concurrency.
        speedup: tokens_per_second over plain_tokens_per_second.
        speedup_median: median over prompts of the same ratio; only at concurrency 1.
        time_per_output_token_p50, time_per_output_token_p95: seconds from a request's first token
            to its last, over the tokens after the first: the median request and the 95th of 100.
        round_milliseconds: time of a round and of each of its parts, medians over rounds, on a GPU
            the device's own; compiled rounds have no parts.
        relay_share: median relay time over median draft + verify time of a round; None without
            relay, and with a packaged draft step, which contains it.
        lossless: every answer equals the plain one but for excused ties; None when the target is
            not in float32 or better, where ties are common and nothing is asserted, and under
            rejection sampling, whose samples share the plain ones' distribution and not their
            noise.
    """

    drafter: str
    relay: str
    temperature: float
    acceptance: str
    backend: str
    tree_nodes: int | None
    concurrency: int
    requests_in_flight: float | None
    family: str
    tau: float
    tau_per_request: float
    accepted_drafts: float
    position_acceptance: list[float]
    histogram: list[int]
    rounds: int
    joint_histogram: list[list[int]]
    prompts: int
    tokens: int
    seconds: float
    tokens_per_second: float | None
    plain_tokens_per_second: float | None
    speedup: float | None
    speedup_median: float | None
    time_per_output_token_p50: float | None
    time_per_output_token_p95: float | None
    round_milliseconds: dict[str, float] | None
    relay_share: float | None
    lossless: bool | None
    excused_ties: int
    differences: list[Difference]


@dataclass(frozen=True)
class DecodedPrompts:
    """Prompts, their answers and what the rounds took."""

    prompts: list[Prompt]
    completions: list[Completion]
    timer: RoundTimer

    @property
    def num_tokens(self) -> int:
        return sum(len(one.token_ids) for one in self.completions)

    @property
    def seconds(self) -> float:
        return sum(one.seconds for one in self.completions)

    @property
    def tokens_per_second(self) -> float | None:
        return self.num_tokens / self.seconds if self.seconds else None

    @property
    def requests_in_flight(self) -> float | None:
        """Mean over the rounds."""
        rounds = len(self.timer.seconds("whole"))
        return sum(len(one.accepted) for one in self.completions) / rounds if rounds else None


def pool(parts: Iterable[DecodedPrompts]) -> DecodedPrompts:
    """Several as one."""
    pooled = DecodedPrompts([], [], RoundTimer())
    for part in parts:
        pooled.prompts.extend(part.prompts)
        pooled.completions.extend(part.completions)
        pooled.timer.extend(part.timer)
    return pooled


def median_speedup(ours: DecodedPrompts, plain: DecodedPrompts) -> float | None:
    """Median over prompts: less moved by one disturbed request than the ratio of sums."""
    ratios = [
        len(fast.token_ids) / fast.seconds / (len(slow.token_ids) / slow.seconds)
        for fast, slow in zip(ours.completions, plain.completions, strict=True)
        if len(fast.token_ids) > 1 and len(slow.token_ids) > 1
    ]
    return median(ratios) if ratios else None


def time_per_output_token(completions: Iterable[Completion], share: float) -> float | None:
    """Seconds a token that `share` of the requests stay within; neighbours' prefill is included."""
    seconds = [
        one.latency / (len(one.token_ids) - 1) for one in completions if len(one.token_ids) > 1
    ]
    if not seconds:
        return None
    return torch.tensor(seconds, dtype=torch.float64).quantile(share).item()


def round_milliseconds(timer: RoundTimer) -> dict[str, float] | None:
    """Time of a round and of those parts that were measured, medians over the rounds."""
    rounds = len(timer.seconds("whole"))
    if not rounds:
        return None
    medians = {}
    for part in ROUND_PARTS:
        seconds = timer.seconds(part)
        times = len(seconds) // rounds  # a round works on the relay in more than one place
        if times:
            medians[part] = 1000 * median(
                sum(seconds[first * times :][:times]) for first in range(rounds)
            )
    return medians


def relay_share(milliseconds: Mapping[str, float] | None) -> float | None:
    """Time of the relay over that of the DFlash round it is added to; None where not measured."""
    if milliseconds is None or "relay" not in milliseconds:
        return None
    return milliseconds["relay"] / (milliseconds["draft"] + milliseconds["verify"])
