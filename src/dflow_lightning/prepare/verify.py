"""How far prepared rows are what the target itself would choose.

Rollouts take the data's tokens for the target's choices. Rows of somebody else's answers make a
drafter learn, and a rollout accept, what the target would never say; nothing fails, acceptance is
just lower.

Shapes: B rows, S sequence, P supervised positions, D hidden, V vocabulary.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dflow_lightning.data.prepared import ON_POLICY_FILE, open_prepared
from dflow_lightning.errors import InputError
from dflow_lightning.files import write_text
from dflow_lightning.models.target import FrozenTarget
from dflow_lightning.terminal import labelled

if TYPE_CHECKING:
    from datasets import Dataset

TOKENS_AT_ONCE = 4096  # rows of like length go through the target together
POSITIONS_AT_ONCE = 256  # whose logits, [P, V], are held


@dataclass(frozen=True)
class OnPolicy:
    """Means over the supervised tokens of some rows.

    Args:
        rows: rows that were compared.
        tokens: supervised tokens in them.
        agreement: share that is the target's most likely token.
        mean_logprob: of the data's tokens, in nats.
        mean_entropy: of the target there, in nats. Samples at temperature 1 have a mean log-prob of
            minus the entropy; greedy answers lie above, answers of others mostly below.
    """

    rows: int
    tokens: int
    agreement: float
    mean_logprob: float
    mean_entropy: float

    def describe(self) -> str:
        """The figures as a phrase."""
        return (
            f"{self.agreement:.1%} of {self.tokens:,} supervised tokens ({self.rows:,} rows) are "
            f"the target's first choice; mean log-prob {self.mean_logprob:.3f}, "
            f"minus entropy {-self.mean_entropy:.3f}"
        )


def report_on_policy(
    folder: Path, target: FrozenTarget, *, num_rows: int, min_agreement: float
) -> OnPolicy:
    """Measure, print, and keep the figures in the folder.

    Raises:
        InputError: a setting is out of its range, or there is nothing to compare.
    """
    if num_rows < 1:
        raise InputError(f"verify_rows is {num_rows}; give 1 or more")
    if not 0 <= min_agreement <= 1:
        raise InputError(f"min_agreement is {min_agreement}; give a share between 0 and 1")
    found = on_policy(target, open_prepared(folder), num_rows)
    content = {**asdict(found), "target": target.name, "weights": target.fingerprint}
    write_text(folder / ON_POLICY_FILE, json.dumps(content, indent=2) + "\n")
    print(labelled("on policy: ", found.describe()))
    if found.agreement < min_agreement:
        advice = (
            f"that is less than min_agreement {min_agreement:g}, so these may not be the "
            "target's own answers, or it sampled them; let it answer again: leave out "
            "--keep_answers, and give --temperature 0"
        )
        print(labelled("warning: ", advice))
    return found


def read_on_policy(folder: Path) -> OnPolicy | None:
    """What was measured of a folder's rows, if anything was.

    Raises:
        InputError: the report cannot be read.
    """
    path = folder / ON_POLICY_FILE
    if not path.is_file():
        return None
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        return OnPolicy(**{field.name: content[field.name] for field in fields(OnPolicy)})
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(
            f"data: {path} is damaged ({type(error).__name__}); verify the data again"
        ) from error


def on_policy(target: FrozenTarget, rows: Dataset, num_rows: int) -> OnPolicy:
    """Compare rows, chosen by the hashes of their ids, with the target's distribution.

    Raises:
        InputError: the rows have no supervised token, or tokens the target does not know; or its
            logits are not finite.
    """
    names = rows["id"]
    order = sorted(range(len(rows)), key=lambda i: hashlib.sha256(names[i].encode()).digest())
    chosen = [rows[i] for i in sorted(order[:num_rows])]
    # Longest first: what does not fit in memory fails at once.
    chosen.sort(key=lambda row: -len(row["input_ids"]))
    sums = torch.zeros(3, dtype=torch.float64)
    tokens = 0
    for batch in _batches(chosen):
        for found_P3 in _compare(target, batch):
            tokens += len(found_P3)
            sums += found_P3.double().sum(0).cpu()
    if not tokens:
        raise InputError("verify: the rows have no supervised token; prepare the data again")
    agreement, logprob, entropy = (sums / tokens).tolist()
    if not math.isfinite(logprob):
        raise target.not_finite()
    return OnPolicy(len(chosen), tokens, agreement, logprob, entropy)


def _batches(rows: Sequence[dict[str, Any]]) -> Iterator[Sequence[dict[str, Any]]]:
    start = 0
    while start < len(rows):
        size = max(1, TOKENS_AT_ONCE // len(rows[start]["input_ids"]))
        yield rows[start : start + size]
        start += size


@torch.inference_mode()
def _compare(target: FrozenTarget, batch: Sequence[dict[str, Any]]) -> Iterator[Tensor]:
    """Equal to the first choice, log-prob and entropy of supervised tokens, `[P, 3]`."""
    longest = max(len(row["input_ids"]) for row in batch)
    ids_BS = torch.zeros(len(batch), longest, dtype=torch.long)
    real_BS, supervised_BS = torch.zeros_like(ids_BS), torch.zeros_like(ids_BS, dtype=torch.bool)
    for i, row in enumerate(batch):
        length = len(row["input_ids"])
        ids_BS[i, :length] = torch.tensor(row["input_ids"])
        real_BS[i, :length] = 1
        supervised_BS[i, :length] = torch.tensor(row["loss_mask"])
    if int(ids_BS.max()) >= target.vocab_size:
        raise InputError(
            f"verify: token {int(ids_BS.max())} is outside the vocabulary of {target.name}; give "
            "the target that the data was prepared for"
        )
    ids_BS, real_BS = ids_BS.to(target.device), real_BS.to(target.device)
    decoder = target.model.get_decoder()
    output = decoder(input_ids=ids_BS, attention_mask=real_BS, use_cache=False)
    wanted_BS = supervised_BS[:, 1:].to(target.device)  # each is predicted one position before
    hidden_PD, ids_P = output.last_hidden_state[:, :-1][wanted_BS], ids_BS[:, 1:][wanted_BS]
    for start in range(0, len(ids_P), POSITIONS_AT_ONCE):
        part = slice(start, start + POSITIONS_AT_ONCE)
        logprob_PV = target.head(hidden_PD[part]).float().log_softmax(-1)
        chosen_P1 = ids_P[part].unsqueeze(1)
        equal_P = logprob_PV.argmax(-1) == ids_P[part]
        entropy_P = -(logprob_PV.exp() * logprob_PV).sum(-1)
        yield torch.stack(
            [equal_P.float(), logprob_PV.gather(1, chosen_P1).squeeze(1), entropy_P], dim=1
        )
