"""Validation by real decoding: the number that chooses the best checkpoint."""

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from dflow_lightning.decode.request import check_answer_length
from dflow_lightning.errors import check_counts
from dflow_lightning.tensors.metrics import acceptance_summary

if TYPE_CHECKING:
    from dflow_lightning.data.datamodule import ChatDataModule, Prompt, Split
    from dflow_lightning.decode import SpeculativeDecoder

DECODED_KEY = "decoded"  # of a checkpoint
DRY_RUN_TOKENS = 8  # Lightning's sanity check decodes a little, so that a defect shows at once


class DecodedPrompt(NamedTuple):
    """One prompt's answer: accepted drafts of each round, and the tokens."""

    number: int
    family: str
    accepted: list[int]
    token_ids: list[int]


class Measured(NamedTuple):
    """What a validation has decoded, for the record and for the checkpoint.

    Attributes:
        passes: all prompts' answers under `""`, and with the relay off under `"_relay_off"`.
        metrics: what was logged.
    """

    step: int
    prompts: "Sequence[Prompt]"
    passes: dict[str, list[DecodedPrompt]]
    metrics: dict[str, float]


class ValidationDecoding(Callback):
    """Decodes held-out prompts with the current drafter and logs tau, with and without the relay.

    Args:
        prompts_per_family: Prompts of each task family; 0 decodes none.
        max_new_tokens: Length limit of an answer.
        temperature: 0 is greedy.
        batch_size: Prompts decoded together.
    """

    def __init__(
        self,
        *,
        prompts_per_family: int = 8,
        max_new_tokens: int = 96,
        temperature: float = 0.0,
        batch_size: int = 8,
    ):
        check_answer_length(max_new_tokens, "validation.max_new_tokens")
        check_counts("validation.", batch_size=batch_size)
        self.prompts_per_family = prompts_per_family
        self.max_new_tokens = max_new_tokens
        self.temperature = temperature
        self.batch_size = batch_size
        self.interrupted: Callable[[], bool] = lambda: False  # asked between batches of prompts
        self.latest: Measured | None = None

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Decodes the validation prompts."""
        self._measure(trainer, pl_module, split="validation", prefix="val")

    def on_test_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Decodes the test prompts."""
        self._measure(trainer, pl_module, split="test", prefix="test")

    def _measure(self, trainer: Trainer, module: Any, *, split: "Split", prefix: str) -> None:
        if self.prompts_per_family < 1:
            return
        dry = trainer.sanity_checking
        datamodule: ChatDataModule = trainer.datamodule  # type: ignore[attr-defined]
        prompts = datamodule.prompts(split, 1 if dry else self.prompts_per_family)
        decoder = module.decoder()
        modes = {"": True, "_relay_off": False} if decoder.keeps_rejected else {"": False}
        measured = Measured(trainer.global_step, prompts, {}, {})
        for suffix, use_rejected in modes.items():
            decoded = self._decode(trainer, decoder, prompts, use_rejected=use_rejected, dry=dry)
            if decoded is None:
                return
            if not dry:
                drafts = module.drafter.dims.block_size - 1
                metrics = summarise(decoded, drafts, prefix=prefix, suffix=suffix)
                module.log_dict(metrics, on_epoch=True, batch_size=1, sync_dist=True)
                measured.passes[suffix] = decoded
                measured.metrics.update(metrics)
        if not dry:
            self.latest = measured

    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Stores the last numbers that were measured, and at which step: an export shows them."""
        if self.latest is not None:
            metrics = {name: float(value) for name, value in self.latest.metrics.items()}
            checkpoint[DECODED_KEY] = {"step": self.latest.step, "metrics": metrics}

    def _decode(
        self,
        trainer: Trainer,
        decoder: "SpeculativeDecoder",
        prompts: Sequence["Prompt"],
        *,
        use_rejected: bool,
        dry: bool,
    ) -> list[DecodedPrompt] | None:
        """Decodes this process's share and gathers everyone's; None if a process was interrupted.

        Each process decodes equally many prompts: a short share repeats prompts, and the gathered
        repeats are dropped. With a sharded target each decodes them all, since every process must
        run the same forwards.
        """
        world, rank = trainer.world_size, trainer.global_rank
        if decoder.target.sharded:
            world, rank = 1, 0
        share = math.ceil(len(prompts) / world)
        mine = [(rank + i * world) % len(prompts) for i in range(share)]
        local: list[DecodedPrompt] = []
        interrupted = False
        for start in range(0, share, self.batch_size):
            # Processes of a sharded target must not part; they stop after decoding.
            if interrupted := (not decoder.target.sharded and self.interrupted()):
                break
            numbers = mine[start : start + self.batch_size]
            completions = decoder.generate(
                [prompts[i].token_ids for i in numbers],
                max_new_tokens=DRY_RUN_TOKENS if dry else self.max_new_tokens,
                temperature=self.temperature,
                seeds=numbers,
                use_rejected=use_rejected,
                batch_size=self.batch_size,
            )
            local += [
                DecodedPrompt(i, prompts[i].family, completion.accepted, completion.token_ids)
                for i, completion in zip(numbers, completions, strict=True)
            ]
        mine_or_none = None if interrupted else local
        gathered: list[Any] = [mine_or_none]
        if world > 1:
            gathered = [None] * world
            torch.distributed.all_gather_object(gathered, mine_or_none)
        if any(rows is None for rows in gathered):
            return None
        return list({row.number: row for rows in gathered for row in rows}.values())


def summarise(
    decoded: Sequence[DecodedPrompt], num_draft_tokens: int, *, prefix: str, suffix: str
) -> dict[str, float]:
    """The metrics of one pass: tau pooled and per family, acceptance of each position."""
    families: dict[str, list[list[int]]] = defaultdict(list)
    for row in decoded:
        families[row.family].append(row.accepted)
    pooled = acceptance_summary([row.accepted for row in decoded], num_draft_tokens)
    metrics = {
        f"{prefix}/tau{suffix}": pooled.tau,
        f"{prefix}/tau_per_request{suffix}": pooled.tau_per_request,
    }
    for family, accepted in families.items():
        tau = acceptance_summary(accepted, num_draft_tokens).tau
        metrics[f"{prefix}/{family}/tau{suffix}"] = tau
    width = len(str(num_draft_tokens))  # dashboards sort names as text
    for position, share in enumerate(pooled.position_acceptance, start=1):
        metrics[f"{prefix}/position_acceptance{suffix}/{position:0{width}}"] = share
    return metrics
