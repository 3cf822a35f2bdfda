"""Every recipe is a run: it parses, prints itself, and the tiny ones train."""

from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import yaml

if TYPE_CHECKING:
    from launch import Launcher

pytest_plugins = ["launch"]
ROOT = Path(__file__).resolve().parents[1]
RECIPES = sorted((ROOT / "recipes").glob("*.yaml"))
TINY = [path for path in RECIPES if path.stem.startswith("tiny-")]
HEADER = ("dflow-train fit --config recipes/", "Hardware:", "docs/results.md")


def names(paths: list[Path]) -> list[str]:
    return [path.stem for path in paths]


@pytest.mark.parametrize("recipe", RECIPES, ids=names(RECIPES))
def test_prints_itself_and_parses_again(launch: "Launcher", recipe: Path, tmp_path: Path) -> None:
    first = launch("fit", "--config", recipe, "--print_config")
    assert first.status == 0, first.err
    printed = tmp_path / "printed.yaml"
    printed.write_text(first.out)
    second = launch("fit", "--config", printed, "--print_config")
    assert second.out == first.out
    assert "${" not in first.out


@pytest.mark.parametrize("recipe", RECIPES, ids=names(RECIPES))
def test_header_says_how_to_run_it(recipe: Path) -> None:
    comment = "\n".join(line for line in recipe.read_text().splitlines() if line.startswith("#"))
    for words in (*HEADER, recipe.name):
        assert words in comment
    assert f"({recipe.name})" in (ROOT / "recipes/README.md").read_text()


def test_tiny_recipes_differ_only_in_the_method() -> None:
    recipes = [yaml.safe_load(path.read_text()) for path in TINY]
    for recipe in recipes:
        del recipe["rollout"], recipe["model"]["relay"]
    assert len(recipes) == 3
    assert recipes[0] == recipes[1] == recipes[2]


@pytest.mark.parametrize("recipe", TINY, ids=names(TINY))
def test_trains_two_steps(launch: "Launcher", recipe: Path, run_options: list[str]) -> None:
    done = launch("fit", "--config", recipe, *run_options, "--trainer.max_steps", 2)
    assert done.status == 0, done.err
    assert "step 2/2" in done.out
    assert (launch.folder / f"runs/{recipe.stem}/checkpoints/last.ckpt").is_file()


def test_environment_defaults_overlays_and_flags_come_in_this_order(
    launch: "Launcher", tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DFLOW_TEST_DATA", "/somewhere")
    base, overlay = tmp_path / "base.yaml", tmp_path / "overlay.yaml"
    base.write_text(
        "model:\n  target: {path: t}\n  drafter: {block_size: 4, num_layers: '${.block_size}'}\n"
        "data: {train: '${oc.env:DFLOW_TEST_DATA}/train.jsonl', batch_size: 7}\n"
    )
    overlay.write_text("model: {drafter: {block_size: 6}}\n")

    def printed(*options: str | Path) -> dict:
        return yaml.safe_load(launch("fit", *options, "--print_config").out)

    one = printed("--config", base)
    assert (one["model"]["drafter"]["num_layers"], one["data"]["batch_size"]) == (4, 7)
    assert one["data"]["train"] == "/somewhere/train.jsonl"
    assert one["data"]["max_length"] == 3072
    two = printed("--config", base, "--config", overlay)
    assert two["model"]["drafter"]["num_layers"] == 6
    three = printed("--config", base, "--config", overlay, "--model.drafter.block_size=8")
    assert three["model"]["drafter"]["num_layers"] == 8
