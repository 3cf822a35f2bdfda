"""What `prepare` and `inspect` need of a target besides its weights."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any

from dflow_lightning.data.template import ChatEncoder
from dflow_lightning.data.turns import training_rows
from dflow_lightning.errors import InputError
from dflow_lightning.models.pretrained import (
    find_config,
    find_generation_config,
    read_tokenizer,
    stop_ids,
)


def load_tokenizer(path: str, field: str = "model.target.path") -> Any:
    """The tokenizer of a folder or of a hub id.

    Args:
        field: the name of the option or recipe key that holds `path`, for messages.

    Raises:
        InputError: the tokenizer is missing or damaged, or the config beside it is damaged or not
            of a text model.
    """
    find_config(path, field)
    return read_tokenizer(path, field)


def stop_token_ids(target: str, tokenizer: Any) -> tuple[int, ...]:
    """End-of-sequence ids of the generation config, the config and the tokenizer together.

    Those are the ids at which `FrozenTarget` stops; this needs no weights.
    """
    return stop_ids(target, find_generation_config(target), find_config(target), tokenizer)


def embedding_rows(target: str) -> int | None:
    """Rows of a target's embedding by its config; None where there is none, or none that is read.

    A folder with a tokenizer alone has no config.
    """
    return getattr(find_config(target), "vocab_size", None)


def end_token_id(encoder: ChatEncoder, stop_ids: Sequence[int], *, strict: bool = True) -> int:
    """The token that the template ends an answer with.

    Raises:
        InputError: with `strict`, if the target does not stop at that token.
    """
    exchange = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    last = training_rows(encoder, exchange)[0].tokens.input_ids[-1]
    for one in (last, encoder.tokenizer.eos_token_id):
        if one is not None and one in stop_ids:
            return one
    if not strict:
        return last
    raise InputError(
        "target: the chat template ends answers with no token that the target stops at "
        f"({list(stop_ids)}); give a target with a template of its own"
    )


def tokenizer_sha256(tokenizer: Any) -> str:
    """Of the vocabulary and what decides the token ids of a text; the template is not in it."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    added = {str(k): v.content for k, v in tokenizer.added_tokens_decoder.items()}
    how = backend.to_str() if backend is not None else sorted(tokenizer.get_vocab().items())
    return _sha256([how, added])


def template_sha256(tokenizer: Any) -> str:
    """Of the chat template's text."""
    return _sha256(tokenizer.chat_template)


def _sha256(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
