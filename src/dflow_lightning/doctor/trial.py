"""What `dflow-train doctor --config` tries out: learning one block, and decoding.

    overfit      one block is learned in 50 steps
    lossless     speculative decoding gives what plain decoding gives

Shapes: B batch, S sequence, N blocks, K block size, J = K-1 drafts, R rounds.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from dflow_lightning.checks import DoubtError, FailedError, SkippedError
from dflow_lightning.decode.equality import EqualityCheck, first_difference
from dflow_lightning.doctor.models import MAX_TOKENS, Loaded
from dflow_lightning.doctor.recipe import documents
from dflow_lightning.tensors.blocks import Anchors, slot_labels
from dflow_lightning.training.step_inputs import Round

OVERFIT_STEPS, OVERFIT_SHARE = 50, 0.25  # what may be left of the loss
NEW_TOKENS, NUM_PROMPTS = 32, 3


def block_to_learn(here: Loaded) -> tuple[Anchors, int]:
    """The block with the most supervised slots, and how many it has."""
    batch, anchors = here.row, here.inputs.rounds[0].anchors
    K = here.module.ttt_steps + 1 if here.eagle3 else here.drafter.dims.block_size
    _, supervised_BNJ = slot_labels(batch.input_ids_BS, batch.loss_mask_BS, anchors, K)
    counts_N = supervised_BNJ.sum(-1)[0]
    best = slice(int(counts_N.argmax()), int(counts_N.argmax()) + 1)
    parts = (anchors.positions_BN, anchors.valid_BN, anchors.starts_BN, anchors.ends_BN)
    one = Anchors(*(None if part is None else part[:, best] for part in parts))  # type: ignore[arg-type]
    return one, int(counts_N.max())


def check_overfit(here: Loaded) -> str:
    """One block, the recipe's learning rate. The drafter is not the same afterwards."""
    module, inputs = here.module, here.inputs
    anchors, asked = block_to_learn(here)
    alone = replace(inputs, rounds=[Round(anchors)])
    lr = here.recipe.model.optimizer.lr
    optimizer = torch.optim.AdamW(module.parameters(), lr=lr)
    losses: list[float] = []
    accepted = 0.0
    module.train()
    for _ in range(OVERFIT_STEPS):
        with here.precision():
            loss, sums_R4 = module.objective(alone)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
        accepted = float(sums_R4[0, 2])
    module.eval()
    summary = (
        f"one block: loss {losses[0]:.2f} to {losses[-1]:.2f} in {OVERFIT_STEPS} steps at "
        f"lr {lr:g}, {accepted:.0f} of {asked} drafts right"
    )
    if accepted < asked and not losses[-1] <= OVERFIT_SHARE * losses[0]:
        raise FailedError(
            f"{summary}; set model.optimizer.lr to something like 6e-4, and fix what failed above"
        )
    return summary


def prompts(here: Loaded) -> list[list[int]]:
    """The text before the block that was learned, and questions of the data."""
    anchors, _ = block_to_learn(here)
    at = int(anchors.positions_BN)
    start = 0 if anchors.starts_BN is None else int(anchors.starts_BN)
    found = [here.row.input_ids_BS[0, start:at].tolist()]
    for ids_S, mask_S in (one for each in here.batches for one in documents(each)):
        found.append(ids_S[: int(mask_S.int().argmax())].tolist()[-MAX_TOKENS:])
    return [prompt for prompt in found if prompt][:NUM_PROMPTS]


def check_lossless(here: Loaded) -> str:
    """With the drafter that has just learned a block, so that drafts are accepted."""
    check, others, most = EqualityCheck(here.target), 0, 0
    if not check.asserted and here.device.type == "cpu":
        raise SkippedError("a target in half precision on a CPU; ties are common there")
    asked, decoder = prompts(here), here.module.decoder()
    plain = [one.token_ids for one in decoder.generate_plain(asked, max_new_tokens=NEW_TOKENS)]
    for relay in [True, False] if decoder.keeps_rejected else [False]:
        found = decoder.generate(asked, use_rejected=relay, max_new_tokens=NEW_TOKENS, batch_size=2)
        for number, (prompt, one) in enumerate(zip(asked, found, strict=True)):
            most = max([most, *one.accepted])
            at = first_difference(one.token_ids, plain[number])
            others += at is not None
            if at is None or not check.asserted:
                continue
            gap = check.compare(
                f"prompt {number}", prompt, one.token_ids, plain[number], temperature=0.0,
                seed=number,
            )  # fmt: skip
            if gap is not None and not gap.excused:
                raise FailedError(
                    f"answer {number} leaves plain decoding at token {at}, relay "
                    f"{'on' if relay else 'off'}; install the tested transformers (see packages)"
                )
    if others:
        raise DoubtError(
            f"{others} answers leave plain decoding, where a target in {here.target.dtype} may be "
            "torn between two tokens; to be sure, --model.target.dtype float32"
        )
    return f"{len(asked)} answers equal plain decoding, with up to {most} drafts accepted a round"
