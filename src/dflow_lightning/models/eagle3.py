"""The EAGLE-3 drafter: one decoder layer that drafts one token at a time, autoregressively.

Its rows are pairs: the token after position t and the feature at t, `(E(x_{t+1}), h_t)`. The first
draft comes from the last pair whose feature the target has computed; each later one from the
previous draft and the drafter's own output in place of the feature. Module and tensor names are
those that SGLang and vLLM load as `LlamaForCausalLMEagle3`: no query and key norms; embedding and
head are the target's.

Training and decoding share this code, since a drafter whose training inputs differ from those in
use loses acceptance without any error: `context_kv` makes the keys and values of pairs, and
`Unroll` runs the steps, on many packed blocks with the data's tokens or on one block per request
with its own drafts.

Shapes: B batch, S context rows, N blocks per sequence, L context length, I steps so far, D hidden,
C tapped width (taps x D), H/G query/key-value heads, E head size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from dflow_lightning.errors import InputError
from dflow_lightning.models.dims import LayerDims, layer_numbers
from dflow_lightning.models.drafter import MLP, Drafter
from dflow_lightning.models.layers import RMSNorm, Rotary, in_compute_type, rotate
from dflow_lightning.models.target import FrozenTarget
from dflow_lightning.tensors.attention import context_visible
from dflow_lightning.tensors.blocks import KV

NUM_TAPS = 3  # low, middle and high, as in the EAGLE-3 paper


@dataclass(kw_only=True)
class Eagle3Config:
    """Shape of the EAGLE-3 drafter; everything left out is taken from the target.

    Args:
        block_size: tokens the target verifies, the anchor included: 8 is seven drafts, made one
            after the other.
        target_layer_ids: target layers whose outputs are the features.
        intermediate_size: width of the MLP.
        num_attention_heads: query heads.
        num_key_value_heads: key/value heads.
        head_dim: size of a head.
    """

    block_size: int = 8
    target_layer_ids: list[int] | None = None
    intermediate_size: int | None = None
    num_attention_heads: int | None = None
    num_key_value_heads: int | None = None
    head_dim: int | None = None


@dataclass(frozen=True, kw_only=True)
class Eagle3Dims(LayerDims):
    """All dimensions of an EAGLE-3 drafter, resolved and checked against its target."""

    num_layers: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_layers != 1:
            raise InputError(
                f"drafter: num_hidden_layers is {self.num_layers}; an EAGLE-3 drafter has 1"
            )

    @classmethod
    def resolve(cls, config: Eagle3Config, target: FrozenTarget) -> Eagle3Dims:
        """Fill omitted values from the target, and check the given ones."""
        return cls(**layer_numbers(config, target, layers=1, taps=NUM_TAPS))


class Eagle3Attention(nn.Module):
    """Grouped-query attention over concatenated pairs, `[..., 2D]`."""

    def __init__(self, dims: LayerDims) -> None:
        super().__init__()
        self.head_dim = dims.head_dim
        query = dims.num_attention_heads * dims.head_dim
        key = dims.num_key_value_heads * dims.head_dim
        self.q_proj = nn.Linear(2 * dims.hidden_size, query, bias=False)
        self.k_proj = nn.Linear(2 * dims.hidden_size, key, bias=False)
        self.v_proj = nn.Linear(2 * dims.hidden_size, key, bias=False)
        self.o_proj = nn.Linear(query, dims.hidden_size, bias=False)

    def keys_values(self, pairs: Tensor, rope: tuple[Tensor, Tensor]) -> KV:
        """Rotated keys and values of pairs `[B, S, 2D]`, as `[B, G, S, E]`."""
        shape = (*pairs.shape[:-1], -1, self.head_dim)
        keys = rotate(self.k_proj(pairs).view(shape).transpose(1, 2), rope)
        return KV(keys, self.v_proj(pairs).view(shape).transpose(1, 2))

    def queries(self, pairs: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
        """Rotated queries of pairs `[B, N, 2D]`, as `[B, H, N, E]`."""
        shape = (*pairs.shape[:-1], -1, self.head_dim)
        return rotate(self.q_proj(pairs).view(shape).transpose(1, 2), rope)


class Eagle3Layer(nn.Module):
    """A pre-norm decoder layer; token and feature each have their own norm."""

    def __init__(self, dims: LayerDims) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(dims.hidden_size, dims.rms_norm_eps)
        self.hidden_norm = RMSNorm(dims.hidden_size, dims.rms_norm_eps)
        self.self_attn = Eagle3Attention(dims)
        self.post_attention_layernorm = RMSNorm(dims.hidden_size, dims.rms_norm_eps)
        self.mlp = MLP(dims)

    def pairs(self, embeds: Tensor, h: Tensor) -> Tensor:
        """The attention's input, `[..., 2D]`: the token first, then the feature."""
        return torch.cat([self.input_layernorm(embeds), self.hidden_norm(h)], dim=-1)


class Eagle3Drafter(nn.Module):
    """Drafts tokens one after the other.

    Attributes:
        gradient_checkpointing: keep only each step's input for the backward pass.
        causal_head, carryover: parts of block drafters, always None here.
    """

    causal_head = None
    carryover = None

    def __init__(self, dims: Eagle3Dims) -> None:
        super().__init__()
        self.dims = dims
        self.gradient_checkpointing = False
        width = len(dims.target_layer_ids) * dims.hidden_size
        self.fc = nn.Linear(width, dims.hidden_size, bias=False)
        self.midlayer = Eagle3Layer(dims)
        self.norm = RMSNorm(dims.hidden_size, dims.rms_norm_eps)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=module.in_features**-0.5)
        self.rotary = Rotary(dims)

    def project(self, taps: Tensor) -> Tensor:
        """Features `h = fc(taps)`, `[..., C] -> [..., D]`; the layer normalizes them itself."""
        return self.fc(in_compute_type(taps, self.fc.weight))

    def context_kv(self, h_BSD: Tensor, embeds_BSD: Tensor, positions_BS: Tensor) -> KV:
        """Keys and values of pairs; `embeds` are of the tokens after the features' positions."""
        rope = self.rope(positions_BS)
        return self.midlayer.self_attn.keys_values(self.midlayer.pairs(embeds_BSD, h_BSD), rope)

    def step(
        self, h_BND: Tensor, embeds_BND: Tensor, positions_BN: Tensor, own: list[KV],
        context: KV, visible_BNL: Tensor,
    ) -> tuple[Tensor, KV]:  # fmt: skip
        """One pair of every block: its output before the final norm, and its keys and values.

        Args:
            h_BND: features in the first step, then the output of the step before.
            own: keys and values of the block's earlier steps, `[B, G, N, E]` each.
            visible_BNL: which columns of the context each block sees.
        """
        layer, attention = self.midlayer, self.midlayer.self_attn
        rope = self.rope(positions_BN)
        pairs = layer.pairs(embeds_BND, h_BND)
        latest = attention.keys_values(pairs, rope)
        attended = attend(attention.queries(pairs, rope), [*own, latest], context, visible_BNL)
        h_BND = h_BND + attention.o_proj(attended.transpose(1, 2).flatten(2))
        return h_BND + layer.mlp(layer.post_attention_layernorm(h_BND)), latest

    def rope(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosine and sine for rotation, `[B, 1, ..., E]`, as `Drafter.rope`."""
        return self.rotary(positions, self.fc.weight.dtype)


AnyDrafter = Drafter | Eagle3Drafter


def attend(q_BHNE: Tensor, own: list[KV], context: KV, visible_BNL: Tensor) -> Tensor:
    """Attend from one row per block to the visible context and to the block's own steps.

    Plain matrix products under one softmax: EAGLE-3 is a baseline and has no kernel. Steps of other
    blocks are left out of the products too, since only one in N of those scores would be used.

    Returns:
        `[B, H, N, E]`.
    """
    groups, size = context.keys.shape[1], q_BHNE.shape[-1]
    q = q_BHNE.unflatten(1, (groups, -1)) * size**-0.5  # [B, G, n, N, E], n queries a key head
    own_k = torch.stack([one.keys for one in own], dim=3)  # [B, G, N, I, E]
    own_v = torch.stack([one.values for one in own], dim=3)
    to_context = torch.einsum("bgnqe,bgle->bgnql", q, context.keys)
    hidden = ~visible_BNL[:, None, None]
    to_context = to_context.masked_fill(hidden, torch.finfo(q.dtype).min)
    to_own = torch.einsum("bgnqe,bgqie->bgnqi", q, own_k)
    weights = torch.cat([to_context, to_own], dim=-1).softmax(-1, dtype=torch.float32).to(q.dtype)
    length = context.keys.shape[2]
    out = torch.einsum("bgnql,bgle->bgnqe", weights[..., :length], context.values)
    out = out + torch.einsum("bgnqi,bgqie->bgnqe", weights[..., length:], own_v)
    return out.flatten(1, 2)


class Unroll:
    """Runs the steps of blocks, one pair after the other.

    Block n starts at the pair of row `first`: the feature there and the token after it, the block's
    anchor. It sees the pairs of its document before `first`, and its own.

    Attributes:
        own: keys and values of the steps so far.
    """

    def __init__(
        self, drafter: Eagle3Drafter, h_BND: Tensor, first_BN: Tensor, context: KV,
        starts_BN: Tensor | None = None,
    ) -> None:  # fmt: skip
        """
        Args:
            h_BND: the feature at `first`.
            context: of all pairs; column l holds that of row l.
            starts_BN: where each block's document begins in a packed row; rotary positions count
                from there.
        """
        self.own: list[KV] = []
        self._drafter, self._h_BND, self._context = drafter, h_BND, context
        self._visible_BNL = context_visible(first_BN, context.keys.shape[2], starts_BN)
        self._positions_BN = first_BN if starts_BN is None else first_BN - starts_BN

    def advance(self, embeds_BND: Tensor) -> Tensor:
        """The next step, on its tokens: hidden states ready for the target's head, `[B, N, D]`."""
        arguments = (
            self._h_BND, embeds_BND, self._positions_BN + len(self.own), list(self.own),
            self._context, self._visible_BNL,
        )  # fmt: skip
        if self._drafter.gradient_checkpointing and torch.is_grad_enabled():
            self._h_BND, latest = checkpoint(
                self._drafter.step, *arguments, use_reentrant=False, preserve_rng_state=False
            )
        else:
            self._h_BND, latest = self._drafter.step(*arguments)
        self.own.append(latest)
        return self._drafter.norm(self._h_BND)


@torch.no_grad()
def start_eagle3_from_target(drafter: Eagle3Drafter, target: FrozenTarget) -> None:
    """Copy what fits from the target: its last layer, which turns features into predictions.

    `fc` starts as the mean of the taps and the final norm as the target's. Queries, keys and values
    read pairs, which no layer of the target does: they stay random.
    """
    source = target.layer_weights(target.num_layers - 1)
    for name, parameter in drafter.midlayer.named_parameters():
        if name in source and source[name].shape == parameter.shape:
            parameter.copy_(source[name])
    dims = drafter.dims
    taps = len(dims.target_layer_ids)
    drafter.fc.weight.copy_(torch.eye(dims.hidden_size).repeat(1, taps) / taps)
    scale = target.final_norm_weight
    if scale is not None and scale.shape == drafter.norm.weight.shape:
        drafter.norm.weight.copy_(scale)
