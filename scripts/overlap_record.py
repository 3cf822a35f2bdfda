"""Rounds that were drafted with and without the relay, and what is counted of them.

Shapes: J drafts of a block.
"""

import itertools
from bisect import bisect_right
from dataclasses import dataclass
from typing import Any

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
        tokens_left: of the answer after the anchor, the round's bonus token included.
    """

    before: int | None
    drafted: TwoDrafts
    reference: list[int]
    entropies: list[float]
    tokens_left: int

    def accepted(self, drafts: list[int]) -> int:
        """Tokens gained less one, as `Completion.accepted` counts them."""
        pairs = zip(drafts, self.reference, strict=False)
        leading = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
        return min(leading, self.tokens_left - 1)


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
