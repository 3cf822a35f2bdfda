"""The DFlash drafter: Qwen3 layers whose keys and values also come from the target's hidden states.

The same module trains on packed blocks and drafts from a cached context: context keys and values
are made by `context_kv`, once per new row, and `forward` attends from blocks to whatever context it
is given. Tensor names are those of the published DFlash checkpoints.

Shapes: B batch, S context rows, N blocks per sequence, K block size, L context length, D hidden,
C tapped width (taps x D), H/G query/key-value heads, E head size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import silu
from torch.utils.checkpoint import checkpoint

from dflow_lightning.models.carryover import CarriedRows, Carryover
from dflow_lightning.models.causal_head import CausalHead
from dflow_lightning.models.dims import DrafterDims, LayerDims
from dflow_lightning.models.layers import RMSNorm, rope_at, rope_frequencies, rotate
from dflow_lightning.models.relay import RelayInput
from dflow_lightning.models.target import FrozenTarget
from dflow_lightning.tensors.attention import Backend, block_attention, choose
from dflow_lightning.tensors.blocks import rows_at, slot_positions


class Attention(nn.Module):
    """Grouped-query attention of a block to its context and itself, with query and key norms."""

    def __init__(self, dims: DrafterDims) -> None:
        super().__init__()
        self.head_dim = dims.head_dim
        query = dims.num_attention_heads * dims.head_dim
        key = dims.num_key_value_heads * dims.head_dim
        self.q_proj = nn.Linear(dims.hidden_size, query, bias=False)
        self.k_proj = nn.Linear(dims.hidden_size, key, bias=False)
        self.v_proj = nn.Linear(dims.hidden_size, key, bias=False)
        self.o_proj = nn.Linear(query, dims.hidden_size, bias=False)
        self.q_norm = RMSNorm(dims.head_dim, dims.rms_norm_eps)
        self.k_norm = RMSNorm(dims.head_dim, dims.rms_norm_eps)

    def keys_values(self, x: Tensor, rope: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Rotated keys and values of rows `[B, ..., D]`, as `[B, G, ..., E]`."""
        shape = (*x.shape[:-1], -1, self.head_dim)
        keys = self.k_norm(self.k_proj(x).view(shape)).movedim(-2, 1)
        return rotate(keys, rope), self.v_proj(x).view(shape).movedim(-2, 1)

    def forward(
        self,
        x_BNKD: Tensor,
        context: ContextKV,
        rope: tuple[Tensor, Tensor],
        anchors_BN: Tensor,
        backend: Backend,
        starts_BN: Tensor | None,
        carried: CarriedRows | None,
    ) -> Tensor:
        shape = (*x_BNKD.shape[:-1], -1, self.head_dim)
        q = self.q_norm(self.q_proj(x_BNKD).view(shape)).movedim(-2, 1)
        own = x_BNKD
        if carried is None:
            q = rotate(q, rope)
        else:  # like rows of the context, which skip the input norm, but each block's own
            cos, sin = (each[..., : x_BNKD.shape[2], :] for each in rope)
            q = rotate(q, (cos, sin))
            own = torch.cat([x_BNKD, carried.h_BNJD], dim=2)
        k_block, v_block = self.keys_values(own, rope)
        out = block_attention(
            q, k_block, v_block, context.keys, context.values, anchors_BN, backend, starts_BN,
            None if carried is None else carried.valid_BNJ,
        )  # fmt: skip
        return self.o_proj(out.movedim(1, -2).flatten(-2))


class MLP(nn.Module):
    """Gated feed-forward layer with SiLU."""

    def __init__(self, dims: LayerDims) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(dims.hidden_size, dims.intermediate_size, bias=False)
        self.up_proj = nn.Linear(dims.hidden_size, dims.intermediate_size, bias=False)
        self.down_proj = nn.Linear(dims.intermediate_size, dims.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(silu(self.gate_proj(x)) * self.up_proj(x))


class DecoderLayer(nn.Module):
    """Pre-norm attention and MLP, each with a residual connection."""

    def __init__(self, dims: DrafterDims) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(dims.hidden_size, dims.rms_norm_eps)
        self.self_attn = Attention(dims)
        self.post_attention_layernorm = RMSNorm(dims.hidden_size, dims.rms_norm_eps)
        self.mlp = MLP(dims)

    def forward(
        self, x_BNKD: Tensor, context: ContextKV, rope, anchors_BN: Tensor, backend: Backend,
        starts_BN: Tensor | None, carried: CarriedRows | None,
    ) -> Tensor:  # fmt: skip
        normed_BNKD = self.input_layernorm(x_BNKD)
        x_BNKD = x_BNKD + self.self_attn(
            normed_BNKD, context, rope, anchors_BN, backend, starts_BN, carried
        )
        return x_BNKD + self.mlp(self.post_attention_layernorm(x_BNKD))


@dataclass(frozen=True)
class ContextKV:
    """One layer's context keys and values, `[B, G, L, E]`; column l holds absolute position l."""

    keys: Tensor
    values: Tensor


class Drafter(nn.Module):
    """Drafts a block of tokens in one non-causal forward.

    Attributes:
        gradient_checkpointing: keep only each layer's input for the backward pass, and run the
            layer once more there: a third more work for a small part of the memory.
        attention: the formulation that `auto` stands for; see `attention.block_attention`.
        causal_head: Domino's, which turns the hidden states into drafts one by one; None in DFlash.
    """

    def __init__(self, dims: DrafterDims) -> None:
        super().__init__()
        self.dims = dims
        self.gradient_checkpointing = False
        self.attention: Backend = "auto"
        width = len(dims.target_layer_ids) * dims.hidden_size
        self.fc = nn.Linear(width, dims.hidden_size, bias=False)
        self.hidden_norm = RMSNorm(dims.hidden_size, dims.rms_norm_eps)
        self.layers = nn.ModuleList(DecoderLayer(dims) for _ in range(dims.num_layers))
        self.norm = RMSNorm(dims.hidden_size, dims.rms_norm_eps)
        self.carryover = Carryover(dims.hidden_size) if dims.carryover else None
        for module in self.modules():
            if isinstance(module, nn.Linear):
                # Keeps its input's scale at every width; at 2,500 about 0.02, Qwen3's own value.
                nn.init.normal_(module.weight, std=module.in_features**-0.5)
        self.causal_head = causal_head(dims)  # after the body, which starts as without it
        # A plain attribute, not a buffer: no cast of the module may touch the float32 frequencies.
        self.inverse_frequencies, self._rope_scale = rope_frequencies(dims)

    def project(self, taps: Tensor) -> Tensor:
        """Context features `h = hidden_norm(fc(taps))`, `[..., C] -> [..., D]`."""
        return self.hidden_norm(self.fc(taps))

    def context_kv(self, h_BSD: Tensor, positions_BS: Tensor) -> list[ContextKV]:
        """Keys and values of context rows for every layer; `h` skips the layers' input norms."""
        rope = self.rope(positions_BS, h_BSD.dtype)
        return [ContextKV(*layer.self_attn.keys_values(h_BSD, rope)) for layer in self.layers]  # type: ignore[union-attr,operator]

    def carry(self, rows: RelayInput | None) -> CarriedRows | None:
        """The rows of the rejected suffix, marked; None for a drafter without carryover."""
        return None if self.carryover is None or rows is None else self.carryover(rows)

    def forward(
        self, x_BNKD: Tensor, context: list[ContextKV], anchors_BN: Tensor,
        backend: Backend = "auto", starts_BN: Tensor | None = None,
        carried: CarriedRows | None = None,
    ) -> Tensor:  # fmt: skip
        """Hidden states of every slot, `[B, N, K, D]`, ready for the target's head.

        Args:
            x_BNKD: slot inputs: the anchor's embedding, then mask embeddings with or without relay.
            context: from `context_kv`; positions at or after a block's anchor are not seen.
            anchors_BN: absolute position of slot 0.
            starts_BN: where each block's document begins in a packed row: what is before is not
                seen, and rotary positions count from there.
            carried: from `carry`.
        """
        wanted = self.attention if backend == "auto" else backend
        backend = choose(wanted, x_BNKD.shape[1], x_BNKD.device, x_BNKD.dtype)
        order_BN = None if backend == "dense" else anchors_BN.argsort(dim=1)
        if order_BN is not None:  # neighbours that see as much of the context leave out the same
            x_BNKD = rows_at(x_BNKD, order_BN)
            anchors_BN = anchors_BN.gather(1, order_BN)
            starts_BN = None if starts_BN is None else starts_BN.gather(1, order_BN)
            carried = None if carried is None else carried.take_along(order_BN)
        first_BN = anchors_BN if starts_BN is None else anchors_BN - starts_BN
        positions_BNK = slot_positions(first_BN, x_BNKD.shape[2])
        if carried is not None:  # they stand at the anchor and after it
            positions_BNK = torch.cat([positions_BNK, positions_BNK[..., :-1]], dim=-1)
        rope = self.rope(positions_BNK, x_BNKD.dtype)
        for layer, layer_context in zip(self.layers, context, strict=True):
            arguments = (x_BNKD, layer_context, rope, anchors_BN, backend, starts_BN, carried)
            if self.gradient_checkpointing and torch.is_grad_enabled():
                x_BNKD = checkpoint(
                    layer, *arguments, use_reentrant=False, preserve_rng_state=False
                )
            else:
                x_BNKD = layer(*arguments)
        if order_BN is not None:
            x_BNKD = rows_at(x_BNKD, order_BN.argsort(dim=1))
        return self.norm(x_BNKD)

    def rope(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Cosine and sine for rotation, `[B, 1, ..., E]`."""
        return rope_at(self.inverse_frequencies, self._rope_scale, positions, dtype)


def causal_head(dims: DrafterDims) -> CausalHead | None:
    """The causal head of a drafter of these dimensions, untrained, if it has one."""
    if dims.gru_hidden_dim is None or dims.emb_dim is None:
        return None
    return CausalHead(
        dims.hidden_size,
        dims.vocab_size,
        gru_hidden_dim=dims.gru_hidden_dim,
        emb_dim=dims.emb_dim,
        pure_draft_prefix_len=dims.pure_draft_prefix_len or 0,
    )


@torch.no_grad()
def start_from_target(drafter: Drafter, target: FrozenTarget) -> None:
    """Copy what fits from the target, so that the drafter starts with working attention heads.

    Drafter layers take the weights of target layers spread evenly from the first to the last, `fc`
    the mean of the taps, and the final norm the target's. Parameters of another name or shape stay
    random. A causal head reads tokens at unit scale; those of embeddings are often ten times
    smaller, and its GRU would hardly notice them at first.
    """
    dims = drafter.dims
    step = (dims.num_target_layers - 1) / max(1, dims.num_layers - 1)
    for index, layer in enumerate(drafter.layers):
        source = target.layer_weights(round(index * step))
        for name, parameter in layer.named_parameters():
            if name in source and source[name].shape == parameter.shape:
                parameter.copy_(source[name])
    taps = len(dims.target_layer_ids)
    drafter.fc.weight.copy_(torch.eye(dims.hidden_size).repeat(1, taps) / taps)
    scale = target.final_norm_weight
    if scale is not None and scale.shape == drafter.norm.weight.shape:
        drafter.norm.weight.copy_(scale)
    if drafter.causal_head is not None:
        drafter.causal_head.prefix_gru.fit_inputs(target.embedding_weight)
