"""`dflow-train plan`: what a recipe needs, before any GPU time is spent.

Parameters are counted on modules without storage, so they are exact. Memory is predicted from
shapes, for the moment it peaks: the backward pass of a step whose rows all have `max_length`
tokens. What passes before it (the target's own activations, the logits of a rollout) is smaller and
gone by then. Nothing is sharded. None of it has been measured on a GPU.

Shapes: B rows on one GPU, S `max_length`, N blocks a row over all rounds, R rolled-out blocks a row
and round, K block size, T taps, D hidden, F intermediate, H/G query and key heads, E head size, V
vocabulary.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from jsonargparse import ActionConfigFile
from lightning.pytorch import Trainer
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from dflow_lightning.cli import INTERPOLATION, SECTIONS, RunParser
from dflow_lightning.data.datamodule import ChatDataModule
from dflow_lightning.data.sets import count_rows
from dflow_lightning.dims import DrafterConfig, DrafterDims
from dflow_lightning.drafter import Drafter
from dflow_lightning.errors import InputError
from dflow_lightning.module import DrafterModule
from dflow_lightning.relay import Relay, RelayConfig
from dflow_lightning.target import UNREADABLE, FrozenTarget

GIB = 2**30
RESERVE = 0.08  # of a GPU: CUDA's context, NCCL, fragmentation
GPUS = "Processes with one GPU each; by default trainer.devices, 1 where that is no number."
TARGET_CONFIG = "The target's config.json or its folder, where the target is not at hand."


class Precision(NamedTuple):
    """Bytes per number: parameters, their copy under autocast, activations; and what is saved.

    `saved` are bytes kept for the backward pass per slot and layer, as multiples of D, H*E, G*E
    and F: inputs and outputs of norms (their input in float32), and what each linear layer and the
    attention read, cast once for each of them under autocast.
    """

    weight: int
    copy: int
    compute: int
    saved: tuple[int, int, int, int]


MIXED = Precision(4, 2, 2, (26, 16, 6, 8))
FULL = Precision(4, 0, 4, (24, 28, 8, 16))
HALF = Precision(2, 0, 2, (16, 16, 6, 8))
PRECISIONS: dict[Any, Precision] = {
    **dict.fromkeys(("bf16-mixed", "16-mixed"), MIXED),
    **dict.fromkeys((None, "32-true", "32", 32), FULL),
    **dict.fromkeys(("bf16-true", "16-true"), HALF),
}


@dataclass(frozen=True)
class Plan:
    """A recipe with its models, which have no storage, on `gpus` GPUs with `rows` rows each."""

    recipe: Any
    target: FrozenTarget
    drafter: Drafter
    relay: Relay | None
    gpus: int
    rows: int

    @property
    def trained(self) -> int:
        """Parameters of drafter and relay."""
        return count(self.drafter) + count(self.relay)

    @property
    def precision(self) -> Precision:
        """Of the drafter and the relay."""
        return PRECISIONS[self.recipe.trainer.precision]

    @property
    def target_bytes(self) -> int:
        """Bytes per number of the target; `auto` is bfloat16 but on a CPU."""
        dtype, on_cpu = self.recipe.model.target.dtype, self.recipe.trainer.accelerator == "cpu"
        return 4 if dtype == "float32" or (dtype == "auto" and on_cpu) else 2

    @property
    def rolled_slots(self) -> int:
        """Slots of one row in one rollout round, R*K."""
        rollout = self.recipe.rollout
        return rollout.num_anchors * self.drafter.dims.block_size if rollout.num_rounds else 0

    @property
    def relay_slots(self) -> int:
        """Slots of one row whose input the relay corrects, over all rounds."""
        return self.recipe.rollout.num_rounds * self.rolled_slots if self.relay else 0

    @property
    def slots(self) -> int:
        """Slots of one row over all rounds, N*K."""
        mask_round = self.recipe.model.num_anchors * self.drafter.dims.block_size
        return mask_round + self.recipe.rollout.num_rounds * self.rolled_slots

    @property
    def verified(self) -> int:
        """Drafted tokens of one row that the target reads, over all rounds."""
        rollout = self.recipe.rollout
        relays = self.relay is not None and rollout.mode in ("online", "teacher_forced")
        read = relays or rollout.reference == "target"
        return rollout.num_rounds * self.rolled_slots if read else 0

    def memory(self) -> dict[str, int]:
        """Bytes on one GPU by part, in the order in which they come to be."""
        weight, copy, *_ = self.precision
        together = self.gpus > 1  # DDP collects gradients in buckets of the same size
        return {
            "target weights": count(self.target.model) * self.target_bytes,
            "drafter weights" + " + bf16 copy" * bool(copy): self.trained * (weight + copy),
            "gradients" + " + DDP buckets" * together: self.trained * weight * (1 + together),
            "optimizer (two moments)": self.trained * weight * 2,
            "clean features, relay rows": self.features(),
            "target KV, clean and verified": self.target_cache(),
            "drafter activations": self.activations(),
            "attention masks": self.masks(),
            "logits of one chunk": self.logits(),
        }

    def features(self) -> int:
        """Taps of the clean rows, `[B, S, T*D]`, and of a round's verify rows, `[B, R, K, T*D]`."""
        rows = self.rows * (self.recipe.data.max_length + self.relay_slots)
        return rows * self.drafter.fc.in_features * self.target_bytes

    def target_cache(self) -> int:
        """Keys and values `[B, G, S + R*K, E]` of each target layer that runs.

        Those are the layers up to the highest tap; all of them if the target's argmax is wanted.
        The slots of the verified blocks are the same in every round.
        """
        config, rollout = self.target.config, self.recipe.rollout
        head_dim = getattr(config, "head_dim", None)
        head_dim = head_dim or config.hidden_size // config.num_attention_heads
        to_the_head = rollout.num_rounds and rollout.reference == "target"
        highest = max(self.drafter.dims.target_layer_ids) + 1
        layers = self.target.num_layers if to_the_head else highest
        slots = self.rows * (self.recipe.data.max_length + self.rolled_slots)
        return 2 * layers * config.num_key_value_heads * head_dim * slots * self.target_bytes

    def activations(self) -> int:
        """What the drafter and the relay keep for their backward pass.

        Slots, B*N*K: `Precision.saved` per layer, and the final norm. Context rows, B*S: keys and
        values of each layer (`[G*E]` normed, both `[H*E]` once repeated for the query heads) and
        `hidden_norm`. Relay slots, B*R*K a round: the projection and the relay's MLP.
        """
        dims, (_, copy, compute, saved) = self.drafter.dims, self.precision
        D, F = dims.hidden_size, dims.intermediate_size
        HE, GE = dims.num_attention_heads * dims.head_dim, dims.num_key_value_heads * dims.head_dim
        slot = sum(n * size for n, size in zip(saved, (D, HE, GE, F), strict=True))
        key_value = saved[2] * GE + 2 * compute * HE + 2 * copy * D
        relay = 12 * D + compute * (10 * D + 2 * (self.relay.hidden_size if self.relay else 0))
        return self.rows * (
            self.slots * (dims.num_layers * slot + 5 * compute * D)
            + self.recipe.data.max_length * (dims.num_layers * key_value + 12 * D)
            + self.relay_slots * relay
        )

    def masks(self) -> int:
        """Each drafter layer's additive mask, `[B, 1, N*K, S + N*K]`, shared by all heads."""
        mask = self.rows * self.slots * (self.recipe.data.max_length + self.slots)
        return self.drafter.dims.num_layers * mask * self.precision.compute

    def logits(self) -> int:
        """`[chunk, K-1, V]`: in the target's type, log-softmax and its gradient in float32."""
        dims, chunk = self.drafter.dims, self.recipe.model.loss.chunk_blocks
        blocks = min(chunk, self.rows * self.slots // dims.block_size)
        return blocks * (dims.block_size - 1) * dims.vocab_size * (self.target_bytes + 8)

    def checkpoint(self) -> int:
        """Bytes of one checkpoint file: weights and both moments; never the target."""
        return self.trained * self.precision.weight * 3

    def refuse_what_does_not_fit(self, gpu_memory: float) -> None:
        """Raise `InputError` naming the first part without room on a GPU of `gpu_memory` GiB."""
        budget, used = gpu_memory * (1 - RESERVE) * GIB, 0
        for index, (part, size) in enumerate(self.memory().items()):
            if used + size > budget:
                raise InputError(
                    f"memory: no room for the {part}: {size / GIB:.1f} GiB on top of "
                    f"{used / GIB:.1f}, and {budget / GIB:.1f} of {gpu_memory:g} GiB are usable; "
                    + self._mend(budget, held=index < 4, target=index == 0)
                )
            used += size

    def _mend(self, budget: float, *, held: bool, target: bool) -> str:
        together = self.rows * self.recipe.trainer.accumulate_grad_batches
        for rows in range(self.rows - 1, 0, -1):
            if together % rows == 0 and sum(replace(self, rows=rows).memory().values()) <= budget:
                return (
                    f"set data.batch_size to {rows} and trainer.accumulate_grad_batches to "
                    f"{together // rows}, which keeps the rows of a step"
                )
        needed = sum(replace(self, rows=1).memory().values()) / (1 - RESERVE) / GIB
        larger = f"take GPUs of {math.ceil(needed)} GiB and data.batch_size 1"
        if not held:
            return f"lower model.num_anchors or data.max_length, or {larger}"
        layers = "" if target else "lower model.drafter.num_layers, "
        return f"{layers}choose a smaller target, or {larger} (nothing is sharded)"


def run(args: Sequence[str]) -> int:
    """Print parameters, memory, steps and disk of a recipe; refuse what cannot fit."""
    recipe = parse(args)
    plan = make_plan(recipe)
    print("\n".join([*counts(plan), "", *memory_table(plan, recipe.gpu_memory), ""]))
    plan.refuse_what_does_not_fit(recipe.gpu_memory)
    print("\n".join([*work(plan), *steps(plan), *disk(plan)]))
    return 0


def parse(args: Sequence[str]) -> Any:
    """The merged recipe, read and checked as `fit` does, and three options of this command."""
    parser = RunParser(prog="dflow-train plan", **INTERPOLATION)  # type: ignore[arg-type]
    parser.add_argument("-c", "--config", action=ActionConfigFile, help="A recipe, then overlays.")
    parser.add_argument("--gpus", type=int | None, default=None, help=GPUS)
    parser.add_argument("--gpu_memory", type=float, default=80.0, help="GiB of one GPU.")
    parser.add_argument("--target_config", type=str | None, default=None, help=TARGET_CONFIG)
    sections: dict[str, Any] = {"model": DrafterModule, "data": ChatDataModule, "trainer": Trainer}
    for section, kind in (sections | SECTIONS).items():
        parser.add_lightning_class_args(kind, section)
    for name in ("seed_everything", "run_dir", "ckpt_path"):
        parser.add_argument(f"--{name}", type=Any, default=None, help="Not used here.")
    parser.link_arguments("model.target.path", "data.tokenizer")
    recipe = parser.parse_args(list(args))
    if recipe.gpu_memory <= 0:
        raise InputError(f"gpu_memory is {recipe.gpu_memory:g}; give the GiB of one GPU")
    return recipe


def make_plan(recipe: Any) -> Plan:
    """The models, on the meta device, from what `parse` gives.

    Raises:
        InputError: the target's config.json is not found, or a setting cannot be planned for.
    """
    model, trainer = recipe.model, recipe.trainer
    if trainer.precision not in PRECISIONS:
        known = ", ".join(name for name in PRECISIONS if isinstance(name, str))
        raise InputError(f"trainer.precision {trainer.precision} has no plan; choose of {known}")
    devices = trainer.devices if isinstance(trainer.devices, int) else 1
    gpus = max(1, devices) * trainer.num_nodes if recipe.gpus is None else recipe.gpus
    if gpus < 1:
        raise InputError(f"gpus is {gpus}; give 1 or more")
    target = empty_target(model.target.path, recipe.target_config)
    dims = DrafterDims.resolve(with_mask(DrafterConfig(**model.drafter.as_dict()), target), target)
    relay = RelayConfig(**model.relay.as_dict())
    with torch.device("meta"):
        drafter = Drafter(dims)
        built = relay.build(dims.hidden_size, dims.rms_norm_eps) if relay.enabled else None
    return Plan(recipe, target, drafter, built, gpus, recipe.data.batch_size)


def empty_target(path: str, target_config: str | None) -> FrozenTarget:
    """The target without storage, built from its config.json alone."""
    source = str(Path(target_config or path).expanduser())
    try:
        config = AutoConfig.from_pretrained(source)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
    except UNREADABLE as error:
        raise InputError(
            f"target: no config.json of a causal language model at {source} "
            f"({str(error).splitlines()[0][:150]}); give --target_config, the file or its folder"
        ) from error
    no_tokenizer = dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"))
    return FrozenTarget(
        model, SimpleNamespace(vocab_size=0, all_special_ids=[], **no_tokenizer), path
    )


def with_mask(config: DrafterConfig, target: FrozenTarget) -> DrafterConfig:
    """Any mask id where the recipe leaves it to the tokenizer, which counting does not need."""
    free = next(i for i in range(target.vocab_size) if i not in target.stop_token_ids)
    return replace(config, mask_token_id=free) if config.mask_token_id is None else config


def count(module: nn.Module | None) -> int:
    """Parameters of a module, tied ones once."""
    return sum(p.numel() for p in module.parameters()) if module else 0


def counts(plan: Plan) -> list[str]:
    """Parameters by model."""
    dims = plan.drafter.dims
    taps = " ".join(map(str, dims.target_layer_ids))
    lines = {
        f"target   {plan.target.name[-46:]}": plan.target.model,
        f"drafter  {dims.num_layers} layers, taps {taps}": plan.drafter,
        f"relay    {'' if plan.relay else 'none'}": plan.relay,
    }
    return ["parameters", *(f"  {name:<56}{count(m):>18,}" for name, m in lines.items())]


def memory_table(plan: Plan, gpu_memory: float) -> list[str]:
    """Memory by part against what a GPU has."""
    parts = plan.memory() | {"kept free (CUDA, NCCL, fragments)": int(gpu_memory * RESERVE * GIB)}
    return [
        "memory per GPU, GiB, at the longest rows (predicted, not measured)",
        *(f"  {part:<56}{size / GIB:>18.2f}" for part, size in parts.items()),
        f"  {f'total, of {gpu_memory:g}':<56}{sum(parts.values()) / GIB:>18.2f}",
    ]


def work(plan: Plan) -> list[str]:
    """Rows and tokens of one optimizer step."""
    accumulate = plan.recipe.trainer.accumulate_grad_batches
    rows = plan.gpus * plan.rows * accumulate
    clean, verified = rows * plan.recipe.data.max_length, rows * plan.verified
    return [
        f"step     {rows} rows: {plan.gpus} GPUs x {plan.rows} x {accumulate} accumulated",
        f"  target   up to {clean:,} tokens, with rollouts {clean + verified:,}",
        f"  drafter  {rows * plan.slots:,} slots",
    ]


def steps(plan: Plan) -> list[str]:
    """Optimizer steps, as the loader and Lightning count them; or what is missing to know them."""
    trainer = plan.recipe.trainer
    given = plan.recipe.data.train
    paths = [Path(one).expanduser() for one in (given if isinstance(given, list) else [given])]
    if missing := [path for path in paths if not path.exists()]:
        rows = plan.gpus * plan.rows * trainer.accumulate_grad_batches
        return [f"steps    one for {rows} rows; data.train is missing: {missing[0]}"]
    rows = sum(count_rows(path, "data.train") for path in paths)
    if plan.recipe.data.pack:
        return [f"steps    {rows:,} conversations an epoch; packed rows are counted by fit"]
    batches = max(rows // plan.rows, min(rows, 1)) // plan.gpus
    if not batches:
        raise InputError(
            f"data.train has {rows} rows, no batch of {plan.rows} for each of {plan.gpus} GPUs; "
            "lower data.batch_size or add rows"
        )
    epoch = math.ceil(batches / trainer.accumulate_grad_batches)
    limits = [trainer.max_steps] if trainer.max_steps >= 0 else []
    epochs = trainer.max_epochs if limits or trainer.max_epochs else 1000  # Lightning's default
    limits += [epochs * epoch] if epochs is not None and epochs >= 0 else []
    total = f"{min(limits):,} ({min(limits) / epoch:.1f} epochs)" if limits else "without end"
    return [f"steps    {total}; {epoch:,} for the {rows:,} rows of an epoch"]


def disk(plan: Plan) -> list[str]:
    """Checkpoints: the best ones, the last one, and one more while it is being written."""
    files = max(0, plan.recipe.checkpoint.save_top_k) + 1
    size = plan.checkpoint() / 1e9
    return [
        f"disk     {(files + 1) * size:.2f} GB: {files} checkpoints of {size:.2f}, one more while "
        "written",
        f"  export   {plan.trained * 2 / 1e9:.2f} GB in bfloat16",
    ]
