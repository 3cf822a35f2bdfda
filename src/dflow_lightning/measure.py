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
        progress: told what comes next, `num_steps` times.
    """
    first = next(iter(decoders.values()))
    check = EqualityCheck(first.target)
    rows = []
    for temperature in settings.temperatures:
        arms = [
            Arm(name, decoder, relay, temperature, settings.seed)
            for name, decoder in decoders.items()
            for relay in relay_modes(decoder, settings.relay)
        ]
        plain, *measured = decode_all(first, arms, prompts, temperature, settings, progress)
        for arm, ours in zip(arms, measured, strict=True):
            rows += [measure(arm, family, ours[family], plain[family], check) for family in ours]
    return rows


def num_steps(prompts: Sequence[Prompt], settings: BenchSettings) -> int:
    """How often `bench` calls `progress`."""
    return len(settings.temperatures) * len(chunks(prompts, settings.batch_size))


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


def decode_all(
    first: SpeculativeDecoder,
    arms: Sequence[Arm],
    prompts: Sequence[Prompt],
    temperature: float,
    settings: BenchSettings,
    progress: Callable[[str], None],
) -> list[dict[str, Decoded]]:
    """What plain decoding and every arm make of the prompts, by family.

    They take turns after every chunk of prompts, so that a machine that slows down for a while
    slows all of them and the ratios stay.
    """
    runs = [_Run(first.generate_plain, temperature, settings, timed=False)]
    for arm in arms:
        generate = partial(arm.decoder.generate, relay=arm.relay == "on")
        runs.append(_Run(generate, temperature, settings, timed=True))
    for run in runs:
        run(prompts[: settings.batch_size], min(settings.max_new_tokens, WARM_UP_TOKENS))
    decoded: list[dict[str, list[Decoded]]] = [{} for _ in runs]
    for family, chunk in chunks(prompts, settings.batch_size):
        progress(f"T={temperature:g} {family}")
        for run, families in zip(runs, decoded, strict=True):
            families.setdefault(family, []).append(run(chunk, settings.max_new_tokens))
    pooled = [{family: pool(parts) for family, parts in one.items()} for one in decoded]
    return [one | {POOLED: pool(one.values())} for one in pooled]


def chunks(prompts: Sequence[Prompt], size: int) -> list[tuple[str, list[Prompt]]]:
    """Prompts of one family that are decoded together."""
    families: dict[str, list[Prompt]] = {}
    for prompt in prompts:
        families.setdefault(prompt.family, []).append(prompt)
    return [
        (family, members[start : start + size])
        for family, members in families.items()
        for start in range(0, len(members), size)
    ]


@dataclass(frozen=True)
class _Run:
    """One way to decode under the settings of a bench; only speculative rounds are timed."""

    generate: Callable[..., list[Completion]]
    temperature: float
    settings: BenchSettings
    timed: bool

    def __call__(self, prompts: Sequence[Prompt], limit: int) -> Decoded:
        timer = RoundTimer()
        completions = self.generate(
            [prompt.token_ids for prompt in prompts],
            max_new_tokens=limit,
            temperature=self.temperature,
            seeds=[prompt_seed(self.settings.seed, prompt.id) for prompt in prompts],
            batch_size=self.settings.batch_size,
            **({"timer": timer} if self.timed else {}),
        )
        return Decoded(list(prompts), completions, timer)


def pool(parts: Iterable[Decoded]) -> Decoded:
    """Several as one."""
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
