"""What would a training step cost whose own forward is the draft, with every block drafted once?

    python scripts/draft_once.py --config recipes/tiny-dflow.yaml --rollout.num_anchors 8

The shipped step drafts without gradient to make its rounds, and runs the same blocks again with
gradient. Here the mask round runs with gradient, its predictions are the drafts that are verified,
the next round runs with gradient, and so on. Three kinds of step take turns on the same batches,
anchors and weights: one without rollouts (DFlash's), the shipped one, and this one. Printed are
processor and wall time with quartiles, the ratios step by step, and how far the gradients are
apart. Exit status 1 where they are further than float32 rounds.
"""

import statistics
import sys
import time
from collections.abc import Callable
from itertools import islice
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from dflow_lightning.data.datamodule import Batch, ChatDataModule
from dflow_lightning.models.drafter import chained_tokens, greedy_tokens
from dflow_lightning.plan.command import parse
from dflow_lightning.plan.measure import build_module
from dflow_lightning.training.precision import ComputePrecision
from dflow_lightning.training.step_inputs import RolloutConfig, Round

STEPS, WARM_UP = 30, 4
NEAR = 1e-6  # of the gradient's norm, in float32


def draft_once(module: Any, batch: Batch, config: RolloutConfig, step: int) -> Tensor:
    """The loss of a step in which every block runs through the drafter once."""
    drafter, slots = module.drafter, config.slots(module.drafter.dims.block_size)
    inputs = module.begin_step(
        batch, extra_slots=slots, up_to_head=config.up_to_head, step=step
    )  # fmt: skip
    context = drafter.context_kv(drafter.project(inputs.taps_BSC), inputs.positions_BS)

    def run(current: Round) -> Tensor:
        rows = None if drafter.carryover is None else current.project(drafter)
        x_BNKD = module.round_inputs(batch, current, rows)
        anchors = current.anchors
        return drafter(
            x_BNKD, context, anchors.positions_BN, starts_BN=anchors.starts_BN,
            carried=drafter.carry(rows),
        )  # fmt: skip

    rollout, (mask_round,) = module.rollout(config), inputs.rounds
    hidden = [run(mask_round)]
    latest, last_BNKD = mask_round.anchors.take(config.num_anchors), hidden[0]
    last_BNKD = last_BNKD[:, : config.num_anchors]
    for _ in range(config.num_rounds):
        with torch.no_grad():
            drafted_BNJD = last_BNKD[..., 1:, :]
            if drafter.causal_head is None:
                drafts_BNJ = greedy_tokens(module.target, drafted_BNJD)
            else:
                ids_BN = batch.input_ids_BS.gather(1, latest.positions_BN)
                drafts_BNJ = chained_tokens(
                    module.target, drafter.causal_head, drafted_BNJD, ids_BN
                )  # fmt: skip
            inputs.rounds.append(rollout.follow(inputs, latest, drafts_BNJ))
        latest = inputs.rounds[-1].anchors
        last_BNKD = run(inputs.rounds[-1])
        hidden.append(last_BNKD)
    with patch.object(module, "_forward_blocks", return_value=torch.cat(hidden, dim=1)):
        return module.objective(inputs)[0]


def main(args: list[str]) -> int:
    """Print the table of a recipe; returns the exit status."""
    recipe = parse(args)
    module: Any = build_module(recipe.model).train()
    torch.manual_seed(2)
    for parameter in module.relay.parameters() if module.relay is not None else ():
        parameter.data.add_(0.1 * torch.randn_like(parameter))  # it starts at exactly zero
    data = ChatDataModule(**recipe.data.as_dict())
    data.setup("fit")
    config = RolloutConfig.of(recipe.rollout)
    precision = ComputePrecision.named(recipe.trainer.precision)
    arms: dict[str, Callable[[Batch, int], Tensor]] = {
        "dflash": lambda batch, step: module.objective(module.begin_step(batch, step=step))[0],
        "twice": lambda batch, step: module.objective(module.step_inputs(batch, config, step=step))[
            0
        ],
        "once": lambda batch, step: draft_once(module, batch, config, step),
    }
    optimizer = torch.optim.AdamW(module.parameters(), lr=recipe.model.optimizer.lr)
    processor: dict[str, list[float]] = {name: [] for name in arms}
    wall: dict[str, list[float]] = {name: [] for name in arms}
    apart = []
    for step, batch in enumerate(islice(iter(data.train_dataloader()), STEPS)):
        found = {}
        for name in list(arms)[:: 1 if step % 2 else -1]:
            module.zero_grad()
            began = time.process_time(), time.perf_counter()
            with precision.autocast("cpu"):
                loss = arms[name](batch, step)
            loss.backward()
            processor[name].append(time.process_time() - began[0])
            wall[name].append(time.perf_counter() - began[1])
            found[name] = torch.cat([p.grad.flatten().clone() for p in module.parameters()])
        shipped, ours = found["twice"], found["once"]
        apart.append(float((shipped - ours).norm() / shipped.norm()))
        optimizer.step()
    print(f"{'ms a step':<12}{'processor':>10}{'quartiles':>18}{'wall':>10}{'quartiles':>18}")
    for name in arms:
        columns = [spread(times[name][WARM_UP:], 1e3, "9.1f") for times in (processor, wall)]
        print(f"{name:<12}{''.join(columns)}")
    for one, other in (("twice", "dflash"), ("once", "dflash"), ("once", "twice")):
        pairs = zip(processor[one][WARM_UP:], processor[other][WARM_UP:], strict=True)
        print(f"{one + ' / ' + other:<16}{spread([a / b for a, b in pairs], 1.0, '9.3f')}")
    print(f"gradients apart: median {statistics.median(apart):.1e}, largest {max(apart):.1e}")
    return int(precision.compute == torch.float32 and max(apart) > NEAR)


def spread(values: list[float], scale: float, form: str) -> str:
    """Median and quartiles."""
    low, middle, high = (format(scale * value, form) for value in statistics.quantiles(values, n=4))
    return f"{middle} {low}{high}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
