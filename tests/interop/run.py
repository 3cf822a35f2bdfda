"""`make interop`: other people's packages load our drafters and draft what we draft, and back.

For each drafter that ships, greedily, in float32 and relay off, since no other package has one:

    z-lab        `dflash` loads the folder, its output is the target's own, its drafts and its
                 acceptance are ours
    speculators  loads the folder and its twin in speculators' own layout, drafts what we draft
    back         a folder that z-lab's class wrote decodes here as the first one does, and starts
                 a training

Our side of the drafts is the drafter on the hidden states of Hugging Face's target, one block at
each anchor of a finished text: no part of our decoder. One row a check; exit status 1 if one
failed.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path

import torch

from dflow_lightning.data.prompts import read_prompts
from dflow_lightning.decode import Completion, SpeculativeDecoder
from dflow_lightning.decode.equality import TIE, first_difference
from dflow_lightning.export.speculators import convert_export
from dflow_lightning.formats.drafter_folder import LoadedDrafter, load_export
from dflow_lightning.formats.engine_contract import check_contract
from dflow_lightning.models.dims import DrafterConfig
from dflow_lightning.models.target import FrozenTarget

ROOT = Path(__file__).resolve().parents[2]
PEERS = ROOT / ".venv-interop/bin/python"
TARGET = "data/tiny-qwen3"  # as the drafters' config.json has it, seen from the root
DRAFTERS = ("dflash", "dflow")


class InteropError(Exception):
    """A check found a difference; the text says which."""


@dataclass
class Case:
    """One shipped drafter, and what several checks need of it."""

    folder: Path
    target: FrozenTarget
    prompts: list[list[int]]
    limit: int
    scratch: Path

    @cached_property
    def loaded(self) -> LoadedDrafter:
        return load_export(self.folder, self.target)

    @cached_property
    def block_size(self) -> int:
        return self.loaded.drafter.dims.block_size

    @cached_property
    def zlab(self) -> list[dict]:
        """What z-lab's package did with each prompt; leaves the drafter as it writes one."""
        (self.scratch / "prompts.json").write_text(json.dumps(self.prompts))
        result = run_peer(
            "zlab_decode.py", "--target", TARGET, "--drafter", self.folder,
            "--prompts", self.scratch / "prompts.json", "--max-new-tokens", self.limit,
            "--save", self.scratch / "saved",
        )  # fmt: skip
        return result["prompts"]

    def decode(self, folder: Path, *, relay: bool) -> list[Completion]:
        decoder = SpeculativeDecoder.from_export(folder, self.target)
        return decoder.generate(self.prompts, max_new_tokens=self.limit, use_rejected=relay)

    @cached_property
    def ours(self) -> list[Completion]:
        return self.decode(self.folder, relay=False)

    @torch.inference_mode()
    def compare_drafts(self, ids: list[int], blocks: dict[int, list[int]]) -> tuple[int, int]:
        """Compare drafts of full blocks with ours, by anchor; returns blocks and excused ties."""
        model, drafter = self.target.model, self.loaded.drafter
        dims = drafter.dims
        ids_1S, anchors_1N = torch.tensor([ids]), torch.tensor([list(blocks)])
        states = model(ids_1S, output_hidden_states=True, use_cache=False).hidden_states
        taps_1SC = torch.cat([states[index + 1] for index in dims.target_layer_ids], dim=-1)
        positions_1S = torch.arange(len(ids)).unsqueeze(0)
        context = drafter.context_kv(drafter.project(taps_1SC), positions_1S)
        slot_ids_1NK = torch.full((1, len(blocks), dims.block_size), dims.mask_token_id)
        slot_ids_1NK[..., 0] = ids_1S[:, anchors_1N[0]]
        hidden_1NKD = drafter(model.get_input_embeddings()(slot_ids_1NK), context, anchors_1N)
        logits_NJV = model.get_output_embeddings()(hidden_1NKD[0, :, 1:])
        theirs_NJ = torch.tensor(list(blocks.values()))
        gap_NJ = logits_NJV.amax(-1) - logits_NJV.gather(-1, theirs_NJ.unsqueeze(-1)).squeeze(-1)
        differs_NJ = logits_NJV.argmax(-1) != theirs_NJ
        if (differs_NJ & (gap_NJ > TIE)).any():
            n, j = (differs_NJ & (gap_NJ > TIE)).nonzero()[0].tolist()
            raise InteropError(
                f"{int(differs_NJ.sum())} of {differs_NJ.numel()} drafts differ, first {j + 1} at "
                f"anchor {list(blocks)[n]}"
            )
        return len(blocks), int(differs_NJ.sum())


def run_peer(script: str, *args: object) -> dict:
    """Run a script in the other environment; its last line of output is JSON."""
    done = subprocess.run(
        [PEERS, Path(__file__).parent / script, *map(str, args)],
        cwd=ROOT, capture_output=True, text=True, check=False,
        env=os.environ | {"HF_HUB_OFFLINE": "1"},
    )  # fmt: skip
    if done.returncode:
        raise InteropError(f"{script}: {(done.stderr.strip().splitlines() or ['no output'])[-1]}")
    return json.loads(done.stdout.splitlines()[-1])


def full_rounds(case: Case, row: dict, prompt: list[int]) -> dict[int, dict]:
    """Rounds by anchor, without the last ones, whose blocks z-lab shortens to the token limit."""
    rounds, anchor = {}, len(prompt)
    for one in row["rounds"]:
        if len(one["drafts"]) == case.block_size - 1:
            rounds[anchor] = one
        anchor += one["gained"]
    return rounds


def engine_contract(case: Case) -> str:
    problems = check_contract(case.folder)
    if problems:
        raise InteropError(problems[0])
    return "SGLang's and vLLM's"


def zlab_output(case: Case) -> str:
    for number, row in enumerate(case.zlab):
        where = first_difference(row["token_ids"], row["plain_ids"])
        if where is not None:
            raise InteropError(f"prompt {number} leaves plain decoding at token {where}")
    tokens = sum(len(row["token_ids"]) for row in case.zlab)
    return f"{len(case.zlab)} prompts, {tokens} tokens equal plain decoding"


def zlab_drafts(case: Case) -> str:
    blocks = ties = 0
    for prompt, row in zip(case.prompts, case.zlab, strict=True):
        rounds = full_rounds(case, row, prompt)
        drafts = {anchor: one["drafts"] for anchor, one in rounds.items()}
        if drafts:
            more = case.compare_drafts(prompt + row["token_ids"], drafts)
            blocks, ties = blocks + more[0], ties + more[1]
    return f"{blocks * (case.block_size - 1)} drafts in {blocks} blocks equal ours ({ties} ties)"


def zlab_acceptance(case: Case) -> str:
    gained = []
    for number, row in enumerate(case.zlab):
        ours = case.ours[number]
        if first_difference(row["token_ids"], ours.token_ids) is not None:
            raise InteropError(f"prompt {number} has another answer here")
        theirs = [one["gained"] for one in full_rounds(case, row, case.prompts[number]).values()]
        if theirs != [accepted + 1 for accepted in ours.accepted[: len(theirs)]]:
            raise InteropError(f"prompt {number}: {theirs} there, {ours.accepted} accepted here")
        gained += theirs
    return f"{len(gained)} rounds equal ours, tau {sum(gained) / len(gained):.3f}"


def zlab_ignores_relay(case: Case) -> str:
    if case.loaded.relay is None:
        return "no relay here"
    on = case.decode(case.folder, relay=True)
    if [one.accepted for one in on] == [one.accepted for one in case.ours]:
        raise InteropError("our relay changes nothing here, so nothing is shown")
    return f"not seen there; here it moves tau from {tau(case.ours):.3f} to {tau(on):.3f}"


def tau(answers: list[Completion]) -> float:
    """Tokens gained per round, over all rounds."""
    gained = [1 + accepted for one in answers for accepted in one.accepted]
    return sum(gained) / len(gained)


def speculators_drafts(case: Case, folder: Path) -> str:
    """One block every third token of the longest answer."""
    answers = [p + row["token_ids"] for p, row in zip(case.prompts, case.zlab, strict=True)]
    ids = max(answers, key=len)
    anchors = list(range(8, len(ids) - case.block_size, 3))
    (case.scratch / "text.json").write_text(json.dumps({"ids": ids, "anchors": anchors}))
    result = run_peer(
        "speculators_draft.py", "--target", TARGET, "--drafter", folder,
        "--text", case.scratch / "text.json",
    )  # fmt: skip
    if result["num_draft_tokens"] != case.block_size - 1:
        raise InteropError(
            f"{result['num_draft_tokens']} tokens to draft, not {case.block_size - 1}"
        )
    drafts = dict(zip(anchors, result["drafts"], strict=True))
    blocks, ties = case.compare_drafts(ids, drafts)
    return f"{blocks * (case.block_size - 1)} drafts in {blocks} blocks equal ours ({ties} ties)"


def speculators_own_layout(case: Case) -> str:
    convert_export(case.folder, case.target, case.scratch / "speculators")
    return speculators_drafts(case, case.scratch / "speculators")


def saved_decodes(case: Case) -> str:
    assert case.zlab
    saved = case.scratch / "saved"
    if "dflow_config" in json.loads((saved / "config.json").read_text()):
        raise InteropError("the folder still has our section")
    problems = check_contract(saved)
    if problems:
        raise InteropError(problems[0])
    theirs = case.decode(saved, relay=True)
    pairs = zip(theirs, case.ours, strict=True)
    same = [(a.token_ids, a.accepted) == (b.token_ids, b.accepted) for a, b in pairs]
    if not all(same):
        raise InteropError(f"prompt {same.index(False)} decodes otherwise")
    return f"{len(same)} prompts: same answers, same acceptance"


def saved_starts_training(case: Case) -> str:
    from dflow_lightning.models.relay import RelayConfig
    from dflow_lightning.training.module import DrafterModule, TargetConfig

    assert case.zlab
    dims = case.loaded.drafter.dims
    module = DrafterModule(
        target=TargetConfig(path=TARGET),
        drafter=DrafterConfig(**{f.name: getattr(dims, f.name) for f in fields(DrafterConfig)}),
        relay=RelayConfig(enabled=True),
        init_from=str(case.scratch / "saved"),
    )
    ours = case.loaded.drafter.state_dict()
    for name, tensor in module.drafter.state_dict().items():
        if not torch.equal(tensor, ours[name]):
            raise InteropError(f"{name} is not the one that was saved")
    decoder = module.eval().decoder()
    started = decoder.generate(case.prompts[:3], max_new_tokens=case.limit)
    if [one.accepted for one in started] != [one.accepted for one in case.ours[:3]]:
        raise InteropError("the new relay changes drafts before any training")
    return f"{len(ours)} tensors; a new relay changes no draft"


CHECKS: dict[str, Callable[[Case], str]] = {
    "engine contract": engine_contract,
    "z-lab: output": zlab_output,
    "z-lab: drafts": zlab_drafts,
    "z-lab: acceptance": zlab_acceptance,
    "z-lab: relay folder": zlab_ignores_relay,
    "speculators: z-lab's layout": lambda case: speculators_drafts(case, case.folder),
    "speculators: own layout": speculators_own_layout,
    "back: decode": saved_decodes,
    "back: model.init_from": saved_starts_training,
}


def outcome(check: Callable[[Case], str], case: Case) -> tuple[bool, str]:
    """Whether a check passed, and what to print."""
    try:
        return True, check(case)
    except InteropError as error:
        return False, str(error)
    except Exception as error:  # a crash is a failure like any other
        return False, f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--per-family", type=int, default=4, help="prompts of each family")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    args = parser.parse_args()
    if not PEERS.exists():
        sys.exit("error: .venv-interop is missing; run `make interop`, which creates it")
    os.chdir(ROOT)
    target = FrozenTarget.load(TARGET, dtype="float32")
    suite = ROOT / TARGET / "prompts/test.jsonl"
    prompts = read_prompts(target.tokenizer, suite, per_family=args.per_family)
    ids = [prompt.token_ids for prompt in prompts]
    failed = 0
    for name in DRAFTERS:
        with tempfile.TemporaryDirectory() as scratch:
            folder = ROOT / "data/tiny-drafters" / name
            case = Case(folder, target, ids, args.max_new_tokens, Path(scratch))
            for title, check in CHECKS.items():
                passed, detail = outcome(check, case)
                failed += not passed
                print(
                    f"{name:7} {title:28} {'ok    ' if passed else 'FAILED'} {detail}", flush=True
                )
    sys.exit(f"{failed} checks failed" if failed else 0)


if __name__ == "__main__":
    main()
