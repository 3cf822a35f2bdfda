"""Where the relay gets its rows: vLLM drafts in the step that has verified, and has them all.

Either runner calls one method of its drafter with the verified batch, rejected rows included,
before the draft pass. It is wrapped: first the corrections are written, then vLLM goes on as ever.
Nothing is kept from step to step, so requests may come, go, be preempted or change places.

The V1 runner was run on the CPU. The V2 runner, vLLM's default on GPUs, needs Triton; its hook was
run against its interface alone.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from dflow_lightning.serving.vllm.correction import VerifiedBatch
from dflow_lightning.serving.vllm.versions import V1_HOOKS, V2_HOOKS, Hook, differences

RELAY_HOOK = "_dflow_relay"


def install_hooks(runner: str) -> str | None:
    """Wrap the drafter of a runner, `V1` or `V2`, once; returns why it cannot be done."""
    hooks, before = {"V1": (V1_HOOKS, before_v1), "V2": (V2_HOOKS, before_v2)}[runner]
    for difference in differences(hooks):
        return difference
    wrap(hooks[0], before)
    return None


def wrap(hook: Hook, before: Callable[[Any, dict[str, Any]], None]) -> None:
    """Let `before(self, arguments)` run ahead of a method of vLLM."""
    owner = getattr(import_module(hook.module), hook.owner)
    method = getattr(owner, hook.method)
    if hasattr(method, RELAY_HOOK):
        return
    signature = inspect.signature(method)

    @functools.wraps(method)
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
        # Asked in each call: methods are wrapped before vLLM loads a model, for every drafter.
        if has_relay(self):
            bound = signature.bind(self, *args, **kwargs)
            bound.apply_defaults()
            before(self, bound.arguments)
        return method(self, *args, **kwargs)

    setattr(wrapped, RELAY_HOOK, True)
    setattr(owner, hook.method, wrapped)


def drafter_of(runner_part: Any) -> Any:
    """The drafter's model, out of the wrapper that breakable CUDA graphs put around it."""
    model = getattr(runner_part, "model", None)
    unwrap = getattr(model, "unwrap", None)
    return unwrap() if callable(unwrap) else model


def has_relay(runner_part: Any) -> bool:
    """Whether the model behind it is ours and has a relay."""
    return getattr(drafter_of(runner_part), "relay", None) is not None


def before_v1(proposer: Any, given: dict[str, Any]) -> None:
    """`DFlashProposer.set_inputs_first_pass`: its hidden states have been through `fc` already."""
    metadata, rejected = given["cad"], given["num_rejected_tokens_gpu"]
    num_requests = metadata.batch_size()
    states_TD = given["target_hidden_states"]
    verified = None
    if rejected is not None:  # None where no request of the batch had drafts
        verified = VerifiedBatch(
            ids_T=given["target_token_ids"],
            ends_R=metadata.query_start_loc[1 : num_requests + 1],
            num_rejected_R=rejected[:num_requests],
            bonus_R=given["next_token_ids"][:num_requests],
            features=lambda rows: states_TD[rows],
        )
    drafter_of(proposer).prepare_correction(
        verified, num_requests, 1 + proposer.num_speculative_tokens
    )


def before_v2(speculator: Any, given: dict[str, Any]) -> None:
    """`DFlashSpeculator.propose`: runs ahead of the graph, which only reads the buffer."""
    batch, taps = given["input_batch"], given["aux_hidden_states"]
    model = drafter_of(speculator)
    num_requests = batch.num_reqs

    def features(rows: Tensor) -> Tensor:
        return model.combine_hidden_states(torch.cat([tap[rows] for tap in taps], dim=-1))

    # Under prefill context parallelism a rank has a part of the rows only.
    whole = getattr(speculator, "pcp_manager", None) is None
    verified = None
    if taps and whole and not given["dummy_run"]:
        sampled = given["last_sampled"]
        verified = VerifiedBatch(
            ids_T=batch.input_ids,
            ends_R=batch.query_start_loc[1 : num_requests + 1],
            num_rejected_R=given["num_rejected"][:num_requests],
            bonus_R=sampled.view(sampled.shape[0], -1)[batch.idx_mapping[:num_requests].long(), 0],
            features=features,
        )
    model.prepare_correction(verified, num_requests, 1 + speculator.num_speculative_steps)
