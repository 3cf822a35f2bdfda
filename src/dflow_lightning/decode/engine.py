"""The decoder: requests in, completions out, with or without a drafter.

Shapes: R requests, P prompt length, T token slots, G key/value heads, E head size.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from dflow_lightning.acceptance import choose, position_uniforms
from dflow_lightning.decode.rounds import (
    DecodeState,
    Models,
    RoundTimer,
    causal,
    commit,
    extend_context,
    round_step,
)
from dflow_lightning.drafter import ContextKV, Drafter
from dflow_lightning.drafter_folder import load_export
from dflow_lightning.errors import InputError
from dflow_lightning.relay import Relay
from dflow_lightning.target import FrozenTarget, TargetOutput


@dataclass(frozen=True)
class Completion:
    """The answer to one prompt.

    Attributes:
        token_ids: generated tokens, the stop token included.
        accepted: tokens gained per round, less one. That is the number of accepted drafts, cut in a
            request's last round at the stop token or the length limit.
        finish_reason: `stop` or `length`.
        seconds: wall time of decoding without the prefill, shared evenly by a batch.
    """

    token_ids: list[int]
    accepted: list[int]
    finish_reason: str
    seconds: float


class SpeculativeDecoder:
    """Decodes with a target and a drafter; the output is what the target alone would give.

    Example:
        >>> decoder = SpeculativeDecoder.from_export("drafter", target="Qwen/Qwen3-8B")
        >>> decoder.generate([decoder.encode("What is 6 times 7?")])[0].token_ids
    """

    def __init__(
        self,
        target: FrozenTarget,
        drafter: Drafter,
        relay: Relay | None = None,
        *,
        first_rejected: bool = True,
    ) -> None:
        self.target, self.drafter, self.relay = target, drafter, relay
        self.first_rejected = first_rejected

    @classmethod
    def from_export(cls, folder: str | Path, target: str | FrozenTarget) -> SpeculativeDecoder:
        """Load an exported drafter beside its target.

        Raises:
            InputError: the folder is damaged or was made for another target.
        """
        if isinstance(target, str):
            target = FrozenTarget.load(target)
        loaded = load_export(Path(folder), target)
        return cls(target, loaded.drafter, loaded.relay, first_rejected=loaded.first_rejected)

    def encode(self, prompt: str, *, enable_thinking: bool = False) -> list[int]:
        """Render one user message with the target's chat template."""
        from dflow_lightning.data.template import render_prompt

        messages = [{"role": "user", "content": prompt}]
        return render_prompt(self.target.tokenizer, messages, enable_thinking=enable_thinking)

    @torch.inference_mode()
    def generate(
        self,
        prompts: list[list[int]],
        *,
        max_new_tokens: int = 128,
        temperature: float = 0.0,
        seeds: list[int] | None = None,
        relay: bool = True,
        stop_token_ids: tuple[int, ...] | None = None,
        batch_size: int = 1,
        timer: RoundTimer | None = None,
    ) -> list[Completion]:
        """Decode prompts speculatively.

        Args:
            prompts: token ids.
            temperature: 0 is greedy; above, the target samples and drafts must match the sample.
            seeds: one a prompt (0, 1, ... by default); a prompt's sample depends on nothing else.
            relay: use the relay, where the drafter has one.
            stop_token_ids: by default the target's end-of-sequence ids; an empty tuple never stops.
            batch_size: prompts decoded together.

        Raises:
            InputError: an empty prompt, or one that leaves no room in the target's context.
        """
        models = Models(
            self.target, self.drafter, self.relay if relay else None, self.first_rejected
        )
        timer = timer or RoundTimer()

        def step(state: DecodeState) -> Tensor:
            return round_step(models, state, timer)

        options = (max_new_tokens, temperature, stop_token_ids)
        return self._run(prompts, seeds, batch_size, options, models, step)

    @torch.inference_mode()
    def generate_plain(
        self,
        prompts: list[list[int]],
        *,
        max_new_tokens: int = 128,
        temperature: float = 0.0,
        seeds: list[int] | None = None,
        stop_token_ids: tuple[int, ...] | None = None,
        batch_size: int = 1,
    ) -> list[Completion]:
        """Decode with the target alone, one token a forward: the reference for speed and output."""

        def step(state: DecodeState) -> Tensor:
            position_R1 = state.anchor_R.unsqueeze(1)
            ids_R1 = state.tokens_RT.gather(1, position_R1)
            output = self._target_forward(state, ids_R1, position_R1)
            chosen_R1 = self._choose(state, output.hidden_BQD, position_R1)
            return commit(state, chosen_R1, torch.zeros_like(state.length_R))

        options = (max_new_tokens, temperature, stop_token_ids)
        return self._run(prompts, seeds, batch_size, options, None, step)

    def _run(
        self,
        prompts: list[list[int]],
        seeds: list[int] | None,
        batch_size: int,
        options: tuple[int, float, tuple[int, ...] | None],
        models: Models | None,
        step: Callable[[DecodeState], Tensor],
    ) -> list[Completion]:
        seeds = list(range(len(prompts))) if seeds is None else seeds
        completions: list[Completion] = []
        for first in range(0, len(prompts), batch_size):
            part = slice(first, first + batch_size)
            state = self._prefill(prompts[part], seeds[part], *options, models)
            prompt_R = [len(prompt) for prompt in prompts[part]]
            accepted: list[list[int]] = [[] for _ in prompt_R]
            start = time.perf_counter()
            while not state.done_R.all():
                for request, gained in zip(accepted, step(state).tolist(), strict=True):
                    if gained:
                        request.append(gained - 1)
            seconds = (time.perf_counter() - start) / len(prompt_R)
            completions += [
                self._complete(state, row, length, accepted[row], seconds)
                for row, length in enumerate(prompt_R)
            ]
        return completions

    @staticmethod
    def _complete(
        state: DecodeState, row: int, prompt: int, accepted: list[int], seconds: float
    ) -> Completion:
        ids = state.tokens_RT[row, prompt : int(state.length_R[row])].tolist()
        stopped = bool(ids) and ids[-1] in state.stop_ids.tolist()
        return Completion(ids, accepted, "stop" if stopped else "length", seconds)

    def _prefill(
        self,
        prompts: list[list[int]],
        seeds: list[int],
        max_new_tokens: int,
        temperature: float,
        stop_token_ids: tuple[int, ...] | None,
        models: Models | None,
    ) -> DecodeState:
        """Run the prompts through the target and commit each one's first token."""
        limit = self.target.config.max_position_embeddings
        for prompt in prompts:
            if not prompt:
                raise InputError("prompt: no tokens; give a text that is not empty")
            if len(prompt) >= limit:
                raise InputError(
                    f"prompt: {len(prompt)} tokens do not fit the target's context of {limit}; "
                    "give a shorter prompt"
                )
        if max_new_tokens < 1:
            raise InputError(f"max_new_tokens is {max_new_tokens}; give 1 or more")
        if temperature < 0:
            raise InputError(
                f"temperature is {temperature}; give 0 for greedy decoding or a positive number"
            )
        state = self._empty_state(prompts, seeds, max_new_tokens, temperature, stop_token_ids)
        width = int(state.length_R.max())
        positions_RP = torch.arange(width, device=self.target.device).expand(len(prompts), -1)
        output = self._target_forward(state, state.tokens_RT[:, :width], positions_RP)
        if models is not None:
            extend_context(models, state, output.taps_BQC, positions_RP)
        last_R1 = (state.length_R - 1).unsqueeze(1)
        index_R1D = last_R1.unsqueeze(-1).expand(-1, -1, output.hidden_BQD.shape[-1])
        hidden_R1D = output.hidden_BQD.gather(1, index_R1D)
        commit(state, self._choose(state, hidden_R1D, last_R1), torch.zeros_like(state.length_R))
        return state

    def _empty_state(
        self,
        prompts: list[list[int]],
        seeds: list[int],
        max_new_tokens: int,
        temperature: float,
        stop_token_ids: tuple[int, ...] | None,
    ) -> DecodeState:
        device, dims = self.target.device, self.drafter.dims
        lengths = [len(prompt) for prompt in prompts]
        end_R = torch.tensor(
            [min(n + max_new_tokens, self.target.config.max_position_embeddings) for n in lengths]
        )
        slots = int(end_R.max()) + dims.block_size
        tokens_RT = torch.zeros(len(prompts), slots, dtype=torch.long)
        for row, prompt in enumerate(prompts):
            tokens_RT[row, : len(prompt)] = torch.tensor(prompt)
        stop_ids = self.target.stop_token_ids if stop_token_ids is None else stop_token_ids
        shape = (len(prompts), dims.num_key_value_heads, slots, dims.head_dim)
        weight = self.drafter.fc.weight
        return DecodeState(
            tokens_RT=tokens_RT.to(device),
            length_R=torch.tensor(lengths, device=device),
            end_R=end_R.to(device),
            done_R=torch.zeros(len(prompts), dtype=torch.bool, device=device),
            temperature_R=torch.full((len(prompts),), float(temperature), device=device),
            uniforms_RT=torch.stack([position_uniforms(seed, slots) for seed in seeds]).to(device),
            stop_ids=torch.tensor(stop_ids, dtype=torch.long, device=device),
            target_cache=self.target.new_cache(slots),
            context=[
                ContextKV(weight.new_zeros(shape), weight.new_zeros(shape))
                for _ in range(dims.num_layers)
            ],
        )

    def _target_forward(
        self, state: DecodeState, ids_RQ: Tensor, positions_RQ: Tensor
    ) -> TargetOutput:
        visible = causal(positions_RQ, state.target_cache.capacity)
        return self.target.forward(
            ids_RQ,
            positions_RQ,
            state.target_cache,
            positions_RQ,
            visible,
            self.drafter.dims.target_layer_ids,
        )

    def _choose(self, state: DecodeState, hidden_R1D: Tensor, position_R1: Tensor) -> Tensor:
        uniforms = state.uniforms_RT.gather(1, position_R1 + 1)
        return choose(self.target.head(hidden_R1D), state.temperature_R, uniforms)
