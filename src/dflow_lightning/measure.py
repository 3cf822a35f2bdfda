"""What a drafter gains: acceptance, speed against plain decoding, and equality with it.

A pure function of decoders and prompts; `bench.py` is its command line.
"""

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from statistics import median
from typing import Literal

import torch

from dflow_lightning.data.prompts import Prompt
from dflow_lightning.decode import Completion, RoundTimer, SpeculativeDecoder
from dflow_lightning.equality import Difference, EqualityCheck
from dflow_lightning.metrics import acceptance_summary

RelayChoice = Literal["both", "on", "off"]
POOLED = "pooled"
WARM_UP_TOKENS = 8


@dataclass(frozen=True, kw_only=True)
class BenchSettings:
    """What the rows of a bench have in common, but for temperatures and relay.

    Args:
        relay: measure drafters that have a relay with it, without it, or both.
        seed: of the sampling noise; each prompt's own follows from it and the prompt's id.
    """

    temperatures: Sequence[float] = (0.0,)
    relay: RelayChoice = "both"
    max_new_tokens: int = 128
    batch_size: int = 1
    seed: int = 0


@dataclass(frozen=True, kw_only=True)
class Row:
    """One drafter, relay setting, temperature and family; a row of the JSON contract.

    Args:
        drafter: folder of the export as given, or the name given to `bench`.
        relay: "on" or "off"; a drafter without a relay is "off".
        acceptance: the rule: "greedy" (temperature 0) or "sample_match".
        family: one of the suite's, or "pooled" over all of them.
        tau: accepted drafts + 1 per round, pooled over rounds.
        tau_per_request: the same, averaged per prompt first.
        position_acceptance: share of rounds that accept at least draft j, j from 1.
        histogram: number of rounds with 0, 1, ... accepted drafts.
        seconds: time of decoding, prefill left out.
        speedup: tokens_per_second over plain_tokens_per_second.
        speedup_median: median over prompts of the same ratio; only at batch size 1.
        relay_share: median relay time over median draft + verify time of a round.
        lossless: every answer equals the plain one but for excused ties; None when the target is
            not in float32 or better, where ties are common and nothing is asserted.
    """

    drafter: str
    relay: str
    temperature: float
    acceptance: str
    family: str
    tau: float
    tau_per_request: float
    accepted_drafts: float
    position_acceptance: list[float]
    histogram: list[int]
    rounds: int
    prompts: int
    tokens: int
    seconds: float
    tokens_per_second: float
    plain_tokens_per_second: float
    speedup: float
    speedup_median: float | None
    relay_share: float | None
    lossless: bool | None
    excused_ties: int
    differences: list[Difference]


@dataclass(frozen=True)
class Decoded:
    """Prompts, their answers and what the rounds took; plain decoding has no timer."""

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
    def tokens_per_second(self) -> float:
        return self.num_tokens / self.seconds


def bench(
    decoders: Mapping[str, SpeculativeDecoder],
    prompts: Sequence[Prompt],
    settings: BenchSettings,
    *,
    progress: Callable[[str], None] = lambda _: None,
) -> list[Row]:
    """Decode the prompts plainly once per temperature and with every drafter; a row per family.

    Args:
        decoders: by the name their rows get; all of them share one target.
        progress: told before each family what is decoded.
    """
    first = next(iter(decoders.values()))
    check = EqualityCheck(first.target)
    rows = []
    for temperature in settings.temperatures:
        decode = _Decode(prompts, settings, temperature, progress)
        plain = decode("plain", first.generate_plain)
        for name, decoder in decoders.items():
            for relay in relay_modes(decoder, settings.relay):
                arm = Arm(name, decoder, relay, temperature, settings.seed)
                ours = decode(arm.title, partial(decoder.generate, relay=relay == "on"), timed=True)
                rows += [
                    measure(arm, family, ours[family], plain[family], check) for family in ours
                ]
    return rows


def relay_modes(decoder: SpeculativeDecoder, choice: RelayChoice) -> list[str]:
    """A drafter without a relay is measured once, as "off"."""
    if decoder.relay is None:
        return ["off"]
    return ["on", "off"] if choice == "both" else [choice]


@dataclass(frozen=True)
class Arm:
    """A drafter as it is measured."""

    name: str
    decoder: SpeculativeDecoder
    relay: str
    temperature: float
    seed: int

    @property
    def title(self) -> str:
        return f"{self.name}, relay {self.relay}"


@dataclass(frozen=True)
class _Decode:
    """Decodes all families under the same settings, and pools them."""

    prompts: Sequence[Prompt]
    settings: BenchSettings
    temperature: float
    progress: Callable[[str], None]

    def __call__(
        self, name: str, generate: Callable[..., list[Completion]], *, timed: bool = False
    ) -> dict[str, Decoded]:
        limit = self.settings.max_new_tokens
        warm_up = self.prompts[: self.settings.batch_size]
        self._run(generate, warm_up, min(limit, WARM_UP_TOKENS), timed)
        families = {}
        for family in dict.fromkeys(prompt.family for prompt in self.prompts):
            self.progress(f"T={self.temperature:g} {name}: {family}")
            members = [prompt for prompt in self.prompts if prompt.family == family]
            families[family] = self._run(generate, members, limit, timed)
        return families | {POOLED: pool(families.values())}

    def _run(self, generate: Callable, prompts: Sequence[Prompt], limit: int, timed: bool):
        timer = RoundTimer()
        completions = generate(
            [prompt.token_ids for prompt in prompts],
            max_new_tokens=limit,
            temperature=self.temperature,
            seeds=[prompt_seed(self.settings.seed, prompt.id) for prompt in prompts],
            batch_size=self.settings.batch_size,
            **({"timer": timer} if timed else {}),
        )
        return Decoded(list(prompts), completions, timer)


def pool(parts: Iterable[Decoded]) -> Decoded:
    """All families as one."""
    pooled = Decoded([], [], RoundTimer())
    for part in parts:
        pooled.prompts.extend(part.prompts)
        pooled.completions.extend(part.completions)
        for name in ("draft", "verify", "relay", "commit"):
            getattr(pooled.timer, name).extend(getattr(part.timer, name))
    return pooled


def prompt_seed(seed: int, prompt_id: str) -> int:
    """The noise of a prompt does not depend on which others are measured with it."""
    return int.from_bytes(hashlib.sha256(f"{seed}:{prompt_id}".encode()).digest()[:6], "big")


def measure(arm: Arm, family: str, ours: Decoded, plain: Decoded, check: EqualityCheck) -> Row:
    """The row of one family, from the drafter's decoding and the plain one."""
    num_drafts = arm.decoder.drafter.dims.block_size - 1
    summary = acceptance_summary([one.accepted for one in ours.completions], num_drafts)
    differences = []
    for prompt, fast, slow in zip(ours.prompts, ours.completions, plain.completions, strict=True):
        difference = check.compare(
            prompt.id,
            prompt.token_ids,
            fast.token_ids,
            slow.token_ids,
            temperature=arm.temperature,
            seed=prompt_seed(arm.seed, prompt.id),
        )
        differences += [difference] if difference else []
    exact = check.target.dtype in (torch.float32, torch.float64)
    return Row(
        drafter=arm.name,
        relay=arm.relay,
        temperature=arm.temperature,
        acceptance="sample_match" if arm.temperature > 0 else "greedy",
        family=family,
        **asdict(summary),
        prompts=len(ours.prompts),
        tokens=ours.num_tokens,
        seconds=ours.seconds,
        tokens_per_second=ours.tokens_per_second,
        plain_tokens_per_second=plain.tokens_per_second,
        speedup=ours.tokens_per_second / plain.tokens_per_second,
        speedup_median=median_speedup(ours.completions, plain.completions),
        relay_share=relay_share(ours.timer) if arm.relay == "on" else None,
        lossless=all(one.excused for one in differences) if exact else None,
        excused_ties=sum(one.excused for one in differences),
        differences=differences,
    )


def median_speedup(ours: list[Completion], plain: list[Completion]) -> float | None:
    """Median over prompts: less moved by one disturbed request than the ratio of sums."""
    ratios = [
        len(fast.token_ids) / fast.seconds / (len(slow.token_ids) / slow.seconds)
        for fast, slow in zip(ours, plain, strict=True)
        if len(fast.token_ids) > 1 and len(slow.token_ids) > 1
    ]
    return median(ratios) if ratios else None


def relay_share(timer: RoundTimer) -> float | None:
    """Time of the relay over that of the DFlash round it is added to, medians over rounds."""
    rounds = len(timer.draft)
    if not rounds:
        return None
    parts = len(timer.relay) // rounds  # a round works on the relay in more than one place
    relay = [sum(timer.relay[first * parts :][:parts]) for first in range(rounds)]
    return median(relay) / (median(timer.draft) + median(timer.verify))
