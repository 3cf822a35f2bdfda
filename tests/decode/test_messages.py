"""Messages given to the Python API are read like those of a file."""

from pathlib import Path

import pytest

from dflow_lightning.decode import SpeculativeDecoder
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
        ([{"content": "x"}], "prompt: message 1 has no role"),
        ([{"role": "user", "content": " "}], "prompt: message 1 is blank"),
        ([{"role": "user", "content": "\ud800"}], "prompt: message 1 has the character"),
    ],
)
def test_messages_that_make_no_conversation(decoder, messages, sentence):
    """F38, F39: KeyError, ValueError, or an answer to nothing."""
    with pytest.raises(InputError, match=sentence):
        decoder.answer(messages)
