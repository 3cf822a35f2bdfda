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
from transformers import Qwen3Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from dflow_lightning.attention import Backend, block_attention
from dflow_lightning.blocks import slot_positions
from dflow_lightning.errors import InputError
from dflow_lightning.target import FrozenTarget


@dataclass(kw_only=True)
class DrafterConfig:
    """Shape of the drafter; everything left out is taken from the target.

    Args:
        num_layers: decoder layers of the drafter.
        block_size: slots of a block, the anchor included: a block of 16 drafts 15 tokens.
        target_layer_ids: target layers whose outputs are the context features.
        mask_token_id: embedding row of the mask slots; by default the first after the tokenizer's.
        intermediate_size: width of the MLP.
        num_attention_heads: query heads.
        num_key_value_heads: key/value heads.
        head_dim: size of a head.
    """

    num_layers: int = 5
    block_size: int = 16
    target_layer_ids: list[int] | None = None
    mask_token_id: int | None = None
    intermediate_size: int | None = None
    num_attention_heads: int | None = None
    num_key_value_heads: int | None = None
    head_dim: int | None = None


@dataclass(frozen=True, kw_only=True)
class DrafterDims:
    """Every number a drafter is built from, resolved and checked against its target."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_parameters: dict
    max_position_embeddings: int
    vocab_size: int
    initializer_range: float
    block_size: int
    mask_token_id: int
    target_layer_ids: list[int]
    num_target_layers: int

    def __post_init__(self) -> None:
        if self.block_size < 2:
            raise InputError(
                f"drafter.block_size is {self.block_size}; a block needs an anchor and a mask, "
                "give 2 or more"
            )
        if self.num_layers < 1:
            raise InputError(f"drafter.num_layers is {self.num_layers}; give 1 or more")
        if "rope_theta" not in self.rope_parameters:
            raise InputError(
                "drafter: the RoPE base (rope_theta) is missing; copy the target's rope_parameters"
            )
        check_target_layer_ids(self.target_layer_ids, self.num_target_layers)

    @classmethod
    def resolve(cls, config: DrafterConfig, target: FrozenTarget) -> DrafterDims:
        """Fill what the user left out from the target, and check what they gave."""
        source = target.config
        layer_ids = config.target_layer_ids
        if layer_ids is None:
            layer_ids = default_target_layer_ids(target.num_layers, config.num_layers)
        mask_token_id = config.mask_token_id
        if mask_token_id is None:
            mask_token_id = len(target.tokenizer)
        check_mask_token_id(mask_token_id, target)
        heads = config.num_attention_heads or source.num_attention_heads
        head_dim = config.head_dim or getattr(source, "head_dim", None)
        return cls(
            hidden_size=source.hidden_size,
            intermediate_size=config.intermediate_size or source.intermediate_size,
            num_layers=config.num_layers,
            num_attention_heads=heads,
            num_key_value_heads=config.num_key_value_heads or source.num_key_value_heads,
            head_dim=head_dim or source.hidden_size // heads,
            rms_norm_eps=source.rms_norm_eps,
            rope_parameters=dict(source.rope_parameters),
            max_position_embeddings=source.max_position_embeddings,
            vocab_size=target.vocab_size,
            initializer_range=getattr(source, "initializer_range", 0.02),
            block_size=config.block_size,
            mask_token_id=mask_token_id,
            target_layer_ids=list(layer_ids),
            num_target_layers=target.num_layers,
        )

    def qwen3_config(self) -> Qwen3Config:
        """The same numbers as a Qwen3 configuration, which serving stacks read."""
        return Qwen3Config(
            hidden_size=self.hidden_size, intermediate_size=self.intermediate_size,
            num_hidden_layers=self.num_layers, num_attention_heads=self.num_attention_heads,
            num_key_value_heads=self.num_key_value_heads, head_dim=self.head_dim,
            rms_norm_eps=self.rms_norm_eps,
            rope_parameters=dict(self.rope_parameters), vocab_size=self.vocab_size,
            max_position_embeddings=self.max_position_embeddings, tie_word_embeddings=False,
            initializer_range=self.initializer_range, attention_bias=False, attention_dropout=0.0,
        )  # fmt: skip


def default_target_layer_ids(num_target_layers: int, num_taps: int) -> list[int]:
    """Evenly spread taps, `round(1 + i (n-4) / (m-1))`, as published DFlash drafters have them."""
    if num_taps == 1:
        return [num_target_layers // 2]
    step = (num_target_layers - 4) / (num_taps - 1)
    return [round(1 + i * step) for i in range(num_taps)]


def check_target_layer_ids(layer_ids: list[int], num_target_layers: int) -> None:
    """Raise `InputError` unless the taps are distinct layers below the target's last."""
    for index in layer_ids:
        if not 0 <= index < num_target_layers - 1:
            raise InputError(
                f"drafter.target_layer_ids holds {index}; "
                f"give ids between 0 and {num_target_layers - 2} (the last of the target's "
                f"{num_target_layers} layers is normalised differently by serving stacks)"
            )
    if not layer_ids or len(set(layer_ids)) != len(layer_ids):
        raise InputError(
            f"drafter.target_layer_ids is {layer_ids}; give at least one id and none twice"
        )


def check_mask_token_id(mask_token_id: int, target: FrozenTarget) -> None:
    """Raise `InputError` unless the mask has an embedding row that is no special token's."""
    if not 0 <= mask_token_id < target.vocab_size:
        raise InputError(
            f"drafter.mask_token_id is {mask_token_id}, outside the target's embedding of "
            f"{target.vocab_size} rows; give the id of a row that no text produces"
        )
    special = {"eos_token": target.stop_token_ids, "pad_token": (target.tokenizer.pad_token_id,),
               "bos_token": (target.tokenizer.bos_token_id,)}  # fmt: skip
    for name, ids in special.items():
        if mask_token_id in ids:
            raise InputError(
                f"drafter.mask_token_id is {mask_token_id}, the target's {name}; "
                "give the id of a row that no text produces"
            )


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
    """Drafts a block of tokens in one non-causal forward."""

    def __init__(self, dims: DrafterDims) -> None:
        super().__init__()
        self.dims = dims
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
        self._inverse_frequencies, self._rope_scale = rope_frequencies(dims)

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
            x_BNKD = layer(x_BNKD, layer_context, rope, anchors_BN, backend)
        return self.norm(x_BNKD)

    def rope(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Cosine and sine for rotation, `[B, 1, ..., E]`."""
        frequencies = self._inverse_frequencies.to(positions.device)
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
    """Rotary position embedding in the half-split layout."""
    cos, sin = rope
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin
