"""The summary of a run, and the estimate of its length."""

import heapq
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
from eagle3_training import make_eagle3
from training import make_module

from dflow_lightning.prepare import progress as prepare_progress
from dflow_lightning.run import progress
from dflow_lightning.run.summary import method
from dflow_lightning.training.rollout import OnlineRollout


@pytest.mark.parametrize(
    ("parts", "rounds", "name"),
    [
        ({"relay": False}, 0, "DFlash"),
        ({"relay": False}, 2, "DFlash with self-conditioning: rollout rounds, no relay"),
        ({"relay": False, "carryover": True}, 2, "DFlash, with carryover: "),
        ({}, 2, "DFlow: "),
        ({"carryover": True}, 2, "DFlow, with carryover: "),
        ({"relay": False, "causal_head": True}, 0, "Domino"),
        ({"relay": False, "causal_head": True}, 2, "Domino with self-conditioning: "),
        ({"causal_head": True}, 2, "Domino with DFlow: "),
    ],
)
def test_methods_have_their_names(
    parts: dict[str, bool], rounds: int, name: str, tiny_target_dir: Path
) -> None:
    trainer: Any = SimpleNamespace(callbacks=[OnlineRollout(num_rounds=rounds)])
    said = method(trainer, make_module(tiny_target_dir, **parts))
    assert said.startswith(name) if name.endswith(" ") else said == name


def test_eagle3_has_its_name(tiny_target_dir: Path) -> None:
    trainer: Any = SimpleNamespace(callbacks=[])
    assert method(trainer, make_eagle3(tiny_target_dir)).startswith("EAGLE-3: ")


def test_f24_an_estimate_is_near_the_truth_after_a_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first steps take eight times as long; a validation of 20 s comes every 200 batches."""
    seconds = [4.0] * 8 + [0.35, 0.65] * 996
    now = [0.0]
    monkeypatch.setattr(progress.time, "perf_counter", lambda: now[0])
    speed, shown = progress.Speed(), list[float]()
    for number, each in enumerate(seconds, start=1):
        now[0] += each
        speed.count(10)
        if now[0] >= 60:
            shown.append(now[0] + speed.remaining(len(seconds) - number))
        if number % 200 == 0:
            now[0] += 20.0
            speed.resume()
    total = now[0]
    assert len(shown) > 1900
    assert all(0.7 * total < estimate < 1.3 * total for estimate in shown)


def test_f24_prepare_is_near_the_truth_after_a_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    """A target loads for 25 s, then 32 answers of 3 to 15 s each are in flight at any time."""
    rng, rows, now = Random(0), 2000, [0.0]
    monkeypatch.setattr(prepare_progress.time, "perf_counter", lambda: now[0])
    flights = sorted(25.0 + rng.uniform(3, 15) for _ in range(32))
    shown = list[float]()
    progress = prepare_progress.PrepareProgress("answers", rows)
    for _ in range(rows):
        now[0] = flights[0]
        heapq.heapreplace(flights, now[0] + rng.uniform(3, 15))
        progress.count(100)
        left = progress.remaining(now[0])
        assert left is not None
        if now[0] >= 60:
            shown.append(now[0] + left)
    assert len(shown) > 1800
    assert all(0.7 * now[0] < estimate < 1.3 * now[0] for estimate in shown)
    assert progress.text(now[0]).endswith("eta 0:00:00")
