"""Ablation recipes change the one thing they are named for, and `base:` is read as it is meant."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from dflow_lightning.commandline.recipe import Recipe, read_layers
from dflow_lightning.errors import InputError
from dflow_lightning.tracking.logger import flatten

if TYPE_CHECKING:
    from launch import Launcher

pytest_plugins = ["launch"]
ROOT = Path(__file__).resolve().parents[1]
ABLATIONS = sorted((ROOT / "recipes/ablations").glob("*.yaml"))
NAMES = [path.stem for path in ABLATIONS]
CHANGES = {
    "carryover-only": {"model.drafter.carryover": True, "model.relay.enabled": False},
    "objective-dpace": {"model.loss.kind": "dpace"},
    "objective-kl": {"model.loss.kind": "kl"},
    "relay-first-rejected-off": {"model.relay.first_rejected": False},
    "relay-hidden-1x": {"model.relay.hidden_size": 160},
    "relay-detached": {"model.relay.detach_features": True},
    "relay-boundary-plain": {"model.relay.normalize_boundary": False},
    "relay-scale-only": {"model.relay.terms": "scale"},
    "relay-shift-only": {"model.relay.terms": "shift"},
    "rounds-0": {"model.relay.enabled": False, "rollout.num_rounds": 0},
    "rounds-1": {"rollout.num_rounds": 1},
    "rounds-3": {"rollout.num_rounds": 3},
    "share-1-8": {"rollout.num_anchors": 1},
    "share-1-4": {"rollout.num_anchors": 2},
    "share-1": {"rollout.num_anchors": 8},
    "mode-teacher-forced": {"rollout.mode": "teacher_forced"},
    "mode-clean-features": {"rollout.mode": "clean_features"},
}


def printed(launch: "Launcher", *options: Any) -> dict[str, Any]:
    done = launch("fit", *options, "--print_config")
    assert done.status == 0, done.err
    return flatten(yaml.safe_load(done.out))


def test_every_ablation_differs_from_its_base_in_its_own_keys(launch: "Launcher") -> None:
    base = printed(launch, "--config", ROOT / "recipes/tiny-dflow.yaml")
    assert sorted(CHANGES) == sorted(NAMES)
    for path in ABLATIONS:
        found = printed(launch, "--config", path)
        changed = {key: value for key, value in found.items() if value != base.get(key)}
        assert changed == {k: str(v) for k, v in CHANGES[path.stem].items()}, path.name


@pytest.mark.parametrize("recipe", ABLATIONS, ids=NAMES)
def test_header_says_how_to_run_it(recipe: Path) -> None:
    comment = "\n".join(line for line in recipe.read_text().splitlines() if line.startswith("#"))
    for words in (f"fit --config recipes/ablations/{recipe.name}", "Hardware:", "docs/results.md"):
        assert words in comment
    assert f"(ablations/{recipe.name})" in (ROOT / "recipes/README.md").read_text()


@pytest.mark.parametrize("name", ["objective-dpace", "objective-kl", "relay-shift-only"])
def test_trains_two_steps(launch: "Launcher", name: str, run_options: list[str]) -> None:
    recipe = f"recipes/ablations/{name}.yaml"
    done = launch("fit", "--config", recipe, *run_options, "--trainer.max_steps", 2)
    assert done.status == 0, done.err
    assert "step 2/2" in done.out
    saved = yaml.safe_load((launch.folder / f"runs/{name}/config.yaml").read_text())
    assert "base" not in saved  # complete in itself: it can be given to --config again
    for key, value in CHANGES[name].items():
        assert flatten(saved)[key] == str(value)


# ---------------------------------------------------------------- `base:`


def write(folder: Path, **recipes: str) -> None:
    for name, text in recipes.items():
        (folder / f"{name}.yaml").write_text(text)


def test_bases_come_first_and_the_command_line_last(launch: "Launcher", tmp_path: Path) -> None:
    (tmp_path / "deeper").mkdir()
    write(
        tmp_path,
        lowest="model: {target: {path: t}, num_anchors: 3, seed: 3}\ndata: {train: x, pack: on}\n",
        middle="base: lowest.yaml\nmodel: {num_anchors: 4}\n",
        alias="base: middle.yaml\n",
    )
    write(
        tmp_path / "deeper",
        top="# a comment\nbase: ../alias.yaml  # and one behind it\nmodel:\n"
        "  seed: 5\n  optimizer: {lr: 1e-3}\n  relay: {hidden_size: '${..num_anchors}'}\n",
    )
    path = tmp_path / "deeper/top.yaml"
    for option in (["--config", path], [f"--config={path}"], ["-c", path]):
        found = printed(launch, *option, "--data.batch_size", "9")
        wanted = {
            "model.num_anchors": "4", "model.seed": "5", "data.pack": "True",
            "model.optimizer.lr": "0.001", "model.relay.hidden_size": "4", "data.batch_size": "9",
        }  # fmt: skip
        assert {key: found[key] for key in wanted} == wanted


def test_recipes_without_a_base_are_left_as_they_are(tmp_path: Path) -> None:
    write(tmp_path, plain="model: {seed: 1}\n")
    args = ["fit", "--config", str(tmp_path / "plain.yaml"), "--model.seed", "2"]
    assert Recipe.read(args).arguments(set()) == args
    assert Recipe.read(["fit", "--config"]).arguments(set()) == ["fit", "--config"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("base: nowhere.yaml\n", "base is 'nowhere.yaml', which is not a file"),
        ("base: 3\n", "base is 3, which is not a file"),
        ("base: other.yaml\n", "other.yaml: base it.yaml is circular"),
        ("base: it.yaml\n", "base it.yaml is circular"),
        ("{base: plain.yaml, model: {seed: 2}}\n", "write base: plain.yaml as one line"),
    ],
)
def test_a_bad_base_is_one_sentence(
    launch: "Launcher", tmp_path: Path, text: str, expected: str
) -> None:
    write(tmp_path, it=text, other="base: it.yaml\n", plain="model: {seed: 1}\n")
    done = launch("fit", "--config", tmp_path / "it.yaml")
    assert done.status == 2
    assert expected in done.err
    assert done.err.count("\n") == 1
    with pytest.raises(InputError):
        read_layers(tmp_path / "it.yaml")


def test_an_unknown_key_above_a_base_is_an_error(launch: "Launcher", tmp_path: Path) -> None:
    base = ROOT / "recipes/tiny-dflow.yaml"
    write(tmp_path, it=f"base: {base}\nmodel:\n  relay:\n    term: scale\n")
    done = launch("fit", "--config", tmp_path / "it.yaml", "--print_config")
    assert done.status == 2
    assert "unknown key 'relay.term'" in done.err


def test_plan_reads_a_recipe_with_a_base(launch: "Launcher") -> None:
    from dflow_lightning.plan.command import parse

    recipe = parse(["--config", "recipes/ablations/rounds-3.yaml"])
    assert (recipe.rollout.num_rounds, recipe.model.relay.enabled) == (3, True)


FAULTY = {
    "F9, at the top": ("data: {pack: on}\ndata: {seed: 1}\n", "line 2: data is given twice, first"),
    "F9, with a dot": ("data:\n  seed: 1\ndata.seed: 2\n", "line 3: data.seed is given twice"),
    "F9, inside": ("data:\n  seed: 1\n  seed: 2\n", "line 3: data.seed is given twice"),
    "F9, interpolation": ("data: {batch_size: '${model.none}'}\n", "'model.none' not found"),
    "F42, tab": ("data:\n\tseed: 1\n", "line 2: a tab where YAML wants spaces"),
    "F42, empty": ("# nothing\n", "is empty; give a recipe"),
    "F42, no mapping": ("a word\n", "is not a recipe"),
    "F42, nan": ("model: {optimizer: {lr: .nan}}\n", "line 1: model.optimizer.lr is .nan; "),
    "F42, type": ("data:\n  batch_size: many\n", "line 2: data.batch_size: "),
    "F42, seed": ("seed_everything: -1\n", "line 1: seed_everything is -1; give a number from 0"),
    "F42, large seed": ("model: {seed: 5000000000}\n", "model.seed is 5000000000; give a number"),
    "F42, null": ("model:\n  optimizer: {lr: null}\n", "line 2: model.optimizer.lr is null; give"),
    "F42, method": ("method: {}\n", "method is {}; choose of"),
    "F42, config": ("config: other.yaml\n", "line 1: config is no key of a recipe"),
    "F42, interval": (
        "trainer: {val_check_interval: 0}\n",
        "trainer.val_check_interval is 0; ",
    ),
}


@pytest.mark.parametrize("name", FAULTY)
def test_a_faulty_recipe_is_one_sentence(launch: "Launcher", tmp_path: Path, name: str) -> None:
    """F9, F42."""
    text, expected = FAULTY[name]
    write(tmp_path, it=text)
    done = launch("fit", "--config", ROOT / "recipes/tiny-dflow.yaml", "--config",
                  tmp_path / "it.yaml")  # fmt: skip
    assert (done.status, done.err.count("\n")) == (2, 1), done.err
    assert done.err.startswith("error: ")
    assert "it.yaml" in done.err
    assert expected in done.err


def test_a_recipe_in_utf_16_is_one_sentence(launch: "Launcher", tmp_path: Path) -> None:
    """F42."""
    (tmp_path / "it.yaml").write_text("seed_everything: 1\n", encoding="utf-16")
    done = launch("fit", "--config", tmp_path / "it.yaml")
    assert done.status == 2
    assert "it.yaml is not UTF-8 text; save it as UTF-8" in done.err


@pytest.mark.parametrize(
    "text", ["tracking:\n  # experiment: mine\n", "tracking: null\n", "model: {relay: , seed: 0}\n"]
)
def test_a_section_without_settings_means_its_defaults(
    launch: "Launcher", tmp_path: Path, text: str
) -> None:
    """F10."""
    recipe = ROOT / "recipes/tiny-dflow.yaml"
    write(tmp_path, it=text)
    assert printed(launch, "--config", recipe, "--config", tmp_path / "it.yaml") == printed(
        launch, "--config", recipe
    )
