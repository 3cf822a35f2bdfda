"""What a drafter gains: acceptance, speed against plain decoding, and equality with it.

A pure function of decoders and prompts; `command.py` is its command line.
"""

import hashlib
import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from dflow_lightning.bench.row import (
    DecodedPrompts,
    Row,
    median_speedup,
    pool,
    relay_share,
    round_milliseconds,
    time_per_output_token,
)
from dflow_lightning.data.prompts import Prompt
from dflow_lightning.decode import SpeculativeDecoder
from dflow_lightning.decode.engine import Acceptance
from dflow_lightning.decode.equality import Difference, EqualityCheck
from dflow_lightning.decode.request import check_answer_length
from dflow_lightning.decode.rounds import Backend, RoundMode
from dflow_lightning.decode.tree import check_tree_settings
from dflow_lightning.errors import InputError
from dflow_lightning.stopwatch import RoundTimer
from dflow_lightning.tensors.metrics import acceptance_summary

RelayChoice = Literal["both", "on", "off"]
POOLED = "pooled"
WARM_UP_TOKENS = 8


@dataclass(frozen=True, kw_only=True)
class BenchSettings:
    """How the prompts are decoded; also a group of options of the command.

    Args:
        temperature: one or more, separated by commas.
        concurrency: requests in flight at the same time, one number or more, separated by commas.
        relay: how drafters that have a relay are measured.
        max_new_tokens: upper limit of an answer.
        acceptance: `match` accepts a draft that the target chooses; `rejection` is rejection
            sampling, whose answers above temperature 0 cannot be compared with the plain ones.
        backend: `eager` or `compiled`, for plain decoding as well; or `package`, the compiled draft
            step of the exports, against eager plain decoding.
        tree_nodes: drafters verify their most probable drafts as a tree of so many tokens, the
            anchor among them, in place of a chain; for DFlash and DFlow, eager, by match.
        seed: of the sampling noise; each prompt's own follows from it and the prompt's id.
    """

    temperature: list[float] = field(default_factory=lambda: [0.0])
    concurrency: list[int] = field(default_factory=lambda: [1])
    relay: RelayChoice = "both"
    max_new_tokens: int = 128
    acceptance: Acceptance = "match"
    backend: Backend = "eager"
    tree_nodes: int | None = None
    seed: int = 0

    def check(self) -> None:
        """Raise `InputError` for settings that no decoder could run with."""
        lists: dict[str, tuple[Sequence[float], str]] = {
            "temperature": (self.temperature, "0 is greedy"),
            "concurrency": (self.concurrency, "1 is one request at a time"),
        }
        for name, (values, example) in lists.items():
            if not values:
                raise InputError(f"{name}: none given; {example}")
            twice = [value for value in values if values.count(value) > 1]
            if twice:
                raise InputError(f"{name} holds {twice[0]} twice; give each value once")
        for temperature in self.temperature:
            if not 0 <= temperature < float("inf"):
                raise InputError(
                    f"temperature holds {temperature}; give 0 for greedy or positive numbers"
                )
        for concurrency in self.concurrency:
            if concurrency < 1:
                raise InputError(f"concurrency holds {concurrency}; give 1 or more")
        check_tree_settings(self.tree_nodes, self.acceptance, self.backend)
        check_answer_length(self.max_new_tokens)


@dataclass(frozen=True)
class BenchResult:
    """The rows, by temperature and concurrency, and the time spent before them.

    Args:
        warm_up_seconds: making, compiling and warming all engines; no row contains any of it.
    """

    rows: list[Row]
    warm_up_seconds: float


@dataclass(frozen=True)
class BenchArm:
    """One way to decode: a drafter with or without its relay, or the target alone.

    Args:
        options: what its engine is made with, see `SpeculativeDecoder.engine`.
    """

    name: str
    decoder: SpeculativeDecoder
    relay: str
    options: dict[str, Any]


def bench(
    decoders: Mapping[str, SpeculativeDecoder],
    prompts: Sequence[Prompt],
    settings: BenchSettings,
    *,
    progress: Callable[[str], None] = lambda _: None,
) -> BenchResult:
    """Decode the prompts plainly and with every drafter; a row per family and for all of them.

    Args:
        decoders: by the name their rows get; all of them share one target.
        progress: called with what comes next, `num_steps` times.

    Raises:
        InputError: a family has too few prompts for a concurrency.
    """
    check_families(prompts, settings)
    first = next(iter(decoders.values()))
    plain_backend = "eager" if settings.backend == "package" else settings.backend
    plain = BenchArm("plain", first, "off", {"speculative": False, "backend": plain_backend})
    arms = [plain, *drafter_arms(decoders, settings)]
    check = EqualityCheck(first.target)
    rows: list[Row] = []
    warm_up_seconds = 0.0
    for concurrency in settings.concurrency:  # engines are made for one, and for all temperatures
        warm_up_seconds += warm_up(arms, prompts, concurrency, settings)
        for temperature in settings.temperature:
            run = BenchPass(temperature, concurrency, settings)
            reference, *measured = run.decode_all(arms, prompts, progress)
            for arm, ours in zip(arms[1:], measured, strict=True):
                rows += [run.row(arm, family, ours, reference, check) for family in ours]
    rows.sort(key=lambda row: settings.temperature.index(row.temperature))
    return BenchResult(rows, warm_up_seconds)


def num_steps(prompts: Sequence[Prompt], settings: BenchSettings) -> int:
    """How often `bench` calls `progress`."""
    steps = sum(len(chunks(prompts, concurrency)) for concurrency in settings.concurrency)
    return len(settings.temperature) * steps


def check_families(prompts: Sequence[Prompt], settings: BenchSettings) -> None:
    """Refuse a concurrency that would not be reached, and so be reported under a wrong number."""
    families = [prompt.family for prompt in prompts]
    smallest = min(dict.fromkeys(families), key=families.count)
    count, largest = families.count(smallest), max(settings.concurrency)
    if count < largest:
        raise InputError(
            f"concurrency holds {largest}, but family {smallest} has {count} prompts; raise "
            f"per_family, give a larger suite, or stay at {count} or below"
        )


def drafter_arms(
    decoders: Mapping[str, SpeculativeDecoder], settings: BenchSettings
) -> list[BenchArm]:
    """Every drafter with every relay setting that is asked for."""
    common = {
        "acceptance": settings.acceptance, "backend": settings.backend,
        "tree_nodes": settings.tree_nodes,
    }  # fmt: skip
    return [
        BenchArm(name, decoder, relay, common | {"use_rejected": relay == "on"})
        for name, decoder in decoders.items()
        for relay in relay_modes(decoder, settings.relay)
    ]


def relay_modes(decoder: SpeculativeDecoder, choice: RelayChoice) -> list[str]:
    """A drafter without relay and carryover is measured once, as "off"."""
    if not decoder.keeps_rejected:
        return ["off"]
    return ["on", "off"] if choice == "both" else [choice]


def warm_up(
    arms: Sequence[BenchArm], prompts: Sequence[Prompt], concurrency: int, settings: BenchSettings
) -> float:
    """Make the engines that all prompts are decoded with, and compile what they will need.

    Returns:
        the seconds it took.
    """
    start = time.perf_counter()
    target = arms[0].decoder.target
    longest = max(len(prompt.token_ids) for prompt in prompts) + settings.max_new_tokens
    longest = target.within_context(longest)
    brief = min(settings.max_new_tokens, WARM_UP_TOKENS)
    modes = [RoundMode(sampled=sampled) for sampled in {t > 0 for t in settings.temperature}]
    for arm in arms:
        engine = arm.decoder.engine(num_slots=concurrency, max_length=longest, **arm.options)
        engine.warm_up(modes)
        for temperature in settings.temperature:  # all slots and a prompt's way through, too
            BenchPass(temperature, concurrency, settings).decode(arm, prompts[:concurrency], brief)
    return time.perf_counter() - start


def chunks(prompts: Sequence[Prompt], concurrency: int) -> list[tuple[str, list[Prompt]]]:
    """Prompts of one family that are decoded in one go: enough of them to keep a queue."""
    wanted = max(4 * concurrency, 8)
    families: dict[str, list[Prompt]] = {}
    for prompt in prompts:
        families.setdefault(prompt.family, []).append(prompt)
    cut = []
    for family, members in families.items():
        parts = max(1, round(len(members) / wanted))  # of like size: a small one has no queue
        edges = [len(members) * part // parts for part in range(parts + 1)]
        cut += [(family, members[start:end]) for start, end in itertools.pairwise(edges)]
    return cut


@dataclass(frozen=True)
class BenchPass:
    """All arms at one temperature and concurrency."""

    temperature: float
    concurrency: int
    settings: BenchSettings

    @property
    def rule(self) -> str:
        """What accepts a draft."""
        if self.temperature == 0:
            return "greedy"
        return {"match": "sample_match", "rejection": "rejection"}[self.settings.acceptance]

    def decode_all(
        self, arms: Sequence[BenchArm], prompts: Sequence[Prompt], progress: Callable[[str], None]
    ) -> list[dict[str, DecodedPrompts]]:
        """What every arm makes of the prompts, by family.

        They take turns after every chunk of prompts, so that a machine that slows down for a while
        slows all of them and the ratios stay.
        """
        decoded: list[dict[str, list[DecodedPrompts]]] = [{} for _ in arms]
        for family, chunk in chunks(prompts, self.concurrency):
            progress(f"T={self.temperature:g} concurrency {self.concurrency} {family}")
            for arm, families in zip(arms, decoded, strict=True):
                one = self.decode(arm, chunk, self.settings.max_new_tokens)
                families.setdefault(family, []).append(one)
        by_family = [{family: pool(parts) for family, parts in one.items()} for one in decoded]
        return [one | {POOLED: pool(one.values())} for one in by_family]

    def decode(self, arm: BenchArm, prompts: Sequence[Prompt], limit: int) -> DecodedPrompts:
        """Answers of one arm, `concurrency` prompts at a time."""
        timer = RoundTimer(arm.decoder.target.device)
        requests = arm.decoder.requests(
            [prompt.token_ids for prompt in prompts],
            [prompt_seed(self.settings.seed, prompt.id) for prompt in prompts],
            max_new_tokens=limit,
            temperature=self.temperature,
        )
        completions = arm.decoder.run(
            requests, batch_size=self.concurrency, timer=timer, **arm.options
        )
        return DecodedPrompts(list(prompts), completions, timer)

    def row(
        self,
        arm: BenchArm,
        family: str,
        measured: Mapping[str, DecodedPrompts],
        reference: Mapping[str, DecodedPrompts],
        check: EqualityCheck,
    ) -> Row:
        """The row of one family, from a drafter's decoding and the plain one."""
        ours, plain = measured[family], reference[family]
        num_drafts = arm.decoder.drafter.dims.block_size - 1
        summary = acceptance_summary([one.accepted for one in ours.completions], num_drafts)
        same_noise = self.rule != "rejection"
        differences = self.differences(ours, plain, check) if same_noise else []
        rate, plain_rate = ours.tokens_per_second, plain.tokens_per_second
        milliseconds = round_milliseconds(ours.timer)
        relay_apart = arm.relay == "on" and self.settings.backend != "package"
        lossless = None
        if check.asserted and same_noise:
            lossless = all(one.excused for one in differences)
        return Row(
            drafter=arm.name,
            relay=arm.relay,
            temperature=self.temperature,
            acceptance=self.rule,
            backend=self.settings.backend,
            tree_nodes=self.settings.tree_nodes,
            concurrency=self.concurrency,
            requests_in_flight=ours.requests_in_flight,
            family=family,
            **asdict(summary),
            prompts=len(ours.prompts),
            tokens=ours.num_tokens,
            seconds=ours.seconds,
            tokens_per_second=rate,
            plain_tokens_per_second=plain_rate,
            speedup=rate / plain_rate if rate and plain_rate else None,
            speedup_median=median_speedup(ours, plain) if self.concurrency == 1 else None,
            time_per_output_token_p50=time_per_output_token(ours.completions, 0.50),
            time_per_output_token_p95=time_per_output_token(ours.completions, 0.95),
            round_milliseconds=milliseconds,
            relay_share=relay_share(milliseconds) if relay_apart else None,
            lossless=lossless,
            excused_ties=sum(one.excused for one in differences),
            differences=differences,
        )

    def differences(
        self, ours: DecodedPrompts, plain: DecodedPrompts, check: EqualityCheck
    ) -> list[Difference]:
        """Every answer that is not the plain one."""
        return check.differences(
            ours.prompts,
            [one.token_ids for one in ours.completions],
            [one.token_ids for one in plain.completions],
            temperature=self.temperature,
            seeds=[prompt_seed(self.settings.seed, prompt.id) for prompt in ours.prompts],
        )


def prompt_seed(seed: int, prompt_id: str) -> int:
    """The noise of a prompt does not depend on which others are measured with it."""
    return int.from_bytes(hashlib.sha256(f"{seed}:{prompt_id}".encode()).digest()[:6], "big")
