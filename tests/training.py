"""Training a small drafter by hand, without a Trainer, for tests that need real drafts."""

import torch
from torch.optim import AdamW

from dflow_lightning.data.datamodule import Batch
from dflow_lightning.models.causal_head import CausalHeadConfig
from dflow_lightning.models.dims import DrafterConfig
from dflow_lightning.models.relay import RelayConfig
from dflow_lightning.training.module import DrafterModule, TargetConfig
from dflow_lightning.training.step_inputs import RolloutConfig, StepInputs


def make_module(
    target_dir,
    *,
    relay=True,
    num_anchors=6,
    block_size=4,
    first_rejected=True,
    causal_head=False,
    carryover=False,
) -> DrafterModule:
    """A module on the given target, with a drafter of two layers and the same weights each time."""
    head = CausalHeadConfig(enabled=causal_head, gru_hidden_dim=24, emb_dim=20)
    torch.manual_seed(1)
    return DrafterModule(
        target=TargetConfig(path=str(target_dir)),
        drafter=DrafterConfig(
            num_layers=2, block_size=block_size, target_layer_ids=[0, 1, 2], carryover=carryover
        ),
        relay=RelayConfig(enabled=relay, hidden_size=96, first_rejected=first_rejected),
        causal_head=head,
        num_anchors=num_anchors,
    )


def one_text(module: DrafterModule, prompt: list[int], length: int) -> Batch:
    """The target's greedy continuation of a prompt, as a batch of one supervised row."""
    decoder = module.decoder()
    answer = decoder.generate_plain([prompt], max_new_tokens=length, stop_token_ids=())[0]
    ids = torch.tensor([prompt + answer.token_ids])
    mask = torch.zeros_like(ids, dtype=torch.bool)
    mask[:, len(prompt) :] = True
    return Batch(ids, mask, torch.tensor([17]))


def roll_out(
    module: DrafterModule, inputs: StepInputs, num_rounds: int, num_anchors: int, mode="online"
) -> None:
    """Append rounds against the data's tokens, as the callback makes them."""
    config = RolloutConfig(num_rounds=num_rounds, num_anchors=num_anchors, mode=mode)
    module.rollout(config).extend(inputs)


def train(
    module: DrafterModule, batch: Batch, steps: int, *, rounds: int = 2, lr: float = 3e-3
) -> list[float]:
    """Optimise on one batch with online rollouts; anchors are drawn anew each step."""
    optimizer = AdamW(module.parameters(), lr=lr)
    losses = []
    for step in range(steps):
        module.seed = step
        rollout = RolloutConfig(num_rounds=rounds, num_anchors=module.num_anchors)
        loss, _ = module.objective(module.step_inputs(batch, rollout))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses
