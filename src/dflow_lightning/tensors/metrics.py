"""Acceptance statistics: one definition for rollouts, validation, bench and reports.

`accepted_drafts` is a, the number of drafts the target confirms in a round; tau, the acceptance
length, is a + 1, bonus token included (as z-lab, SGLang and vLLM count).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class AcceptanceSummary:
    """Acceptance over a set of requests.

    Attributes:
        tau: mean acceptance length over all rounds.
        tau_per_request: mean over requests of each request's own mean.
        accepted_drafts: mean accepted drafts per round, `tau - 1`.
        position_acceptance: `P(a >= j)` for j = 1..K-1.
        histogram: number of rounds with a = 0..K-1.
        rounds: number of rounds.
        joint_histogram: number of rounds by a of the request's round before (first index) and a of
            the round itself, 0..K-1 each; a request's first round is in none.
    """

    tau: float
    tau_per_request: float
    accepted_drafts: float
    position_acceptance: list[float]
    histogram: list[int]
    rounds: int
    joint_histogram: list[list[int]]


def acceptance_summary(
    accepted: Sequence[Sequence[int]], num_draft_tokens: int
) -> AcceptanceSummary:
    """Summarise the accepted drafts per round of each request; no rounds at all give tau 1."""
    histogram = [0] * (num_draft_tokens + 1)
    joint = [[0] * (num_draft_tokens + 1) for _ in histogram]
    for request in accepted:
        for count in request:
            histogram[count] += 1
        for before, count in itertools.pairwise(request):
            joint[before][count] += 1
    rounds = sum(histogram)
    total = sum(count * times for count, times in enumerate(histogram))
    reached = [
        sum(histogram[j:]) / rounds if rounds else 0.0 for j in range(1, num_draft_tokens + 1)
    ]
    means = [sum(request) / len(request) for request in accepted if request]
    drafts = total / rounds if rounds else 0.0
    per_request = sum(means) / len(means) if means else 0.0
    return AcceptanceSummary(drafts + 1, per_request + 1, drafts, reached, histogram, rounds, joint)
