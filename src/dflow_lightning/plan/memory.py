"""Memory of a training step on one GPU, by part, and what to change if it does not fit.

Parameters are counted on modules without storage, so they are exact. Memory is predicted from
shapes for the largest phase of a step whose rows all have `max_length` tokens: the target's forward
and the rollouts, the loss, or the backward pass of a layer. What one phase holds is freed in the
next. Gradients are there from the start, as with accumulated micro-batches and in the buckets of
DDP and ZeRO. The shapes are tested against real tensors on a CPU, the sum by `make fake-cuda`.

Shapes: B rows on one GPU, S `max_length`, N blocks a row over all rounds, R rolled-out blocks a row
and round, K block size, T taps, D hidden, F intermediate, H/G query and key heads, E head size, V
vocabulary.
"""

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import nn

from dflow_lightning.errors import InputError
from dflow_lightning.models.device import choose_dtype
from dflow_lightning.models.relay import Relay
from dflow_lightning.models.target import FrozenTarget
from dflow_lightning.tensors.attention import formulation_for
from dflow_lightning.tensors.loss import CHUNK_BYTES, blocks_within

GIB = 2**30


class Sharding(NamedTuple):
    """ZeRO's stage, 0 for none, and whether the optimizer is offloaded to the CPU."""

    stage: int = 0
    offload: bool = False

    @property
    def name(self) -> str:
        """The value of `trainer.strategy`."""
        return f"zero{self.stage}" + "_offload" * self.offload


SHARDINGS = [Sharding(2), Sharding(2, offload=True), Sharding(3), Sharding(3, offload=True)]


class Precision(NamedTuple):
    """Bytes per number: parameters, their copy under autocast, activations, the residual stream.

    `saved` are bytes kept for the backward pass per slot and layer, as multiples of D, H*E, G*E
    and F: the inputs of norms, and what each linear layer and the attention read, cast once for
    each of them under autocast.
    """

    weight: int
    copy: int
    compute: int
    residual: int
    saved: tuple[int, int, int, int]


MIXED = Precision(4, 2, 2, 4, (18, 8, 2, 8))


FULL = Precision(4, 0, 4, 4, (16, 16, 4, 16))


HALF = Precision(2, 0, 2, 2, (8, 8, 2, 8))


PRECISIONS: dict[Any, Precision] = {
    **dict.fromkeys(("bf16-mixed", "16-mixed"), MIXED),
    **dict.fromkeys((None, "32-true", "32", 32), FULL),
    **dict.fromkeys(("bf16-true", "16-true"), HALF),
}


def amount(value: float, decimals: int = 2) -> str:
    """A number with `decimals` decimals, or with two digits if those would all be zero."""
    if not 0 < value < 0.5 * 10**-decimals:
        return f"{value:.{decimals}f}"
    return f"{value:.{1 - math.floor(math.log10(value))}f}"


def parameter_count(module: nn.Module | None) -> int:
    """Parameters of a module; tied ones count once."""
    return sum(p.numel() for p in module.parameters()) if module else 0


RESERVE = 0.08  # of a GPU: CUDA's context, NCCL, fragmentation
ZERO_BUCKETS = 2 * 50_000_000 * 4  # bytes of gradients on their way to other processes


@dataclass(frozen=True)
class Plan:
    """A recipe with its models, which have no storage, on `gpus` GPUs with `rows` rows each."""

    recipe: Any
    target: FrozenTarget
    drafter: Any  # Drafter, or Eagle3Drafter in an Eagle3Plan
    relay: Relay | None
    gpus: int
    rows: int
    sharding: Sharding
    recompute: bool
    shard_target: bool = False

    @property
    def trained(self) -> int:
        """Parameters of drafter and relay."""
        return parameter_count(self.drafter) + parameter_count(self.relay)

    @property
    def precision(self) -> Precision:
        """Bytes of the drafter's and the relay's numbers."""
        return PRECISIONS[self.recipe.trainer.precision]

    @property
    def on_cpu(self) -> bool:
        """Whether the run is on this machine's CPU."""
        return bool(self.recipe.trainer.accelerator == "cpu")

    @property
    def rolls_out(self) -> bool:
        """Whether blocks are rolled out."""
        return bool(self.rolled_slots)

    @property
    def target_dtype(self) -> str:
        """The name of the target's dtype, whatever the precision of the run."""
        device = torch.device("cpu" if self.on_cpu else "cuda")
        dtype = choose_dtype(str(self.recipe.model.target.dtype), device)
        return str(dtype).removeprefix("torch.")

    @property
    def target_bytes(self) -> int:
        """Bytes per number of the target."""
        return 4 if self.target_dtype == "float32" else 2

    @property
    def rolled_slots(self) -> int:
        """Slots of one row in one rollout round, R*K."""
        rollout = self.recipe.rollout
        return rollout.num_anchors * self.drafter.dims.block_size if rollout.num_rounds else 0

    @property
    def relay_slots(self) -> int:
        """Slots of one row that get a rejected row, over all rounds."""
        return self.recipe.rollout.num_rounds * self.rolled_slots if self.keeps_rejected else 0

    @property
    def keeps_rejected(self) -> bool:
        """Whether the recipe has a relay or carryover."""
        return self.relay is not None or self.drafter.carryover is not None

    @property
    def slots(self) -> int:
        """Slots of one row over all rounds, N*K."""
        mask_round = self.recipe.model.num_anchors * self.drafter.dims.block_size
        return mask_round + self.recipe.rollout.num_rounds * self.rolled_slots

    @property
    def carried_rows(self) -> int:
        """Rows that the blocks of one row attend to by carryover; all blocks have K-1 of them."""
        carries = self.drafter.carryover is not None and self.rolled_slots
        return self.slots - self.slots // self.drafter.dims.block_size if carries else 0

    @property
    def verified(self) -> int:
        """Drafted tokens of one row that the target reads, over all rounds."""
        rollout = self.recipe.rollout
        relays = self.keeps_rejected and rollout.mode in ("online", "teacher_forced")
        read = relays or rollout.reference == "target"
        return rollout.num_rounds * self.rolled_slots if read else 0

    def memory(self) -> dict[str, int]:
        """Bytes on one GPU by part, in the order of allocation."""
        target = parameter_count(self.target.model)
        if self.shard_target:  # embedding and head stay whole; a layer runs, the next is gathered
            layer = sum(weight.numel() for weight in self.target.layer_weights(0).values())
            layers = layer * self.target.num_layers
            target = target - layers + layers // self.gpus + 2 * layer
        target *= self.target_bytes
        return {
            "target weights" + f", layers 1/{self.gpus}" * self.shard_target: target,
            **self.trained_state(),
            "clean features" + ", relay rows" * bool(self.relay_slots): self.features(),
            **max(self.phases(), key=lambda parts: sum(parts.values())),
        }

    def phases(self) -> list[dict[str, int]]:
        """What the phases of a step hold beside weights, gradients, optimizer and features.

        Those are the target's forwards with the rollouts, the loss and a layer's backward pass.
        When the loss is computed, recomputed layers hold their inputs alone; that phase is taken
        for larger than it is.
        """
        parts = self.activation_parts()
        at_loss = sum(parts.pop(name) for name in ("final norm", "loss") if name in parts)
        backward = sum(parts.pop(name) for name in list(parts) if name.startswith("gradients"))
        kept, name = sum(parts.values()), "drafter activations" + ", recomputed" * self.recompute
        masks = {"attention masks": self.masks()}
        logits = {"logits of one chunk": self.logits()}
        cache = "target KV, clean" + " and verified" * bool(self.rolled_slots)
        return [
            {cache: self.target_cache(), "one layer of the target": self.target_layer()} | logits,
            {name: kept + at_loss} | masks | logits,
            {name: kept + backward} | masks,
        ]

    def target_layer(self) -> int:
        """Hidden states and MLP of one layer of the target, `4 D + 3 F` a token, without gradients.

        The clean rows, or a round's verified blocks if those are more tokens.
        """
        tokens = self.rows * max(self.recipe.data.max_length, self.rolled_slots)
        D = self.target.hidden_size
        F = getattr(self.target.config, "intermediate_size", None) or 4 * D
        return tokens * (4 * D + 3 * F) * self.target_bytes

    def trained_state(self) -> dict[str, int]:
        """Weights, gradients and optimizer of drafter and relay.

        Under ZeRO each GPU has its share of the optimizer, from stage 2 of the gradients and in
        stage 3 of the weights; its optimizer steps on a float32 copy of its own share.
        """
        weight, copy, *_ = self.precision
        # Autocast's copy of a recomputed layer lives as long as the layer does.
        layers = getattr(self.drafter, "layers", ()) if self.recompute else ()
        copied = self.trained - sum(map(parameter_count, layers[1:]))
        stage, offload = self.sharding
        share = [self.trained / (self.gpus if stage >= least else 1) for least in (1, 2, 3)]
        if stage:
            passing, buckets = ZERO_BUCKETS, " + buckets"
            optimizer = 0 if offload else 12 * share[0]
        else:  # DDP collects gradients in buckets of the same size
            passing = self.trained * weight * (self.gpus > 1)
            buckets = " + DDP buckets" * (self.gpus > 1)
            optimizer = 2 * weight * share[0]
        where = ", in CPU memory" if offload else f", {self.sharding.name}" if stage else ""
        return {
            "drafter weights" + " + bf16 copy" * bool(copy): int(share[2] * weight + copied * copy),
            f"gradients{buckets}": int(share[1] * weight + passing),
            f"optimizer{where}": int(optimizer),
        }

    @property
    def cpu_memory(self) -> int:
        """Bytes that an optimizer in CPU memory takes on a node: weights, gradients, moments."""
        return self.trained * 16 if self.sharding.offload else 0

    @property
    def target_copies(self) -> int:
        """Copies of the target in the CPU memory of a node, while its processes load it.

        Files of the wanted type are mapped, and all processes share their pages; of another type
        each process makes a copy of its own.
        """
        stored = str(getattr(self.target.model.config, "dtype", None)).removeprefix("torch.")
        processes = max(1, self.gpus // self.recipe.trainer.num_nodes)
        return 1 if stored == self.target_dtype else processes

    @property
    def loading_memory(self) -> int:
        """Bytes of CPU memory that those copies take; on GPUs they are dropped afterwards."""
        return self.target_copies * parameter_count(self.target.model) * self.target_bytes

    def features(self) -> int:
        """Taps of the clean rows, `[B, S, T*D]`, and of a round's verify rows, `[B, R, K, T*D]`."""
        rows = self.rows * (self.recipe.data.max_length + self.relay_slots)
        return rows * self.drafter.fc.in_features * self.target_bytes

    def target_cache(self) -> int:
        """Keys and values `[B, G, S + R*K, E]` of each target layer that runs.

        Those are the layers up to the highest tap; all of them if the target's argmax is wanted.
        The slots of the verified blocks are the same in every round.
        """
        config = self.target.config
        slots = self.rows * (self.recipe.data.max_length + self.rolled_slots)
        width = config.num_key_value_heads * self.target_head_dim
        return 2 * self.target_layers * width * slots * self.target_bytes

    @property
    def target_layers(self) -> int:
        """Layers of the target that run."""
        rollout = self.recipe.rollout
        to_the_head = rollout.num_rounds and rollout.reference == "target"
        to_the_head = to_the_head or self.recipe.model.loss.kind == "kl"
        return (
            self.target.num_layers if to_the_head else max(self.drafter.dims.target_layer_ids) + 1
        )

    @property
    def target_head_dim(self) -> int:
        """Size of the target's heads."""
        config = self.target.config
        given = getattr(config, "head_dim", None)
        return given or config.hidden_size // config.num_attention_heads

    @property
    def attention(self) -> str:
        """The formulation of block attention that will run."""
        device = "cpu" if self.recipe.trainer.accelerator == "cpu" else "cuda"
        dtype = torch.float32 if self.precision.compute == 4 else torch.bfloat16
        return formulation_for(self.recipe.model.attention, 2, torch.device(device), dtype)

    def activation_parts(self) -> dict[str, int]:
        """What the drafter, the relay and the loss keep for the backward pass.

        Slots, B*N*K: `Precision.saved` per layer; the final norm and the loss's gradient. Context
        rows, B*S: keys and values of each layer, and `hidden_norm`. Keys and values that attention
        reads: `flex` joins context and slots, the others repeat both for the query heads. Relay
        slots, B*R*K a round: the projection and the relay's MLP. Carried rows, B*N*(K-1), and
        slots beside them: what a layer makes their keys and values of. Recomputed layers keep their
        input and their context, and one layer at a time is whole. Gradients on their way back are
        those of an MLP: its product, both factors and one more at width F, as many at width D. A
        causal head's are its tokens, its gates and states and the rank.
        """
        dims, (_, _, compute, residual, saved) = self.drafter.dims, self.precision
        D, F, length = dims.hidden_size, dims.intermediate_size, self.recipe.data.max_length
        HE, GE = dims.num_attention_heads * dims.head_dim, dims.num_key_value_heads * dims.head_dim
        whole = 1 if self.recompute else dims.num_layers
        slot = sum(n * size for n, size in zip(saved, (D, HE, GE, F), strict=True))
        read = 2 * compute * (GE if self.attention == "flex" else HE)
        context = dims.num_layers * saved[2] * GE + 2 * compute * D
        kept = dims.num_layers * residual * D if self.recompute else 0
        if (state := dims.gru_hidden_dim) is not None and (rank := dims.emb_dim) is not None:
            head = {"causal head": residual * 2 * D + compute * (D + 10 * state + 4 * rank)}
        else:
            head = {}
        beside = self.carried_rows and self.slots + self.carried_rows  # slots and rows as one
        carried = beside * residual * D + self.carried_rows * (saved[2] * GE + read)
        relay = 12 * D + compute * (10 * D + 2 * (self.relay.hidden_size if self.relay else 0))
        return {
            "layers of the blocks": self.rows * self.slots * (whole * slot + kept),
            "keys and values read": self.rows * (self.slots + length) * whole * read,
            "context rows": self.rows * length * context,
            "final norm": self.rows * self.slots * residual * D,
            "loss": self.rows * self.slots * 2 * residual * D,
            "gradients of one layer": self.rows * self.slots * 4 * compute * (D + F),
            "relay": self.rows * self.relay_slots * relay,
            "carried rows": self.rows * whole * carried,
            **{part: self.rows * self.slots * size for part, size in head.items()},
        }

    def masks(self) -> int:
        """Additive masks: of all slots by all keys in each layer, or of the context in one."""
        length, slots = self.recipe.data.max_length, self.slots
        if self.attention == "flex":
            return 0  # lists of tiles
        if self.attention == "split":
            return self.rows * slots * length * self.precision.compute
        layers = 1 if self.recompute else self.drafter.dims.num_layers
        return layers * self.rows * slots * (length + slots) * self.precision.compute

    def logits(self) -> int:
        """`[chunk, J, V]`: the softmax in float32, and once in the head's type beside it.

        A causal head has two softmaxes, of which each keeps its input and has a gradient.
        """
        dims, blocks = self.drafter.dims, self.rows * self.slots // self.drafter.dims.block_size
        slots = dims.block_size - 1
        chunk = self.recipe.model.loss.chunk_blocks
        chunk = chunk or blocks_within(CHUNK_BYTES, slots, dims.vocab_size)
        beside = 2 if self.target_bytes == 2 else 0
        copies = 1 if dims.gru_hidden_dim is None else 5
        return min(chunk, blocks) * slots * dims.vocab_size * (4 * copies + beside)

    def checkpoint(self) -> int:
        """Bytes of one checkpoint file: weights and both moments; never the target."""
        return self.trained * self.precision.weight * 3

    def refuse_what_does_not_fit(self, gpu_memory: float) -> None:
        """Raise `InputError` naming the first part without room on a GPU of `gpu_memory` GiB."""
        budget, used = gpu_memory * (1 - RESERVE) * GIB, 0
        for part, size in self.memory().items():
            if used + size > budget:
                raise InputError(
                    f"memory: no room for the {part}: {size / GIB:.1f} GiB on top of "
                    f"{used / GIB:.1f}, and {budget / GIB:.1f} of {gpu_memory:g} GiB are usable; "
                    + self._changes_that_fit(budget)
                )
            used += size

    def _changes_that_fit(self, budget: float) -> str:
        """The fewest changes that fit; rows of a step, anchors and the model stay the same."""
        found = sorted(self._changes(), key=lambda change: len(change[0]))
        for words, changed in found:
            if changed.total <= budget:
                return ", ".join(words)
        words, smallest = min(found, key=lambda change: (change[1].total, len(change[0])))
        needed = math.ceil(smallest.total / (1 - RESERVE) / GIB)
        return (
            "choose a smaller target, lower model.drafter.num_layers, or take GPUs of "
            + " and ".join([f"{needed} GiB", *words])
        )

    @property
    def total(self) -> int:
        """Bytes of all parts."""
        return sum(self.memory().values())

    def _changes(self) -> "Iterator[tuple[list[str], Plan]]":
        """Every combination of the settings that save memory, in words and as a plan."""
        together = self.rows * self.recipe.trainer.accumulate_grad_batches
        fewer = [rows for rows in range(self.rows - 1, 0, -1) if together % rows == 0]
        stronger = [s for s in SHARDINGS if s > self.sharding] if self.gpus > 1 else []
        # What costs least comes last here and is therefore tried first.
        for shard, recompute, sharding, rows in itertools.product(
            dict.fromkeys((self.shard_target, self.shard_target or self.gpus > 1)),
            dict.fromkeys((self.recompute, True)),
            [self.sharding, *stronger],
            [self.rows, *fewer],
        ):
            words = []
            if rows != self.rows:
                words.append(
                    f"set data.batch_size to {rows} and trainer.accumulate_grad_batches to "
                    f"{together // rows}, which keeps the rows of a step"
                )
            if recompute != self.recompute:
                words.append("set model.gradient_checkpointing to true")
            if sharding != self.sharding:
                words.append(f"set trainer.strategy to {sharding.name}")
            if shard != self.shard_target:
                words.append("set model.target.shard to true")
            yield (
                words,
                replace(
                    self, rows=rows, recompute=recompute, sharding=sharding, shard_target=shard
                ),
            )
