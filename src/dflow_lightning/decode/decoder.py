"""The decoder: an exported drafter beside its target, and prompts in, answers out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from dflow_lightning.decode.engine import STOP_IDS, Acceptance, Engine
from dflow_lightning.decode.request import Answer, Completion, Request, Update
from dflow_lightning.decode.rounds import Backend, RoundBackend
from dflow_lightning.decode.state import Models
from dflow_lightning.decode.tree import check_tree_settings
from dflow_lightning.errors import InputError, check_counts
from dflow_lightning.formats.drafter_folder import load_export, read_export_config
from dflow_lightning.models.device import choose_device
from dflow_lightning.models.eagle3 import AnyDrafter
from dflow_lightning.models.relay import Relay
from dflow_lightning.models.target import FrozenTarget
from dflow_lightning.stopwatch import RoundTimer

CAPACITY_STEP = 128  # engines are made for a multiple of this many tokens, to be used again


class SpeculativeDecoder:
    """Decodes with a target and a drafter; the output is what the target alone would give.

    Example:
        >>> decoder = SpeculativeDecoder.from_export("drafter", target="Qwen/Qwen3-8B")
        >>> decoder.generate([decoder.encode("What is 6 times 7?")])[0].token_ids
    """

    def __init__(
        self,
        target: FrozenTarget,
        drafter: AnyDrafter,
        relay: Relay | None = None,
        *,
        folder: Path | None = None,
    ) -> None:
        """
        Args:
            folder: the export, where its compiled package is to be used.
        """
        self.target, self.drafter, self.relay = target, drafter, relay
        self.folder = folder
        self._engines: dict[tuple, Engine] = {}

    @classmethod
    def from_export(
        cls, folder: str | Path, target: str | Path | FrozenTarget
    ) -> SpeculativeDecoder:
        """Load an exported drafter beside its target.

        Raises:
            InputError: the folder is damaged or was made for another target.
        """
        if not isinstance(target, FrozenTarget):
            target = FrozenTarget.load(str(target))
        folder = Path(folder)
        loaded = load_export(folder, target)
        return cls(target, loaded.drafter, loaded.relay, folder=folder)

    def encode(
        self, prompt: str | Sequence[dict[str, Any]], *, enable_thinking: bool = False
    ) -> list[int]:
        """Token ids of what the user says, or of a conversation, by the target's chat template."""
        from dflow_lightning.data.conversations import check_messages
        from dflow_lightning.data.template import render_prompt

        given = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        messages = check_messages(given, "prompt")
        return render_prompt(
            self.target.tokenizer, messages, enable_thinking=enable_thinking,
            vocab_size=self.target.vocab_size,
        )  # fmt: skip

    def text(self, completion: Completion) -> str:
        """An answer's text, without special tokens."""
        return self.target.tokenizer.decode(completion.token_ids, skip_special_tokens=True)

    def answer(
        self,
        prompt: str | Sequence[dict[str, Any]],
        *,
        enable_thinking: bool = False,
        **options: Any,
    ) -> Answer:
        """Answer one prompt: text in, text out.

        Args:
            prompt: what the user says, or messages `{"role": ..., "content": ...}`.
            enable_thinking: let the target think first, where its chat template knows how.
            options: those of `generate`, such as `max_new_tokens` and `temperature`.

        Raises:
            InputError: the prompt is empty, does not fit the target's context, or an option is out
                of its range.
        """
        if isinstance(prompt, str) and not prompt.strip():
            raise InputError("prompt is empty; say something to the target")
        ids = self.encode(prompt, enable_thinking=enable_thinking)
        completion = self.generate([ids], **options)[0]
        return Answer(self.text(completion), completion)

    def models(self, *, speculative: bool = True, use_rejected: bool = True) -> Models:
        """The parts a round runs: all of them, without relay and carryover, or the target alone.

        Args:
            use_rejected: hand the rejected rows to the next block, by what the drafter has: relay,
                carryover or both.
        """
        if not speculative:
            return Models(self.target, None)
        return Models(
            self.target, self.drafter, self.relay if use_rejected else None,
            use_carryover=use_rejected,
        )  # fmt: skip

    @property
    def keeps_rejected(self) -> bool:
        """Whether the drafter has a relay or carryover, which `use_rejected=False` switches off."""
        return self.models().keeps_rejected

    def engine(
        self,
        *,
        num_slots: int,
        max_length: int,
        use_rejected: bool = True,
        speculative: bool = True,
        acceptance: Acceptance = "match",
        backend: Backend = "eager",
        tree_nodes: int | None = None,
        max_stop_ids: int = STOP_IDS,
    ) -> Engine:
        """An engine of this decoder; the last one of each kind is kept and used again.

        Args:
            max_stop_ids: stop tokens that a request brings; the target's own have room anyway.
        """
        if backend == "package" and not speculative:
            raise InputError(
                "backend is package, which drafts; choose eager or compiled for plain decoding"
            )
        # Before a package is looked for.
        check_tree_settings(tree_nodes, acceptance, backend, speculative=speculative)
        kind = (speculative, use_rejected and self.keeps_rejected, acceptance, backend, tree_nodes)
        engine = self._engines.get(kind)
        if (
            engine is None
            or engine.num_slots != num_slots
            or engine.max_length < max_length
            or engine.max_stop_ids < max_stop_ids
        ):
            limit = self.target.config.max_position_embeddings
            rounded = min(-(-max_length // CAPACITY_STEP) * CAPACITY_STEP, limit)
            engine = Engine(
                self.models(speculative=speculative, use_rejected=use_rejected),
                num_slots=num_slots,
                max_length=max(rounded, 2),
                acceptance=acceptance,
                backend=self._packaged() if backend == "package" else backend,
                tree_nodes=tree_nodes,
                max_stop_ids=max(max_stop_ids, len(self.target.stop_token_ids)),
            )
            self._engines[kind] = engine
        return engine

    def _packaged(self) -> RoundBackend:
        """RoundBackend with the export's own package as the draft step."""
        from dflow_lightning.decode.package import PackagedDraft

        if self.folder is None:
            raise InputError("backend is package; load the decoder from an export to use it")
        return RoundBackend("package", PackagedDraft(self.folder, self.models()))

    def generate(
        self,
        prompts: list[list[int]],
        *,
        max_new_tokens: int = 128,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        seeds: list[int] | None = None,
        use_rejected: bool = True,
        speculative: bool = True,
        stop_token_ids: tuple[int, ...] | None = None,
        batch_size: int = 1,
        acceptance: Acceptance = "match",
        backend: Backend = "eager",
        tree_nodes: int | None = None,
        timer: RoundTimer | None = None,
    ) -> list[Completion]:
        """Decode prompts speculatively.

        Args:
            prompts: token ids.
            temperature: 0 is greedy; above, the target samples.
            top_k, top_p: see `Request`.
            seeds: one a prompt (0, 1, ... by default); a prompt's sample depends on nothing else.
            use_rejected: use relay and carryover, where the drafter has them.
            speculative: false decodes with the target alone.
            stop_token_ids: by default the target's end-of-sequence ids; an empty tuple never stops.
            batch_size: prompts in flight at the same time.
            acceptance: `match` or `rejection`, see `Engine`.
            backend: `eager`, `compiled`, or `package` (the compiled draft step of the export).
            tree_nodes: verify a tree of so many tokens in place of a chain, see `Engine`.
            timer: is given the seconds of each part of each round.

        Raises:
            InputError: an empty prompt, one that leaves no room in the target's context, another
                number of seeds than of prompts, or a value that is none of its option's.
        """
        requests = self.requests(
            prompts, seeds, max_new_tokens=max_new_tokens, temperature=temperature, top_k=top_k,
            top_p=top_p, stop_token_ids=stop_token_ids,
        )  # fmt: skip
        return self.run(
            requests, batch_size=batch_size, use_rejected=use_rejected, speculative=speculative,
            acceptance=acceptance, backend=backend, tree_nodes=tree_nodes, timer=timer,
        )  # fmt: skip

    def generate_plain(self, prompts: list[list[int]], **options: Any) -> list[Completion]:
        """Decode with the target alone, one token a forward: the reference for speed and output.

        Args:
            options: those of `generate`.
        """
        return self.generate(prompts, speculative=False, **options)

    def stream(self, request: Request, **options) -> Iterator[Update]:
        """Decode one request and yield its tokens as they are committed, round by round.

        Args:
            options: those of `engine`, but for `num_slots` and `max_length`.
        """
        engine = self.engine(
            num_slots=1, max_length=self._longest([request]), max_stop_ids=_most_stops([request]),
            **options,
        )  # fmt: skip
        number = engine.submit(request)
        try:
            while engine.busy:
                yield from engine.step()
        finally:  # also when the reader stops listening
            engine.cancel(number)

    @staticmethod
    def requests(prompts: list[list[int]], seeds: list[int] | None, **settings) -> list[Request]:
        """One request a prompt, with settings in common.

        Raises:
            InputError: another number of seeds, or a prompt or setting that is none.
        """
        seeds = list(range(len(prompts))) if seeds is None else seeds
        given: Any = seeds
        if not isinstance(given, Sequence) or len(given) != len(prompts):
            raise InputError(
                f"seeds is {seeds} for {len(prompts)} prompts; give a list with one seed a prompt"
            )
        return [
            Request(prompt_ids=prompt, seed=seed, **settings)
            for prompt, seed in zip(prompts, seeds, strict=True)
        ]

    def run(
        self,
        requests: list[Request],
        *,
        batch_size: int = 1,
        timer: RoundTimer | None = None,
        **options,
    ) -> list[Completion]:
        """Decode requests, `batch_size` at a time; the completions come in their order.

        Args:
            options: those of `engine`.
        """
        if not requests:
            return []
        check_counts(batch_size=batch_size)
        engine = self.engine(
            num_slots=batch_size, max_length=self._longest(requests),
            max_stop_ids=_most_stops(requests), **options,
        )  # fmt: skip
        engine.timer = timer or RoundTimer()
        return engine.run(requests)

    def _longest(self, requests: list[Request]) -> int:
        """Tokens of the longest prompt and answer together, as far as the context goes."""
        longest = max(len(one.prompt_ids) + one.max_new_tokens for one in requests)
        return self.target.within_context(longest)


def _most_stops(requests: Sequence[Request]) -> int:
    return max(STOP_IDS, *(len(one.stop_token_ids or ()) for one in requests))


def load_decoder(
    drafter: str | Path,
    target: str | Path | FrozenTarget | None = None,
    *,
    device: str = "cpu",
    dtype: str = "auto",
) -> SpeculativeDecoder:
    """A decoder of an exported drafter and its target.

    Example:
        >>> decoder = load_decoder("data/tiny-drafters/dflow")
        >>> decoder.answer("What can I cook with rice and beans?").text

    Args:
        drafter: folder that `dflow-train export` wrote, or a published DFlash folder.
        target: hub id or folder of the target, or a loaded one, which stays where it is; by default
            the one that the export names.
        device: where a target is loaded, such as `cuda`; the drafter follows it.
        dtype: `auto` is float32 on a CPU and bfloat16 elsewhere.

    Raises:
        InputError: the drafter is damaged or of another target, or the target cannot be loaded.
    """
    config = read_export_config(Path(drafter))  # before a large target is loaded
    if target is None:
        target = ((config.get("dflow_config") or {}).get("target") or {}).get("name")
    if not isinstance(target, FrozenTarget):
        choose_device(device)
    if target is None:
        raise InputError(f"target is missing: {drafter} names none; give its hub id or folder")
    if not isinstance(target, FrozenTarget):
        target = FrozenTarget.load(str(target), device=device, dtype=dtype)
    return SpeculativeDecoder.from_export(drafter, target)
