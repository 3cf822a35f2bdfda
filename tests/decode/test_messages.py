"""Messages given to the Python API are read like those of a file."""

from pathlib import Path

import numpy as np
import pytest
import torch

from dflow_lightning.decode import Engine, Request, SpeculativeDecoder
from dflow_lightning.errors import InputError
from dflow_lightning.models.target import FrozenTarget

DATA = Path(__file__).resolve().parents[2] / "data"


@pytest.fixture(scope="module")
def decoder() -> SpeculativeDecoder:
    target = FrozenTarget.load(str(DATA / "tiny-qwen3"))
    return SpeculativeDecoder.from_export(DATA / "tiny-drafters/dflow", target)


def test_text_parts_are_joined(decoder):
    """F31: the target was given the list as Python prints it."""
    parts = [{"type": "text", "text": "What is "}, {"type": "text", "text": "2?"}]
    assert decoder.encode([{"role": "user", "content": parts}]) == decoder.encode("What is 2?")


@pytest.mark.parametrize(
    ("messages", "sentence"),
    [
        ([], "prompt: messages is an empty list"),
        (None, "prompt is None; give a text, or a list of messages"),
        (3, "prompt is 3; give a text, or a list of messages"),
        ({"role": "user", "content": "x"}, "give a text, or a list of messages"),
        ([{"content": "x"}], "prompt: message 1 has no role"),
        ([{"role": "user", "content": " "}], "prompt: message 1 is blank"),
        ([{"role": "user", "content": "\ud800"}], "prompt: message 1 has the character"),
    ],
)
def test_messages_that_make_no_conversation(decoder, messages, sentence):
    """F38, F39: KeyError, ValueError, or an answer to nothing."""
    with pytest.raises(InputError, match=sentence):
        decoder.answer(messages)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"seeds": [1]}, r"seeds is \[1\] for 2 prompts; give a list with one seed a prompt"),
        ({"seeds": 1}, "seeds is 1 for 2 prompts"),
        ({"seeds": [1, 2**70]}, "seed is 1180591620717411303424; give a whole number"),
        ({"seeds": [1, 1.5]}, "seed is 1.5; give a whole number"),
        ({"prompts": [40, 60]}, "prompt: 40 is no list of token ids"),
        ({"prompts": ["hello"]}, "prompt: 'hello' is no list of token ids; encode a text first"),
        ({"prompts": [torch.tensor([1])]}, r"prompt: tensor\(\[1\]\) is no list of token ids"),
        ({"prompts": [[1.5]]}, r"prompt: \[1.5\] is no list of token ids"),
        ({"max_new_tokens": "4"}, "max_new_tokens is '4'; give 1 or more"),
        ({"temperature": None}, "temperature is None; give 0 for greedy"),
        ({"top_k": 2.5}, "top_k is 2.5; give 0"),
        ({"top_k": 2**70}, "top_k is 1180591620717411303424; give 0"),
        ({"top_p": "all"}, "top_p is 'all'; give a number"),
        ({"batch_size": 0}, "batch_size is 0; give 1 or more"),
        ({"acceptance": "exact"}, "acceptance is exact; choose match or rejection"),
        ({"stop_token_ids": 5}, "stop_token_ids is 5; give a tuple of token ids"),
        ({"tree_nodes": "8"}, "tree_nodes is '8'; give 2 to"),
    ],
)
def test_f38_values_that_are_none_of_an_option(decoder, options, sentence):
    """F38: ValueError, TypeError or RuntimeError of a library, or taken for something else."""
    with pytest.raises(InputError, match=sentence):
        decoder.generate(**{"prompts": [[40, 60], [7]], "max_new_tokens": 2, **options})


def test_f38_numbers_of_numpy_are_numbers(decoder):
    """F38: they come out of data frames; a bool or float is none of them."""
    prompt = list(np.array([40, 60, 7]))
    wanted = decoder.generate([[40, 60, 7]], max_new_tokens=3, temperature=0.5, seeds=[3])
    found = decoder.generate(
        [prompt], max_new_tokens=np.int64(3), temperature=np.float32(0.5), seeds=[np.int32(3)]
    )
    assert found[0].token_ids == wanted[0].token_ids


def test_f44_as_many_stop_tokens_as_there_are(decoder, monkeypatch):
    """F44: more than 16 were refused with advice that no command could take."""
    plain = decoder.generate([[40, 60, 7]], max_new_tokens=12, stop_token_ids=())[0]
    last = plain.token_ids[3]
    many = (*range(1000, 1030), last)
    assert not {*many[:-1]} & {*plain.token_ids}
    options = {"max_new_tokens": 12, "stop_token_ids": many}
    found = decoder.generate([[40, 60, 7]], **options)[0]
    assert found.finish_reason == "stop"
    assert found.token_ids == plain.token_ids[: plain.token_ids.index(last) + 1]
    request = Request(prompt_ids=[40, 60, 7], **options)
    assert [*decoder.stream(request)][-1].completion.token_ids == found.token_ids
    monkeypatch.setattr(FrozenTarget, "stop_token_ids", many)  # of the target: `prepare` and all
    engine = Engine(decoder.models(speculative=False), num_slots=1, max_length=32)
    (own,) = engine.run([Request(prompt_ids=[40, 60, 7], max_new_tokens=12)])
    assert own.token_ids == found.token_ids
