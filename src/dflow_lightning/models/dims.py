"""The drafter's dimensions: what the user gives, what the target gives, and what does not fit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from transformers import Qwen3Config

from dflow_lightning.errors import InputError
from dflow_lightning.models.causal_head import CausalHeadConfig
from dflow_lightning.models.target import FrozenTarget

HEAD = ("gru_hidden_dim", "emb_dim", "pure_draft_prefix_len")  # of the causal head


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
        carryover: blocks also attend to the rejected rows of the block before (`carryover.py`).
    """

    num_layers: int = 5
    block_size: int = 16
    target_layer_ids: list[int] | None = None
    mask_token_id: int | None = None
    intermediate_size: int | None = None
    num_attention_heads: int | None = None
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    carryover: bool = False


@dataclass(frozen=True, kw_only=True)
class LayerDims:
    """The numbers that layers, context and verification are built from, checked."""

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
    target_layer_ids: list[int]
    num_target_layers: int

    def __post_init__(self) -> None:
        if self.block_size < 2:
            raise InputError(
                f"drafter.block_size is {self.block_size}; a block needs an anchor and a draft, "
                "give 2 or more"
            )
        counts = "num_layers intermediate_size num_attention_heads num_key_value_heads head_dim"
        for name in counts.split():
            if getattr(self, name) < 1:
                raise InputError(f"drafter.{name} is {getattr(self, name)}; give 1 or more")
        if self.num_attention_heads % self.num_key_value_heads:
            raise InputError(
                f"drafter.num_attention_heads is {self.num_attention_heads}; give a multiple of "
                f"num_key_value_heads, which is {self.num_key_value_heads}"
            )
        if self.head_dim % 2:
            raise InputError(f"drafter.head_dim is {self.head_dim}; RoPE needs an even number")
        if "rope_theta" not in self.rope_parameters:
            raise InputError(
                "drafter: the RoPE base (rope_theta) is missing; copy the target's rope_parameters"
            )
        check_target_layer_ids(self.target_layer_ids, self.num_target_layers)

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


@dataclass(frozen=True, kw_only=True)
class DrafterDims(LayerDims):
    """Every number a block drafter is built from, resolved and checked against its target.

    Those of the causal head are None where the drafter has none.
    """

    mask_token_id: int
    gru_hidden_dim: int | None = None
    emb_dim: int | None = None
    pure_draft_prefix_len: int | None = None
    carryover: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        prefix = self.pure_draft_prefix_len
        if prefix is not None and not 0 <= prefix < self.block_size - 1:
            raise InputError(
                f"causal_head.pure_draft_prefix_len is {prefix}, but a block of {self.block_size} "
                f"has {self.block_size - 1} drafts and at least one is to be corrected; give 0 up "
                f"to {self.block_size - 2}"
            )

    @classmethod
    def resolve(
        cls,
        config: DrafterConfig,
        target: FrozenTarget,
        causal_head: CausalHeadConfig = CausalHeadConfig(),  # noqa: B008
    ) -> DrafterDims:
        """Fill what the user left out from the target, and check what they gave."""
        return cls(
            **layer_numbers(config, target, config.num_layers, config.num_layers),
            mask_token_id=choose_mask_token_id(config.mask_token_id, target),
            carryover=config.carryover,
            **{name: getattr(causal_head, name) for name in HEAD if causal_head.enabled},
        )


def layer_numbers(config: Any, target: FrozenTarget, layers: int, taps: int) -> dict[str, Any]:
    """The numbers of `LayerDims`: those that a user's configuration gives, the rest the target's.

    Args:
        layers: decoder layers of the drafter.
        taps: target layers to tap, where the configuration names none.
    """
    source = target.config
    for key in ("rms_norm_eps", "rope_parameters"):
        if not getattr(source, key, None):
            raise InputError(
                f"target: {target.name} has no {key}; the drafter's layers are Qwen3's, "
                "choose a target with RMS norms and RoPE"
            )

    def given(name: str) -> int:
        value = getattr(config, name)
        return getattr(source, name) if value is None else value

    layer_ids = config.target_layer_ids
    if layer_ids is None:
        layer_ids = default_target_layer_ids(target.num_layers, taps)
    head_dim = config.head_dim
    if head_dim is None:
        whole = source.hidden_size // source.num_attention_heads
        head_dim = getattr(source, "head_dim", None) or whole
    # The drafter turns whole heads, whatever share of its own the target turns.
    rope = {k: v for k, v in source.rope_parameters.items() if k != "partial_rotary_factor"}
    return {
        "hidden_size": source.hidden_size,
        "intermediate_size": given("intermediate_size"),
        "num_layers": layers,
        "num_attention_heads": given("num_attention_heads"),
        "num_key_value_heads": given("num_key_value_heads"),
        "head_dim": head_dim,
        "rms_norm_eps": source.rms_norm_eps,
        "rope_parameters": rope,
        "max_position_embeddings": source.max_position_embeddings,
        "vocab_size": target.vocab_size,
        "initializer_range": getattr(source, "initializer_range", 0.02),
        "block_size": config.block_size,
        "target_layer_ids": list(layer_ids),
        "num_target_layers": target.num_layers,
    }


def default_target_layer_ids(num_target_layers: int, num_taps: int) -> list[int]:
    """Evenly spread taps, `round(1 + i (n-4) / (m-1))`, as published DFlash drafters have them.

    Raises:
        InputError: the target has too few layers for that.
    """
    if num_taps == 1:
        return [num_target_layers // 2]
    step = (num_target_layers - 4) / (num_taps - 1)
    found = [round(1 + i * step) for i in range(num_taps)]
    if found != sorted(set(found)):
        raise InputError(
            f"drafter.target_layer_ids has no default for {num_taps} taps of a target of "
            f"{num_target_layers} layers; give the ids"
        )
    return found


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


def choose_mask_token_id(given: int | None, target: FrozenTarget) -> int:
    """The given id, if no ordinary text holds it, or the first row after the tokenizer's."""
    tokenizer = target.tokenizer
    if given is None and len(tokenizer) >= target.vocab_size:
        raise InputError(
            f"drafter.mask_token_id: {target.name} has no row after the tokenizer's "
            f"{len(tokenizer)} tokens; give the id of a special token that no conversation "
            f"contains{_unused_special(target)}"
        )
    mask_token_id = len(tokenizer) if given is None else given
    check_mask_token_id(mask_token_id, target)
    if mask_token_id < tokenizer.vocab_size and not _is_special(tokenizer, mask_token_id):
        raise InputError(
            f"drafter.mask_token_id is {mask_token_id}, a token of ordinary text; "
            "give the id of a row that no text produces"
        )
    return mask_token_id


def _is_special(tokenizer: Any, token_id: int) -> bool:
    """Whether no text produces the token: a named special one, or one that was added as such."""
    added = tokenizer.added_tokens_decoder.get(token_id)
    return token_id in tokenizer.all_special_ids or (added is not None and added.special)


def _unused_special(target: FrozenTarget) -> str:
    """Some special tokens that stop, pad or begin nothing and that no chat template names."""
    tokenizer, template = target.tokenizer, str(target.tokenizer.chat_template or "")
    taken = {*target.stop_token_ids, tokenizer.pad_token_id, tokenizer.bos_token_id}
    free = [
        f"{token.content} ({index})"
        for index, token in sorted(tokenizer.added_tokens_decoder.items())
        if token.special and index not in taken and token.content not in template
    ]
    return f", such as {', '.join(free[:3])}" if free else ""


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
