"""The engine: a queue of requests, a fixed number of slots, and rounds over all active slots.

A request's answer does not depend on its neighbours, the number of slots or the order of arrival:
its tokens, caches, relay and noise are its own, and a row of a batch reads nothing of another.

Shapes: R requests, Q tokens of a prompt chunk, K slots of a block.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, get_args

import torch
from torch import Tensor

from dflow_lightning.decode import rounds
from dflow_lightning.decode.request import Completion, Request, Update
from dflow_lightning.decode.rounds import Backend, RoundBackend, RoundMode, rounded_length
from dflow_lightning.decode.state import NO_TOKEN, NOT_FINITE, DecodeState, Models
from dflow_lightning.decode.tree import candidate_pairs, check_tree
from dflow_lightning.errors import InputError, check_counts
from dflow_lightning.stopwatch import RoundTimer
from dflow_lightning.tensors.acceptance import TokenSampling

Acceptance = Literal["match", "rejection"]
STOP_IDS = 16  # room for stop tokens of a request that brings its own
ROUND_MODES = (RoundMode(), RoundMode(sampled=True), RoundMode(sampled=True, filtered=True))


@dataclass
class Flight:
    """A request that is waiting or occupies a slot.

    Attributes:
        submitted, first_token: `time.perf_counter` values; 0 until the event happens.
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
        """The completion so far; `reason` is `stop`, `length` or `cancelled`."""
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


class Engine:
    """Decodes many requests at once, each as if it were alone.

    Args:
        models: target, drafter and relay; without a drafter the engine decodes plainly.
        num_slots: requests in flight at the same time.
        max_length: longest prompt and answer together, in tokens.
        acceptance: `match` accepts drafts that equal the target's choice, greedy or sampled;
            `rejection` draws drafts from the drafter and corrects by rejection sampling.
        backend: `eager`, `compiled` rounds, or steps made elsewhere.
        tree_nodes: tokens that the target verifies in a round, the anchor among them, as a tree of
            the most probable drafts; None is a chain of the block's.
        prefill_chunk: prompt tokens a request reads between two rounds.
        max_stop_ids: stop tokens a request may have; None is room for the target's own, and 16.
    """

    def __init__(
        self,
        models: Models,
        *,
        num_slots: int,
        max_length: int,
        acceptance: Acceptance = "match",
        backend: Backend | RoundBackend = "eager",
        tree_nodes: int | None = None,
        prefill_chunk: int = 512,
        max_stop_ids: int | None = None,
    ) -> None:
        limit = models.target.config.max_position_embeddings
        check_counts(
            num_slots=num_slots, prefill_chunk=prefill_chunk, max_stop_ids=max_stop_ids
        )  # fmt: skip
        if acceptance not in get_args(Acceptance):
            raise InputError(f"acceptance is {acceptance}; choose match or rejection")
        if not 2 <= max_length <= limit:
            raise InputError(
                f"max_length is {max_length}; give 2 up to the target's context of {limit}"
            )
        if tree_nodes is not None:
            check_tree(tree_nodes, models, acceptance, backend)
            models = replace(
                models, tree_nodes=tree_nodes,
                tree_pairs=candidate_pairs(tree_nodes, models.target.device),
            )  # fmt: skip
        self.models, self.num_slots, self.max_length = models, num_slots, max_length
        self.prefill_chunk = prefill_chunk
        self.max_stop_ids = max_stop_ids or max(STOP_IDS, len(models.target.stop_token_ids))
        self.backend = RoundBackend(backend) if isinstance(backend, str) else backend
        # The last block of a full request may pass its end; noise is read one position further.
        self.capacity = max_length + models.verified_tokens + 1
        rejection = acceptance == "rejection" and models.drafter is not None
        self._rejection = rejection
        self._start_over()
        self._ids = itertools.count()
        self.timer = RoundTimer()

    @torch.inference_mode(False)  # slots are released outside of it, too
    def _start_over(self) -> None:
        self.state = DecodeState.empty(
            self.models, self.num_slots, self.capacity, self.max_stop_ids,
            rejection=self._rejection,
        )  # fmt: skip
        self._slots: list[Flight | None] = [None] * self.num_slots
        self._queue: deque[Flight] = deque()

    # ---------------------------------------------------------------- requests

    def submit(self, request: Request) -> int:
        """Queue a request; returns its number.

        Raises:
            InputError: the prompt does not fit, or a setting is out of its range.
        """
        request.check(self.models.target, self.max_length)
        stop = request.stop_token_ids
        stop = self.models.target.stop_token_ids if stop is None else stop
        if len(stop) > self.max_stop_ids:
            raise InputError(
                f"stop_token_ids has {len(stop)} tokens, but the engine was made for "
                f"{self.max_stop_ids}; raise max_stop_ids"
            )
        request = Request(**vars(request) | {"stop_token_ids": tuple(stop)})
        flight = Flight(next(self._ids), request, time.perf_counter())
        self._queue.append(flight)
        return flight.id

    def cancel(self, request_id: int) -> Completion | None:
        """End a request now; returns its completion so far, None for an unknown id."""
        for waiting in self._queue:
            if waiting.id == request_id:
                self._queue.remove(waiting)
                return Completion([], [], "cancelled")
        for slot, flight in self._flights():
            if flight.id == request_id:
                self._release(slot)
                return flight.completion("cancelled")
        return None

    @property
    def busy(self) -> bool:
        """Whether any request is waiting or active."""
        return bool(self._queue) or any(self._slots)

    @torch.inference_mode()
    def run(self, requests: Sequence[Request]) -> list[Completion]:
        """Decode all requests; the completions come in their order."""
        found: dict[int, Completion] = {}
        numbers: list[int] = []
        try:
            for request in requests:
                numbers.append(self.submit(request))
            while self.busy:
                found |= {u.request_id: u.completion for u in self.step() if u.completion}
        finally:  # refused or interrupted: the engine must not go on with the others
            for number in numbers:
                self.cancel(number)
        return [found[number] for number in numbers]

    def _release(self, slot: int) -> None:
        self._slots[slot] = None
        self.state.idle_R[slot] = True
        self.state.length_R[slot] = 1  # what a free slot computes is short and thrown away

    # ---------------------------------------------------------------- one step

    @torch.inference_mode()
    def step(self) -> list[Update]:
        """Admit requests, read a chunk of each new prompt, and run one round.

        Returns:
            an update for each request that gained tokens or ended.

        Raises:
            InputError: the target's logits are not finite; all requests are cancelled.
        """
        self.admit()
        updates = self.prefill()  # before the round, which a finished prompt already takes part in
        return updates + self.round()

    @torch.inference_mode()
    def warm_up(self, modes: Sequence[RoundMode] = ROUND_MODES) -> None:
        """Run throwaway rounds, so that everything a round can need is compiled in advance.

        Args:
            modes: of the requests that will come; a mode that was not warmed up compiles when its
                first request arrives.

        Raises:
            RuntimeError: requests are in flight.
        """
        if self.busy:
            raise RuntimeError("an engine warms up before its first request")
        for mode in modes:
            request = Request(
                prompt_ids=[0],
                max_new_tokens=self.max_length - 1,
                temperature=1.0 if mode.sampled else 0.0,
                top_p=0.9 if mode.filtered else 1.0,
                stop_token_ids=(),
            )
            number = self.submit(request)
            for _ in range(3):  # the first round has no relay yet
                self.step()
            self.cancel(number)
            mode = replace(mode, rejection=self._rejection and mode.sampled)
            for count, length in self.backend.shapes(self.num_slots, self.capacity):
                # All slots are free: their results are discarded.
                state = self._in_view(count, length)
                self.backend.round(self.models, state, mode, self.timer)

    def admit(self) -> None:
        """Put waiting requests into free slots, in their order."""
        for slot, flight in enumerate(self._slots):
            if flight is None and self._queue:
                arriving = self._queue.popleft()
                self._slots[slot] = arriving
                self.state.admit(slot, arriving.request, self.max_length)

    def prefill(self) -> list[Update]:
        """Read the next chunk of every unread prompt; a finished prompt gets its first token."""
        reading = [(s, f) for s, f in self._flights() if not f.decoding]
        if not reading:
            return []
        device = self.models.target.device
        chunks = [min(len(f.request.prompt_ids) - f.read, self.prefill_chunk) for _, f in reading]
        rows_R = torch.tensor([slot for slot, _ in reading], device=device)
        start_R1 = torch.tensor([[f.read] for _, f in reading], device=device)
        # Rows beyond a shorter prompt are never visible: later tokens overwrite them first.
        positions_RQ = start_R1 + torch.arange(max(chunks), device=device)
        positions_RQ = positions_RQ.clamp(max=self.capacity - 1)
        needed = max(flight.read for _, flight in reading) + max(chunks)
        hidden_RQD = self._read(rows_R, positions_RQ, rounded_length(needed, self.capacity))
        for (_, flight), size in zip(reading, chunks, strict=True):
            flight.read += size
        ended = [i for i, (_, flight) in enumerate(reading) if flight.decoding]
        if not ended:
            return []
        last = torch.tensor([chunks[i] - 1 for i in ended], device=device)
        hidden_R1D = hidden_RQD[torch.tensor(ended, device=device), last].unsqueeze(1)
        mode = self._mode([reading[i] for i in ended])
        report = self._first_tokens(rows_R[ended], hidden_R1D, mode)
        now = time.perf_counter()
        updates = []
        for i, row in zip(ended, report, strict=True):
            slot, flight = reading[i]
            flight.first_token = now
            updates.append(self._update(slot, flight, row, now, from_round=False))
        return updates

    def _read(self, rows_R: Tensor, positions_RQ: Tensor, length: int) -> Tensor:
        """Run prompt tokens through the target and the drafter's context; hidden states."""
        models, state = self.models, self.state
        cache = state.target_cache
        cache.rows_B, cache.length = rows_R, length
        ids_RQ = state.tokens_RT[rows_R.unsqueeze(1), positions_RQ]
        layer_ids = models.drafter.dims.target_layer_ids if models.drafter is not None else []
        output = models.target.forward(
            ids_RQ, positions_RQ, cache, positions_RQ, rounds.causal(positions_RQ, length),
            layer_ids,
        )  # fmt: skip
        cache.rows_B = None
        next_ids_RQ = state.tokens_RT[
            rows_R.unsqueeze(1), (positions_RQ + 1).clamp(max=self.capacity - 1)
        ]
        # Relative to the chunk: beyond it while the prompt goes on.
        last_R = state.length_R[rows_R] - 1 - positions_RQ[:, 0]
        rounds.extend_context(
            models, state, rows_R, output.taps_BQC, positions_RQ, next_ids_RQ, last_R
        )
        return output.hidden_BQD

    def _first_tokens(self, rows_R: Tensor, hidden_R1D: Tensor, mode: RoundMode) -> list[list[int]]:
        """Choose and commit the token after each prompt; the requests decode from here on."""
        state = self.state
        sampling = TokenSampling(
            *(getattr(state.sampling, name)[rows_R] for name in vars(state.sampling))
        )
        position_R = state.length_R[rows_R]
        noise_R1 = state.noise_RTC[rows_R, position_R, :1]
        logits_R1V = self.models.target.head(hidden_R1D)
        token_R = rounds.chosen_tokens(logits_R1V, sampling, noise_R1, mode).squeeze(1)
        state.tokens_RT[rows_R, position_R] = token_R
        state.length_R[rows_R] = position_R + 1
        stopped_R = (token_R.unsqueeze(1) == state.stop_ids_RM[rows_R]).any(1)
        idle_R = stopped_R | (position_R + 1 >= state.end_R[rows_R])
        state.idle_R[rows_R] = idle_R
        status_R = idle_R.long().masked_fill(~rounds.finite(logits_R1V).squeeze(1), NOT_FINITE)
        return torch.stack([token_R, status_R], dim=1).tolist()

    def close_gaps(self) -> None:
        """Move requests from the last slots to free ones, so that a round computes fewer rows."""
        for free in range(self.num_slots):
            last = max((slot for slot, _ in self._flights()), default=-1)
            if self._slots[free] is None and free < last:
                self.state.move(last, free)
                self._slots[free] = self._slots[last]
                self._release(last)

    def round(self) -> list[Update]:
        """Draft, verify and commit one block for every request that decodes."""
        if not self.backend.static:  # which computes all slots anyway
            self.close_gaps()
        decoding = [(slot, flight) for slot, flight in self._flights() if flight.decoding]
        if not decoding:
            return []
        start = time.perf_counter()
        state = self._in_use(decoding)
        report = self.backend.round(self.models, state, self._mode(decoding), self.timer).tolist()
        now = time.perf_counter()
        updates = []
        for slot, flight in decoding:
            # Shared equally, so that the seconds of all requests add up to the time of all rounds.
            flight.seconds += (now - start) / len(decoding)
            updates.append(self._update(slot, flight, report[slot], now, from_round=True))
        return updates

    def _in_use(self, decoding: list[tuple[int, Flight]]) -> DecodeState:
        """The part of the state that a round must compute."""
        count = decoding[-1][0] + 1
        tokens = max(
            len(f.request.prompt_ids) + len(f.token_ids) for s, f in self._flights() if s < count
        )
        return self._in_view(
            self.backend.rows(count, self.num_slots),
            self.backend.length(tokens + self.models.verified_tokens, self.capacity),
        )

    def _in_view(self, count: int, length: int) -> DecodeState:
        """The first requests and token slots of the state, and the target's cache read as far."""
        self.state.target_cache.length = length
        return self.state.first(count, length)

    def _mode(self, decoding: list[tuple[int, Flight]]) -> RoundMode:
        requests = [flight.request for _, flight in decoding]
        sampled = any(one.temperature > 0 for one in requests)
        filtered = any(one.top_k > 0 or one.top_p < 1 for one in requests)
        return RoundMode(sampled, sampled and filtered, self._rejection and sampled)

    def _flights(self) -> Iterator[tuple[int, Flight]]:
        return ((slot, flight) for slot, flight in enumerate(self._slots) if flight is not None)

    def _update(
        self, slot: int, flight: Flight, row: list[int], now: float, *, from_round: bool
    ) -> Update:
        *tokens, done = row
        if done == NOT_FINITE:
            self._start_over()  # a masked NaN in a cache would still reach the next request
            raise self.models.target.not_finite()
        gained = [token for token in tokens if token != NO_TOKEN]
        flight.token_ids += gained
        if from_round:  # one of a round's tokens is the bonus token; a prompt's first is no round
            flight.accepted.append(len(gained) - 1)
        if not done:
            return Update(flight.id, gained, None)
        stop = flight.request.stop_token_ids or ()
        self._release(slot)
        reason = "stop" if flight.token_ids[-1] in stop else "length"
        return Update(flight.id, gained, flight.completion(reason, now))
