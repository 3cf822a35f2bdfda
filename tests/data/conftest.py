"""Fixtures for the data tests: a small tokenizer with the embedded target's chat template."""

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conversations import question
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from dflow_lightning.data.datamodule import ChatDataModule

TEMPLATE = Path(__file__).resolve().parents[2] / "data/build/chat_template.jinja"
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>"]
CORPUS = [
    "user\nassistant\nsystem\n",
    "Hello there, how are you?\n\nI am fine.\n\n\n\nThank you.",
    "What is two plus three? Two plus three is five.",
    "def add(a, b):\n    return a + b\n\n\n<div>im_end</div>",
]


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE of at most 400 tokens, in which runs of newlines are one token."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=395, initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator(CORPUS * 4, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        additional_special_tokens=SPECIAL,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
    )
    fast.chat_template = TEMPLATE.read_text()
    return fast


@pytest.fixture(scope="session")
def with_template(tokenizer) -> Callable[[str | None], PreTrainedTokenizerFast]:
    """The same tokenizer with another chat template."""

    def change(template: str | None) -> PreTrainedTokenizerFast:
        other = copy.deepcopy(tokenizer)
        other.chat_template = template
        return other

    return change


@pytest.fixture(scope="session")
def tokenizer_dir(tokenizer, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def write(tmp_path) -> Callable[..., Path]:
    """Write rows, given as objects or as raw lines, to a JSONL file."""

    def write_rows(*rows: Any, name: str = "rows.jsonl") -> Path:
        lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
        path = tmp_path / name
        path.write_text("".join(line + "\n" for line in lines))
        return path

    return write_rows


@pytest.fixture
def make_data(tokenizer_dir, write) -> Callable[..., ChatDataModule]:
    """A data module on `train` numbered rows or on given sets, with any other argument set."""

    def make(train: Any = 22, **arguments: Any) -> ChatDataModule:
        if isinstance(train, int):
            train = write(*map(question, range(train)), name="train.jsonl")
        return ChatDataModule(train=train, **{"tokenizer": str(tokenizer_dir)} | arguments)

    return make
