"""Training steps of `speculators`' DFlash: forward with its own loss, and backward, on this CPU.

Features come from the target before the first step and do not count; nor is there an optimizer.
float32, full attention in every layer, z-lab's taps, tokens at random and all supervised. Settings
are theirs, but for attention and loss, whose defaults need a GPU. A row holds one sequence: their
packed rows would attend over the whole batch and are slower here. `step_worker` has the protocol.
"""

import torch
from speculators.models.dflash import DFlashDraftModel
from speculators.train.cli import create_transformer_layer_config
from step_worker import serve, step_parser
from transformers import AutoModelForCausalLM


@torch.no_grad()
def features(target_dir: str, input_ids: torch.Tensor, taps: list[int]):
    """Tapped layers side by side, `[B, S, C]`, and the last layer before its norm."""
    target = AutoModelForCausalLM.from_pretrained(target_dir, dtype=torch.float32).eval()
    before_norm: list[torch.Tensor] = []
    target.model.norm.register_forward_pre_hook(lambda module, args: before_norm.append(args[0]))
    states = target.model(input_ids, output_hidden_states=True, use_cache=False).hidden_states
    return torch.cat([states[tap + 1] for tap in taps], dim=-1), before_norm[0]


def main() -> None:
    parser = step_parser(__doc__)
    parser.add_argument("--taps", type=int, nargs="+", required=True, help="layers, from 0")
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    torch.set_num_threads(1)
    layers = create_transformer_layer_config(
        args.target, num_layers=args.layers, draft_arch="qwen3", hidden_act=None,
        sliding_window=2048, full_attention_indices=list(range(args.layers)),
    )  # fmt: skip
    ids = torch.randint(2, layers.vocab_size, (args.batch, args.seq_len))
    taps, last = features(args.target, ids, args.taps)
    drafter = DFlashDraftModel.from_training_args(
        layers, verifier_name_or_path=args.target, draft_vocab_size=layers.vocab_size,
        block_size=args.block_size, target_layer_ids=[tap + 1 for tap in args.taps],
        mask_token_id=1, draft_attn_impl="sdpa",
    ).train()  # fmt: skip
    settings, _ = DFlashDraftModel.get_trainer_kwargs(
        loss_fn="ce", loss_implementation="eager", per_position_loss_weight="dpace",
        dflash_decay_gamma=7.0, max_anchors=args.anchors,
    )  # fmt: skip
    everything = torch.ones(1, args.seq_len, dtype=torch.long)
    rows = [
        {
            "input_ids": ids[row : row + 1],
            "hidden_states": taps[row : row + 1],
            "verifier_last_hidden_states": last[row : row + 1],
            "loss_mask": everything,
            "document_ids": torch.zeros_like(everything),
            "position_ids": torch.arange(args.seq_len)[None],
        }
        for row in range(args.batch)
    ]

    def step() -> float:
        drafter.zero_grad(set_to_none=True)
        total = 0.0
        for row in rows:
            _, loss, _ = drafter(**row, **settings)
            (loss / len(rows)).backward()
            total += loss.item() / len(rows)
        return total

    trained = sum(p.numel() for p in drafter.parameters() if p.requires_grad)
    serve({"dflash": step}, {"trained_parameters": trained})


if __name__ == "__main__":
    main()
