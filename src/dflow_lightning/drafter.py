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
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from dflow_lightning.attention import Backend, block_attention
from dflow_lightning.blocks import slot_positions
from dflow_lightning.dims import DrafterDims
from dflow_lightning.target import FrozenTarget


class RMSNorm(nn.Module):
    """Root-mean-square norm with float32 statistics."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        normed = nn.functional.rms_norm(x.float(), (x.shape[-1],), eps=self.eps)
        return normed.to(x.dtype) * self.weight.to(x.dtype)


class Attention(nn.Module):
    """Grouped-query attention of a block to its context and itself, with query and key norms."""

    def __init__(self, dims: DrafterDims) -> None:
        super().__init__()
        self.head_dim = dims.head_dim
        self.group = dims.num_attention_heads // dims.num_key_value_heads
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
    ) -> Tensor:
        shape = (*x_BNKD.shape[:-1], -1, self.head_dim)
        q = rotate(self.q_norm(self.q_proj(x_BNKD).view(shape)).movedim(-2, 1), rope)
        k_block, v_block, k_context, v_context = (
            t.repeat_interleave(self.group, dim=1)
            for t in (*self.keys_values(x_BNKD, rope), context.keys, context.values)
        )
        out = block_attention(q, k_block, v_block, k_context, v_context, anchors_BN, backend)
        return self.o_proj(out.movedim(1, -2).flatten(-2))


class MLP(nn.Module):
    """Gated feed-forward layer with SiLU."""

    def __init__(self, dims: DrafterDims) -> None:
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
        self, x_BNKD: Tensor, context: ContextKV, rope, anchors_BN: Tensor, backend: Backend
    ) -> Tensor:
        normed_BNKD = self.input_layernorm(x_BNKD)
        x_BNKD = x_BNKD + self.self_attn(normed_BNKD, context, rope, anchors_BN, backend)
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
    """

    def __init__(self, dims: DrafterDims) -> None:
        super().__init__()
        self.dims = dims
        self.gradient_checkpointing = False
        width = len(dims.target_layer_ids) * dims.hidden_size
        self.fc = nn.Linear(width, dims.hidden_size, bias=False)
        self.hidden_norm = RMSNorm(dims.hidden_size, dims.rms_norm_eps)
        self.layers = nn.ModuleList(DecoderLayer(dims) for _ in range(dims.num_layers))
        self.norm = RMSNorm(dims.hidden_size, dims.rms_norm_eps)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                # Keeps its input's scale at every width; at 2,500 about 0.02, Qwen3's own value.
                nn.init.normal_(module.weight, std=module.in_features**-0.5)
        # A plain attribute, not a buffer: no cast of the module may touch the float32 frequencies.
        self.inverse_frequencies, self._rope_scale = rope_frequencies(dims)

    def project(self, taps: Tensor) -> Tensor:
        """Context features `h = hidden_norm(fc(taps))`, `[..., C] -> [..., D]`."""
        return self.hidden_norm(self.fc(taps))

    def context_kv(self, h_BSD: Tensor, positions_BS: Tensor) -> list[ContextKV]:
        """Keys and values of context rows for every layer; `h` skips the layers' input norms."""
        rope = self.rope(positions_BS, h_BSD.dtype)
        return [ContextKV(*layer.self_attn.keys_values(h_BSD, rope)) for layer in self.layers]  # type: ignore[union-attr,operator]

    def forward(
        self, x_BNKD: Tensor, context: list[ContextKV], anchors_BN: Tensor,
        backend: Backend = "auto",
    ) -> Tensor:  # fmt: skip
        """Hidden states of every slot, `[B, N, K, D]`, ready for the target's head.

        Args:
            x_BNKD: slot inputs: the anchor's embedding, then mask embeddings with or without relay.
            context: from `context_kv`; positions at or after a block's anchor are not seen.
            anchors_BN: absolute position of slot 0.
        """
        rope = self.rope(slot_positions(anchors_BN, x_BNKD.shape[2]), x_BNKD.dtype)
        for layer, layer_context in zip(self.layers, context, strict=True):
            arguments = (x_BNKD, layer_context, rope, anchors_BN, backend)
            if self.gradient_checkpointing and torch.is_grad_enabled():
                x_BNKD = checkpoint(
                    layer, *arguments, use_reentrant=False, preserve_rng_state=False
                )
            else:
                x_BNKD = layer(*arguments)
        return self.norm(x_BNKD)

    def rope(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Cosine and sine for rotation, `[B, 1, ..., E]`."""
        frequencies = self.inverse_frequencies.to(positions.device)
        angles = positions.unsqueeze(1).unsqueeze(-1).float() * frequencies
        angles = torch.cat([angles, angles], dim=-1)
        cos, sin = angles.cos() * self._rope_scale, angles.sin() * self._rope_scale
        return cos.to(dtype), sin.to(dtype)


@torch.no_grad()
def start_from_target(drafter: Drafter, target: FrozenTarget) -> None:
    """Copy what fits from the target, so that the drafter starts with working attention heads.

    Drafter layers take the weights of target layers spread evenly from the first to the last, `fc`
    the mean of the taps, and the final norm the target's. Parameters of another name or shape stay
    random.
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


def rope_frequencies(dims: DrafterDims) -> tuple[Tensor, float]:
    """Inverse frequencies in float32 and the scale of cosine and sine, for any RoPE type."""
    kind = dims.rope_parameters.get("rope_type", "default")
    if kind != "default":
        frequencies, scale = ROPE_INIT_FUNCTIONS[kind](dims.qwen3_config(), torch.device("cpu"))
        return frequencies.float(), scale
    exponents = torch.arange(0, dims.head_dim, 2, dtype=torch.float32) / dims.head_dim
    return 1.0 / dims.rope_parameters["rope_theta"] ** exponents, 1.0


def rotate(x: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
    """Rotary position embedding in the half-split layout, in the type of `x`.

    Under autocast `x` is bfloat16 and the angles are float32: the rotation is then float32 too.
    """
    cos, sin = rope
    first, second = x.chunk(2, dim=-1)
    return (x * cos + torch.cat([-second, first], dim=-1) * sin).to(x.dtype)
