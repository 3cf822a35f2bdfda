"""What `prepare` and `inspect` need of a target besides its weights."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from dflow_lightning.data.template import ChatEncoder
from dflow_lightning.data.turns import training_rows
from dflow_lightning.errors import InputError


def load_tokenizer(path: str, field: str = "model.target.path") -> Any:
    """The tokenizer of a folder or of a hub id.

    Args:
        field: the name of the option or recipe key that holds `path`, for messages.

    Raises:
        InputError: the tokenizer is missing or cannot be loaded.
    """
    folder = Path(path).expanduser()
    # A missing folder that reads like a hub id would be looked up over the network, slowly.
    if not folder.exists() and (path.count("/") != 1 or folder.parent.exists()):
        raise InputError(f"{field}: {path} does not exist; give a model folder or a hub id")
    try:
        return AutoTokenizer.from_pretrained(folder if folder.exists() else path)
    except (OSError, ValueError) as error:
        reason = str(error).splitlines()[0]
        if not folder.exists():
            raise InputError(
                f"{field}: there is no folder {path} in {Path.cwd()}, and as a hub id it could not "
                f"be loaded ({reason}); give the folder's whole path, or a hub id that can be "
                "reached"
            ) from error
        raise InputError(
            f"{field}: {path} has no tokenizer that can be loaded ({reason}); "
            "give the folder of a model with its tokenizer, or a hub id"
        ) from error


def stop_token_ids(target: str, tokenizer: Any) -> tuple[int, ...]:
    """End-of-sequence ids of the generation config, the config and the tokenizer together.

    Those are the ids at which `FrozenTarget` stops; this needs no weights.
    """
    from transformers import AutoConfig, GenerationConfig

    sources = [tokenizer]
    for kind in (GenerationConfig, AutoConfig):
        try:
            sources.append(kind.from_pretrained(target))
        except (OSError, ValueError):  # the folder of a tokenizer alone
            continue
    found: set[int] = set()
    for source in sources:
        value = getattr(source, "eos_token_id", None)
        found |= {value} if isinstance(value, int) else set(value or ())
    return tuple(sorted(found))


def embedding_rows(target: str) -> int | None:
    """Rows of a target's embedding by its config; None where there is none, or none that is read.

    A folder with a tokenizer alone has no config.
    """
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(target).get_text_config().vocab_size
    except (OSError, ValueError, AttributeError):
        return None


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
