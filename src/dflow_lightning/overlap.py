"""Where the relay helps: every round of a relay-on decoding drafted twice, with and without it.

With the relay on and off a request goes through different rounds, so that their averages also
compare different states. Here both drafts start from the same anchor and the same context, and both
are scored against the answer that the target gives; the gain of a state is exact.

Shapes: R requests, J drafts of a block, S tokens of a prompt and its answer, V vocabulary.
"""

import itertools
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dflow_lightning.data.prompts import Prompt
from dflow_lightning.decode import Engine, SpeculativeDecoder
from dflow_lightning.decode.rounds import Drafts, Mode, correct, draft
from dflow_lightning.decode.state import DecodeState, Models
from dflow_lightning.decode.steps import Steps
from dflow_lightning.errors import InputError
from dflow_lightning.measure import POOLED, BenchSettings, prompt_seed
from dflow_lightning.target import FrozenTarget

# Nats of the target's own distribution; the first bin is text that it is sure of.
ENTROPY_EDGES = (0.01, 0.1, 0.5, 1.0, 2.0)


@dataclass(frozen=True)
class TwoDrafts:
    """One state drafted with and without the relay.

    Args:
        anchor: position of the last committed token.
        with_row: the draft's slot had a relay row.
    """

    anchor: int
    on: list[int]
    off: list[int]
    with_row: list[bool]


@dataclass(frozen=True)
class PairedRound:
    """Two drafts, and what the answer holds in their place.

    Args:
        before: accepted drafts of the request's round before; None for its first round.
        reference: the target's tokens at the drafts' positions, cut at the answer's end.
        entropies: of the target's distribution at these positions, in nats.
    """

    before: int | None
    drafted: TwoDrafts
    reference: list[int]
    entropies: list[float]

    def accepted(self, drafts: list[int]) -> int:
        """Tokens gained less one, as `Completion.accepted` counts them."""
        pairs = zip(drafts, self.reference, strict=False)
        leading = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
        return min(leading, len(self.reference) - 1)


@dataclass(kw_only=True)
class Overlap:
    """The paired rounds of one drafter, temperature and family; a record of the bench's JSON.

    First index everywhere: accepted drafts of the round before, 0..J. First rounds are left out:
    they have no relay. Lists of lists have one more index, the draft's position 1..J.

    Args:
        entropy: mean of the target's distribution over the answers' positions, in nats.
        rounds: number of rounds.
        accepted_on, accepted_off: sums over rounds of the accepted drafts.
        squared_gain: sum of the squared differences of the two.
        slots: drafts that the answer reaches.
        slots_with_row: those whose slot had a relay row.
        hits_on, hits_off: drafts that equal the target's token, whatever came before them.
        reached_on, reached_off: rounds that accept at least so many drafts.
        entropy_edges: upper edges of the entropy bins; the last bin has none.
        entropy_slots, entropy_hits_on, entropy_hits_off: of drafts with a relay row, by bin.
    """

    drafter: str
    temperature: float
    acceptance: str
    family: str
    num_draft_tokens: int
    prompts: int
    entropy: float
    rounds: list[int]
    accepted_on: list[int]
    accepted_off: list[int]
    squared_gain: list[int]
    slots: list[list[int]]
    slots_with_row: list[list[int]]
    hits_on: list[list[int]]
    hits_off: list[list[int]]
    reached_on: list[list[int]]
    reached_off: list[list[int]]
    entropy_edges: list[float]
    entropy_slots: list[int]
    entropy_hits_on: list[int]
    entropy_hits_off: list[int]

    @classmethod
    def empty(cls, num_draft_tokens: int, **names: Any) -> "Overlap":
        """No rounds yet."""
        J = num_draft_tokens
        counts: dict[str, Any] = {}
        for name in ("rounds", "accepted_on", "accepted_off", "squared_gain"):
            counts[name] = [0] * (J + 1)
        slots = ("slots", "slots_with_row", "hits_on", "hits_off", "reached_on", "reached_off")
        for name in slots:
            counts[name] = [[0] * J for _ in range(J + 1)]
        for name in ("entropy_slots", "entropy_hits_on", "entropy_hits_off"):
            counts[name] = [0] * (len(ENTROPY_EDGES) + 1)
        return cls(
            num_draft_tokens=J,
            prompts=0,
            entropy=0.0,
            entropy_edges=list(ENTROPY_EDGES),
            **counts,
            **names,
        )

    def gain(self) -> list[tuple[float, float] | None]:
        """Mean gain in accepted drafts by those of the round before, with its standard error.

        None where there was no such round.
        """
        found: list[tuple[float, float] | None] = []
        for rounds, on, off, squares in zip(
            self.rounds, self.accepted_on, self.accepted_off, self.squared_gain, strict=True
        ):
            mean = (on - off) / rounds if rounds else 0.0
            variance = squares / rounds - mean**2 if rounds else 0.0
            error = (max(0.0, variance) / max(1, rounds - 1)) ** 0.5
            found.append((mean, error) if rounds else None)
        return found

    def add(self, one: PairedRound) -> None:
        """Count a round; a request's first one is not."""
        a, drafted = one.before, one.drafted
        if a is None:
            return
        on, off = one.accepted(drafted.on), one.accepted(drafted.off)
        self.rounds[a] += 1
        self.accepted_on[a] += on
        self.accepted_off[a] += off
        self.squared_gain[a] += (on - off) ** 2
        for j, token in enumerate(one.reference):
            hit_on, hit_off = drafted.on[j] == token, drafted.off[j] == token
            self.slots[a][j] += 1
            self.slots_with_row[a][j] += drafted.with_row[j]
            self.hits_on[a][j] += hit_on
            self.hits_off[a][j] += hit_off
            self.reached_on[a][j] += on > j
            self.reached_off[a][j] += off > j
            if drafted.with_row[j]:
                index = bisect_right(self.entropy_edges, one.entropies[j])
                self.entropy_slots[index] += 1
                self.entropy_hits_on[index] += hit_on
                self.entropy_hits_off[index] += hit_off


class PairedDraft:
    """A draft step that drafts with the relay, and once more without it for the record.

    Made for an engine of one slot.
    """

    def __init__(self) -> None:
        self.drafted: list[TwoDrafts] = []

    def clear(self) -> None:
        """Before the next request."""
        self.drafted.clear()

    def __call__(self, models: Models, state: DecodeState, mode: Mode) -> Drafts:
        """What `rounds.draft` gives with the relay."""
        on = draft(models, state, mode, correct(models, state))
        off = draft(models, state, mode, None)
        assert state.relay is not None
        # The last J slots draft: all but the anchor's, or all where a slot predicts the next token.
        with_row_J = state.relay.valid_BNK[0, 0, -on.tokens_RJ.shape[1] :]
        self.drafted.append(
            TwoDrafts(
                int(state.anchor_R[0]),
                on.tokens_RJ[0].tolist(),
                off.tokens_RJ[0].tolist(),
                with_row_J.tolist(),
            )
        )
        return on


def measure_overlap(
    decoders: Mapping[str, SpeculativeDecoder],
    prompts: Sequence[Prompt],
    settings: BenchSettings,
    *,
    progress: Callable[[str], None] = lambda _: None,
) -> list[Overlap]:
    """Paired rounds of every drafter that has a relay; a record per family and for all of them.

    Args:
        decoders: by the name their records get.
        settings: temperatures, length and seed count; one request at a time, eager.
        progress: told what comes next.

    Raises:
        InputError: no drafter has a relay, or drafts are accepted by rejection sampling.
    """
    check_overlap(decoders, settings)
    found: list[Overlap] = []
    for temperature, (name, decoder) in itertools.product(settings.temperatures, decoders.items()):
        if decoder.relay is None:
            continue
        rule = "greedy" if temperature == 0 else "sample_match"
        about = {"drafter": name, "temperature": temperature, "acceptance": rule}
        paired = PairedDecoding(decoder, prompts, settings)
        records: dict[str, Overlap] = {}
        entropies: dict[str, list[float]] = {}
        for prompt in prompts:
            progress(f"paired T={temperature:g} {prompt.family}")
            rounds, of_answer = paired.rounds(prompt, temperature)
            for family in (prompt.family, POOLED):
                if family not in records:
                    records[family] = Overlap.empty(paired.num_drafts, family=family, **about)
                records[family].prompts += 1
                entropies.setdefault(family, []).extend(of_answer)
                for one in rounds:
                    records[family].add(one)
        for family, values in entropies.items():
            records[family].entropy = sum(values) / len(values)
        pooled = records.pop(POOLED)
        found += [*records.values(), pooled]
    return found


def check_overlap(decoders: Mapping[str, SpeculativeDecoder], settings: BenchSettings) -> None:
    """Refuse what has no paired rounds, before anything is decoded."""
    if settings.acceptance == "rejection":
        raise InputError(
            "overlap: under rejection sampling an answer depends on its drafts, so that two drafts "
            "of one state have no answer in common; set acceptance to match"
        )
    if all(decoder.relay is None for decoder in decoders.values()):
        raise InputError("overlap: no drafter has a relay; give one that has, or leave it out")


class PairedDecoding:
    """An engine of one slot whose rounds are kept, each with its two drafts."""

    def __init__(
        self, decoder: SpeculativeDecoder, prompts: Sequence[Prompt], settings: BenchSettings
    ) -> None:
        self._decoder, self._settings = decoder, settings
        self._record = PairedDraft()
        longest = max(len(prompt.token_ids) for prompt in prompts) + settings.max_new_tokens
        limit = decoder.target.config.max_position_embeddings
        self._engine = Engine(
            decoder.models(),
            num_slots=1,
            max_length=min(limit, longest),
            backend=Steps("eager", self._record),
        )
        self.num_drafts = decoder.models().block_size - 1

    @torch.inference_mode()
    def rounds(self, prompt: Prompt, temperature: float) -> tuple[list[PairedRound], list[float]]:
        """The rounds of one prompt's answer, and the target's entropies along the answer."""
        requests = self._decoder.requests(
            [prompt.token_ids],
            [prompt_seed(self._settings.seed, prompt.id)],
            max_new_tokens=self._settings.max_new_tokens,
            temperature=temperature,
        )
        self._record.clear()
        (completion,) = self._engine.run(requests)
        answer = completion.token_ids
        entropies = answer_entropies(self._decoder.target, prompt.token_ids, answer)
        befores = [None, *completion.accepted]
        rounds = []
        for before, drafted in zip(befores, self._record.drafted, strict=False):
            start = drafted.anchor + 1 - len(prompt.token_ids)
            span = slice(start, start + len(drafted.on))
            rounds.append(PairedRound(before, drafted, answer[span], entropies[span]))
        return rounds, entropies


def answer_entropies(
    target: FrozenTarget, prompt_ids: list[int], answer_ids: list[int]
) -> list[float]:
    """Nats of the target's distribution at each position of an answer, at temperature 1."""
    ids_1S = torch.tensor([prompt_ids + answer_ids], device=target.device)
    logits_SV = target.model(ids_1S).logits[0, len(prompt_ids) - 1 : -1]
    return torch.distributions.Categorical(logits=logits_SV.float()).entropy().tolist()
