"""Speculative decoding gives what the target alone gives: token for token, and in distribution."""

import itertools

import pytest
import torch

from dflow_lightning.decode import SpeculativeDecoder, rounds
from dflow_lightning.decode.state import NO_TOKEN, DecodeState
from dflow_lightning.models.dims import DrafterConfig, DrafterDims
from dflow_lightning.models.drafter import Drafter
from dflow_lightning.models.target import FrozenTarget
from dflow_lightning.tensors import acceptance

# Upper 1 % points of the chi-square distribution, from its Wilson-Hilferty approximation.
NORMAL_99 = 2.3263478740408408


def chi_square_99(degrees: int) -> float:
    """The value that a chi-square statistic exceeds once in a hundred times."""
    return degrees * (1 - 2 / (9 * degrees) + NORMAL_99 * (2 / (9 * degrees)) ** 0.5) ** 3


def prompts(count=6):
    """Random token ids of different lengths, the same ones each time."""
    generator = torch.Generator().manual_seed(0)
    sizes = torch.randint(2, 20, (count,), generator=generator).tolist()
    return [torch.randint(0, 256, (size,), generator=generator).tolist() for size in sizes]


@pytest.mark.parametrize("relay", [True, False])
@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
@pytest.mark.parametrize("batch_size", [1, 3])
def test_same_tokens_as_the_target_alone(half_trained, relay, temperature, batch_size):
    module, batch = half_trained
    decoder = module.decoder()
    asked = [batch.input_ids_BS[0, :4].tolist(), batch.input_ids_BS[0, :30].tolist(), *prompts()]
    plain = decoder.generate_plain(asked, max_new_tokens=40, temperature=temperature)
    fast = decoder.generate(
        asked, max_new_tokens=40, temperature=temperature, use_rejected=relay, batch_size=batch_size
    )
    for one, other in zip(plain, fast, strict=True):
        assert one.token_ids == other.token_ids
        assert one.finish_reason == other.finish_reason
        assert sum(other.accepted) + len(other.accepted) == len(other.token_ids) - 1
    if temperature == 0.0:
        assert max(fast[0].accepted) > 0


def test_equals_greedy_generation_of_transformers(half_trained):
    module, _ = half_trained
    for prompt in prompts():
        wanted = module.target.model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            max_new_tokens=30,
            do_sample=False,
        )
        got = module.decoder().generate([prompt], max_new_tokens=30)[0]
        assert got.token_ids == wanted[0, len(prompt) :].tolist()


class Scripted:
    """A drafter whose drafts are known: right up to a given slot, wrong from there."""

    def __init__(self, answer, prompt_length, right):
        self.answer, self.prompt_length, self.right = answer, prompt_length, right

    def __call__(self, models, state, mode, correction_RNKD):
        first = int(state.anchor_R[0]) - self.prompt_length + 1
        truth = (self.answer + [0] * 8)[first : first + 3]
        drafts = [
            token if slot < self.right else (token + 1) % 256 for slot, token in enumerate(truth)
        ]
        return rounds.Drafts(torch.tensor([drafts]))


@pytest.mark.parametrize("right", [0, 1, 2, 3])
def test_never_sometimes_and_always_accepted(half_trained, monkeypatch, right):
    module, batch = half_trained
    prompt = batch.input_ids_BS[0, :10].tolist()
    decoder = module.decoder()
    answer = decoder.generate_plain([prompt], max_new_tokens=41, stop_token_ids=())[0].token_ids
    monkeypatch.setattr(rounds, "draft", Scripted(answer, len(prompt), right))
    completion = decoder.generate([prompt], max_new_tokens=41, stop_token_ids=())[0]
    assert completion.token_ids == answer
    assert completion.accepted[:-1] == [right] * (len(completion.accepted) - 1)


def test_a_stop_token_inside_the_accepted_prefix_ends_the_answer(half_trained, monkeypatch):
    module, batch = half_trained
    prompt = batch.input_ids_BS[0, :10].tolist()
    decoder = module.decoder()
    answer = decoder.generate_plain([prompt], max_new_tokens=41, stop_token_ids=())[0].token_ids
    monkeypatch.setattr(rounds, "draft", Scripted(answer, len(prompt), 3))
    for place in range(1, 12):
        stop = answer[place]
        wanted = answer[: answer.index(stop) + 1]
        completion = decoder.generate([prompt], max_new_tokens=41, stop_token_ids=(stop,))[0]
        assert completion.token_ids == wanted
        assert completion.finish_reason == "stop"


def test_commit_equals_loops():
    generator = torch.Generator().manual_seed(5)

    def draw(high, *shape):
        return torch.randint(0, high, shape, generator=generator)

    for _ in range(1000):
        state = DecodeState(
            tokens_RT=draw(9, 2, 20),
            length_R=draw(8, 2) + 1,
            end_R=draw(6, 2) + 9,
            idle_R=draw(4, 2) == 0,
            sampling=None,
            noise_RTC=None,
            stop_ids_RM=torch.tensor([[7, 8], [8, NO_TOKEN]]),
            target_cache=None,
            context=[],
            rejected=None,
        )
        chosen, accepted = draw(9, 2, 4), draw(4, 2)
        wanted_tokens, wanted_length, wanted_done, wanted_gain = [], [], [], []
        for r in range(2):
            tokens = state.tokens_RT[r].tolist()
            length, done = int(state.length_R[r]), bool(state.idle_R[r])
            gain = []
            for token in [] if done else chosen[r, : int(accepted[r]) + 1].tolist():
                tokens[length] = token
                gain.append(token)
                length += 1
                done = token in ((7, 8), (8,))[r] or length == int(state.end_R[r])
                if done:
                    break
            wanted_tokens.append(tokens)
            wanted_length.append(length)
            wanted_done.append(done)
            wanted_gain.append(gain + [NO_TOKEN] * (4 - len(gain)) + [int(done)])
        assert rounds.commit(state, chosen, accepted).tolist() == wanted_gain
        assert state.tokens_RT.tolist() == wanted_tokens
        assert state.length_R.tolist() == wanted_length
        assert state.idle_R.tolist() == wanted_done


# ------------------------------------------------------------------ distribution at T = 1


@pytest.fixture(scope="module")
def small_vocabulary(tmp_path_factory):
    """A target of five tokens that matter, and a drafter that often guesses them."""
    from targets import random_target

    target = FrozenTarget.load(
        str(random_target(tmp_path_factory.mktemp("small"), seed=3, scale=6.0))
    )
    with torch.no_grad():
        # Logits outside the first five tokens are pushed far down by a constant hidden direction.
        original = target.head
        target.head = lambda hidden: original(hidden).index_fill(-1, torch.arange(5, 320), -1e9)
    torch.manual_seed(0)
    config = DrafterConfig(num_layers=1, block_size=3, target_layer_ids=[0, 1])
    drafter = Drafter(DrafterDims.resolve(config, target)).eval()
    return target, drafter


def exact_distribution(target, prompt):
    """Probability of every sequence of three tokens, computed by the target alone."""
    sequences = list(itertools.product(range(5), repeat=3))
    ids = torch.tensor([prompt + list(s) for s in sequences])
    decoder_output = target.model.model(ids).last_hidden_state
    log_probs = target.head(decoder_output).double().log_softmax(-1)
    start = len(prompt) - 1
    total = sum(
        log_probs[:, start + i].gather(1, ids[:, start + i + 1 :][:, :1]).squeeze(1)
        for i in range(3)
    )
    return sequences, total.exp()


def chi_square(target, drafter, relay=None, samples=4000, batch_size=500, **options):
    """Statistic of sampled against exact sequences, its 1 % limit, and the completions."""
    prompt = [1, 2, 3]
    sequences, probabilities = exact_distribution(target, prompt)
    assert abs(probabilities.sum().item() - 1) < 1e-9
    decoder = SpeculativeDecoder(target, drafter, relay)
    completions = decoder.generate(
        [prompt] * samples,
        max_new_tokens=3,
        temperature=1.0,
        seeds=list(range(samples)),
        stop_token_ids=(),
        batch_size=batch_size,
        **options,
    )
    counts = dict.fromkeys(sequences, 0)
    for completion in completions:
        counts[tuple(completion.token_ids)] += 1
    # Sequences too rare to be counted one by one share one cell.
    cells = [(counts[s], samples * float(p)) for s, p in zip(sequences, probabilities, strict=True)]
    common = [cell for cell in cells if cell[1] >= 5]
    rare = [sum(column) for column in zip(*[cell for cell in cells if cell[1] < 5], strict=True)]
    if rare and rare[1] > 0:
        common.append(tuple(rare))
    statistic = sum((seen - expected) ** 2 / expected for seen, expected in common)
    return statistic, chi_square_99(len(common) - 1), completions


@pytest.mark.parametrize("acceptance", ["match", "rejection"])
@pytest.mark.parametrize("batch_size", [7, 500])
@torch.inference_mode()
def test_sampled_sequences_have_the_targets_distribution(small_vocabulary, acceptance, batch_size):
    samples = 4000 if batch_size > 100 else 1500
    statistic, limit, completions = chi_square(
        *small_vocabulary, samples=samples, batch_size=batch_size, acceptance=acceptance
    )
    assert sum(sum(c.accepted) for c in completions) > samples / 20  # drafts do get accepted
    assert statistic < limit


@torch.inference_mode()
def test_a_broken_acceptance_rule_is_noticed(small_vocabulary, monkeypatch):
    """Accepting one draft too many whatever the target chose must fail the same test."""

    def commit_drafts(drafts, chosen):
        chosen[:, :1] = drafts[:, :1]  # the first draft is taken on trust
        return acceptance.accept(drafts, chosen)

    monkeypatch.setattr(rounds, "accept", commit_drafts)
    statistic, limit, _ = chi_square(*small_vocabulary)
    assert statistic > limit


@torch.inference_mode()
def test_rejection_without_resampling_is_noticed(small_vocabulary, monkeypatch):
    """Drawing the token after a rejection from p itself, not from p - q, must fail as well."""

    def careless(drafts, q, p, accept_u, choice_u):
        return acceptance.accept_or_resample(drafts, q * 1e-9, p, accept_u * 1e9, choice_u)

    monkeypatch.setattr(rounds, "accept_or_resample", careless)
    statistic, limit, _ = chi_square(*small_vocabulary, acceptance="rejection")
    assert statistic > limit


@torch.inference_mode()
def test_reused_draft_noise_is_noticed(small_vocabulary, monkeypatch):
    """Rejection sampling with the acceptance noise as draft noise must fail as well."""
    original = rounds.draw

    def draw(probabilities, noise):
        return original(probabilities, shared[0][:, : noise.shape[1]])

    shared = []
    remember = rounds.draft

    def draft(models, state, mode, correction):
        anchor = state.anchor_R.unsqueeze(1) + 1 + torch.arange(2)
        shared[:] = [state.noise_RTC[..., 1].gather(1, anchor)]
        return remember(models, state, mode, correction)

    monkeypatch.setattr(rounds, "draw", draw)
    monkeypatch.setattr(rounds, "draft", draft)
    statistic, limit, _ = chi_square(*small_vocabulary, acceptance="rejection")
    assert statistic > limit


def test_sampled_output_depends_on_the_seed_alone(half_trained):
    module, _ = half_trained
    decoder = module.decoder()
    asked = prompts()
    alone = [decoder.generate([p], temperature=1.0, seeds=[7])[0].token_ids for p in asked]
    together = decoder.generate(asked, temperature=1.0, seeds=[7] * len(asked), batch_size=6)
    assert [c.token_ids for c in together] == alone
    other = decoder.generate([asked[0]], temperature=1.0, seeds=[8])[0].token_ids
    assert other != alone[0]
