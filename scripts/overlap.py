"""Where the relay helps: every round of a relay-on decoding drafted twice, with and without it.

    python scripts/overlap.py --drafter data/tiny-drafters/dflow --out runs/overlap.html

With the relay on and off a request goes through different rounds, so that their averages also
compare different states. Here both drafts start from the same anchor and the same context, and both
are scored against the answer that the target gives; the gain of a state is exact.

Shapes: R requests, J drafts of a block, K slots, S tokens of a prompt and its answer, V vocabulary.
"""

import argparse
import itertools
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

import torch
from overlap_page import write_page
from overlap_record import Overlap, PairedRound, TwoDrafts

from dflow_lightning import files
from dflow_lightning.bench.measure import POOLED, BenchSettings, prompt_seed
from dflow_lightning.bench.suite import TINY_SUITE
from dflow_lightning.bench.table import short_names
from dflow_lightning.data.prompts import Prompt, read_prompts
from dflow_lightning.decode import Engine, SpeculativeDecoder
from dflow_lightning.decode.rounds import Drafts, RoundBackend, RoundMode, correct, draft
from dflow_lightning.decode.state import DecodeState, Models
from dflow_lightning.errors import InputError
from dflow_lightning.models.target import FrozenTarget


class PairedDraft:
    """A draft step that drafts with the relay, and once more without it for the record.

    Made for an engine of one slot.
    """

    def __init__(self) -> None:
        self.drafted: list[TwoDrafts] = []

    def clear(self) -> None:
        """Before the next request."""
        self.drafted.clear()

    def __call__(self, models: Models, state: DecodeState, mode: RoundMode) -> Drafts:
        """What `rounds.draft` gives with the relay."""
        on = draft(models, state, mode, correct(models, state))
        off = draft(models, state, mode, None)
        assert state.rejected is not None
        # The last J slots draft: all but the anchor's, or all where a slot predicts the next token.
        with_row_J = state.rejected.valid_BNK[0, 0, -on.tokens_RJ.shape[1] :]
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
        InputError: no drafter has a relay.
    """
    if all(decoder.relay is None for decoder in decoders.values()):
        raise InputError("drafter: none has a relay; give one that has")
    found: list[Overlap] = []
    for temperature, (name, decoder) in itertools.product(settings.temperature, decoders.items()):
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
            backend=RoundBackend("eager", self._record),
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
            left = len(answer) - start
            rounds.append(PairedRound(before, drafted, answer[span], entropies[span], left))
        return rounds, entropies


def answer_entropies(
    target: FrozenTarget, prompt_ids: list[int], answer_ids: list[int]
) -> list[float]:
    """Nats of the target's distribution at each position of an answer, at temperature 1."""
    ids_1S = torch.tensor([prompt_ids + answer_ids], device=target.device)
    logits_SV = target.model(ids_1S).logits[0, len(prompt_ids) - 1 : -1]
    return torch.distributions.Categorical(logits=logits_SV.float()).entropy().tolist()


def main(
    target: str, drafter: list[Path], temperature: list[float], per_family: int,
    max_new_tokens: int, out: Path,
) -> None:  # fmt: skip
    """Measure, print the gain by the round before, and write the page and its records."""
    frozen = FrozenTarget.load(target)
    decoders = {str(one): SpeculativeDecoder.from_export(one, frozen) for one in drafter}
    limit = frozen.config.max_position_embeddings - 1
    prompts = read_prompts(
        frozen.tokenizer, Path(target) / TINY_SUITE, per_family=per_family, max_length=limit,
        field="suite",
    )  # fmt: skip
    settings = BenchSettings(temperature=temperature, max_new_tokens=max_new_tokens)
    records = measure_overlap(
        decoders, prompts, settings, progress=lambda text: print(text, file=sys.stderr)
    )
    names = short_names([one.drafter for one in records])
    print("gain in accepted drafts +- standard error (rounds), by accepted drafts before")
    for one in records:
        cells = [
            f"{before}: {gain[0]:+.2f} +- {gain[1]:.2f} ({rounds})"
            for before, (gain, rounds) in enumerate(zip(one.gain(), one.rounds, strict=True))
            if gain is not None
        ]
        print(f"{names[one.drafter]} T={one.temperature:g} {one.family}  {'  '.join(cells)}")
    content = {"overlap": [asdict(one) for one in records]}
    files.write_text(out.with_suffix(".json"), json.dumps(content, indent=1) + "\n")
    write_page(out, records, names)
    print(f"page written to {out}, records to {out.with_suffix('.json')}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--target", default="data/tiny-qwen3")
    parser.add_argument("--drafter", type=Path, action="append", required=True)
    parser.add_argument("--temperature", type=float, nargs="+", default=[0.0, 1.0])
    parser.add_argument("--per-family", type=int, default=32)
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--out", type=Path, default=Path("runs/overlap.html"))
    main(**vars(parser.parse_args()))
