"""Answers by the target in this process: the decoding engine without a drafter."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from dflow_lightning.data.turns import TargetAnswer
from dflow_lightning.decode.engine import Engine
from dflow_lightning.decode.request import Request
from dflow_lightning.decode.state import Models
from dflow_lightning.errors import InputError
from dflow_lightning.models.target import FrozenTarget
from dflow_lightning.prepare.dialogue import Ask, Dialogue, Done, Failed, check_room


class EngineGenerator:
    """Continuous batching on one device; an answer does not depend on its neighbours.

    Args:
        concurrency: dialogues in flight at the same time.
        max_length: longest prompt and answer together, in tokens.
    """

    def __init__(self, target: FrozenTarget, *, concurrency: int, max_length: int) -> None:
        self._limit = target.config.max_position_embeddings
        self.target = target
        self._engine = Engine(
            Models(target, None), num_slots=concurrency, max_length=min(max_length, self._limit)
        )

    def describe(self) -> dict[str, Any]:
        """Its kind and the type of its numbers."""
        return {"kind": "engine", "dtype": str(self.target.dtype).removeprefix("torch.")}

    @torch.inference_mode()
    def run(self, dialogues: Iterable[Dialogue], done: Done, failed: Failed) -> None:
        """See `Generator`; only as many dialogues are taken as there are slots."""
        waiting = iter(dialogues)
        flying: dict[int, Dialogue] = {}
        more = True
        try:
            while more or flying:
                while more and len(flying) < self._engine.num_slots:
                    dialogue = next(waiting, None)
                    more = dialogue is not None
                    if dialogue is not None:
                        self._ask(dialogue, flying, done, failed)
                for update in self._engine.step():
                    if update.completion is None:
                        continue
                    dialogue = flying.pop(update.request_id)
                    finished = update.completion.finish_reason == "stop"
                    dialogue.add(TargetAnswer(update.completion.token_ids, finished))
                    self._ask(dialogue, flying, done, failed)
        finally:  # interrupted: what is in flight is asked again by the next run
            for number in flying:
                self._engine.cancel(number)

    def _ask(
        self, dialogue: Dialogue, flying: dict[int, Dialogue], done: Done, failed: Failed
    ) -> None:
        """Submit the next prompt of a dialogue, or report it."""
        try:
            ask = dialogue.next()
            if ask is None:
                done(dialogue)
            else:
                check_room(ask, self._limit, self.target.name)
                flying[self._engine.submit(_request(ask))] = dialogue
        except InputError as error:
            failed(dialogue, str(error), again=False)


def _request(ask: Ask) -> Request:
    return Request(
        prompt_ids=ask.prompt_ids,
        max_new_tokens=ask.max_new_tokens,
        temperature=ask.temperature,
        top_p=ask.top_p,
        seed=ask.seed,
    )
