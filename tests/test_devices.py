"""What a GPU asks of the code, shown on a CPU: one device, one type, no copy from the host.

The meta device stands for the GPU: its tensors have shapes and types but no values, so a round that
read a value or mixed in a tensor of the host would show. Rounds run there as they do on a GPU.
"""

import copy
from contextlib import nullcontext

import pytest
import torch
from eagle3_training import make_eagle3
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from training import make_module

from dflow_lightning.decode import Engine
from dflow_lightning.decode.rounds import RoundMode, run_round
from dflow_lightning.models.layers import rotate
from dflow_lightning.stopwatch import Stopwatch
from dflow_lightning.training.rollout import OnlineRollout


class NoHostTensors(TorchDispatchMode):
    """Notes every operation that touches a tensor outside the meta device."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        tensors = [leaf for leaf in tree_leaves((args, kwargs, out)) if torch.is_tensor(leaf)]
        if any(tensor.device.type != "meta" for tensor in tensors):
            self.found.append(str(func))
        return out


class NoHostData(TorchFunctionMode):
    """Notes every tensor that is made of numbers of the program."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if getattr(func, "__name__", "") in ("tensor", "as_tensor", "asarray", "new_tensor"):
            self.found.append(str(func))
        return func(*args, **(kwargs or {}))


def meta_round(models, mode: RoundMode) -> list[str]:
    """Operations of one round that touch the host."""
    models.target.to("meta")
    for part in (models.drafter, models.relay):
        if part is not None:
            part.to("meta")
    acceptance = "rejection" if mode.rejection else "match"
    engine = Engine(
        models, num_slots=2, max_length=40, acceptance=acceptance, tree_nodes=models.tree_nodes
    )
    with torch.inference_mode(), NoHostData() as made, NoHostTensors() as seen:
        run_round(engine.models, engine.state, mode, lambda part: nullcontext())
    return made.found + seen.found


MODES = {
    "greedy": RoundMode(),
    "sampled": RoundMode(sampled=True, filtered=True),
    "rejection": RoundMode(sampled=True, rejection=True),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", ["dflow", "dflash", "carryover", "domino", "tree", "eagle3"])
def test_a_round_copies_nothing_from_the_host(tiny_target_dir, kind, mode):
    if kind == "eagle3":
        module = make_eagle3(tiny_target_dir)
    else:
        module = make_module(
            tiny_target_dir, relay=kind in ("dflow", "tree"), carryover=kind == "carryover",
            causal_head=kind == "domino",
        )  # fmt: skip
    models = module.decoder().models()
    if kind == "tree":
        if mode == "rejection":
            pytest.skip("a tree is verified by match")
        models = copy.copy(models)
        object.__setattr__(models, "tree_nodes", 6)
    assert meta_round(models, MODES[mode]) == []


@pytest.mark.parametrize(
    "change",
    [
        lambda ids, exact: ids + ids.new_tensor(0),
        lambda ids, exact: ids + torch.tensor(0, device=ids.device),
        lambda ids, exact: ids + 0 * exact.to(ids.device).long()[0],
    ],
)
def test_the_check_sees_a_copy(tiny_target_dir, monkeypatch, change):
    """Rounds that make a tensor of a number, or keep frequencies on the host, as rounds did."""
    module = make_module(tiny_target_dir)
    own, exact = type(module.target).embed, torch.ones(4)
    monkeypatch.setattr(
        type(module.target), "embed", lambda self, ids: own(self, change(ids, exact))
    )
    assert meta_round(module.decoder().models(), RoundMode())


@pytest.mark.parametrize("make", [make_module, make_eagle3])
def test_frequencies_move_with_the_weights_and_stay_float32(tiny_target_dir, make):
    drafter = make(tiny_target_dir).drafter
    exact = drafter.rotary.inverse_frequencies.clone()
    assert not [name for name in drafter.state_dict() if "frequencies" in name]
    drafter.to(torch.bfloat16)
    assert drafter.rotary.inverse_frequencies.dtype == torch.float32
    assert torch.equal(drafter.rotary.inverse_frequencies, exact)
    assert copy.deepcopy(drafter).to("meta").rotary.inverse_frequencies.device.type == "meta"


# ---------------------------------------------------------------- types


@pytest.mark.parametrize("make", [make_module, make_eagle3])
@pytest.mark.parametrize(
    ("taps", "weights", "autocast"),
    [
        (torch.bfloat16, torch.float32, False),
        (torch.float32, torch.bfloat16, False),
        (torch.bfloat16, torch.float32, True),
        (torch.float32, torch.float32, True),
    ],
)
def test_taps_of_any_type_are_projected(tiny_target_dir, make, taps, weights, autocast):
    drafter = make(tiny_target_dir).drafter.to(weights)
    rows = torch.randn(1, 3, drafter.fc.in_features, dtype=taps)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        h = drafter.project(rows)
    assert h.dtype == (torch.bfloat16 if autocast else weights)


def test_a_target_of_another_type_trains_and_rolls_out(tiny_target_dir):
    """`target.dtype` bfloat16 with `trainer.precision` 32-true, which `plan` accepts."""
    from training import one_text

    from dflow_lightning.training.step_inputs import RolloutConfig

    module = make_module(tiny_target_dir)
    batch = one_text(module, [3, 5, 7], 24)
    module.target.model.bfloat16()
    loss, _ = module.objective(
        module.step_inputs(batch, RolloutConfig(num_rounds=1, num_anchors=2))
    )
    loss.backward()
    assert all(p.grad.dtype == torch.float32 for p in module.drafter.parameters())


def test_context_and_blocks_turn_by_the_same_angles_under_autocast(tiny_target_dir):
    """A key of the context at a position equals that of a block there, bit for bit."""
    drafter = make_module(tiny_target_dir).drafter
    h = torch.randn(1, 1, drafter.dims.hidden_size)
    position = torch.tensor([[3_000]])
    attention = drafter.layers[0].self_attn
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        got = drafter.context_kv(h.bfloat16(), position)[0].keys
        keys = attention.k_proj(h.bfloat16()).view(1, 1, -1, attention.head_dim)
        wanted = rotate(
            attention.k_norm(keys).movedim(-2, 1), drafter.rotary(position, torch.float32)
        )
    assert torch.equal(got, wanted)


# ---------------------------------------------------------------- time


def test_rollouts_are_timed_for_a_reader_alone():
    assert OnlineRollout().watch is None


def test_a_tracked_training_reads_its_rollouts():
    from types import SimpleNamespace

    from dflow_lightning.tracking.meters import Meters

    rollout = OnlineRollout()
    Meters.watch_rollouts(SimpleNamespace(callbacks=[rollout]))
    assert isinstance(rollout.watch, Stopwatch)
