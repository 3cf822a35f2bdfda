"""A request in one of the engine's slots: how far it has come, and when."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from dflow_lightning.decode.request import Completion, Request


@dataclass
class Flight:
    """A request that waits or occupies a slot.

    Attributes:
        submitted, first_token: on the clock of `time.perf_counter`, 0 where it is still to come.
        read: prompt tokens already in the caches.
        accepted: drafts accepted in each round.
        seconds: its share of the rounds' time.
    """

    id: int
    request: Request
    submitted: float
    read: int = 0
    token_ids: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    first_token: float = 0.0
    seconds: float = 0.0

    @property
    def decoding(self) -> bool:
        """Whether its prompt is read."""
        return self.read == len(self.request.prompt_ids)

    def completion(self, reason: str, now: float | None = None) -> Completion:
        """What it has come to, for a reason: `stop`, `length` or `cancelled`."""
        end = time.perf_counter() if now is None else now
        started = self.first_token or end
        return Completion(
            self.token_ids,
            self.accepted,
            reason,
            seconds=self.seconds,
            latency=end - started,
            time_to_first_token=started - self.submitted,
        )
