"""Load a drafter with `speculators` and let it draft one block at each of some anchors.

A folder in speculators' own layout is loaded as it is; one in z-lab's goes through their converter
first. The tensors in the file are compared with the loaded model's, since their loader only warns
of missing and unknown ones. Drafting is in float32, with the context strictly before each anchor.
One line of JSON on stdout.
"""

import argparse
import json
import tempfile
from pathlib import Path

import torch
from safetensors.torch import load_file
from speculators.convert import convert_model
from speculators.models.dflash import DFlashDraftModel, DFlashSpeculatorConfig
from transformers import AutoModelForCausalLM


def load_drafter(folder: Path, target: str) -> DFlashDraftModel:
    """Load either layout; their own takes the target from its config, ours from `target`."""
    if "speculators_model_type" not in json.loads((folder / "config.json").read_text()):
        with tempfile.TemporaryDirectory() as converted:
            convert_model(str(folder), target, "dflash", converted, validate_device="cpu")
            return load_drafter(Path(converted), target)
    config = DFlashSpeculatorConfig.from_pretrained(folder)
    # Their default attention would compile its mask on first use.
    config.transformer_layer_config._attn_implementation = "sdpa"
    return DFlashDraftModel.from_pretrained(str(folder), config=config, dtype=torch.float32).eval()


def wrong_tensors(stored: dict[str, torch.Tensor], drafter: DFlashDraftModel) -> list[str]:
    """Tensors that the file lacks, and tensors of the file that the model lacks or changed."""
    loaded = drafter.state_dict()
    never_saved = set(drafter._keys_to_ignore_on_save)  # embedding, norm and head of the target
    missing = loaded.keys() - never_saved - stored.keys()
    changed = {
        name
        for name, tensor in stored.items()
        if name not in loaded or not torch.equal(loaded[name], tensor.to(loaded[name].dtype))
    }
    return sorted(missing | changed)


@torch.no_grad()
def draft(drafter: DFlashDraftModel, target: str, ids: list[int], anchors: list[int]):
    """Greedy drafts of one block at each anchor, `[anchors, block_size - 1]`."""
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
    input_ids = torch.tensor([ids])
    states = model.model(input_ids, output_hidden_states=True, use_cache=False).hidden_states
    # Anchors are drawn from the loss mask; with as many ones as anchors the draw is fixed.
    loss_mask = torch.zeros_like(input_ids)
    loss_mask[0, anchors] = 1
    _, logits, *_ = drafter._backbone_forward(
        hidden_states=torch.cat([states[index] for index in drafter.target_layer_ids], dim=-1),
        input_ids=input_ids,
        loss_mask=loss_mask,
        verifier_last_hidden_states=torch.zeros_like(states[-1]),  # only the loss reads it
        document_ids=torch.zeros_like(input_ids),
        max_anchors=len(anchors),
    )
    if not logits.isfinite().all():
        raise SystemExit("logits are not finite: embedding or head was never loaded")
    return logits.unflatten(1, (len(anchors), -1))[0, :, 1:].argmax(-1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--target", required=True)
    parser.add_argument("--drafter", type=Path, required=True, help="in either layout")
    parser.add_argument("--text", type=Path, required=True, help='JSON: {"ids": [], "anchors": []}')
    args = parser.parse_args()
    drafter = load_drafter(args.drafter, args.target)
    if wrong := wrong_tensors(load_file(args.drafter / "model.safetensors"), drafter):
        raise SystemExit(f"tensors missing, unknown or changed by loading: {wrong}")
    text = json.loads(args.text.read_text())
    method = drafter.config.speculators_config.proposal_methods[0]
    result = {
        "num_draft_tokens": method.speculative_tokens,
        "drafts": draft(drafter, args.target, text["ids"], text["anchors"]).tolist(),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
