"""A stand-in for vLLM with what the plug-in hooks, and nothing else: its signatures are vLLM's.

That the real ones are still like this is checked by the plug-in at start (`versions`), and by
`make serving`.
"""

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch


class FakeLogger:
    """Keeps what is said."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def warning(self, text: str, *args: object) -> None:
        self.said.append(text % args if args else text)

    info = warning


class FakeDrafter:
    """Takes the place of the model: notes what it is asked to prepare."""

    def __init__(self, relay: object = "a relay") -> None:
        self.relay = relay
        self.asked: list[tuple] = []
        self.fc = torch.nn.Linear(6, 4, bias=False)

    def combine_hidden_states(self, hidden_states):
        return self.fc(hidden_states)

    def prepare_correction(self, verified, num_requests, block) -> None:
        self.asked.append((verified, num_requests, block))


def proposer_class():
    class DFlashProposer:
        num_speculative_tokens = 3

        def propose(self, target_hidden_states):
            return self.model.combine_hidden_states(target_hidden_states)

        def set_inputs_first_pass(
            self, target_token_ids, next_token_ids, target_positions, target_hidden_states,
            token_indices_to_sample, cad, num_rejected_tokens_gpu,
        ):  # fmt: skip
            return "inputs", len(self.model.asked)

    return DFlashProposer


def speculator_class():
    class DFlashSpeculator:
        num_speculative_steps = 3

        def propose(
            self, input_batch, attn_metadata, slot_mappings, last_hidden_states,
            aux_hidden_states, num_sampled, num_rejected, last_sampled, next_prefill_tokens,
            temperature, seeds, dp_sync_state=None, dummy_run=False, mm_inputs=None,
        ):  # fmt: skip
            self.model.combine_hidden_states(torch.cat(aux_hidden_states, dim=-1))
            return "drafts", len(self.model.asked)

    return DFlashSpeculator


def engine_args_class():
    class EngineArgs:
        config: object = None

        def create_engine_config(self, usage_context=None):
            return self.config

    return EngineArgs


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Fake modules of vLLM, for this test only, and the parts a test looks at."""
    logger, registered = FakeLogger(), {}
    parts = SimpleNamespace(
        logger=logger, registered=registered, proposer=proposer_class(),
        speculator=speculator_class(), engine_args=engine_args_class(), drafter=FakeDrafter,
    )  # fmt: skip
    registry = SimpleNamespace(register_model=registered.__setitem__)
    contents = {
        "vllm": {"ModelRegistry": registry, "__version__": "0.32.0"},
        "vllm.logger": {"init_logger": lambda name: logger},
        "vllm.platforms": {"current_platform": SimpleNamespace(is_cpu=lambda: True)},
        "vllm.triton_utils": {"HAS_TRITON": False},
        "vllm.v1.sample.rejection_sampler": {"expand_batch_to_tokens": None},
        "vllm.engine.arg_utils": {"EngineArgs": parts.engine_args},
        "vllm.v1.spec_decode.dflash": {"DFlashProposer": parts.proposer},
        "vllm.v1.worker.gpu.spec_decode.dflash.speculator": {"DFlashSpeculator": parts.speculator},
    }
    for name, content in contents.items():
        pieces = name.split(".")
        for depth in range(1, len(pieces) + 1):
            path = ".".join(pieces[:depth])
            if path not in sys.modules or depth == len(pieces):
                module = ModuleType(path)
                monkeypatch.setitem(sys.modules, path, module)
                if depth > 1:
                    setattr(sys.modules[".".join(pieces[: depth - 1])], pieces[depth - 1], module)
        vars(sys.modules[name]).update(content)
    parts.modules = {name: sys.modules[name] for name in contents}
    return parts
