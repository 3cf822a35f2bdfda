"""What an engine should have drafted: every block again, from the text alone, in float64.

Nothing of the decoder is used: the taps come from Hugging Face's target over the whole text, the
relay's rows from the same target over the text before a block and the drafts that were verified
there, row by row; the relay's formula is written out once more. A draft that differs is excused
only where the recomputed logits of the two tokens lie within `TIE` of each other.

Shapes: N blocks of a request, K slots, J = K-1 drafts, L tokens of the text, C tapped width, D
hidden, V vocabulary.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from dflow_lightning.decode.equality import TIE
from dflow_lightning.formats.drafter_folder import load_export
from dflow_lightning.models.target import FrozenTarget


@dataclass
class Verdict:
    """What comparing a run's blocks has shown.

    Args:
        blocks: compared.
        relayed: of these, how many had relay rows.
        differ: blocks with a draft that is not the recomputed one, excused or not.
        ties: of these, the excused ones.
        unread: blocks drafted while a prompt was still being read, or a text once more after a
            preemption, or behind an answer's end: no answer depends on them.
        errors: what is wrong, a line each.
    """

    blocks: int = 0
    relayed: int = 0
    differ: int = 0
    ties: int = 0
    unread: int = 0
    errors: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        return (
            f"{self.blocks} blocks ({self.relayed} with relay rows): {self.differ} differ, "
            f"{self.ties} of them ties"
        )


@dataclass(frozen=True)
class Step:
    """A verification: the anchor it began at, the next anchor, and the drafts it verified."""

    start: int
    anchor: int
    drafts: list[int]


def leading(drafts: list[int], text: list[int]) -> int:
    """How many drafts agree with the text before the first that does not."""
    count = 0
    for draft, token in zip(drafts, text, strict=False):
        if draft != token:
            break
        count += 1
    return count


def rejected_in(block: dict, before: dict | None, text: list[int]) -> tuple[int, list[int]]:
    """How many drafts the step before this block rejected by the text, and the verified drafts.

    A step that verified begins at the anchor of the block before and has a row for each draft.
    """
    rows, start = block["rows"], block["anchor"] - (block["rows"] - block["rejected"])
    if before is None or rows < 2 or start != before["anchor"]:
        return 0, []
    drafts = before["drafts"][: rows - 1]
    return len(drafts) - leading(drafts, text[start + 1 :]), drafts


class Recompute:
    """Drafts of one drafter, from scratch.

    Args:
        relay: recompute with the relay of the folder.
    """

    def __init__(self, folder: Path, target: FrozenTarget, *, relay: bool) -> None:
        loaded = load_export(folder, target)
        self.dims = loaded.drafter.dims
        self.drafter = copy.deepcopy(loaded.drafter).double()
        self.model = copy.deepcopy(target.model).double()
        self.embedding_VD = self.model.get_input_embeddings().weight
        self.weights: dict[str, Tensor] = {}
        self.settings: dict = {}
        if relay:
            self.settings = json.loads((folder / "relay/config.json").read_text())
            stored = load_file(folder / "relay/relay.safetensors")
            self.weights = {name: tensor.double() for name, tensor in stored.items()}

    def taps(self, text: list[int], steps: Sequence[Step] = ()) -> Tensor:
        """The tapped layers' outputs, `[1, L, C]`: of a text, then of each step's drafts.

        Drafts see the text up to their step's anchor and those of their step before them.
        """
        ids, positions = list(text), list(range(len(text)))
        total = len(text) + sum(len(step.drafts) for step in steps)
        sees_LL = torch.ones(total, total, dtype=torch.bool).tril()
        sees_LL[len(text) :] = False
        for step in steps:
            here = slice(len(ids), len(ids) + len(step.drafts))
            sees_LL[here, : step.start + 1] = True
            sees_LL[here, here] = torch.ones(len(step.drafts), len(step.drafts)).tril().bool()
            ids += step.drafts
            positions += range(step.start + 1, step.start + 1 + len(step.drafts))
        states = self.model.model(
            torch.tensor([ids]),
            attention_mask=sees_LL[None, None],
            position_ids=torch.tensor([positions]),
            output_hidden_states=True,
            use_cache=False,
        ).hidden_states
        return torch.cat([states[layer + 1] for layer in self.dims.target_layer_ids], dim=-1)

    def relay_row(self, h_D: Tensor, bonus: int, rejected: int) -> Tensor:
        """`beta * LayerNorm(h) + gamma` of one row."""
        ends = [self.embedding_VD[bonus], self.embedding_VD[rejected]]
        if self.settings.get("normalize_boundary", False):
            ends = [end / (end.square().mean() + 1e-6).sqrt() for end in ends]
        w = self.weights
        hidden = w["relay_mlp.0.weight"] @ torch.cat([*ends, h_D]) + w["relay_mlp.0.bias"]
        hidden = hidden * hidden.sigmoid()
        made = w["relay_mlp.2.weight"] @ hidden + w["relay_mlp.2.bias"]
        terms = self.settings.get("terms", "both")
        if terms == "shift":
            return made
        beta_D, gamma_D = made.chunk(2) if terms == "both" else (made, 0.0)
        centred = h_D - h_D.mean()
        normed = centred / (centred.square().mean() + self.settings["norm_eps"]).sqrt()
        return beta_D * (normed * w["relay_norm.weight"] + w["relay_norm.bias"]) + gamma_D

    def corrections(self, text: list[int], steps: list[Step]) -> Tensor:
        """What the relay adds to each slot of blocks that have relay rows, `[N, K, D]`."""
        added_NKD = torch.zeros(
            len(steps), self.dims.block_size, self.dims.hidden_size, dtype=torch.float64
        )
        h_LD = self.drafter.project(self.taps(text, steps)[0])
        first = 1 if self.settings["first_rejected"] else 2
        behind = len(text)  # where the rows of a step's drafts begin
        for added_KD, step in zip(added_NKD, steps, strict=True):
            rejected = step.drafts[step.anchor - step.start - 1]
            for slot in range(first, self.dims.block_size):
                position = step.anchor + slot - 1  # its row predicts the slot's own position
                if position > step.start + len(step.drafts):
                    break
                row = behind + position - step.start - 1
                added_KD[slot] = self.relay_row(h_LD[row], text[step.anchor], rejected)
            behind += len(step.drafts)
        return added_NKD

    @torch.inference_mode()
    def logits(self, text: list[int], blocks: list[dict], added_NKD: Tensor) -> Tensor:
        """The drafter's logits of each block's drafts, `[N, J, V]`."""
        context = self.drafter.context_kv(
            self.drafter.project(self.taps(text)), torch.arange(len(text))[None]
        )
        anchors = [block["anchor"] for block in blocks]
        ids_NK = torch.full((len(blocks), self.dims.block_size), self.dims.mask_token_id)
        ids_NK[:, 0] = torch.tensor([text[anchor] for anchor in anchors])
        x_1NKD = (self.embedding_VD[ids_NK] + added_NKD).unsqueeze(0)
        hidden_1NKD = self.drafter(x_1NKD, context, torch.tensor([anchors]), backend="dense")
        return self.model.get_output_embeddings()(hidden_1NKD[0, :, 1:])

    @torch.inference_mode()
    def compare(self, name: str, text: list[int], prompt_length: int, rows: list[dict],
                found: Verdict) -> None:  # fmt: skip
        """Compare one request's blocks, in the order they were drafted, and add to `found`."""
        blocks: list[dict] = []
        steps: dict[int, Step] = {}
        before = None
        for block in rows:
            again = before is not None and block["anchor"] <= before["anchor"]
            if again or not prompt_length <= block["anchor"] < len(text):
                found.unread += 1
                continue
            if block["anchor_id"] != text[block["anchor"]]:
                found.errors.append(f"{name}: anchor {block['anchor']} is another token")
                continue
            rejected, drafts = rejected_in(block, before, text)
            if rejected != block["rejected"]:
                found.errors.append(
                    f"{name}: anchor {block['anchor']}: {block['rejected']} drafts were rejected, "
                    f"by the text {rejected}"
                )
            if self.weights and rejected and before is not None:
                steps[len(blocks)] = Step(before["anchor"], block["anchor"], drafts)
            blocks.append(block)
            before = block
        if blocks:
            found.blocks += len(blocks)
            found.relayed += len(steps)
            added_NKD = torch.zeros(
                len(blocks), self.dims.block_size, self.dims.hidden_size, dtype=torch.float64
            )
            if steps:
                added_NKD[list(steps)] = self.corrections(text, list(steps.values()))
            self._judge(name, blocks, self.logits(text, blocks, added_NKD), found)

    @staticmethod
    def _judge(name: str, blocks: list[dict], logits_NJV: Tensor, found: Verdict) -> None:
        theirs_NJ = torch.tensor([block["drafts"] for block in blocks])
        gap_NJ = logits_NJV.amax(-1) - logits_NJV.gather(-1, theirs_NJ.unsqueeze(-1)).squeeze(-1)
        differ_N = (logits_NJV.argmax(-1) != theirs_NJ).any(-1)
        wrong_N = (gap_NJ >= TIE).any(-1)
        found.differ += int(differ_N.sum())
        found.ties += int((differ_N & ~wrong_N).sum())
        for index in wrong_N.nonzero().flatten().tolist():
            found.errors.append(
                f"{name}: block at {blocks[index]['anchor']} is not the recomputed one "
                f"(gap {gap_NJ[index].max():.2g})"
            )


def compare_run(
    recompute: Recompute, prompts: list[list[int]], answers: list[list[int]],
    requests: list[str], blocks: list[dict],
) -> Verdict:  # fmt: skip
    """Compare all blocks of a run.

    Args:
        requests: ids of the requests; blocks name theirs with this and a suffix.
    """
    found = Verdict()
    rows: dict[str, list[dict]] = {}
    for block in blocks:
        rows.setdefault(block["request"].rpartition("-")[0], []).append(block)
    for name, prompt, answer in zip(requests, prompts, answers, strict=True):
        recompute.compare(name, prompt + answer, len(prompt), rows.pop(name, []), found)
    found.errors += [f"{name}: blocks of a request that was not asked" for name in rows]
    return found


def gains(prompt: list[int], answer: list[int], rows: list[dict]) -> Iterator[int]:
    """Accepted drafts of each round, as our engine counts them: cut at the answer's end."""
    anchors = [block["anchor"] for block in rows if len(prompt) <= block["anchor"]]
    end = len(prompt) + len(answer)
    anchors = [anchor for anchor in anchors if anchor < end - 1]
    for anchor, after in zip(anchors, [*anchors[1:], end - 1], strict=True):
        yield after - anchor - 1
