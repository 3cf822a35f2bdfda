"""Known answers of a target's tapped layers, for everyone who has to tap the same ones.

An export keeps them as `dflow_config.tap_fingerprint` in config.json:

    {"token_ids": [7, 27, ...], "weights": "float32",
     "layers": {"1": {"norm": 8.25, "values": [0.5, -1.125, ...]}, ...}}

Run the target once over `token_ids` as they stand (positions 0, 1, ...; causal; no template, no
token added). Take the hidden state of the last token that decoder layer `id` (counted from 0) gives
to the next layer: Hugging Face's `hidden_states[id + 1]`, residual included, no final norm. Its
Euclidean norm is `norm` and its first components are `values`. Both were computed in float32, from
weights that had been loaded as `weights` says; the numbers in the file are exact, but other kernels
differ in the last digits. An engine in float32 that is more than 1 in 1,000 away, or one in
bfloat16 more than 1 in 20, taps another layer or runs another target: `tap_distance` below says how
that is measured. (The embedded target in bfloat16 is 1 in 70 away; its next layer 1 in 5.)

Shapes: S sequence, D hidden, C tapped width (taps x D).
"""

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dflow_lightning.models.target import FrozenTarget

NUM_TOKENS, NUM_VALUES = 16, 8
TOLERANCE, ROUNDED_TOLERANCE = 1e-3, 5e-2


@torch.inference_mode()
def tapped_states(target: FrozenTarget, token_ids: list[int], layer_ids: Sequence[int]) -> Tensor:
    """Outputs of the tapped layers side by side, `[1, S, C]`, as Hugging Face itself gives them."""
    ids_1S = torch.tensor([token_ids], device=target.device)
    output = target.model(ids_1S, output_hidden_states=True, use_cache=False, logits_to_keep=1)
    return torch.cat([output.hidden_states[index + 1] for index in layer_ids], dim=-1)


def tap_fingerprint(
    target: FrozenTarget, layer_ids: Sequence[int], token_ids: list[int] | None = None
) -> dict[str, Any]:
    """The section of an export, computed in float32 whatever the target is loaded in.

    Args:
        token_ids: of an earlier fingerprint; by default some spread over the vocabulary.

    Raises:
        InputError: the target computes NaN or infinity.
    """
    if token_ids is None:
        step = target.vocab_size // NUM_TOKENS
        token_ids = [7 % step + step * index for index in range(NUM_TOKENS)]
    exact = target
    if target.dtype != torch.float32:
        model = copy.deepcopy(target.model).float()
        exact = FrozenTarget(model, target.tokenizer, target.name)
    states_TD = tapped_states(exact, token_ids, layer_ids)[0, -1].view(len(layer_ids), -1)
    if not states_TD.isfinite().all():
        raise exact.not_finite()
    layers = {
        str(index): {"norm": state_D.norm().item(), "values": state_D[:NUM_VALUES].tolist()}
        for index, state_D in zip(layer_ids, states_TD, strict=True)
    }
    weights = str(target.dtype).removeprefix("torch.")
    return {"token_ids": token_ids, "weights": weights, "layers": layers}


def far_layers(recorded: dict[str, Any], found: dict[str, Any]) -> dict[str, float]:
    """Layers that two fingerprints of the same tokens do not agree on, with their distance."""
    limit = TOLERANCE if recorded["weights"] == found["weights"] else ROUNDED_TOLERANCE
    pairs = {id: (recorded["layers"][id], found["layers"][id]) for id in recorded["layers"]}
    distances = {id: tap_distance(*pair) for id, pair in pairs.items()}
    return {id: far for id, far in distances.items() if not far <= limit}  # NaN is far, too


def tap_distance(recorded: dict[str, Any], found: dict[str, Any]) -> float:
    """How far apart one layer is in two fingerprints, relative to the recorded one.

    The larger of the relative difference of the norms and that of the values, taken as vectors.
    """
    ours, theirs = torch.tensor(recorded["values"]), torch.tensor(found["values"])
    values = float((ours - theirs).norm() / ours.norm())
    return max(values, abs(found["norm"] - recorded["norm"]) / recorded["norm"])
