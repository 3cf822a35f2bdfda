"""The drafter's folder against the engine's settings, before any process or weight is spent on it.

Runs where vLLM has put its configuration together, in the process the user has started. What would
make the relay wrong is refused in one sentence; what only costs acceptance is a warning. Output
is the target's own in every case.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import Tensor

from dflow_lightning.errors import InputError
from dflow_lightning.formats.relay_folder import read_config
from dflow_lightning.models.fingerprint import weights_fingerprint
from dflow_lightning.serving.vllm.folder import FoundRelay, local_folder, read_folder

SWITCH = "dflow_relay"
SERVE_WITHOUT_RELAY = f"""or serve without relay: --additional-config '{{"{SWITCH}": false}}'"""
RELAY_CHECK = "_dflow_relay"


def install_preflight() -> None:
    """Let vLLM check a drafter's folder when it has made its configuration, once."""
    from vllm.engine.arg_utils import EngineArgs

    create = EngineArgs.create_engine_config
    if hasattr(create, RELAY_CHECK):
        return

    @functools.wraps(create)
    def create_engine_config(self: Any, *args: Any, **kwargs: Any) -> Any:
        config = create(self, *args, **kwargs)
        check(config)
        return config

    setattr(create_engine_config, RELAY_CHECK, True)
    EngineArgs.create_engine_config = create_engine_config


def switched_off(vllm_config: Any) -> bool:
    """Whether `additional_config` says so.

    Raises:
        InputError: it says something else than true or false.
    """
    additional = vllm_config.additional_config
    value = additional.get(SWITCH, True) if isinstance(additional, dict) else True
    if not isinstance(value, bool):
        raise InputError(f"additional_config: {SWITCH} is {value!r}; give true or false")
    return not value


def find_relay(vllm_config: Any) -> FoundRelay | None:
    """The relay that this engine is to run; None where there is none or it is switched off.

    Raises:
        InputError: the folder is damaged; one sentence.
    """
    if switched_off(vllm_config):
        return None
    draft = vllm_config.speculative_config.draft_model_config
    folder = local_folder(draft.model, getattr(draft, "revision", None))
    return None if folder is None else read_folder(folder)


def check(vllm_config: Any) -> None:
    """Refuse what cannot work, and warn of what costs acceptance.

    Raises:
        InputError: the drafter's folder is damaged or made for a target of another size, or a
            setting keeps the rejected rows from the relay.
    """
    from vllm.logger import init_logger

    speculative = vllm_config.speculative_config
    if speculative is None or speculative.method != "dflash":
        return
    try:
        found = find_relay(vllm_config)
        if found is None:
            return
        if speculative.disable_padded_drafter_batch:
            raise InputError(
                "speculative_config: disable_padded_drafter_batch is true, which drops the rows "
                "that the relay reads; leave it out"
            )
        config = read_config(found.folder / "config.json")
        check_sizes(config, vllm_config.model_config, found.folder)
    except InputError as error:
        raise InputError(f"{error}, {SERVE_WITHOUT_RELAY}") from None
    warn = init_logger("vllm.dflow_lightning").warning
    for sentence in warnings(config, vllm_config, found.folder):
        warn(sentence)


def check_sizes(config: dict[str, Any], target: Any, folder: Path) -> None:
    """Raise `InputError` where the drafter was made for a target of another size."""
    text = target.hf_text_config
    layers = config.get("transformer_layer_config") or config
    pairs = {
        "hidden_size": (layers.get("hidden_size"), text.hidden_size),
        "vocab_size": (layers.get("vocab_size"), text.vocab_size),
        "num_target_layers": (config.get("num_target_layers"), text.num_hidden_layers),
    }
    for key, (drafter, served) in pairs.items():
        if drafter is not None and drafter != served:
            raise InputError(
                f"drafter: {folder} is for a target with {key} {drafter}, but {target.model} has "
                f"{served}; give the target it was trained for"
            )


def warnings(config: dict[str, Any], vllm_config: Any, folder: Path) -> list[str]:
    """What costs acceptance and nothing else."""
    found = []
    drafts = vllm_config.speculative_config.num_speculative_tokens
    trained = config.get("block_size") or (config.get("dflash_config") or {}).get("block_size")
    if trained is not None and drafts != trained - 1:
        found.append(
            f"DFlow drafter: num_speculative_tokens is {drafts}, but {folder} was trained to "
            f"draft {trained - 1}; give that number"
        )
    recorded = (config.get("dflow_config") or {}).get("target") or {}
    served = vllm_config.model_config.model
    actual = folder_fingerprint(Path(served)) if Path(served).is_dir() else None
    if actual and recorded.get("fingerprint", actual) != actual:
        found.append(
            f"DFlow drafter: {folder} was trained for {recorded.get('name')}, whose weights are "
            f"not those of {served}; fewer drafts will be accepted"
        )
    return found


def folder_fingerprint(folder: Path) -> str | None:
    """The fingerprint of a target's safetensors files; None where there are none."""
    tensors: dict[str, Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            tensors |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    if not tensors:
        return None
    # A head that is tied to the embedding is stored once and counted twice.
    embedding = tensors.get("model.embed_tokens.weight")
    if embedding is not None:
        tensors.setdefault("lm_head.weight", embedding)
    return weights_fingerprint(tensors.items())
