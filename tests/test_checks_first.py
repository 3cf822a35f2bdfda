"""A check that one command has, all have that are given the same, and before models are loaded."""

import json
import re
import shutil
import sys
from pathlib import Path

import pytest

from dflow_lightning.__main__ import main
from dflow_lightning.doctor.command import read_recipe
from dflow_lightning.errors import InputError
from dflow_lightning.models.target import FrozenTarget
from dflow_lightning.plan.command import make_plan, parse
from dflow_lightning.sweep.command import read_settings

ROOT = Path(__file__).resolve().parents[1]
TARGET, DRAFTER = str(ROOT / "data/tiny-qwen3"), str(ROOT / "data/tiny-drafters/dflow")
MEASURING = ("bench", "validate-export", "serve-check")
WITH_JSON = ("bench", "decode", "validate-export")
# What a good call of each command has; `--python` need only exist.
GOOD = {
    "bench": {"target": TARGET, "drafter": DRAFTER},
    "decode": {"target": TARGET, "drafter": DRAFTER, "prompt": "hello"},
    "validate-export": {"target": TARGET, "drafter": DRAFTER},
    "serve-check": {"target": TARGET, "drafter": DRAFTER, "python": sys.executable},
    "sweep": {"config": str(ROOT / "recipes/tiny-dflow.yaml")},
}
CASES = [
    *((one, {"drafter": "./gone"}, "drafter: gone does not exist; give a folder")
      for one in (*MEASURING, "decode")),
    *((one, {"suite": "gone.jsonl"}, "suite: gone.jsonl does not exist; give tiny, all, some of")
      for one in (*MEASURING, "sweep")),
    *((one, {"max_new_tokens": "1"}, "max_new_tokens is 1; give 2 or more")
      for one in (*MEASURING, "sweep")),
    *((one, {"device": "tpu"}, "device is tpu; choose auto, cpu, cuda")
      for one in (*MEASURING, "decode", "sweep")),
    *((one, {"json": "."}, "json: . is a folder") for one in WITH_JSON),
    ("decode", {"prompt": None, "prompts": "gone.jsonl"}, "prompts: gone.jsonl does not exist"),
    ("decode", {"temperature": "-1"}, "temperature is -1.0; give 0"),
    ("sweep", {"temperature": "0,-1"}, "temperature holds -1.0; give 0"),
    ("sweep", {"temperature": "0,0"}, "temperature holds 0.0 twice"),
    ("sweep", {"concurrency": "64"}, "concurrency holds 64, but per_family is 32"),
    ("sweep", {"suite": "gsm8k", "limit": "0"}, "limit is 0; give 1 or more"),
    ("sweep", {"model.target.path": "./gone"}, "target: ./gone does not exist; give a folder"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("command", "change", "said"), CASES, ids=[f"{one[0]} {[*one[1]][-1]}" for one in CASES]
)
def test_a_mistake_is_found_before_a_target_is_loaded(
    command: str, change: dict[str, str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """F22, F32: a sweep trained for hours before it met what `bench` refuses at once."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(FrozenTarget, "load", lambda *_, **__: pytest.fail("a target was loaded"))
    options = {key: value for key, value in (GOOD[command] | change).items() if value is not None}
    if command == "sweep":
        options = {"model.target.path": TARGET} | options
    words = [word for key, value in options.items() for word in (f"--{key}", value)]
    assert main([command, *words]) == 2
    err = capsys.readouterr().err
    assert said in " ".join(err.split())
    assert len(err.splitlines()) == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("command", ["bench", "decode", "serve-check"])
def test_a_drafter_without_a_config_is_found_first(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """F32: also one that is damaged. `validate-export` is there to look into such a folder."""
    monkeypatch.setattr(FrozenTarget, "load", lambda *_, **__: pytest.fail("a target was loaded"))
    folder = shutil.copytree(DRAFTER, tmp_path / "drafter")
    for content, said in ((None, "holds no config.json"), (json.dumps([1]), "config.json")):
        (folder / "config.json").unlink(missing_ok=True)
        if content is not None:
            (folder / "config.json").write_text(content)
        options = GOOD[command] | {"drafter": str(folder)}
        words = [word for key, value in options.items() for word in (f"--{key}", value)]
        assert main([command, *words]) == 2
        assert said in capsys.readouterr().err


RECIPE = ["--config", str(ROOT / "recipes/tiny-dflow.yaml")]


@pytest.mark.parametrize(
    ("option", "value", "said"),
    [
        ("trainer.strategy", "zorro", "trainer.strategy is zorro, which is unknown"),
        ("trainer.precision", "16-true", "trainer.precision is 16-true"),
        ("rollout.num_anchors", "9999", "rollout.num_anchors is 9999 but model.num_anchors is"),
        ("rollout.num_rounds", "0", "rollout.num_rounds is 0 but relay.enabled is true"),
        ("validation.max_new_tokens", "1", "validation.max_new_tokens is 1; give 2 or more"),
        ("checkpoint.every_n_steps", "0", "checkpoint.every_n_steps is 0; give 1 or more"),
        ("guards.parameters_every_n_steps", "0", "guards.parameters_every_n_steps is 0"),
        ("data.train_weights", "[1,2]", "data.train_weights has 2 numbers for 1 sets"),
    ],
)
def test_a_recipe_is_checked_alike_by_all_who_read_it(option: str, value: str, said: str) -> None:
    """F13: `plan` and `sweep` took what `fit` refuses, and `doctor` had nothing to say."""
    args = [*RECIPE, f"--{option}", value]
    with pytest.raises(InputError, match=re.escape(said)):
        make_plan(parse(args))
    with pytest.raises(InputError, match=rf"tiny-dflow\.yaml: {re.escape(said)}"):
        read_settings(Path(RECIPE[1]), args[2:])
    recipe, check = read_recipe(args)
    assert (check.status, recipe is not None) == ("FAIL", True)  # the other checks can go on
    assert said in check.detail
