"""What the sections of `make serving` share: the prompts, our side, and a run of vLLM offline."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import torch
from recompute import Recompute, Verdict, compare_run

from dflow_lightning.data.prompts import Prompt, read_prompts
from dflow_lightning.decode import SpeculativeDecoder
from dflow_lightning.decode.equality import EqualityCheck
from dflow_lightning.models.target import FrozenTarget
from dflow_lightning.serving.check import Counts

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).resolve().parent
VLLM = ROOT / ".venv-vllm/bin/python"
TARGET = ROOT / "data/tiny-qwen3"
DRAFTERS = ROOT / "data/tiny-drafters"


@dataclass(frozen=True)
class Arm:
    """A drafter and whether its relay is on."""

    name: str
    folder: Path
    relay: bool


ARMS = (
    Arm("DFlash", DRAFTERS / "dflash", False),
    Arm("DFlow, relay off", DRAFTERS / "dflow", False),
    Arm("DFlow, relay on", DRAFTERS / "dflow", True),
)


@dataclass(eq=False)  # hashable, for `cache`
class Bench:
    """The prompts of the tiny suite and what is computed from them once."""

    scratch: Path
    per_family: int = 32
    max_new_tokens: int = 128
    num_requests: int = 300
    failures: list[str] = field(default_factory=list)

    @cached_property
    def target(self) -> FrozenTarget:
        return FrozenTarget.load(str(TARGET), dtype="float32")

    @cached_property
    def prompts(self) -> list[Prompt]:
        path = TARGET / "prompts/test.jsonl"
        return read_prompts(self.target.tokenizer, path, per_family=self.per_family, field="suite")

    @property
    def ids(self) -> list[list[int]]:
        return [prompt.token_ids for prompt in self.prompts]

    @cached_property
    def equality(self) -> EqualityCheck:
        return EqualityCheck(self.target)

    @cache  # noqa: B019  (there is one)
    def decoder(self, folder: Path) -> SpeculativeDecoder:
        """Our own engine with a drafter."""
        return SpeculativeDecoder.from_export(folder, self.target)

    @cached_property
    def plain(self) -> list[list[int]]:
        """Plain greedy answers of our own engine."""
        decoder = self.decoder(ARMS[0].folder)
        found = decoder.generate_plain(self.ids, max_new_tokens=self.max_new_tokens, batch_size=8)
        return [one.token_ids for one in found]

    def expect(self, what: str, truth: bool) -> str:
        """`ok` or `FAILED`, which is kept for the exit status."""
        if not truth:
            self.failures.append(what)
        return "ok" if truth else "FAILED"

    def differing(
        self, answers: Sequence[list[int]], plain: Sequence[list[int]]
    ) -> tuple[int, int]:
        """Answers that are not the plain ones, and how many of them are ties."""
        found = self.equality.differences(
            self.prompts[: len(answers)], answers, plain, temperature=0.0, seeds=range(len(answers))
        )
        return len(found), sum(one.excused for one in found)

    def offline(
        self, prompts: Sequence[list[int]], arm: Arm | None, *, python: Path = VLLM,
        environment: dict[str, str] | None = None, script: str = "offline.py", **options: Any,
    ) -> dict:  # fmt: skip
        """A run of vLLM in a process of its own; what its script has written."""
        asked, out = self.scratch / "prompts.json", self.scratch / "out.json"
        asked.write_text(json.dumps(list(prompts)))
        command = [
            str(python), str(HERE / script), "--target", str(TARGET), "--prompts", str(asked),
            "--out", str(out),
        ]  # fmt: skip
        if arm is not None:
            command += ["--drafter", str(arm.folder), "--relay", "on" if arm.relay else "off"]
        for name, value in options.items():
            flag = f"--{name.replace('_', '-')}"
            command += [flag] if value is True else [flag, str(value)]
        # Our source is found through the environment's own installation.
        inherited = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
        done = subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, check=False,
            env=inherited | (environment or {}),
        )  # fmt: skip
        if done.returncode:
            raise RuntimeError(f"{script} failed\n{done.stderr[-3000:]}")
        return json.loads(out.read_text()) | {"log": done.stdout + done.stderr}

    def blocks(self, arm: Arm, prompts: Sequence[list[int]], run: dict) -> Verdict:
        """Every block of a run, recomputed."""
        recompute = Recompute(arm.folder, self.target, relay=arm.relay)
        return compare_run(recompute, list(prompts), run["answers"], run["requests"], run["blocks"])

    @torch.inference_mode()
    def surprise(self, answers: Sequence[list[int]]) -> float:
        """Mean negative log probability of answers under the target, per token."""
        total, count = 0.0, 0
        for prompt, answer in zip(self.ids, answers, strict=True):
            logits_LV = self.target.model(torch.tensor([prompt + answer])).logits[0]
            logs_LV = logits_LV[len(prompt) - 1 : -1].double().log_softmax(-1)
            total -= float(logs_LV.gather(-1, torch.tensor(answer)[:, None]).sum())
            count += len(answer)
        return total / count


def counts(run: dict) -> Counts:
    """vLLM's own counters of a run."""
    return Counts(run["rounds"], run["accepted"])
