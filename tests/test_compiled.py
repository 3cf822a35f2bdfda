"""Compiled steps give the tokens of the eager ones, and compile nothing after warm-up."""

import pytest
import torch

from dflow_lightning.decode import Engine, Request
from dflow_lightning.decode.rounds import RoundBackend, RoundMode

PROMPTS = 8


@pytest.fixture(scope="module")
def requests(half_trained):
    _, batch = half_trained
    text = batch.input_ids_BS[0].tolist()
    settings = [{}, {"temperature": 0.9}, {"temperature": 1.0, "top_k": 30}, {}]
    return [
        Request(
            prompt_ids=text[i : 2 * i + 3],
            max_new_tokens=10 + 3 * i,
            seed=i,
            stop_token_ids=(),
            **settings[i % 4],
        )
        for i in range(PROMPTS)
    ]


@pytest.mark.usefixtures("traced")
@pytest.mark.parametrize("speculative", [True, False])
def test_compiled_equals_eager_and_never_compiles_again(half_trained, requests, speculative):
    module, _ = half_trained
    models = module.decoder().models(speculative=speculative)
    wanted = Engine(models, num_slots=2, max_length=80).run(requests)
    engine = Engine(models, num_slots=2, max_length=80, backend="compiled")
    engine.warm_up()
    with torch.compiler.set_stance("fail_on_recompile"):
        got = engine.run(requests)
    assert [c.token_ids for c in got] == [c.token_ids for c in wanted]
    assert [c.accepted for c in got] == [c.accepted for c in wanted]
    if speculative:
        assert sum(sum(c.accepted) for c in got) > 0


@pytest.mark.slow
def test_generated_code_equals_eager(half_trained, requests):
    """One graph, greedy; `make codegen` generates the code of all of them."""
    models = half_trained[0].decoder().models()
    greedy = [request for request in requests if request.temperature == 0]
    wanted = Engine(models, num_slots=1, max_length=80).run(greedy)
    engine = Engine(models, num_slots=1, max_length=80, backend="compiled")
    engine.warm_up([RoundMode()])
    with torch.compiler.set_stance("fail_on_recompile"):
        got = engine.run(greedy)
    assert [c.token_ids for c in got] == [c.token_ids for c in wanted]
    assert [c.accepted for c in got] == [c.accepted for c in wanted]


def test_every_round_has_a_shape_that_was_warmed_up():
    steps = RoundBackend("compiled")
    shapes = set(steps.shapes(num_slots=6, capacity=700))
    assert shapes == {(rows, length) for rows in (1, 2, 4, 6) for length in (128, 256, 512, 700)}
    for count in range(1, 7):
        for needed in range(1, 701):
            rows, length = steps.rows(count, 6), steps.length(needed, 700)
            assert (rows, length) in shapes
            assert count <= rows <= 2 * count
            assert length >= needed


def test_eager_rounds_compute_only_what_is_in_use():
    steps = RoundBackend("eager")
    assert steps.shapes(6, 700) == []
    assert (steps.rows(3, 6), steps.length(65, 700), steps.length(690, 700)) == (3, 128, 700)


@pytest.mark.parametrize("backend", ["eager", "compiled", "package"])
def test_prompts_are_read_over_no_more_than_they_need(half_trained, monkeypatch, backend):
    """Prompts are read eagerly, whatever rounds are made of."""
    module, _ = half_trained
    steps = RoundBackend(backend, draft_step=lambda models, state, mode: None)
    engine = Engine(module.decoder().models(), num_slots=2, max_length=200, backend=steps)
    lengths, read = [], engine._read
    monkeypatch.setattr(engine, "_read", lambda *args: (lengths.append(args[-1]), read(*args))[1])
    engine.submit(Request(prompt_ids=[5] * 70, stop_token_ids=()))
    with torch.inference_mode():
        engine.admit()
        engine.prefill()
    assert lengths == [128]
