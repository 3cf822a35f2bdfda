"""Which vLLM the plug-in works with, and whether the installed one is as expected.

A release that is not in the table, or whose classes are not those that are hooked, is served
without the relay and with a warning: drafts that are quietly wrong would cost more than none.
"""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from typing import Any

# What was run with each release; the fast contract tests and `make serving` say so again.
SUPPORTED = {
    "0.31": "V1 runner on the CPU ran; V2 runner read",
    "0.32": "V1 runner on the CPU ran; V2 runner read",
}
UNTESTED = "DFLOW_VLLM_UNTESTED"  # 1: try a release that is not in the table


@dataclass(frozen=True)
class Hook:
    """A method of vLLM that the plug-in overrides or calls, and the parameters it relies on.

    Args:
        calls: text that its source must contain, because the plug-in relies on that call.
    """

    module: str
    owner: str
    method: str
    parameters: tuple[str, ...]
    calls: str = ""


MODEL, PROPOSER, SPECULATOR = (
    "vllm.model_executor.models.qwen3_dflash",
    "vllm.v1.spec_decode.dflash",
    "vllm.v1.worker.gpu.spec_decode.dflash.speculator",
)
MODEL_HOOKS = (
    Hook(MODEL, "DFlashQwen3Model", "embed_input_ids", ("input_ids",)),
    Hook(MODEL, "DFlashQwen3Model", "forward", ("input_ids",), "self.embed_input_ids("),
    Hook(MODEL, "DFlashQwen3Model", "_normalize_context_k", ("all_k",)),
    Hook(MODEL, "DFlashQwen3ForCausalLM", "__init__", ("vllm_config", "prefix"), "self.model_cls("),
    Hook(MODEL, "DFlashQwen3ForCausalLM", "combine_hidden_states", ("hidden_states",), "fc("),
)
V1_HOOKS = (
    Hook(
        PROPOSER,
        "DFlashProposer",
        "set_inputs_first_pass",
        (
            "target_token_ids",
            "next_token_ids",
            "target_hidden_states",
            "cad",
            "num_rejected_tokens_gpu",
        ),
    ),
    Hook(
        PROPOSER,
        "DFlashProposer",
        "propose",
        ("target_hidden_states",),
        "self.model.combine_hidden_states(",
    ),
)
V2_HOOKS = (
    Hook(
        SPECULATOR,
        "DFlashSpeculator",
        "propose",
        ("input_batch", "aux_hidden_states", "num_rejected", "last_sampled", "dummy_run"),
        "self.model.combine_hidden_states(",
    ),
)


def release(version: str) -> str:
    """`0.32` of `0.32.0+cpu`; the text itself where it does not begin with two numbers."""
    found = re.match(r"\d+\.\d+", version)
    return found[0] if found else version


def unsupported(version: str) -> str | None:
    """One sentence for a release that is not in the table, None for one that is."""
    if release(version) in SUPPORTED or os.environ.get(UNTESTED) == "1":
        return None
    return (
        f"DFlow relay: off, since vLLM {version} is none of the releases it was tried with "
        f"({', '.join(sorted(SUPPORTED))}); install one of these, or set {UNTESTED}=1 to try"
    )


def differences(
    hooks: tuple[Hook, ...], load: Callable[[str], Any] = import_module
) -> Iterator[str]:
    """What is not as the plug-in expects it, hook by hook."""
    for hook in hooks:
        name = f"{hook.owner}.{hook.method}"
        try:
            method = getattr(getattr(load(hook.module), hook.owner), hook.method)
        except (ImportError, AttributeError):
            yield f"{name} is not in {hook.module}"
            continue
        method = inspect.unwrap(method)
        missing = set(hook.parameters) - set(inspect.signature(method).parameters)
        if missing:
            yield f"{name} has no parameter {sorted(missing)[0]}"
        elif hook.calls and hook.calls not in inspect.getsource(method):
            yield f"{name} no longer calls {hook.calls.rstrip('(')}"
