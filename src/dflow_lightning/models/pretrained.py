"""A target's files: where they are, its config and its tokenizer, and one sentence for each fault.

A target is named by a folder that `save_pretrained` wrote or by a hub id, and the two look alike.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoTokenizer, GenerationConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from dflow_lightning.errors import InputError

NOT_THE_FILES = (InputError, MemoryError, torch.OutOfMemoryError)


def source_of(path: str, field: str) -> str:
    """What transformers is given for a target: its folder, or the hub id as it is.

    Args:
        field: the name of the option or recipe key that holds `path`, for messages.

    Raises:
        InputError: the folder does not exist.
    """
    folder = Path(path).expanduser()
    if folder.exists():
        return str(folder)
    # A missing folder would be looked up over the network, slowly. `owner/name` may be a hub id,
    # but not where a folder `owner` lies beside us.
    if path.count("/") != 1 or path.startswith((".", "/", "~")) or folder.parent.is_dir():
        raise InputError(
            f"{field}: {path} does not exist; give a folder saved by save_pretrained or a hub id"
        )
    return path


@contextmanager
def reading(path: str, field: str, what: str = "") -> Iterator[None]:
    """Turn what a library raises for missing, damaged or unknown files into one sentence.

    The libraries raise nearly everything for a damaged file, so everything is taken for that.

    Args:
        what: the part that is read, with a blank after it, where it is not the whole target.

    Raises:
        InputError: with the library's reason.
    """
    try:
        yield
    except NOT_THE_FILES:
        raise
    except Exception as error:
        said = " ".join(str(error).split()) or type(error).__name__
        reason = textwrap.shorten(said, 300, placeholder=" ...")
        if Path(path).expanduser().exists():
            advice = "; save or download the model again, with its tokenizer" if what else ""
            raise InputError(
                f"{field}: {what}{path} could not be loaded ({reason}){advice}"
            ) from error
        # A relative folder seen from elsewhere reads like a hub id, and the hub's reason misleads.
        raise InputError(
            f"{field}: there is no folder {path} in {Path.cwd()}, and as a hub id it could not be "
            f"loaded ({reason}); give the folder's whole path, or a hub id that can be reached"
        ) from error


def read_config(path: str, field: str = "target") -> Any:
    """The config of a target that this package can decode with.

    Raises:
        InputError: there is none, it is damaged, or not of a text model.
    """
    source = source_of(path, field)
    if Path(source).is_dir() and not (Path(source) / "config.json").is_file():
        raise InputError(
            f"{field}: {path} holds no config.json; "
            "give a folder saved by save_pretrained or a hub id"
        )
    with reading(path, field, "the config of "):
        config = AutoConfig.from_pretrained(source)
    check_text_model(path, config, field)
    return config


def find_config(path: str, field: str = "target") -> Any | None:
    """As `read_config`, where the weights are elsewhere: None for a tokenizer without a config, and
    for an architecture that only a server knows.
    """
    source = source_of(path, field)
    folder = Path(source)
    if folder.is_dir() and not (folder / "config.json").is_file():
        return None
    with reading(path, field, "the config of "):
        try:
            config = AutoConfig.from_pretrained(source)
        except ValueError:  # the type is missing or unknown
            return None
        except OSError:
            if folder.is_dir():  # not valid JSON
                raise
            return None
    check_text_model(path, config, field)
    return config


def read_tokenizer(path: str, field: str = "target") -> Any:
    """The tokenizer of a folder or hub id.

    Raises:
        InputError: there is none, or it is damaged.
    """
    source = source_of(path, field)
    with reading(path, field, "the tokenizer of "):
        return AutoTokenizer.from_pretrained(source)


def find_generation_config(path: str, field: str = "target") -> Any | None:
    """Generation settings that a target comes with; None where it has none.

    Raises:
        InputError: they are damaged. transformers goes on without them, and so without stop tokens.
    """
    source = source_of(path, field)
    file = Path(source) / "generation_config.json"
    if Path(source).is_dir() and not file.is_file():
        return None
    with reading(path, field, "the generation_config.json of "):
        try:
            return GenerationConfig.from_pretrained(source)
        except OSError:
            if file.is_file():
                raise
            return None


def stop_ids(name: str, *sources: Any) -> tuple[int, ...]:
    """End-of-sequence ids of a generation config, a config and a tokenizer together.

    Args:
        name: of the target, for messages.
        sources: whatever has an `eos_token_id`: none, one or several; None is left out.

    Raises:
        InputError: one of them is no token id.
    """
    found: set[int] = set()
    for source in sources:
        value = getattr(source, "eos_token_id", None)
        ids = value if isinstance(value, list | tuple) else [] if value is None else [value]
        for one in ids:
            if type(one) is not int or one < 0:
                raise InputError(
                    f"target: {name} has the eos_token_id {value!r} in a {type(source).__name__}; "
                    "give a token id, or a list of them"
                )
            found.add(one)
    return tuple(sorted(found))


def check_text_model(path: str, config: Any, field: str = "target") -> None:
    """Refuse a model that wraps a text model with other inputs.

    Raises:
        InputError: it does, as vision-language models do.
    """
    text = config.get_text_config()
    if text is config or config.model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        return
    raise InputError(
        f"{field}: {path} is a {config.model_type} model, which wraps a {text.model_type} text "
        "model with other inputs, such as images, and is not supported; choose a text-only target, "
        "or save the text model and its tokenizer to a folder of their own and give that"
    )
