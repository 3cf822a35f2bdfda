"""Our side of `bench_step.py` and `memory.py`: training steps on the shape that is asked for.

`dflash` is forward and backward over the mask round, features made before and not counted. `dflow`
also rolls out: two rounds from an eighth of the blocks, their verification by the target included.
`dflash_whole` and `dflow_whole` begin with the target's clean forward. No optimizer on either side.
"""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests/interop"))
from step_worker import serve, step_parser

from dflow_lightning.data.datamodule import Batch
from dflow_lightning.models.dims import DrafterConfig
from dflow_lightning.models.relay import RelayConfig
from dflow_lightning.training.module import DrafterModule, TargetConfig
from dflow_lightning.training.step_inputs import RolloutConfig

ROUNDS, SHARE = 2, 8


def main() -> None:
    parser = step_parser(__doc__)
    parser.add_argument("--gradient-checkpointing", action="store_true")
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    torch.set_num_threads(1)
    module = DrafterModule(
        target=TargetConfig(path=args.target),
        drafter=DrafterConfig(num_layers=args.layers, block_size=args.block_size),
        relay=RelayConfig(enabled=True),
        num_anchors=args.anchors,
        gradient_checkpointing=args.gradient_checkpointing,
    )
    ids = torch.randint(2, module.target.vocab_size, (args.batch, args.seq_len))
    batch = Batch(ids, torch.ones_like(ids, dtype=torch.bool), torch.arange(args.batch))
    config = RolloutConfig(num_rounds=ROUNDS, num_anchors=args.anchors // SHARE)
    clean, rolled = module.step_inputs(batch), module.step_inputs(batch, config)

    relay = module.relay

    def train(inputs) -> float:
        module.relay = relay if len(inputs.rounds) > 1 else None  # without one it is DFlash
        module.zero_grad(set_to_none=True)
        loss, _ = module.objective(inputs)
        loss.backward()
        module.relay = relay
        return loss.item()

    def dflow() -> float:
        del rolled.rounds[1:]  # the clean forward is kept, the rounds are made again
        module.rollout(config).extend(rolled)
        return train(rolled)

    serve(
        {
            "dflash": lambda: train(clean),
            "dflow": dflow,
            "dflash_whole": lambda: train(module.step_inputs(batch)),
            "dflow_whole": lambda: train(module.step_inputs(batch, config)),
        },
        {"trained_parameters": sum(p.numel() for p in module.drafter.parameters())},
    )


if __name__ == "__main__":
    main()
