"""Floating-point operations of a training step, counted from shapes.

A matrix of n weights costs 2n a row forward, and twice that backward where it is trained. Attention
costs 4 E a query, key and head forward and two and a half times that backward (flash attention
computes its scores again). Rows are `max_length` long, and a block sees half of its row.

Counted by hand, although torch has a counter: `FlopCounterMode` over a step on the meta device
takes 16 s for a Qwen3-8B recipe, where `plan` takes one, needs `torch.autocast` replaced (it knows
no meta device), and gives 19 % more, since there the blocks' attention is dense and counts the keys
that flex attention skips. A test compares this module with the counter on a small CPU step.
"""

from dataclasses import dataclass

from torch import nn

from dflow_lightning.plan.eagle3 import Eagle3Plan
from dflow_lightning.plan.memory import Plan, parameter_count


def matrices(module: nn.Module | None) -> int:
    """Weights that are matrices."""
    return sum(p.numel() for p in module.parameters() if p.ndim > 1) if module else 0


@dataclass(frozen=True)
class Work:
    """What one row costs in a step."""

    plan: Plan

    @property
    def row(self) -> float:
        """FLOP of one row."""
        return sum(self.parts().values())

    def parts(self) -> dict[str, float]:
        """FLOP of one row by part."""
        plan = self.plan
        rolled = plan.recipe.rollout.num_rounds * plan.rolled_slots
        length = plan.recipe.data.max_length
        backward = 3 + plan.recompute  # forward, twice that backward, and forward again
        return {
            "target": self._target(length, length / 2),
            "verify": self._target(plan.verified, length / 2 + plan.rolled_slots),
            "draft": self._drafter(rolled, 1, 1)
            + self._head(rolled, 2)
            + self._causal_head(rolled, 2, 2),
            "train": self._drafter(plan.slots, backward, 3.5 + plan.recompute)
            + self._relay(backward),
            "head": self._heads(plan.slots),
        }

    def _target(self, tokens: int, keys: float) -> float:
        """Forward through the layers that run: up to the highest tap, or all of them."""
        plan, config = self.plan, self.plan.target.config
        layers = plan.target_layers
        share = layers / plan.target.num_layers
        embeddings = {plan.target.embedding_weight, plan.target.head_weight} - {None}
        weights = parameter_count(plan.target.model) - sum(
            w.numel() for w in embeddings if w is not None
        )
        heads = config.num_attention_heads * plan.target_head_dim
        return tokens * (2 * weights * share + 4 * heads * keys * layers)

    def _drafter(self, slots: int, times: float, attention_times: float) -> float:
        """Layers on the slots, context keys, values and projection on the row's tokens."""
        plan, dims = self.plan, self.plan.drafter.dims
        length = plan.recipe.data.max_length if slots else 0
        heads = dims.num_attention_heads * dims.head_dim
        key_value = 2 * dims.hidden_size * dims.num_key_value_heads * dims.head_dim
        context = dims.num_layers * key_value + plan.drafter.fc.weight.numel()
        attention = 4 * heads * (length / 2 + dims.block_size) * dims.num_layers
        layers = matrices(plan.drafter.layers)
        return times * 2 * (slots * layers + length * context) + attention_times * slots * attention

    def _relay(self, times: float) -> float:
        """The relay's MLP and its rows' projection."""
        plan = self.plan
        weights = matrices(plan.relay) + plan.drafter.fc.weight.numel()
        return times * 2 * weights * plan.relay_slots

    def _heads(self, slots: int) -> float:
        """Products of the loss; with a causal head logits are computed once more backward."""
        if self.plan.drafter.causal_head is None:
            return self._head(slots, 4)
        return self._head(slots, 6) + self._causal_head(slots, 6, 8)

    def _causal_head(self, slots: int, times: float, last_times: float) -> float:
        """The GRU and the inner layer, and the layer that gives logits."""
        head, block = self.plan.drafter.causal_head, self.plan.drafter.dims.block_size
        if head is None:
            return 0.0
        last = matrices(head.embed_proj[2])
        once = times * (matrices(head) - last) + last_times * last
        return slots * (block - 1) / block * once

    def _head(self, slots: int, times: float) -> float:
        """Products with the head: 2 for drafts, 4 where the gradient follows."""
        dims = self.plan.drafter.dims
        predicted = slots * (dims.block_size - 1) / dims.block_size
        return times * predicted * dims.vocab_size * dims.hidden_size


class Eagle3Work(Work):
    """What one row of an EAGLE-3 recipe costs: its scores are products with all keys of the row."""

    def parts(self) -> dict[str, float]:
        """FLOP of one row by part."""
        plan = self.plan
        assert isinstance(plan, Eagle3Plan)
        dims, length = plan.drafter.dims, plan.recipe.data.max_length
        backward = 3 + plan.recompute
        attention = plan.drafter.midlayer.self_attn
        keys = matrices(attention.k_proj) + matrices(attention.v_proj)
        # Context keys and the projection are made once a row; recomputation does not touch them.
        once = 3 * 2 * length * (keys + matrices(plan.drafter.fc))
        heads = dims.num_attention_heads * dims.head_dim
        scores = 4 * heads * (length + (plan.steps + 1) / 2)
        slots = plan.slots * backward * (2 * matrices(plan.drafter.midlayer) + scores)
        return {
            "target": self._target(length, length / 2),
            "train": once + slots,
            # Logits of both and the gradient of the drafter's.
            "head": 6 * plan.slots * dims.vocab_size * dims.hidden_size,
        }


def work_of(plan: Plan) -> Work:
    """The work of a plan's method."""
    return Eagle3Work(plan) if isinstance(plan, Eagle3Plan) else Work(plan)
