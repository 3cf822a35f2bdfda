"""The frozen target: loading, taps, embedding and head.

Shapes: B batch, Q query tokens, L cache slots, D hidden, C tapped width (taps x D), V vocabulary.
"""

from __future__ import annotations

import copy
import inspect
import sys
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

from dflow_lightning.errors import InputError
from dflow_lightning.models.device import choose_dtype
from dflow_lightning.models.fingerprint import weights_fingerprint
from dflow_lightning.models.pretrained import (
    find_generation_config,
    read_config,
    read_tokenizer,
    reading,
    source_of,
    stop_ids,
)
from dflow_lightning.models.slot_cache import SlotCache
from dflow_lightning.terminal import labelled


@dataclass(frozen=True)
class TargetOutput:
    """`hidden_BQD` is the input of the head, `taps_BQC` the tapped layers side by side."""

    hidden_BQD: Tensor
    taps_BQC: Tensor


class FrozenTarget:
    """A Hugging Face causal language model that is read and never changed.

    It is deliberately no `nn.Module`: no optimizer, checkpoint, state dict or reducer ever sees it.
    """

    def __init__(self, model: Any, tokenizer: Any, name: str) -> None:
        self.model = model.eval().requires_grad_(False)
        self.tokenizer = tokenizer
        self.name = name
        self.sharded = False
        self._source: str | None = None  # where it was loaded from, if it was
        self._context_said = False
        self.config = model.config.get_text_config()
        self._decoder = model.get_decoder()
        self._head = model.get_output_embeddings()
        self._embedding = model.get_input_embeddings()
        self._wanted: dict[int, Tensor | None] = {}
        self._shortened: dict[int, Any] = {}
        self._check_supported()
        for index, layer in enumerate(self._decoder.layers):
            layer.register_forward_hook(self._capture(index))
        named = inspect.signature(self._decoder.forward).parameters
        self._cache_argument = "cache" if "cache" in named else "past_key_values"

    @classmethod
    def load(
        cls,
        path: str,
        *,
        dtype: str = "auto",
        attn_implementation: str = "sdpa",
        device: str | torch.device = "cpu",
    ) -> FrozenTarget:
        """Load a target from a hub id or a folder.

        Args:
            dtype: a name of `choose_dtype`.

        Raises:
            InputError: the dtype is unknown, the folder does not exist or is damaged, or the
                architecture is not a text model, or cannot be tapped or rewound.
        """
        weights_dtype = choose_dtype(dtype, torch.device(device))
        read_config(path)  # before weights, which may be many
        find_generation_config(path)
        if not sys.stderr.isatty():
            disable_progress_bar()
        source = source_of(path, "target")
        with reading(path, "target"):
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                source,
                output_loading_info=True,
                dtype=weights_dtype,
                attn_implementation=attn_implementation,
            )
        model, report = loaded
        tokenizer = read_tokenizer(path)
        if absent := sorted(report["missing_keys"]):  # transformers would leave them random
            raise InputError(
                f"target: {path} lacks {len(absent)} tensors, first {absent[0]}; "
                "save or download the model again"
            )
        target = cls(model.to(device), tokenizer, path)
        target._source = source
        return target

    def _check_supported(self) -> None:
        if not hasattr(self._decoder, "layers"):
            raise InputError(
                f"target: {self.name} is a {type(self.model).__name__}, whose layers cannot be "
                "tapped; choose a target of the Llama or Qwen3 kind"
            )
        windowed = getattr(self.config, "sliding_window", None) is not None
        kinds = set(
            getattr(self.config, "layer_types", None)  # older architectures name no types
            or ["sliding_attention" if windowed else "full_attention"]
        )
        if kinds != {"full_attention"}:
            raise InputError(
                f"target: {self.name} has layers of type {', '.join(sorted(kinds))}; "
                "only full attention can be verified and rewound block by block, "
                "choose a target without other layers"
            )
        for key in ("final_logit_softcapping", "logit_scale", "logits_scaling"):
            if getattr(self.config, key, None) not in (None, 1.0):
                raise InputError(
                    f"target: {self.name} sets {key}, which is not supported; choose another target"
                )

    @property
    def hidden_size(self) -> int:
        """Width of the hidden states, D."""
        return self.config.hidden_size

    @property
    def num_layers(self) -> int:
        """Number of decoder layers."""
        return len(self._decoder.layers)

    @property
    def vocab_size(self) -> int:
        """Rows of the embedding, which may be more than the tokenizer has tokens."""
        return self._embedding.weight.shape[0]

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self._embedding.weight.device

    @property
    def dtype(self) -> torch.dtype:
        """The type of the weights."""
        return self._embedding.weight.dtype

    def layer_weights(self, index: int) -> dict[str, Tensor]:
        """Parameters of one decoder layer, by their names inside it."""
        return dict(self._decoder.layers[index].named_parameters())

    @property
    def final_norm_weight(self) -> Tensor | None:
        """Scale of the norm before the head, where the architecture has one of the usual name."""
        return getattr(getattr(self._decoder, "norm", None), "weight", None)

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """End-of-sequence ids of the generation config, the model and the tokenizer together."""
        generation = getattr(self.model, "generation_config", None)
        return stop_ids(self.name, generation, self.config, self.tokenizer)

    @property
    def fingerprint(self) -> str:
        """Hash of the weights: names, shapes and a strided sample of every tensor, in bfloat16.

        float16 loses what bfloat16 keeps of small numbers, and rounds float32 to others. A target
        in float16 is read once more, in bfloat16: it is the same whatever it is loaded in.
        """
        if not hasattr(self, "_fingerprint"):
            model = self.model
            if self.dtype == torch.float16 and self._source is not None:
                model = AutoModelForCausalLM.from_pretrained(self._source, dtype=torch.bfloat16)
            self._fingerprint = weights_fingerprint(model.state_dict().items())
        return self._fingerprint

    def not_finite(self) -> InputError:
        """The error of a target that computes NaN or infinity where logits should be."""
        dtype = str(self.dtype).removeprefix("torch.")
        advice = (
            "give it dtype float32 or bfloat16, whose range is larger"
            if self.dtype == torch.float16
            else "its weights are damaged, or were saved in too small a type; save or download the "
            "model again"
        )
        return InputError(
            f"target: {self.name} in {dtype} computes logits that are not finite; {advice}"
        )

    def within_context(self, length: int) -> int:
        """A length in tokens, at most the context; says once where it had to be lowered."""
        limit = self.config.max_position_embeddings
        ranked = torch.distributed.is_available() and torch.distributed.is_initialized()
        if length > limit and not self._context_said:
            self._context_said = True
            if not ranked or torch.distributed.get_rank() == 0:
                text = (
                    f"prompt and answer may take {length:,} tokens, but the context of {self.name} "
                    f"ends at {limit:,}, and so do the answers; give fewer max_new_tokens"
                )
                print(labelled("warning: ", text, sys.stderr), file=sys.stderr)
        return min(length, limit)

    def to(self, device: torch.device | str) -> FrozenTarget:
        """Move the weights in place; returns the target itself."""
        self.model.to(device)
        return self

    def shard(self, device: torch.device) -> FrozenTarget:
        """Keep one share of every decoder layer on each process; a layer is whole while it runs.

        Embedding, final norm and head stay whole. From here on every process must run the same
        number of forwards, since each gathers its layers from all of them.
        """
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        _ = self.fingerprint  # of whole weights, now or never
        mesh = init_device_mesh(device.type, (torch.distributed.get_world_size(),))
        for layer in self._decoder.layers:  # one at a time: the whole may not fit the device
            fully_shard(layer.to(device), mesh=mesh, reshard_after_forward=True)
        self.sharded = True
        return self.to(device)

    @property
    def embedding_weight(self) -> Tensor:
        """Token embeddings, `[V, D]`."""
        return self._embedding.weight

    @property
    def head_weight(self) -> Tensor | None:
        """Weight of the head, `[V, D]`; None where the head is more than a matrix."""
        return None if getattr(self._head, "bias", None) is not None else self._head.weight

    def embed(self, ids: Tensor) -> Tensor:
        """Embedding rows, `[..., D]`."""
        return torch.nn.functional.embedding(ids, self._embedding.weight)

    def head(self, hidden: Tensor) -> Tensor:
        """Logits of the last (normed) hidden state, `[..., V]`."""
        return self._head(hidden.contiguous())  # a slice would be multiplied batch by batch

    def new_cache(self, capacity: int, num_rows: int | None = None) -> SlotCache:
        """An empty cache of `capacity` slots per request, for as many as the first batch has.

        Args:
            num_rows: requests to hold, where the first batch is not all of them.
        """
        return SlotCache(self.num_layers, capacity, num_rows)

    def forward(
        self, ids_BQ: Tensor, positions_BQ: Tensor, cache: SlotCache, slots_BQ: Tensor,
        visible_BQL: Tensor, target_layer_ids: list[int],
    ) -> TargetOutput:  # fmt: skip
        """Run tokens through the target on top of a cache.

        Args:
            positions_BQ: RoPE positions.
            slots_BQ: where the tokens' keys and values are written; equal to the positions, except
                for the blocks of a rollout, which all stand behind the clean sequence.
            visible_BQL: which cache slots each token sees, its own included; L is `cache.length`.
            target_layer_ids: decoder layers whose OUTPUT is tapped (Hugging Face's
                `hidden_states[id + 1]`).
        """
        return self._run(
            self._decoder, ids_BQ, positions_BQ, cache, slots_BQ, visible_BQL, target_layer_ids
        )

    def features(
        self, ids_BQ: Tensor, positions_BQ: Tensor, cache: SlotCache, slots_BQ: Tensor,
        visible_BQL: Tensor, target_layer_ids: list[int],
    ) -> Tensor:  # fmt: skip
        """The taps of `forward` alone, `[B, Q, C]`; layers above the highest tap do not run."""
        decoder = self._first_layers(max(target_layer_ids) + 1)
        return self._run(
            decoder, ids_BQ, positions_BQ, cache, slots_BQ, visible_BQL, target_layer_ids
        ).taps_BQC

    def _run(
        self, decoder, ids_BQ, positions_BQ, cache, slots_BQ, visible_BQL, target_layer_ids
    ) -> TargetOutput:
        cache.slots_BQ = slots_BQ
        self._wanted = dict.fromkeys(target_layer_ids)
        output = decoder(
            input_ids=ids_BQ,
            position_ids=positions_BQ,
            attention_mask=visible_BQL.unsqueeze(1),
            use_cache=True,
            **{self._cache_argument: cache},
        )
        taps = [self._wanted[index] for index in target_layer_ids]
        self._wanted = {}
        hidden_BQD = output.last_hidden_state
        # Without taps, as in plain decoding, their width is zero.
        taps_BQC = torch.cat([hidden_BQD[..., :0], *(t for t in taps if t is not None)], dim=-1)
        return TargetOutput(hidden_BQD, taps_BQC)

    def _first_layers(self, count: int) -> Any:
        """The decoder with its first layers only; all parts are shared with the whole one."""
        if count not in self._shortened:
            shortened = copy.copy(self._decoder)
            shortened._modules = self._decoder._modules | {"layers": self._decoder.layers[:count]}
            self._shortened[count] = shortened
        return self._shortened[count]

    def _capture(self, index: int):
        def hook(module: Any, args: Any, output: Any) -> None:
            if index in self._wanted:
                self._wanted[index] = output[0] if isinstance(output, tuple) else output

        return hook
