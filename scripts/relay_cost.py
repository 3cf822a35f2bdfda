"""What the relay costs: its share of a DFlash round (draft and verify), in time, FLOPs and bytes.

    python scripts/relay_cost.py                 # the embedded target and a 1.7B-shaped random one

Times are medians over rounds of one run, eager, one request, float32 on this CPU; the relay's time
is the correction, plus keeping the rejected rows. The 1.7B shape has Qwen3-1.7B's dimensions with
random weights, since cost does not depend on their values.
"""

import argparse
from pathlib import Path

import torch
from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

from dflow_lightning.bench.row import relay_share, round_milliseconds
from dflow_lightning.decode import SpeculativeDecoder
from dflow_lightning.models.dims import DrafterConfig, DrafterDims
from dflow_lightning.models.drafter import Drafter
from dflow_lightning.models.relay import Relay
from dflow_lightning.models.target import FrozenTarget
from dflow_lightning.stopwatch import RoundTimer

TINY = "data/tiny-qwen3"


def large_decoder(layers: int) -> SpeculativeDecoder:
    """A random target of Qwen3-1.7B's shape, with the published drafter shape of five layers."""
    config = Qwen3Config(
        vocab_size=151936, hidden_size=2048, intermediate_size=6144, num_hidden_layers=layers,
        num_attention_heads=16, num_key_value_heads=8, head_dim=128, tie_word_embeddings=True,
        max_position_embeddings=40960, eos_token_id=151645, pad_token_id=151643,
    )  # fmt: skip
    target = FrozenTarget(
        Qwen3ForCausalLM(config), AutoTokenizer.from_pretrained(TINY), "random 1.7B"
    )
    dims = DrafterDims.resolve(
        DrafterConfig(num_layers=5, block_size=16, mask_token_id=151669), target
    )
    relay = Relay(dims.hidden_size, 2 * dims.hidden_size)
    return SpeculativeDecoder(target, Drafter(dims).eval(), relay.eval())


def parameters(module: torch.nn.Module) -> int:
    """Weights of a module."""
    return sum(p.numel() for p in module.parameters())


def report(name: str, decoder: SpeculativeDecoder, rounds: int) -> None:
    """Print one shape's row."""
    timer = RoundTimer(decoder.target.device)
    drafter, relay = decoder.drafter, decoder.relay
    assert relay is not None
    K = drafter.dims.block_size
    # Random drafters are hardly ever right: a token a round.
    decoder.generate([[5, 6, 7, 8]], max_new_tokens=8, stop_token_ids=())
    while len(timer.seconds("draft")) < rounds:
        decoder.generate([[5, 6, 7, 8]], max_new_tokens=rounds, stop_token_ids=(), timer=timer)
    parts = round_milliseconds(timer)
    assert parts is not None
    share = relay_share(parts)
    assert share is not None
    target = sum(p.numel() for p in decoder.target.model.parameters())
    head = decoder.target.vocab_size * decoder.target.hidden_size
    # A matrix of n weights costs 2 n FLOPs a row; the head runs in both forwards.
    body = 2 * K * (target - head + parameters(drafter)) + 2 * (2 * K - 1) * head
    # Two thirds of the first layer read the boundary: once a block instead of once a slot.
    once = 2 * decoder.target.hidden_size * relay.hidden_size
    relay_flops = 2 * (K * (parameters(relay) - once) + once)
    read = target + parameters(drafter) + head
    measured = len(timer.seconds("draft"))
    print(
        f"{name:<12} {measured:>6} {parts['draft']:>9.2f} {parts['verify']:>9.2f} "
        f"{parts['relay']:>8.3f} {100 * share:>7.2f} "
        f"{100 * relay_flops / body:>7.2f} {100 * parameters(relay) / read:>7.2f}",
        flush=True,
    )


def main(rounds: int, layers: int, drafter: Path) -> None:
    """Print the table."""
    torch.manual_seed(0)
    print("            rounds  draft ms verify ms relay ms  time %  FLOP % weights %")
    report("tiny", SpeculativeDecoder.from_export(drafter, TINY), rounds)
    report("Qwen3-1.7B", large_decoder(layers), rounds)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--layers", type=int, default=28, help="target layers of the large shape")
    parser.add_argument("--drafter", type=Path, default=Path("data/tiny-drafters/dflow"))
    main(**vars(parser.parse_args()))
