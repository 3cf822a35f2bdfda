"""The DFlash drafter: Qwen3 layers whose keys and values also come from the target's hidden states.

The same module trains on packed blocks and drafts from a cached context: context keys and values
are made by `context_kv`, once per new row, and `forward` attends from blocks to whatever context it
is given. Tensor names are those of the published DFlash checkpoints.
The functions at the end lead from a block's start to its draft tokens, for training and decoding
alike.

Shapes: B batch, S context rows, N blocks per sequence, K block size, J = K-1 drafts, L context
length, D hidden, C tapped width (taps x D), H/G query/key-value heads, E head size, V vocabulary, R
blocks of a chunk.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.functional import silu
from torch.utils.checkpoint import checkpoint

from dflow_lightning.models.carryover import CarriedRows, Carryover
from dflow_lightning.models.causal_head import CausalHead
from dflow_lightning.models.dims import DrafterDims, LayerDims
from dflow_lightning.models.layers import RMSNorm, Rotary, in_compute_type, rotate
from dflow_lightning.models.relay import ProjectedRows, Relay
from dflow_lightning.models.target import FrozenTarget
from dflow_lightning.tensors.attention import (
    AttentionBackend,
    Formulation,
    block_attention,
    formulation_for,
)
from dflow_lightning.tensors.blocks import (
    KV,
    Anchors,
    BlockView,
    rows_at,
    slot_inputs,
    slot_positions,
)
from dflow_lightning.tensors.loss import CHUNK_BYTES, blocks_within


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

    def keys_values(self, x: Tensor, rope: tuple[Tensor, Tensor]) -> KV:
        """Rotated keys and values of rows `[B, ..., D]`, as `[B, G, ..., E]`."""
        shape = (*x.shape[:-1], -1, self.head_dim)
        keys = self.k_norm(self.k_proj(x).view(shape)).movedim(-2, 1)
        return KV(rotate(keys, rope), self.v_proj(x).view(shape).movedim(-2, 1))

    def forward(
        self,
        x_BNKD: Tensor,
        context: KV,
        rope: tuple[Tensor, Tensor],
        view: BlockView,
        formulation: Formulation,
        carried_BNJD: Tensor | None,
    ) -> Tensor:
        shape = (*x_BNKD.shape[:-1], -1, self.head_dim)
        q = self.q_norm(self.q_proj(x_BNKD).view(shape)).movedim(-2, 1)
        own = x_BNKD
        if carried_BNJD is None:
            q = rotate(q, rope)
        else:  # like rows of the context, which skip the input norm, but each block's own
            cos, sin = (each[..., : x_BNKD.shape[2], :] for each in rope)
            q = rotate(q, (cos, sin))
            own = torch.cat([x_BNKD, carried_BNJD], dim=2)
        out = block_attention(q, self.keys_values(own, rope), context, view, formulation)
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
        self, x_BNKD: Tensor, context: KV, rope: tuple[Tensor, Tensor], view: BlockView,
        formulation: Formulation, carried_BNJD: Tensor | None,
    ) -> Tensor:  # fmt: skip
        normed_BNKD = self.input_layernorm(x_BNKD)
        x_BNKD = x_BNKD + self.self_attn(
            normed_BNKD, context, rope, view, formulation, carried_BNJD
        )
        return x_BNKD + self.mlp(self.post_attention_layernorm(x_BNKD))


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
        self.attention: AttentionBackend = "auto"
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
        self.rotary = Rotary(dims)

    def project(self, taps: Tensor) -> Tensor:
        """Context features `h = hidden_norm(fc(taps))`, `[..., C] -> [..., D]`.

        Args:
            taps: of the target, in its own type.
        """
        return self.hidden_norm(self.fc(in_compute_type(taps, self.fc.weight)))

    def context_kv(self, h_BSD: Tensor, positions_BS: Tensor) -> list[KV]:
        """Keys and values of context rows for every layer; `h` skips the layers' input norms."""
        rope = self.rope(positions_BS)
        return [layer.self_attn.keys_values(h_BSD, rope) for layer in self.layers]  # type: ignore[union-attr,operator]

    def carry(self, rows: ProjectedRows | None) -> CarriedRows | None:
        """The rows of the rejected suffix, marked; None for a drafter without carryover."""
        return None if self.carryover is None or rows is None else self.carryover(rows)

    def forward(
        self, x_BNKD: Tensor, context: list[KV], anchors_BN: Tensor,
        backend: AttentionBackend = "auto", starts_BN: Tensor | None = None,
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
        formulation = formulation_for(wanted, x_BNKD.shape[1], x_BNKD.device, x_BNKD.dtype)
        order_BN = None if formulation == "dense" else anchors_BN.argsort(dim=1)
        if order_BN is not None:  # neighbours that see as much of the context leave out the same
            x_BNKD = rows_at(x_BNKD, order_BN)
            anchors_BN = anchors_BN.gather(1, order_BN)
            starts_BN = None if starts_BN is None else starts_BN.gather(1, order_BN)
            carried = None if carried is None else carried.take_along(order_BN)
        first_BN = anchors_BN if starts_BN is None else anchors_BN - starts_BN
        positions_BNK = slot_positions(first_BN, x_BNKD.shape[2])
        if carried is not None:  # they stand at the anchor and after it
            positions_BNK = torch.cat([positions_BNK, positions_BNK[..., :-1]], dim=-1)
        rope = self.rope(positions_BNK)
        carried_BNJD, carried_BNJ = (
            (None, None) if carried is None else (carried.h_BNJD, carried.valid_BNJ)
        )
        view = BlockView(anchors_BN, starts_BN, carried_BNJ)
        for layer, layer_context in zip(self.layers, context, strict=True):
            arguments = (x_BNKD, layer_context, rope, view, formulation, carried_BNJD)
            if self.gradient_checkpointing and torch.is_grad_enabled():
                x_BNKD = checkpoint(
                    layer, *arguments, use_reentrant=False, preserve_rng_state=False
                )
            else:
                x_BNKD = layer(*arguments)
        if order_BN is not None:
            x_BNKD = rows_at(x_BNKD, order_BN.argsort(dim=1))
        return self.norm(x_BNKD)

    def rope(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosine and sine for rotation, `[B, 1, ..., E]`.

        In the type of the weights and not of what is rotated, which under autocast is bfloat16 for
        context rows and float32 for blocks: keys and queries must turn by the same angles.
        """
        return self.rotary(positions, self.fc.weight.dtype)


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


def relay_correction(target: FrozenTarget, relay: Relay, rows: ProjectedRows) -> Tensor:
    """What the relay adds to the mask slots, `[B, N, K, D]`."""
    bonus = target.embed(rows.bonus_BN).to(rows.h_BNKD.dtype)
    rejected = target.embed(rows.rejected_BN).to(rows.h_BNKD.dtype)
    return relay(rows.h_BNKD, bonus, rejected, rows.valid_BNK)


def embed_blocks(
    target: FrozenTarget, drafter: Drafter, anchor_ids_BN: Tensor, correction_BNKD: Tensor | None
) -> Tensor:
    """Slot inputs, `[B, N, K, D]`: the anchor's embedding, then masks corrected by the relay."""
    dtype = drafter.fc.weight.dtype
    return slot_inputs(
        target.embed(anchor_ids_BN).to(dtype),
        # By number and not through a tensor of the id, which would be a copy from the host.
        target.embedding_weight[drafter.dims.mask_token_id].to(dtype),
        drafter.dims.block_size,
        correction_BNKD,
    )


def draft_hidden(
    drafter: Drafter,
    x_BNKD: Tensor,
    context: list[KV],
    anchors_BN: Tensor,
    starts_BN: Tensor | None = None,
    carried: CarriedRows | None = None,
) -> Tensor:
    """Hidden states of slots 1..K-1, `[B, N, J, D]`, ready for the target's head."""
    hidden_BNKD = drafter(x_BNKD, context, anchors_BN, starts_BN=starts_BN, carried=carried)
    return hidden_BNKD[..., 1:, :]


def draft_tokens(
    target: FrozenTarget,
    drafter: Drafter,
    x_BNKD: Tensor,
    context: list[KV],
    anchors: Anchors,
    anchor_ids_BN: Tensor,
    gold_BNJ: Tensor | None = None,
    carried: CarriedRows | None = None,
) -> Tensor:
    """Greedy drafts of slots 1..K-1, `[B, N, J]`, from one drafter forward.

    Args:
        gold_BNJ: tokens that a causal head reads in place of its own drafts.
    """
    hidden_BNJD = draft_hidden(
        drafter, x_BNKD, context, anchors.positions_BN, anchors.starts_BN, carried
    )
    if drafter.causal_head is None:
        return greedy_tokens(target, hidden_BNJD)
    return chained_tokens(target, drafter.causal_head, hidden_BNJD, anchor_ids_BN, gold_BNJ)


def chained_tokens(
    target: FrozenTarget,
    causal_head: CausalHead,
    hidden_BNJD: Tensor,
    anchor_ids_BN: Tensor,
    gold_BNJ: Tensor | None = None,
) -> Tensor:
    """Greedy drafts of a causal head, `[B, N, J]`: each reads those before it, or `gold_BNJ`."""
    rows = [hidden_BNJD.flatten(0, 1), anchor_ids_BN.flatten()]
    if gold_BNJ is not None:
        rows.append(gold_BNJ.flatten(0, 1))
    size = blocks_within(CHUNK_BYTES, hidden_BNJD.shape[2], target.vocab_size)
    drafts = []
    for hidden_RJD, *others in zip(*(part.split(size) for part in rows), strict=True):
        logits_RJV = target.head(hidden_RJD.to(target.dtype))
        embed = embedding(target, hidden_RJD.dtype)
        drafts.append(causal_head.unroll(logits_RJV, hidden_RJD, embed, best, *others))
    return torch.cat(drafts).view(hidden_BNJD.shape[:-1])


def embedding(target: FrozenTarget, dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    """The target's embedding of token ids, in the type of a drafter."""
    return lambda ids: target.embed(ids).to(dtype)


def best(logits_RV: Tensor, slot: int) -> Tensor:
    """The most likely token of a slot."""
    return logits_RV.argmax(-1)


def greedy_tokens(target: FrozenTarget, hidden_BNJD: Tensor) -> Tensor:
    """The target's greedy choice for each hidden state, `[B, N, J]`, never holding all logits."""
    hidden = hidden_BNJD.flatten(0, 1)
    size = blocks_within(CHUNK_BYTES, hidden.shape[1], target.vocab_size)
    chosen = [target.head(part.to(target.dtype)).argmax(-1) for part in hidden.split(size)]
    return torch.cat(chosen).view(hidden_BNJD.shape[:-1])
