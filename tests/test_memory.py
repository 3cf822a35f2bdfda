"""What a training step keeps: recomputation changes no bit, and nothing grows with the vocabulary.

Kept memory is counted as the tensors that autograd saves, once per storage.
"""

import gc
import weakref

import pytest
import torch
from test_module import gradients, uneven_batch, wake_relay, with_rounds
from training import make_module

from dflow_lightning.data.datamodule import Batch
from dflow_lightning.models.dims import DrafterConfig
from dflow_lightning.models.slot_cache import SlotCache
from dflow_lightning.tensors.loss import token_losses
from dflow_lightning.training.module import DrafterModule, TargetConfig
from dflow_lightning.training.step_inputs import RolloutConfig

BF16 = torch.bfloat16


class Kept:
    """Bytes that autograd saves inside the `with`; weights do not count."""

    def __init__(self, module: torch.nn.Module | None = None) -> None:
        parameters = module.parameters() if module is not None else ()
        self._weights = {p.untyped_storage().data_ptr() for p in parameters}
        self.tensors: dict[int, torch.Tensor] = {}
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._keep, lambda tensor: tensor)

    def _keep(self, tensor: torch.Tensor) -> torch.Tensor:
        pointer = tensor.untyped_storage().data_ptr()
        if pointer not in self._weights:
            self.tensors[pointer] = tensor
        return tensor

    def __enter__(self) -> "Kept":
        self._hooks.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._hooks.__exit__(*error)

    @property
    def bytes(self) -> int:
        return sum(t.untyped_storage().nbytes() for t in self.tensors.values())


@pytest.fixture(scope="module")
def step(tiny_target_dir) -> tuple[DrafterModule, Batch]:
    return wake_relay(make_module(tiny_target_dir)), uneven_batch()


@pytest.mark.parametrize("mixed", [False, True])
def test_gradient_checkpointing_keeps_less_and_changes_no_bit(step, mixed):
    module, batch = step
    found = []
    for recompute in (False, True):
        module.drafter.gradient_checkpointing = recompute
        module.zero_grad()
        with torch.autocast("cpu", BF16, enabled=mixed):
            inputs = with_rounds(module, batch)
            with Kept(module) as kept:
                loss, _ = module.objective(inputs)
        loss.backward()
        found.append((loss.detach(), gradients(module), kept.bytes))
    module.drafter.gradient_checkpointing = False
    (loss, plain, all_bytes), (other, again, few_bytes) = found
    assert loss.dtype == torch.float32
    assert torch.equal(loss, other)
    assert all(torch.equal(plain[name], again[name]) for name in plain)
    assert few_bytes < 0.5 * all_bytes


def test_the_option_reaches_the_drafter(tiny_target_dir):
    module = DrafterModule(
        target=TargetConfig(path=str(tiny_target_dir)),
        drafter=DrafterConfig(num_layers=1, block_size=4, target_layer_ids=[0]),
        gradient_checkpointing=True,
    )
    assert module.drafter.gradient_checkpointing
    with torch.no_grad():  # the rollout drafts without gradients, and so without recomputation
        module.objective(module.begin_step(uneven_batch()))


@pytest.mark.parametrize("fast", [False, True])
def test_what_the_loss_keeps_does_not_depend_on_vocabulary_or_chunks(fast):
    torch.manual_seed(0)
    hidden = torch.randn(2, 12, 3, 8, requires_grad=True)
    kept = {}
    for vocabulary in (16, 4096):
        head = torch.nn.Linear(8, vocabulary, bias=False).requires_grad_(False)
        labels = torch.randint(0, vocabulary, (2, 12, 3))
        for chunk in (1, 5, 24):
            with Kept(head) as saved:
                token_losses(hidden, labels, head, chunk, head.weight if fast else None)
            kept[vocabulary, chunk] = saved.bytes
    assert len(set(kept.values())) == 1
    assert kept[16, 1] <= hidden.nbytes + labels.nbytes


def test_the_targets_keys_and_values_end_with_the_inputs_of_a_step(step, monkeypatch):
    """At once: nothing behind reads them, and no circle of references keeps them."""
    module, batch = step
    caches: list[weakref.ref[SlotCache]] = []

    def new_cache(capacity: int) -> SlotCache:
        cache = SlotCache(module.target.num_layers, capacity)
        caches.append(weakref.ref(cache))
        return cache

    monkeypatch.setattr(module.target, "new_cache", new_cache)
    rollout = RolloutConfig(num_rounds=1, num_anchors=4)
    gc.disable()
    try:
        inputs = module.begin_step(batch)
        assert caches[0]() is inputs.cache
        del inputs
        steps = [module.step_inputs(batch, rollout), module.step_inputs(batch)]
        assert [cache() for cache in caches] == [None] * 3
        assert [step.cache for step in steps] == [None] * 2
    finally:
        gc.enable()


def test_only_the_tapped_layers_outlive_the_clean_forward(step):
    """The features are one tensor of their own: no layer's output is held by it."""
    module, batch = step
    outputs = []
    hooks = [
        layer.register_forward_hook(lambda module, args, output: outputs.append(output))
        for layer in module.target.model.model.layers
    ]
    inputs = module.begin_step(batch)
    for hook in hooks:
        hook.remove()
    rows, length = batch.input_ids_BS.shape
    taps = len(module.drafter.dims.target_layer_ids) * module.target.hidden_size
    assert inputs.taps_BSC.untyped_storage().nbytes() == rows * length * taps * 4
    assert not module.target._wanted
    pointers = {output.untyped_storage().data_ptr() for output in outputs}
    assert inputs.taps_BSC.untyped_storage().data_ptr() not in pointers
    assert len(outputs) == 3  # layers above the highest tap did not run


def test_a_rollout_reads_the_drafted_tokens_and_no_clean_one_again(step):
    """Each round is one forward of N*K tokens on top of the step's own cache."""
    module, batch = step
    lengths = []
    embedding = module.target.model.get_input_embeddings()
    hook = embedding.register_forward_hook(lambda module, args, output: lengths.append(args[0]))
    with_rounds(module, batch, num_rounds=2, num_anchors=4)
    hook.remove()
    rows, length = batch.input_ids_BS.shape
    assert [ids.shape for ids in lengths] == [(rows, length), (rows, 16), (rows, 16)]


def test_drafting_never_holds_more_logits_than_a_chunk(step, monkeypatch):
    module, batch = step
    whole = with_rounds(module, batch).rounds[1:]
    sizes = []
    head = module.target.head
    monkeypatch.setattr("dflow_lightning.models.drafter.CHUNK_BYTES", 5 * 3 * 320 * 4)  # 5 blocks
    monkeypatch.setattr(module.target, "head", lambda part: sizes.append(len(part)) or head(part))
    in_parts = with_rounds(module, batch).rounds[1:]
    assert sizes == [5, 5, 5, 1] * 2  # 4 rows of 4 blocks, twice
    for one, other in zip(whole, in_parts, strict=True):
        assert torch.equal(one.rejected.rejected_BN, other.rejected.rejected_BN)
