"""A recipe built as `dflow-train fit` builds it, and a step and rounds of it on fake CUDA tensors.

The trainer, its strategy and precision plug-in, the module and the callbacks come from the command
line. Only what cannot run is replaced: the target's weights, kernels that torch chooses by asking
the device, and the values that are read back.
"""

import contextlib
import dataclasses
import gc
import types
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import PropertyMock, patch

import torch
from fake_cuda.machine import HAS_BACKWARD, Event, gpus
from fake_cuda.targets import from_pretrained, tokenizer_of
from fake_cuda.watch import Watch, same
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn

from dflow_lightning.data.token_rows import Batch
from dflow_lightning.decode.engine import Engine
from dflow_lightning.decode.request import Request
from dflow_lightning.decode.state import Models
from dflow_lightning.plan.command import make_plan, parse
from dflow_lightning.plan.memory import Sharding
from dflow_lightning.run.fit import TrainCLI, quiet
from dflow_lightning.run.signals import Signals
from dflow_lightning.tensors import attention, attention_flex
from dflow_lightning.tensors.blocks import Documents
from dflow_lightning.training.rollout import OnlineRollout

GIB = 2**30
PROMPT, ANSWER = 600, 512  # tokens of a request


@dataclass
class Found:
    """What a case showed.

    Attributes:
        peak, planned: bytes at the peak of a step, on one device without an optimizer.
        copies: between host and device, by kind and source line: of the whole step, or of a round.
    """

    peak: int | None = None
    planned: int | None = None
    copies: Counter[tuple[str, str]] = field(default_factory=Counter)


class Built(TrainCLI):
    """The command line up to the point where Lightning would start to train."""

    def _run_subcommand(self, subcommand: str) -> None:
        """Nothing runs."""


@contextlib.contextmanager
def fake_run(count: int) -> Iterator[Watch]:
    """Fake tensors on a machine with `count` GPUs, watched."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    watch = Watch()

    def read_back(tensor: Tensor) -> Any:
        if tensor.device.type == "cuda":
            watch.note("tolist")
        return zeros(tensor.shape)

    def new_tensor(like: Tensor, data: Any, dtype: Any = None, device: Any = None) -> Tensor:
        device = torch.device(device or like.device)
        if device.type == "cuda":
            watch.note("new_tensor")
        shape = (len(data),) if isinstance(data, list | tuple) else ()
        return torch.empty(shape, dtype=dtype or like.dtype, device=device)

    def pinned(tensor: Tensor) -> Tensor:
        copy = tensor.clone()
        copy.is_in_pinned_memory = True  # type: ignore[attr-defined]
        return copy

    def document_keys(documents: Documents, seed: int, step: int) -> list[Tensor]:
        if documents.starts_BS.device.type == "cuda":
            watch.note("cuda to cpu")  # it reads where documents begin
        rows, length = documents.starts_BS.shape
        return [torch.zeros(length, dtype=torch.float64) for _ in range(rows)]

    replaced = {
        "dflow_lightning.models.target.AutoModelForCausalLM.from_pretrained": from_pretrained,
        "dflow_lightning.models.pretrained.AutoTokenizer.from_pretrained": tokenizer_of,
        "torch.nn.functional.scaled_dot_product_attention": attend,
        "dflow_lightning.tensors.attention.scaled_dot_product_attention": attend,
        "dflow_lightning.tensors.attention_flex.flex_attention": attend_tiles,
        "torch.compile": lambda function, **_: function,
        "dflow_lightning.tensors.attention_flex.BlockMask": Tiles,
        "dflow_lightning.tensors.blocks._document_keys": document_keys,
        "torch._subclasses.fake_tensor.FakeTensor.tolist": read_back,
        "torch.Tensor.new_tensor": new_tensor,
        "torch.Tensor.pin_memory": pinned,
        "torch.nn.Module._apply": convert,
        "torch.cuda.Event": Event,
        "torch.cuda.synchronize": lambda *_: None,
        "torch.cuda.current_stream": lambda *_: None,
    }
    assert attention.scaled_dot_product_attention
    assert attention_flex.BlockMask
    with contextlib.ExitStack() as stack:
        stack.enter_context(gpus(count))
        for name, value in replaced.items():
            stack.enter_context(patch(name, value))
        # It would ask a device that it believes in.
        stack.enter_context(patch.object(FakeTensorMode, "avoid_device_init", True))
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        stack.enter_context(watch)
        yield watch


def build(args: Sequence[str]) -> Built:
    """`dflow-train fit` with these arguments, set up on its first device."""
    quiet()
    cli = Built(["fit", *args], Signals())
    trainer, module = cli.trainer, cli.model
    trainer.strategy.connect(module)
    module.trainer = trainer
    trainer._data_connector.attach_datamodule(module, cli.datamodule)
    module.setup("fit")
    for callback in rollouts(trainer):
        callback.setup(trainer, module, "fit")
    trainer.strategy.scale_gradients = lambda factor: None  # there is no engine
    module.to(trainer.strategy.root_device)
    on = {p.device for p in (*module.parameters(), *module.target.model.parameters())}
    assert on == {torch.device("cuda", 0)}, f"weights on {on}"
    return cli


def train_step(cli: Built, watch: Watch) -> Found:
    """One training step with rollouts and, where torch can, its backward pass; one validation."""
    trainer, module = cli.trainer, cli.model
    plugin, device = trainer.precision_plugin, trainer.strategy.root_device
    data = cli.datamodule
    rows, length, packed = data.batch_size, data.max_length, data.pack
    with logging_nowhere():
        batch = trainer.strategy.batch_to_device(make_batch(rows, length, packed), device)
        module.train()
        ATTENDED.clear()
        with accumulating(module) as grown:
            watch.copies.clear()
            watch.peak = watch.now
            for callback in rollouts(trainer):
                callback.on_train_batch_start(trainer, module, batch, 0)
            with plugin.train_step_context():
                loss = module.training_step(batch, 0)
            check_attention(plugin.precision)
            assert (loss.device, loss.dtype) == (device, torch.float32), (loss.device, loss.dtype)
            if HAS_BACKWARD:
                loss.backward()
                check_gradients(module, grown)
        module.on_before_optimizer_step(None)
        found = Found(peak=watch.peak, copies=Counter(watch.copies))
        del loss
        module.zero_grad()
        with plugin.val_step_context(), torch.inference_mode():
            module.eval()
            module.validation_step(batch, 0)
            module.on_validation_epoch_end()
    return found


def check_attention(precision: str) -> None:
    """Blocks attend in the type of the arithmetic, in rollouts as in the step."""
    wanted = torch.bfloat16 if precision == "bf16-mixed" else torch.float32
    wrong = ATTENDED - {wanted}
    assert not wrong, f"blocks attend in {wrong} under {precision}"


@contextlib.contextmanager
def accumulating(module: LightningModule) -> Iterator[set[nn.Parameter]]:
    """Gradients of an earlier micro-batch are there, as `plan` counts them; yields which grow.

    DDP's and ZeRO's buffers of gradients outlive a step in the same way.
    """
    grown: set[nn.Parameter] = set()
    for parameter in module.parameters():
        parameter.grad = torch.zeros_like(parameter)
    hooks = [p.register_post_accumulate_grad_hook(grown.add) for p in module.parameters()]
    yield grown
    for hook in hooks:
        hook.remove()


def check_gradients(module: LightningModule, grown: set[nn.Parameter]) -> None:
    """Every trained parameter has one, of its own dtype and on its own device."""
    missing = [name for name, p in module.named_parameters() if p not in grown]
    assert not missing, f"no gradient: {missing[:3]}"
    for parameter in module.parameters():
        assert parameter.grad is not None
        assert parameter.grad.dtype == parameter.dtype
        assert parameter.grad.device == parameter.device


def rounds(models: Models, watch: Watch, slots: int, length: int, **settings: Any) -> Found:
    """A prefill and two rounds; the copies are those of the second round, without its report."""
    gc.collect()  # buffers of the engine before
    acceptance = settings.pop("acceptance", "match")
    tree_nodes = settings.pop("tree_nodes", None)
    engine = Engine(
        models, num_slots=slots, max_length=length, acceptance=acceptance, tree_nodes=tree_nodes
    )
    for seed in range(slots):
        request = Request(
            prompt_ids=[5] * min(PROMPT, length // 4), max_new_tokens=min(ANSWER, length // 2),
            seed=seed, stop_token_ids=(1,), **settings,
        )  # fmt: skip
        engine.submit(request)
    while not all(flight.decoding for _, flight in engine._flights()) or engine._queue:
        engine.step()
    watch.copies.clear()
    watch.peak = watch.now
    with torch.inference_mode():
        engine.round()
    reports = [key for key in watch.copies if key[0] == "tolist"]
    assert len(reports) == 1, f"a round reads back {len(reports)} times: {reports}"
    assert watch.copies[reports[0]] == 1
    return Found(
        peak=watch.peak, copies=Counter({k: n for k, n in watch.copies.items() if k not in reports})
    )


def planned(args: Sequence[str], config: Path) -> int:
    """What `plan` says for one such device without an optimizer, in bytes."""
    plan = make_plan(parse([*args, "--target_config", str(config)]))
    alone = dataclasses.replace(plan, gpus=1, sharding=Sharding())
    return sum(size for part, size in alone.memory().items() if not part.startswith("optimizer"))


def rollouts(trainer: Trainer) -> list[Any]:
    """The rollout callback of the trainer; an EAGLE-3 run has none."""
    return [each for each in trainer.callbacks if isinstance(each, OnlineRollout)]


@contextlib.contextmanager
def logging_nowhere() -> Iterator[None]:
    """What a module asks of a loop that runs."""
    schedule = types.SimpleNamespace(get_last_lr=lambda: [0.0])
    steps = PropertyMock(return_value=1000)
    with (
        patch.object(LightningModule, "log"),
        patch.object(LightningModule, "log_dict"),
        patch.object(LightningModule, "lr_schedulers", return_value=schedule),
        patch.object(Trainer, "estimated_stepping_batches", steps),
    ):
        yield


def make_batch(rows: int, length: int, packed: bool) -> Batch:
    """Full rows, all supervised, as the loader hands them over: on the host."""
    ids_BS = torch.zeros(rows, length, dtype=torch.long)
    mask_BS = torch.ones(rows, length, dtype=torch.bool)
    sample_ids_B = torch.zeros(rows, dtype=torch.long)
    documents = Documents(torch.zeros_like(ids_BS), torch.zeros_like(ids_BS)) if packed else None
    return Batch(ids_BS, mask_BS, sample_ids_B, documents)


def convert(module: nn.Module, function: Any, recurse: bool = True) -> nn.Module:
    """In place of `Module._apply`, which cannot change the data of a fake tensor: new parameters.

    A parameter that several modules share stays shared.
    """
    for child in module.children() if recurse else ():
        child._apply(function)
    for name, parameter in module._parameters.items():
        if parameter is not None:
            if not hasattr(parameter, "_converted"):
                new = nn.Parameter(function(parameter.detach()), parameter.requires_grad)
                parameter._converted = new
            module._parameters[name] = parameter._converted
    for name, buffer in module._buffers.items():
        module._buffers[name] = None if buffer is None else function(buffer)
    return module


def zeros(shape: Sequence[int]) -> Any:
    """Nested lists of that shape, or a number."""
    return [zeros(shape[1:]) for _ in range(shape[0])] if shape else 0


# ---------------------------------------------------------------- kernels

ATTENDED: set[torch.dtype] = set()  # types in which blocks have attended


def cast_and_check(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """As autocast does for attention; raises where the kernel would."""
    if torch.is_autocast_enabled("cuda"):
        dtype = torch.get_autocast_dtype("cuda")
        q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    same(q.dtype, k.dtype, "attention")
    same(q.dtype, v.dtype, "attention")
    assert q.device == k.device == v.device, f"attention on {q.device}, {k.device}, {v.device}"
    return q, k, v


def attend(
    q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None, *_: Any, **__: Any
) -> Tensor:
    """In place of `scaled_dot_product_attention`, whose kernel is chosen by the device."""
    q, k, v = cast_and_check(q, k, v)
    if attn_mask is not None:
        assert attn_mask.device == q.device, f"mask on {attn_mask.device}"
        torch.broadcast_shapes(attn_mask.shape, (*q.shape[:3], k.shape[2]))
    return Kernel.apply(q, k, v)


def attend_tiles(
    q: Tensor, k: Tensor, v: Tensor, block_mask: Any, enable_gqa: bool = False
) -> Tensor:
    """In place of `flex_attention`, which is then not compiled."""
    q, k, v = cast_and_check(q, k, v)
    assert block_mask.seq_lengths == (q.shape[2], k.shape[2]), "the mask is of other lengths"
    assert block_mask.device == q.device, f"mask on {block_mask.device}"
    ATTENDED.add(q.dtype)
    return Kernel.apply(q, k, v)


class Tiles:
    """In place of `BlockMask`."""

    def __init__(self, lengths: tuple[int, int], device: torch.device) -> None:
        self.seq_lengths, self.device = lengths, device

    @classmethod
    def from_kv_blocks(cls, *lists: Tensor, seq_lengths: tuple[int, int], **_: Any) -> "Tiles":
        """From lists of tiles, int32 as Triton wants them."""
        assert {each.dtype for each in lists} == {torch.int32}
        (device,) = {each.device for each in lists}
        return cls(seq_lengths, device)


class Kernel(torch.autograd.Function):
    """What fused attention keeps for its backward pass, and nothing else."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = q.new_empty(*q.shape[:3], v.shape[-1])
        ctx.save_for_backward(q, k, v, out, q.new_empty(q.shape[:3], dtype=torch.float32))
        return out

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v, *_ = ctx.saved_tensors
        return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


@torch.library.register_fake("aten::_thnn_fused_gru_cell")
def _fused_gru_cell(
    from_input: Tensor, from_state: Tensor, state: Tensor, *biases: Tensor | None
) -> tuple[Tensor, Tensor]:
    same(from_input.dtype, from_state.dtype, "gru_cell")
    same(from_input.dtype, state.dtype, "gru_cell")
    return torch.empty_like(state), state.new_empty(state.shape[0], 5 * state.shape[1])


@torch.library.register_fake("aten::_thnn_fused_gru_cell_backward")
def _fused_gru_cell_backward(
    grad_state: Tensor, kept: Tensor, has_bias: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    rows, width = grad_state.shape
    gates = [grad_state.new_empty(rows, 3 * width) for _ in range(2)]
    biases = [grad_state.new_empty(3 * width) if has_bias else None for _ in range(2)]
    return gates[0], gates[1], torch.empty_like(grad_state), biases[0], biases[1]
