"""The plan of an EAGLE-3 recipe: what the unrolled layer keeps, and what its steps compute.

What autograd keeps is not a formula here: the layer is unrolled once on fake tensors, which have
shapes and no storage, at the recipe's own shapes and precision, and the saved tensors are counted.
The layer's attention is written with products of matrices, so it saves the same on every device.

Shapes: B rows on one GPU, S `max_length`, N positions a row, T `ttt_steps`, D hidden, F
intermediate, H query heads, V vocabulary.
"""

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from dflow_lightning.models.eagle3 import Eagle3Drafter, Unroll
from dflow_lightning.plan.memory import Plan, Precision, parameter_count
from dflow_lightning.tensors.loss import CHUNK_BYTES, blocks_within


@dataclass(frozen=True)
class Eagle3Plan(Plan):
    """An EAGLE-3 recipe with its models: no rounds, no relay, and the whole target runs."""

    @property
    def rolled_slots(self) -> int:
        """0: nothing is rolled out, verified, carried over or given to a relay."""
        return 0

    relay_slots = carried_rows = verified = rolled_slots

    @property
    def keeps_rejected(self) -> bool:
        """No."""
        return False

    @property
    def steps(self) -> int:
        """Steps of the unroll, T."""
        return int(self.recipe.model.ttt_steps)

    @property
    def slots(self) -> int:
        """Steps of one row over all positions, N*T."""
        return int(self.recipe.model.num_anchors) * self.steps

    @property
    def target_layers(self) -> int:
        """All: the loss compares with the target's own distribution."""
        return self.target.num_layers

    @property
    def attention(self) -> str:
        """The layer has one formulation."""
        return "dense"

    def features(self) -> int:
        """Taps and the target's last hidden states of the clean rows, `[B, S, C + D]`."""
        width = self.drafter.fc.in_features + self.drafter.dims.hidden_size
        return self.rows * self.recipe.data.max_length * width * self.target_bytes

    def activation_parts(self) -> dict[str, int]:
        """What the unroll and the loss keep for the backward pass, and gradients of one step."""
        dims, precision, length = self.drafter.dims, self.precision, self.recipe.data.max_length
        blocks, D = self.rows * self.recipe.model.num_anchors, dims.hidden_size
        shape = (self.rows, self.recipe.model.num_anchors, length)
        kept = saved_bytes(self.drafter, precision, *shape, 1 if self.recompute else self.steps)
        scores = dims.num_attention_heads * (length + self.steps)
        # Lightning's autocast keeps no cast weights: each step casts the layer's anew.
        inputs, recast = 0, 1 if self.recompute else self.steps
        if self.recompute:  # each step's feature, embedding, keys and values
            keys = 2 * dims.num_key_value_heads * dims.head_dim
            each = D * (precision.residual + self.target_bytes) + keys * precision.compute
            inputs = blocks * self.steps * each
        return {
            "unrolled steps": kept + inputs,
            "weights cast in later steps": (
                (recast - 1) * precision.copy * parameter_count(self.drafter.midlayer)
            ),
            "loss": blocks * self.steps * 2 * precision.residual * D,
            "gradients of one step": blocks
            * (4 * precision.compute * (D + dims.intermediate_size) + scores * 4),
        }

    def masks(self) -> int:
        """None beside those that the steps keep."""
        return 0

    def logits(self) -> int:
        """`[chunk, T, V]`: four softmaxes or logits in float32 and one product of them at once."""
        vocabulary = self.drafter.dims.vocab_size
        chunk = blocks_within(CHUNK_BYTES // 2, self.steps, vocabulary)
        chunk = min(chunk, self.rows * self.recipe.model.num_anchors)
        beside = 2 if self.target_bytes == 2 else 0
        return chunk * self.steps * vocabulary * (20 + beside)


@lru_cache(maxsize=256)
def saved_bytes(
    drafter: Eagle3Drafter, precision: Precision, rows: int, blocks: int, length: int, steps: int
) -> int:
    """Bytes that autograd keeps of an unroll, weights and their copies left out.

    Args:
        drafter: with any weights; one like it is made of fake tensors.
        rows: B.
        blocks: positions of each row from which the layer is unrolled, N.
        length: tokens of a row, S.
        steps: T.
    """
    with FakeTensorMode():
        fake = Eagle3Drafter(drafter.dims)
        for module in fake.modules():  # `Module.to` cannot swap fake parameters
            for name, parameter in module.named_parameters(recurse=False):
                cast = parameter.detach().to(_dtype(precision))
                setattr(module, name, nn.Parameter(cast))
        return unrolled(fake, precision, rows, blocks, length, steps)


def _dtype(precision: Precision) -> torch.dtype:
    return torch.bfloat16 if precision.weight == 2 else torch.float32


def unrolled(
    drafter: Eagle3Drafter, precision: Precision, rows: int, blocks: int, length: int, steps: int
) -> int:
    """Unroll a drafter on random rows and count the bytes that autograd saves, once a storage."""
    dtype = _dtype(precision)
    shapes = {shape for p in drafter.parameters() for shape in (p.shape, p.shape[::-1])}
    saved: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        if tensor.shape not in shapes:  # weights, and their copies under autocast
            saved[tensor.untyped_storage()._cdata] = tensor
        return tensor

    dims = drafter.dims
    D, taps = dims.hidden_size, drafter.fc.in_features
    taps_BSC = torch.zeros(rows, length, taps, dtype=dtype)
    embeds_BSD = torch.zeros(rows, length, D, dtype=dtype)
    embeds_BNTD = torch.zeros(rows, blocks, steps, D, dtype=dtype)
    first_BN = torch.zeros(rows, blocks, dtype=torch.long)
    positions_BS = torch.zeros(rows, length, dtype=torch.long)
    # Autocast of the CPU: it casts what autocast of a GPU casts here, and needs no GPU.
    mixed = torch.autocast("cpu", torch.bfloat16, enabled=precision.copy > 0)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor), mixed:
        h_BSD = drafter.project(taps_BSC)
        context = drafter.context_kv(h_BSD, embeds_BSD, positions_BS)
        h_BND = torch.zeros(rows, blocks, D, dtype=h_BSD.dtype, requires_grad=True)
        unroll = Unroll(drafter, h_BND, first_BN, context)
        torch.stack([unroll.advance(embeds) for embeds in embeds_BNTD.unbind(2)], dim=2).sum()
    return sum(tensor.untyped_storage().nbytes() for tensor in saved.values())
