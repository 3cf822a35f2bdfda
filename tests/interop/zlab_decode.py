"""Decode prompts with z-lab's `dflash` package, and show every block that it drafted.

Each prompt is decoded greedily in float32, twice: by the package's own `dflash_generate`, and by
the target alone, one token a forward, in a loop that shares no code with it. Both must give the
same ids. With `--save` the package's class also writes the drafter, without the section of its
config that only we read. One line of JSON on stdout.

A round here is `{"gained": ..., "drafts": [...]}`. Gained are all tokens of the round, the bonus
token included; the last round is cut at the stop token or the token limit, and a block that the
limit leaves no room for is drafted shorter.
"""

import json
import time
from pathlib import Path

import dflash.model
import torch
from dflash.model import DFlashDraftModel, dflash_generate
from peer import peer_parser
from safetensors import safe_open
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

# The package's own timer calls torch.cuda.synchronize(), which needs a GPU.
if not torch.cuda.is_available():
    dflash.model._cuda_time = time.perf_counter


def load_drafter(folder: Path) -> DFlashDraftModel:
    """Load the drafter; fail where the package only warns: names, shapes, architecture."""
    config = AutoConfig.from_pretrained(folder)
    if config.architectures != ["DFlashDraftModel"]:
        raise SystemExit(f"{folder}: architectures {config.architectures}")
    drafter = DFlashDraftModel.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="sdpa"
    )
    wanted = {name: list(tensor.shape) for name, tensor in drafter.state_dict().items()}
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        stored = {name: file.get_slice(name).get_shape() for name in list(file.keys())}
    wrong = sorted(n for n in wanted.keys() | stored.keys() if wanted.get(n) != stored.get(n))
    if wrong:
        raise SystemExit(f"{folder}: tensors missing, unknown or of another shape: {wrong}")
    return drafter.eval()


def load_target(folder: Path) -> tuple:
    """The target, and the ids that end its answers."""
    target = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="sdpa"
    ).eval()
    eos = target.generation_config.eos_token_id
    return target, [eos] if isinstance(eos, int) else list(eos)


@torch.inference_mode()
def plain_generate(target, prompt: list[int], limit: int, stop_ids: list[int]) -> list[int]:
    """Greedy decoding with the target alone."""
    cache = DynamicCache(config=target.config)
    token_ids: list[int] = []
    new = prompt
    while len(token_ids) < limit and not set(token_ids[-1:]) & set(stop_ids):
        input_ids = torch.tensor([new])
        logits = target(input_ids, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
        new = [logits[0, -1].argmax().item()]
        token_ids += new
    return token_ids


def decode(target, drafter, prompt: list[int], limit: int, stop_ids: list[int]) -> dict:
    """The ids of both decodings, and the package's rounds."""
    drafts: list[list[int]] = []
    compute_logits = drafter.compute_logits

    def recorded(hidden, head):
        logits = compute_logits(hidden, head)
        drafts.append(logits[0].argmax(-1).tolist())
        return logits

    drafter.compute_logits = recorded
    out = dflash_generate(
        drafter, target, torch.tensor([prompt]), limit, stop_ids, return_stats=True
    )
    drafter.compute_logits = compute_logits
    drafts += [[]] * (len(out.acceptance_lengths) - len(drafts))  # a block of one slot drafts none
    return {
        "token_ids": out.output_ids[0, len(prompt) :].tolist(),
        "plain_ids": plain_generate(target, prompt, limit, stop_ids),
        "rounds": [
            {"gained": gained, "drafts": block}
            for gained, block in zip(out.acceptance_lengths, drafts, strict=True)
        ],
    }


def main() -> None:
    parser = peer_parser(__doc__)
    parser.add_argument("--save", type=Path, help="folder to write the drafter to")
    args = parser.parse_args()
    target, stop_ids = load_target(args.target)
    drafter = load_drafter(args.drafter)
    prompts = json.loads(args.prompts.read_text())
    rows = [decode(target, drafter, one, args.max_new_tokens, stop_ids) for one in prompts]
    if args.save:
        if hasattr(drafter.config, "dflow_config"):
            del drafter.config.dflow_config
        drafter.save_pretrained(args.save)
    print(json.dumps({"block_size": drafter.block_size, "prompts": rows}))


if __name__ == "__main__":
    main()
