"""The same drafter in the layout of the `speculators` library, which vLLM reads too.

    config.json               keys of `speculators`, and `dflow_config`, which others ignore
    model.safetensors         the DFlash body: the tensors of the other layout, byte for byte
    relay/                    as in the other layout
    README.md                 model card

The embedding and the head are never stored: loaders take them from the target ("verifier") that
config.json names, and a drafter with the target's whole vocabulary has no `t2d` and `d2t`.
"""

import json
import re
import shutil
import tempfile
from pathlib import Path
from typing import Any, Literal

from dflow_lightning import files
from dflow_lightning.errors import InputError
from dflow_lightning.export.write import check_replaceable, export_drafter
from dflow_lightning.formats import integrity
from dflow_lightning.formats.drafter_folder import load_export
from dflow_lightning.formats.relay_folder import read_config
from dflow_lightning.models.drafter import Drafter
from dflow_lightning.models.relay import Relay
from dflow_lightning.models.target import FrozenTarget

SPECULATORS_VERSION = "0.9.0"  # whose configuration schema this is
# Everything else in config.json of the dflash layout is about the drafter, not its layers.
LAYER_KEYS = (
    "model_type",
    "num_hidden_layers",
    "hidden_size",
    "intermediate_size",
    "head_dim",
    "num_attention_heads",
    "num_key_value_heads",
    "hidden_act",
    "rms_norm_eps",
    "attention_bias",
    "attention_dropout",
    "layer_types",
    "sliding_window",
    "use_sliding_window",
    "max_window_layers",
    "rope_theta",
    "rope_scaling",
    "rope_parameters",
    "max_position_embeddings",
    "vocab_size",
    "tie_word_embeddings",
    "initializer_range",
    "bos_token_id",
    "eos_token_id",
    "dtype",
)

SERVE = """## Serve

vLLM reads the target and the number of tokens to draft, {num_draft_tokens}, from config.json; or
give both:

```
vllm serve <this folder>

vllm serve {verifier} --speculative-config \\
  '{{"method": "dflash", "model": "<this folder>", "num_speculative_tokens": {num_draft_tokens}}}'
```

It reads the body alone, and leaves a `relay` folder aside. The target is the one named by
`speculators_config.verifier.name_or_path` in config.json, now `{verifier}`: edit it if the target
lies elsewhere. `dflow-train decode` and SGLang read the other layout,
`dflow-train export --format dflash`.
"""


def export_speculators(
    drafter: Drafter,
    relay: Relay | None,
    target: FrozenTarget,
    out: Path,
    *,
    dtype: Literal["bfloat16", "float32"] = "bfloat16",
    recipe: dict[str, Any] | None = None,
) -> None:
    """`export_drafter` in the other layout; the drafter is compared there and then rewritten.

    Raises:
        InputError: `out` holds something else, a weight is not finite, or there is a causal head.
    """
    check_replaceable(out)
    if drafter.causal_head is not None:
        raise InputError(
            "format: speculators knows no drafter with a causal head; export in the format dflash"
        )
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "dflash"
        export_drafter(drafter, relay, target, folder, dtype=dtype, recipe=recipe)
        convert_export(folder, target, out)


def convert_export(folder: Path, target: FrozenTarget, out: Path) -> None:
    """Write an export of the dflash layout in the layout of `speculators`.

    Args:
        folder: what `dflow-train export` wrote for `target`.

    Raises:
        InputError: the folder is damaged or of another target, or `out` holds something else.
    """
    check_replaceable(out)
    load_export(folder, target)
    config = speculators_config(read_config(folder / "config.json"), target)
    with files.staged_folder(out) as staged:
        shutil.copyfile(folder / "model.safetensors", staged / "model.safetensors")
        for part in ("relay", "carryover"):
            if (folder / part).is_dir():
                shutil.copytree(folder / part, staged / part)
        integrity.record(staged, config)
        card = (folder / "README.md").read_text(encoding="utf-8")
        (staged / "README.md").write_text(serve_section(card, config), encoding="utf-8")
        text = json.dumps(config, indent=2) + "\n"
        (staged / "config.json").write_text(text, encoding="utf-8")


def speculators_config(config: dict[str, Any], target: FrozenTarget) -> dict[str, Any]:
    """config.json of `speculators` from that of the dflash layout."""
    dflash = config["dflash_config"]
    num_draft_tokens = dflash["block_size"] - 1
    return {
        "architectures": ["DFlashSpeculator"],
        "speculators_model_type": "dflash",
        "speculators_version": SPECULATORS_VERSION,
        "speculators_config": {
            "algorithm": "dflash",
            "proposal_methods": [
                {"proposal_type": "greedy", "speculative_tokens": num_draft_tokens}
            ],
            "default_proposal_method": "greedy",
            "verifier": {
                "name_or_path": target.name,
                "architectures": list(target.model.config.architectures or []),
            },
        },
        "transformer_layer_config": {key: config[key] for key in LAYER_KEYS},
        "draft_vocab_size": config["vocab_size"],
        "block_size": dflash["block_size"],
        # Counted from the embedding's output: one more than the layers' own numbers.
        "aux_hidden_state_layer_ids": [layer_id + 1 for layer_id in dflash["target_layer_ids"]],
        "mask_token_id": dflash["mask_token_id"],
        # For sliding layers only, of which there are none; but vLLM 0.32 makes every layer causal
        # where this is false.
        "sliding_window_non_causal": True,
        "sample_from_anchor": False,
        "tie_word_embeddings": False,
        "dtype": config["dtype"],
        "dflow_config": config["dflow_config"],
    }


def serve_section(card: str, config: dict[str, Any]) -> str:
    """The model card with the commands of this layout instead of the other's."""
    settings = config["speculators_config"]
    serve = SERVE.format(
        num_draft_tokens=settings["proposal_methods"][0]["speculative_tokens"],
        verifier=settings["verifier"]["name_or_path"],
    )
    return re.sub(r"## Decode\n.*?(?=\n## (?!Serve))", lambda _: serve, card, flags=re.DOTALL)
