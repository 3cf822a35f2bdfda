"""Fixtures of the command-line tests: a way to call `dflow-train`, and a run that takes seconds.

A test module asks for them with `pytest_plugins = ["launch"]`.
"""

import json
import logging
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
import yaml

from dflow_lightning.__main__ import main

FAMILIES = ("math", "code", "chat")


@dataclass(frozen=True)
class Result:
    """How a command line ended and what it printed."""

    status: int
    out: str
    err: str


@dataclass(frozen=True)
class Launcher:
    """Calls `dflow-train` inside this process; the working directory is `folder`."""

    folder: Path
    capture: pytest.CaptureFixture[str]

    def __call__(self, *args: Any) -> Result:
        self.capture.readouterr()
        status = main([str(arg) for arg in args])
        return Result(status, *self.capture.readouterr())


@pytest.fixture
def launch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Iterator[Launcher]:
    """Runs in a folder of its own, and takes back what Lightning sets for the whole process."""
    root = Path(__file__).resolve().parents[1]
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    (tmp_path / "recipes").symlink_to(root / "recipes")
    interrupt = signal.getsignal(signal.SIGINT)
    levels = {name: logging.getLogger(name).level for name in ("lightning.pytorch", "mlflow")}
    yield Launcher(tmp_path, capsys)
    torch.use_deterministic_algorithms(False)
    signal.signal(signal.SIGINT, interrupt)
    for name, level in levels.items():
        logging.getLogger(name).setLevel(level)


@pytest.fixture(scope="session")
def data_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sums, spelled out: 24 rows to train on and 6 of each other split."""
    folder = tmp_path_factory.mktemp("data")
    rng = Random(0)
    for split, count in {"train": 24, "validation": 6, "test": 6}.items():
        rows = []
        for i in range(count):
            a, b = rng.randrange(100), rng.randrange(100)
            family, prompt = FAMILIES[i % len(FAMILIES)], f"{split} {i}: {a} + {b}"
            row = {
                "id": f"{split}-{i}",
                "family": family,
                "prompt": prompt,
                "answer": f"It is {a + b}.",
            }
            rows.append(json.dumps(row))
        (folder / f"{split}.jsonl").write_text("\n".join(rows) + "\n")
    return folder


@pytest.fixture
def run_options(tiny_target_dir: Path, data_dir: Path) -> list[str]:
    """Options that make any recipe small: a random target, few rows, short answers, no record."""
    values = {
        "model.target.path": tiny_target_dir,
        "model.drafter.num_layers": 1,
        "model.drafter.block_size": 4,
        "model.drafter.target_layer_ids": "[0,1,2]",
        "model.num_anchors": 6,
        **{
            f"data.{split}": data_dir / f"{split}.jsonl"
            for split in ("train", "validation", "test")
        },
        "data.batch_size": 4,
        "validation.prompts_per_family": 1,
        "validation.max_new_tokens": 8,
        "trainer.max_steps": 4,
        "trainer.val_check_interval": 2,
        "trainer.log_every_n_steps": 1,
        "tracking.enabled": "false",
    }
    return [f"--{key}={value}" for key, value in values.items()]


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    """A recipe file; `run_options` hold its values."""
    path = tmp_path / "small.yaml"
    content = {
        "model": {"target": {"path": "unset"}, "relay": {"enabled": True}},
        "rollout": {"num_rounds": 2, "num_anchors": 4},
        "data": {"train": "unset"},
        "trainer": {"accelerator": "cpu", "devices": 1, "check_val_every_n_epoch": None},
    }
    path.write_text(yaml.safe_dump(content))
    return path
