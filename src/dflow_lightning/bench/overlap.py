"""Where the relay helps: every round of a relay-on decoding drafted twice, with and without it.

With the relay on and off a request goes through different rounds, so that their averages also
compare different states. Here both drafts start from the same anchor and the same context, and both
are scored against the answer that the target gives; the gain of a state is exact.

Shapes: R requests, J drafts of a block, K slots, S tokens of a prompt and its answer, V vocabulary.
"""

import itertools
from collections.abc import Callable, Mapping, Sequence

import torch

from dflow_lightning.bench.measure import POOLED, BenchSettings, prompt_seed
from dflow_lightning.bench.overlap_record import Overlap, PairedRound, TwoDrafts
from dflow_lightning.data.prompts import Prompt
from dflow_lightning.decode import Engine, SpeculativeDecoder
from dflow_lightning.decode.rounds import Drafts, Mode, correct, draft
from dflow_lightning.decode.state import DecodeState, Models
from dflow_lightning.decode.steps import Steps
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
    if settings.tree_nodes is not None:
        raise InputError(
            f"overlap: its rounds are chains, but tree_nodes is {settings.tree_nodes}; leave one "
            "of both out"
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
