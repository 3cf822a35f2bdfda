"""Compiled steps give the tokens of the eager ones, and compile nothing after warm-up."""

import pytest
import torch

from dflow_lightning.decode import Engine, Request

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


@pytest.mark.parametrize("speculative", [True, False])
def test_compiled_equals_eager_and_never_compiles_again(half_trained, requests, speculative):
    module, _ = half_trained
    models = module.decoder().models(speculative=speculative)
    wanted = Engine(models, num_slots=3, max_length=80).run(requests)
    engine = Engine(models, num_slots=3, max_length=80, backend="compiled")
    engine.warm_up()
    with torch.compiler.set_stance("fail_on_recompile"):
        got = engine.run(requests)
    assert [c.token_ids for c in got] == [c.token_ids for c in wanted]
    assert [c.accepted for c in got] == [c.accepted for c in wanted]
    if speculative:
        assert sum(sum(c.accepted) for c in got) > 0
