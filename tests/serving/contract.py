"""The installed vLLM against what the plug-in relies on, and both runners' hooks on one batch.

The V2 runner needs Triton, so its draft pass cannot run here. But its class, its batch and its call
are vLLM's own: the hook runs on them up to the draft pass, and has to leave the same corrections in
the buffer as the V1 runner's hook. JSON on stdout.
"""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import offline
import torch

K, D, REQUESTS = 8, 160, 3
REJECTED, BONUS = [3, 0, 7], [11, 12, 13]


class DraftPassError(Exception):
    """The hook is over, and vLLM's own code begins."""


def make_drafter(folder: Path):
    """Our `prepare_correction` with the drafter's own relay, and layers of noise around it."""
    from dflow_lightning.serving.vllm.folder import read_folder
    from dflow_lightning.serving.vllm.model import RelayDFlashForCausalLM

    found = read_folder(folder)
    assert found is not None
    torch.manual_seed(0)

    class Drafter:
        relay = found.relay
        prepare_correction = RelayDFlashForCausalLM.prepare_correction
        model = SimpleNamespace(
            correction_QD=torch.full((REQUESTS * K, D), float("nan")),
            hidden_norm=torch.nn.LayerNorm(D),
            embed_tokens=torch.nn.Embedding(2048, D),
        )
        fc = torch.nn.Linear(2 * D, D, bias=False)

        def combine_hidden_states(self, states):
            return self.fc(states)

    return Drafter()


def run_v1(drafter, ids, taps, starts):
    """`set_inputs_first_pass`, as `propose` calls it."""
    from vllm.v1.spec_decode.dflash import DFlashProposer

    class Metadata:
        query_start_loc = starts

        def batch_size(self):
            if "bonus" in vars(self):
                raise DraftPassError
            self.bonus = True
            return REQUESTS

    proposer = DFlashProposer.__new__(DFlashProposer)
    proposer.model, proposer.num_speculative_tokens = drafter, K - 1
    with torch.inference_mode():
        proposer.set_inputs_first_pass(
            target_token_ids=ids,
            next_token_ids=torch.tensor(BONUS),
            target_positions=torch.arange(len(ids)),
            target_hidden_states=drafter.combine_hidden_states(torch.cat(taps, dim=-1)),
            token_indices_to_sample=None,
            cad=Metadata(),
            num_rejected_tokens_gpu=torch.tensor(REJECTED, dtype=torch.int32),
        )


def run_v2(drafter, ids, taps, starts):
    """`propose` with vLLM's own batch; requests stand in the runner's slots 2, 0 and 1."""
    from vllm.v1.worker.gpu.input_batch import InputBatch, InputBuffers
    from vllm.v1.worker.gpu.spec_decode.dflash.speculator import DFlashSpeculator

    buffers = InputBuffers(8, 64, torch.device("cpu"))
    batch = InputBatch.make_dummy(REQUESTS, len(ids), buffers)
    batch.input_ids.copy_(ids)
    assert batch.query_start_loc.tolist() == starts.tolist()
    slots = torch.tensor([2, 0, 1])
    batch.idx_mapping = slots.to(batch.idx_mapping.dtype)
    last_sampled = torch.zeros(8, 1, dtype=torch.int64)
    last_sampled[slots, 0] = torch.tensor(BONUS)

    class Speculator(DFlashSpeculator):
        def __init__(self):
            self.model, self.num_speculative_steps = drafter, K - 1
            self.pcp_manager = None

        @property
        def num_query_per_req(self):
            raise DraftPassError

    one = torch.zeros(8)
    Speculator().propose(
        batch, {}, {}, torch.zeros(len(ids), D), taps, torch.ones(REQUESTS, dtype=torch.int32),
        torch.tensor(REJECTED, dtype=torch.int32), last_sampled, one, one, one,
    )  # fmt: skip


def main() -> None:
    from vllm import __version__

    from dflow_lightning.serving.vllm import hooks
    from dflow_lightning.serving.vllm.versions import MODEL_HOOKS, V1_HOOKS, V2_HOOKS, differences

    groups = {"model": MODEL_HOOKS, "V1": V1_HOOKS, "V2": V2_HOOKS}
    result = {name: list(differences(group)) for name, group in groups.items()}
    drafter = make_drafter(Path(sys.argv[1]))
    ids = torch.randint(0, 2000, (REQUESTS * K,), dtype=torch.int32)
    taps = [torch.randn(REQUESTS * K, D) for _ in range(2)]
    starts = torch.arange(REQUESTS + 1, dtype=torch.int32) * K
    left = {}
    for name, run in (("V1", run_v1), ("V2", run_v2)):
        assert hooks.install_hooks(name) is None
        drafter.model.correction_QD.fill_(float("nan"))
        try:
            run(drafter, ids, taps, starts)
        except DraftPassError:
            left[name] = drafter.model.correction_QD.clone()
    equal = torch.allclose(left["V1"], left["V2"], atol=1e-6)
    nonzero = (left["V2"].view(REQUESTS, K, D) != 0).any(-1).sum(-1).tolist()
    print(json.dumps(result | {"version": __version__, "equal": equal, "corrected": nonzero}))


if __name__ == "__main__":
    assert offline.DEFAULTS  # which has set the environment before vLLM is imported
    main()
