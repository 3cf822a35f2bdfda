"""The engine: many requests in one batch, each answered as if it were alone."""

import gc
import mmap
import random
from pathlib import Path

import pytest
import torch

from dflow_lightning.decode import Completion, Engine, Request, SpeculativeDecoder, rounds
from dflow_lightning.decode.state import Models
from dflow_lightning.errors import InputError
from dflow_lightning.tensors.acceptance import position_uniforms


def draw_request(rng: random.Random, text: list[int]) -> Request:
    """A request of random length, start, stop tokens and sampling."""
    start, size = rng.randrange(40), rng.randrange(1, 24)
    prompt = text[start : start + size] if rng.random() < 0.6 else rng.choices(range(256), k=size)
    return Request(
        prompt_ids=prompt,
        max_new_tokens=rng.randrange(1, 33),
        temperature=rng.choice([0.0, 0.0, 0.8, 1.0]),
        top_k=rng.choice([0, 0, 20]),
        top_p=rng.choice([1.0, 1.0, 0.9]),
        seed=rng.randrange(2**40),
        stop_token_ids=tuple(rng.sample(range(256), rng.randrange(3))),
    )


def live_memory() -> tuple[int, int]:
    """Bytes of the process's tensors, and of its resident memory (0 where /proc is not there)."""
    gc.collect()
    # Plain tensors alone: asking a lazy object would wake it, and traces leave fake ones behind.
    kinds = (torch.Tensor, torch.nn.Parameter)
    tensors = sum(one.nbytes for one in gc.get_objects() if type(one) in kinds)
    statm = Path("/proc/self/statm")
    pages = int(statm.read_text().split()[1]) if statm.exists() else 0
    return tensors, pages * mmap.PAGESIZE


def alone(models: Models, requests: list[Request], **options) -> list[Completion]:
    """Each request's answer with an engine to itself."""
    engine = Engine(models, num_slots=1, max_length=120, **options)
    return [engine.run([request])[0] for request in requests]


@pytest.mark.parametrize("acceptance", ["match", "rejection"])
def test_random_arrivals_and_cancellations(half_trained, acceptance):
    """Requests come and go; every answer is the one the request gets alone, and no slot is lost."""
    module, batch = half_trained
    rng = random.Random(7)
    models = module.decoder().models()
    text = batch.input_ids_BS[0].tolist()
    requests = [draw_request(rng, text) for _ in range(200 if acceptance == "match" else 100)]
    options = {"acceptance": acceptance, "prefill_chunk": 8}
    wanted = alone(models, requests, **options)
    engine = Engine(models, num_slots=8, max_length=120, **options)
    buffers = {name: t.data_ptr() for name, t in vars(engine.state).items() if torch.is_tensor(t)}
    waiting = list(enumerate(requests))
    number, streamed, completed, cancelled = {}, {}, {}, {}
    early, total = None, len(requests)
    while waiting or engine.busy:
        if early is None and len(completed) >= total // 5:  # everything has run several times
            early = live_memory()
        for _ in range(min(len(waiting), rng.choice([0, 0, 1, 3]))):
            index, request = waiting.pop(0)
            number[engine.submit(request)] = index
        for update in engine.step():
            index = number[update.request_id]
            streamed.setdefault(index, []).extend(update.token_ids)
            if update.completion:
                completed[index] = update.completion
        if number and rng.random() < 0.05:
            victim = rng.choice(list(number))
            gone = engine.cancel(victim)
            if gone is not None:
                cancelled[number[victim]] = gone
    assert len(completed) + len(cancelled) == len(requests)
    assert len(cancelled) > 3
    assert not completed.keys() & cancelled.keys()
    for index, completion in completed.items():
        assert completion.token_ids == wanted[index].token_ids == streamed[index]
        assert completion.accepted == wanted[index].accepted  # the drafts were the same as well
    for index, completion in cancelled.items():
        assert completion.token_ids == wanted[index].token_ids[: len(completion.token_ids)]
        assert completion.finish_reason == "cancelled"
    assert engine._slots == [None] * 8
    assert engine.state.idle_R.all()
    now = {name: t.data_ptr() for name, t in vars(engine.state).items() if torch.is_tensor(t)}
    assert now == buffers  # nothing was allocated again
    tensors, resident = live_memory()
    assert tensors <= early[0]
    assert resident - early[1] < 16 * 2**20


def test_the_last_request_does_not_pay_for_empty_slots(half_trained, monkeypatch):
    """A round computes as many rows as requests are left, wherever they began."""
    module, batch = half_trained
    prompts = [batch.input_ids_BS[0, start : start + 4].tolist() for start in range(4)]
    requests = [
        Request(prompt_ids=prompt, max_new_tokens=size, stop_token_ids=())
        for prompt, size in zip(prompts, (2, 9, 3, 40), strict=True)
    ]
    models = module.decoder().models()
    wanted = alone(models, requests)
    rows = []
    verify = rounds.verify

    def counted(models, state, *rest):
        rows.append(len(state.length_R))
        return verify(models, state, *rest)

    monkeypatch.setattr(rounds, "verify", counted)
    got = Engine(models, num_slots=4, max_length=120).run(requests)
    assert [c.token_ids for c in got] == [c.token_ids for c in wanted]
    assert [c.accepted for c in got] == [c.accepted for c in wanted]
    assert rows[0] == 4
    assert rows[-1] == 1
    assert rows == sorted(rows, reverse=True)


def test_prompts_are_read_in_chunks(half_trained):
    module, batch = half_trained
    models = module.decoder().models()
    prompts = [batch.input_ids_BS[0, :n].tolist() for n in (1, 7, 8, 9, 50)]
    requests = [Request(prompt_ids=p, max_new_tokens=20, stop_token_ids=()) for p in prompts]
    wanted = Engine(models, num_slots=5, max_length=120).run(requests)
    for chunk in (1, 3, 8, 49):
        got = Engine(models, num_slots=5, max_length=120, prefill_chunk=chunk).run(requests)
        assert [c.token_ids for c in got] == [c.token_ids for c in wanted]


def test_others_decode_while_a_long_prompt_is_read(half_trained):
    module, batch = half_trained
    engine = Engine(module.decoder().models(), num_slots=2, max_length=120, prefill_chunk=2)
    short = engine.submit(Request(prompt_ids=[3, 5], max_new_tokens=30, stop_token_ids=()))
    engine.step()
    long = engine.submit(Request(prompt_ids=batch.input_ids_BS[0, :40].tolist(), max_new_tokens=4))
    seen = [u.request_id for _ in range(4) for u in engine.step()]
    assert short in seen
    assert long not in seen


def test_an_answer_ends_at_the_context(half_trained):
    module, batch = half_trained
    limit = module.target.config.max_position_embeddings
    prompt = (batch.input_ids_BS[0].tolist() * 20)[: limit - 5]
    decoder = module.decoder()
    fast = decoder.generate([prompt], max_new_tokens=50, stop_token_ids=())[0]
    slow = decoder.generate_plain([prompt], max_new_tokens=50, stop_token_ids=())[0]
    assert len(fast.token_ids) == 5
    assert fast.token_ids == slow.token_ids
    assert fast.finish_reason == "length"


def test_stream_yields_the_answer_round_by_round(half_trained):
    module, batch = half_trained
    decoder = module.decoder()
    prompt = batch.input_ids_BS[0, :4].tolist()
    request = Request(prompt_ids=prompt, max_new_tokens=30, stop_token_ids=())
    updates = list(decoder.stream(request))
    wanted = decoder.generate([prompt], max_new_tokens=30, stop_token_ids=())[0]
    assert [token for update in updates for token in update.token_ids] == wanted.token_ids
    assert len(updates) == 1 + len(wanted.accepted)
    assert updates[-1].completion.token_ids == wanted.token_ids
    for _ in decoder.stream(request):  # leaving early frees the slot
        break
    assert not any(engine.busy for engine in decoder._engines.values())


def test_an_interrupted_run_leaves_the_engine_usable(half_trained, monkeypatch):
    module, batch = half_trained
    decoder = module.decoder()
    prompt = batch.input_ids_BS[0, :4].tolist()
    wanted = decoder.generate([prompt], max_new_tokens=30)[0].token_ids
    real, calls = Engine.round, []

    def interrupted(self):
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return real(self)

    monkeypatch.setattr(Engine, "round", interrupted)
    with pytest.raises(KeyboardInterrupt):
        decoder.generate([prompt], max_new_tokens=30)
    assert decoder.generate([prompt], max_new_tokens=30)[0].token_ids == wanted


def test_a_marker_in_one_requests_relay_reaches_no_other(half_trained):
    """Rows of one slot's relay filled with huge values change that request's drafts alone."""
    module, batch = half_trained
    text = batch.input_ids_BS[0].tolist()
    requests = [Request(prompt_ids=text[i : i + 6], max_new_tokens=12) for i in range(4)]

    def drafts_of(marked: int | None):
        engine = Engine(module.decoder().models(), num_slots=4, max_length=60)
        for request in requests:
            engine.submit(request)
        engine.step()
        assert engine.state.rejected.valid_BNK[2].any()
        if marked is not None:
            engine.state.rejected.h_BNKD[marked] = 100.0
        state = engine._in_view(4, engine.capacity)
        with torch.no_grad():
            correction = rounds.correct(engine.models, state)
            return rounds.draft(engine.models, state, rounds.RoundMode(), correction).tokens_RJ

    clean, marked = drafts_of(None), drafts_of(2)
    assert not torch.equal(clean[2], marked[2])
    others = [0, 1, 3]
    assert torch.equal(clean[others], marked[others])


def test_a_new_request_never_sees_the_relay_of_its_slots_last_one(half_trained):
    module, batch = half_trained
    engine = Engine(module.decoder().models(), num_slots=1, max_length=60)
    text = batch.input_ids_BS[0].tolist()
    first = Request(prompt_ids=text[2:8], max_new_tokens=30, stop_token_ids=())
    number = engine.submit(first)
    engine.step()
    assert engine.state.rejected.valid_BNK.any()
    engine.cancel(number)
    engine.submit(first)
    engine.admit()
    assert not engine.state.rejected.valid_BNK.any()


def test_noise_belongs_to_the_request():
    assert torch.equal(position_uniforms(5, 40), position_uniforms(5, 40))
    assert not torch.equal(position_uniforms(5, 40), position_uniforms(6, 40))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"prompt_ids": []}, "no tokens"),
        ({"prompt_ids": [1] * 200}, "200 tokens do not fit"),
        ({"prompt_ids": [1, 320]}, "token id 320"),
        ({"prompt_ids": [-1]}, "token id -1"),
        ({"max_new_tokens": 0}, "max_new_tokens is 0"),
        ({"temperature": -0.5}, "temperature is -0.5"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"top_k": -1}, "top_k is -1"),
        ({"top_p": 0.0}, "top_p is 0.0"),
        ({"top_p": 1.5}, "top_p is 1.5"),
        ({"stop_token_ids": tuple(range(20))}, "stop_token_ids has 20"),
    ],
)
def test_bad_requests_are_refused_before_they_queue(half_trained, settings, words):
    module, _ = half_trained
    engine = Engine(module.decoder().models(), num_slots=1, max_length=100)
    with pytest.raises(InputError, match=words):
        engine.submit(Request(**{"prompt_ids": [1]} | settings))
    assert not engine.busy


def test_a_refused_request_takes_back_the_others_of_its_run(half_trained):
    module, _ = half_trained
    engine = Engine(module.decoder().models(), num_slots=1, max_length=100)
    other = engine.submit(Request(prompt_ids=[1, 2], max_new_tokens=3, stop_token_ids=()))
    with pytest.raises(InputError, match="no tokens"):
        engine.run([Request(prompt_ids=[1]), Request(prompt_ids=[])])
    updates = []
    while engine.busy:
        updates += engine.step()
    assert {update.request_id for update in updates} == {other}


def test_bad_engines_are_refused(half_trained):
    module, _ = half_trained
    models = module.decoder().models()
    for settings, words in (
        ({"num_slots": 0}, "num_slots is 0"),
        ({"max_length": 1}, "max_length is 1"),
        ({"max_length": 10**6}, "max_length is 1000000"),
        ({"prefill_chunk": 0}, "prefill_chunk is 0"),
        ({"backend": "fast"}, "backend is fast"),
    ):
        with pytest.raises(InputError, match=words):
            Engine(models, **{"num_slots": 1, "max_length": 50} | settings)


def test_a_decoder_uses_its_engine_again(half_trained):
    module, _ = half_trained
    decoder = SpeculativeDecoder(module.target, module.drafter, module.relay)
    decoder.generate([[1, 2, 3]], max_new_tokens=5)
    (engine,) = decoder._engines.values()
    decoder.generate([[1, 2, 3, 4]], max_new_tokens=9)
    assert list(decoder._engines.values()) == [engine]
