"""Targets without weights: published shapes, by their configuration alone."""

from pathlib import Path
from typing import Any

from transformers import AutoModelForCausalLM, Qwen3Config

SHAPES = {  # hidden size, layers, query heads, intermediate size, tied embeddings
    "1.7b": (2048, 28, 16, 6144, True),
    "4b": (2560, 36, 32, 9728, True),
    "8b": (4096, 36, 32, 12288, False),
    "small": (256, 6, 4, 512, False),
}
EOS = 151645


def qwen3(size: str) -> Qwen3Config:
    """The configuration of Qwen3-1.7B, 4B or 8B as published; `small` has few of everything."""
    hidden, layers, heads, intermediate, tied = SHAPES[size]
    return Qwen3Config(
        vocab_size=151936 if size != "small" else 2048, hidden_size=hidden,
        intermediate_size=intermediate, num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=8 if size != "small" else 2, head_dim=128, tie_word_embeddings=tied,
        max_position_embeddings=40960, eos_token_id=EOS if size != "small" else 1,
        bos_token_id=None, pad_token_id=0, dtype="bfloat16",
        rope_parameters={"rope_type": "default", "rope_theta": 1000000.0},
    )  # fmt: skip


class Tokenizer:
    """Only what a target is asked for about its tokens."""

    pad_token_id = bos_token_id = eos_token_id = None
    all_special_ids: tuple[int, ...] = ()

    def __init__(self, size: int) -> None:
        self.vocab_size = size

    def __len__(self) -> int:
        return self.vocab_size


def saved(size: str, folder: Path) -> Path:
    """A folder with the target's config.json, which is all that `plan` reads."""
    qwen3(size).save_pretrained(folder / size)
    return folder / size


def from_pretrained(path: Any, *, dtype: Any, attn_implementation: str, **_: Any) -> Any:
    """In place of `AutoModelForCausalLM.from_pretrained`: the folder's shape, no weights."""
    config = Qwen3Config.from_pretrained(path)
    options = {"dtype": dtype, "attn_implementation": attn_implementation}
    return AutoModelForCausalLM.from_config(config, **options), {"missing_keys": []}


def tokenizer_of(path: Any, **_: Any) -> Tokenizer:
    """In place of `AutoTokenizer.from_pretrained`."""
    return Tokenizer(Qwen3Config.from_pretrained(path).vocab_size - 200)
