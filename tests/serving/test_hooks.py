"""The hooks in vLLM's two model runners, on a stand-in with their signatures."""

from types import SimpleNamespace

import pytest
import torch

from dflow_lightning.serving.vllm import hooks
from dflow_lightning.serving.vllm.versions import MODEL_HOOKS, V1_HOOKS, differences


def v1_call(proposer, rejected):
    """Two requests: a verified block of four rows, and a prompt of five."""
    metadata = SimpleNamespace(
        batch_size=lambda: 2, query_start_loc=torch.tensor([0, 4, 9, 9], dtype=torch.int32)
    )
    return proposer.set_inputs_first_pass(
        target_token_ids=torch.arange(9),
        next_token_ids=torch.tensor([50, 51]),
        target_positions=torch.arange(9),
        target_hidden_states=torch.arange(9.0).unsqueeze(-1),
        token_indices_to_sample=None,
        cad=metadata,
        num_rejected_tokens_gpu=rejected,
    )


def test_v1_prepares_before_vllm_goes_on(vllm) -> None:
    assert hooks.install_hooks("V1") is None
    proposer = vllm.proposer()
    proposer.model = vllm.drafter()
    assert v1_call(proposer, torch.tensor([2, 0], dtype=torch.int32)) == ("inputs", 1)
    verified, num_requests, block = proposer.model.asked[0]
    assert (num_requests, block) == (2, 4)
    assert verified.ends_R.tolist() == [4, 9]
    assert verified.num_rejected_R.tolist() == [2, 0]
    assert verified.bonus_R.tolist() == [50, 51]
    assert verified.ids_T.tolist() == list(range(9))
    assert verified.features(torch.tensor([3, 8])).flatten().tolist() == [3, 8]


def test_v1_without_drafts_has_nothing_verified(vllm) -> None:
    hooks.install_hooks("V1")
    proposer = vllm.proposer()
    proposer.model = vllm.drafter()
    v1_call(proposer, None)
    assert proposer.model.asked == [(None, 2, 4)]


def test_a_model_inside_a_graph_wrapper_is_found(vllm) -> None:
    hooks.install_hooks("V1")
    proposer, inner = vllm.proposer(), vllm.drafter()
    proposer.model = SimpleNamespace(unwrap=lambda: inner, asked=[])
    v1_call(proposer, None)
    assert len(inner.asked) == 1


@pytest.mark.parametrize("model", ["no relay", "another class"])
def test_other_drafters_run_as_ever(vllm, model: str) -> None:
    hooks.install_hooks("V1")
    proposer = vllm.proposer()
    proposer.model = vllm.drafter(relay=None) if model == "no relay" else SimpleNamespace(asked=[])
    assert v1_call(proposer, torch.tensor([2, 0])) == ("inputs", 0)


def test_installing_twice_wraps_once(vllm) -> None:
    hooks.install_hooks("V1")
    hooks.install_hooks("V1")
    proposer = vllm.proposer()
    proposer.model = vllm.drafter()
    v1_call(proposer, None)
    assert len(proposer.model.asked) == 1


def v2_call(speculator, **changes):
    """Three requests in slots 5, 0 and 2 of the runner: two verified blocks and a prompt."""
    batch = SimpleNamespace(
        num_reqs=3,
        input_ids=torch.arange(16),
        query_start_loc=torch.tensor([0, 4, 8, 13, 13, 13], dtype=torch.int32),
        idx_mapping=torch.tensor([5, 0, 2], dtype=torch.int32),
    )
    last_sampled = torch.zeros(8, 1, dtype=torch.int64)
    last_sampled[[5, 0, 2], 0] = torch.tensor([55, 50, 52])
    taps = [torch.arange(16.0).unsqueeze(-1).repeat(1, 3) * scale for scale in (1, 10)]
    return speculator.propose(
        batch, {}, {}, torch.zeros(16, 4), taps, torch.tensor([2, 4, 1]),
        torch.tensor([2, 0, 0], dtype=torch.int32), last_sampled, torch.zeros(8),
        torch.zeros(8), torch.zeros(8), **changes,
    )  # fmt: skip


def v2_speculator(vllm):
    assert hooks.install_hooks("V2") is None
    speculator = vllm.speculator()
    speculator.model = vllm.drafter()
    return speculator


def test_v2_prepares_before_the_graph(vllm) -> None:
    speculator = v2_speculator(vllm)
    assert v2_call(speculator) == ("drafts", 1)
    verified, num_requests, block = speculator.model.asked[0]
    assert (num_requests, block) == (3, 4)
    assert verified.ends_R.tolist() == [4, 8, 13]
    assert verified.num_rejected_R.tolist() == [2, 0, 0]
    assert verified.bonus_R.tolist() == [55, 50, 52]  # by the runner's slots, in batch order
    rows = torch.tensor([2, 3])
    wanted = speculator.model.fc(torch.tensor([[2.0] * 3 + [20.0] * 3, [3.0] * 3 + [30.0] * 3]))
    torch.testing.assert_close(verified.features(rows), wanted)


@pytest.mark.parametrize("why", ["dummy run", "prefill context parallel"])
def test_v2_has_nothing_verified(vllm, why: str) -> None:
    speculator = v2_speculator(vllm)
    if why == "dummy run":
        v2_call(speculator, dummy_run=True)
    else:
        speculator.pcp_manager = object()
        v2_call(speculator)
    assert speculator.model.asked == [(None, 3, 4)]


@pytest.mark.parametrize("runner", ["V1", "V2"])
def test_a_changed_signature_is_named_and_left_alone(vllm, runner: str) -> None:
    owner = vllm.proposer if runner == "V1" else vllm.speculator
    name = "set_inputs_first_pass" if runner == "V1" else "propose"
    other = lambda self, batch: None  # noqa: E731
    setattr(owner, name, other)
    assert "has no parameter" in str(hooks.install_hooks(runner))
    assert getattr(owner, name) is other


def test_a_call_that_is_gone_is_named(vllm) -> None:
    vllm.proposer.propose = lambda self, target_hidden_states: None
    assert hooks.install_hooks("V1") == (
        "DFlashProposer.propose no longer calls self.model.combine_hidden_states"
    )


def test_a_module_that_is_gone_is_named(vllm) -> None:
    assert next(iter(differences(MODEL_HOOKS))) == (
        "DFlashQwen3Model.embed_input_ids is not in vllm.model_executor.models.qwen3_dflash"
    )
    assert list(differences(V1_HOOKS)) == []
