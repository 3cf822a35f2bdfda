"""Every recipe is a run: it parses, prints itself, and the tiny ones train."""

from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import yaml

from dflow_lightning.models.dims import default_target_layer_ids

if TYPE_CHECKING:
    from launch import Launcher

pytest_plugins = ["launch"]
ROOT = Path(__file__).resolve().parents[1]
RECIPES = sorted((ROOT / "recipes").glob("*.yaml"))
WARM = ROOT / "recipes/tiny-dflow-from-dflash.yaml"
CARRYOVER = ROOT / "recipes/tiny-dflow-carryover.yaml"  # tiny-dflow and one key, see its base
EAGLE3 = ROOT / "recipes/tiny-eagle3.yaml"
OTHER = (WARM, CARRYOVER, EAGLE3)
TINY = [path for path in RECIPES if path.stem.startswith("tiny-") and path not in OTHER]
QWEN3 = [path for path in RECIPES if path.stem.startswith("qwen3-")]
OVERLAYS = sorted((ROOT / "recipes/hardware").glob("*.yaml"))
HEADER = ("dflow-train fit --config recipes/", "Hardware:", "docs/results.md")


SIZES = ("1.7b", "4b", "8b")
METHODS = ("dflash", "dflash-sc", "dflow", "domino", "domino-dflow")
NAMES = [f"{size}-{method}" for size in SIZES for method in METHODS]


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
        recipe["model"].pop("causal_head", None)
    assert len(recipes) == 5
    assert all(recipe == recipes[0] for recipe in recipes)


def test_domino_dflow_is_dflow_with_a_causal_head() -> None:
    ours, flow = (
        yaml.safe_load((ROOT / f"recipes/tiny-{name}.yaml").read_text())
        for name in ("domino-dflow", "dflow")
    )
    assert ours["model"].pop("causal_head")["enabled"] is True
    assert ours == flow
    domino, flash = (
        yaml.safe_load((ROOT / f"recipes/tiny-{name}.yaml").read_text())
        for name in ("domino", "dflash")
    )
    assert domino["model"].pop("causal_head")["enabled"] is True
    assert domino == flash


def test_eagle3_has_the_data_steps_optimizer_and_taps_of_the_others() -> None:
    eagle3, dflash = (
        yaml.safe_load(path.read_text()) for path in (EAGLE3, ROOT / "recipes/tiny-dflash.yaml")
    )
    for section in ("seed_everything", "data", "validation", "trainer"):
        assert eagle3[section] == dflash[section]
    assert eagle3["model"]["target"] == dflash["model"]["target"]
    assert eagle3["model"]["optimizer"] == dflash["model"]["optimizer"]
    for name in ("block_size", "target_layer_ids"):
        assert eagle3["model"]["drafter"][name] == dflash["model"]["drafter"][name]
    assert eagle3["model"]["ttt_steps"] == eagle3["model"]["drafter"]["block_size"] - 1


def test_the_warm_recipe_is_tiny_dflow_with_a_start() -> None:
    warm, cold = (
        yaml.safe_load(path.read_text()) for path in (WARM, ROOT / "recipes/tiny-dflow.yaml")
    )
    assert warm["model"].pop("init_from") == "data/tiny-drafters/dflash"
    for recipe in (warm, cold):
        del recipe["model"]["optimizer"], recipe["trainer"]
    assert warm == cold


def test_the_warm_recipe_begins_as_good_as_the_drafter_it_begins_with(
    launch: "Launcher", data_dir: Path
) -> None:
    """Step 0 of DFlow is the DFlash drafter, token for token, relay on or off."""
    from dflow_lightning.decode import SpeculativeDecoder
    from dflow_lightning.training.saved import load_trained, open_checkpoint

    target, dflash = ROOT / "data/tiny-qwen3", ROOT / "data/tiny-drafters/dflash"
    values = {
        "model.target.path": target,
        "model.init_from": dflash,
        **{f"data.{split}": data_dir / f"{split}.jsonl" for split in ("train", "validation")},
        "data.test": data_dir / "test.jsonl",
        "model.optimizer.lr": 1e-12,  # two steps that leave the weights as good as they were
        "trainer.max_steps": 2,
        "trainer.limit_val_batches": 0,
        "trainer.num_sanity_val_steps": 0,
        "tracking.enabled": "false",
    }
    done = launch("fit", "--config", WARM, *(f"--{key}={value}" for key, value in values.items()))
    assert done.status == 0, done.err
    path = launch.folder / "runs/tiny-dflow-from-dflash/checkpoints/last.ckpt"
    module = load_trained(open_checkpoint(path), target=str(target))
    begun, published = module.decoder(), SpeculativeDecoder.from_export(dflash, target=str(target))
    prompts = [begun.encode("What can I cook with rice and beans?"), begun.encode("What is 3 + 4?")]
    expected = published.generate(prompts, max_new_tokens=32)
    assert any(sum(one.accepted) for one in expected)
    for relay in (True, False):
        decoded = begun.generate(prompts, max_new_tokens=32, use_rejected=relay)
        for one, other in zip(decoded, expected, strict=True):
            assert (one.token_ids, one.accepted) == (other.token_ids, other.accepted)


def resolved(launch: "Launcher", recipe: Path) -> dict:
    """All settings of a recipe, its bases and the defaults included."""
    done = launch("fit", "--config", recipe, "--print_config")
    assert done.status == 0, done.err
    return yaml.safe_load(done.out)


def test_there_is_a_qwen3_recipe_for_every_size_and_method_of_the_paper() -> None:
    page = (ROOT / "docs/paper-tables.md").read_text()
    expected = {f"qwen3-{size}-{method}" for size in SIZES for method in (*METHODS, "eagle3")}
    assert {path.stem for path in QWEN3} == expected
    for name in expected:
        assert f"`{name}`" in page
        assert "NOT MEASURED" in (ROOT / f"recipes/{name}.yaml").read_text()


def test_qwen3_recipes_differ_only_in_target_and_method(launch: "Launcher") -> None:
    recipes = {name: resolved(launch, ROOT / f"recipes/qwen3-{name}.yaml") for name in NAMES}
    for name, recipe in recipes.items():
        size, _, method = name.partition("-")
        assert recipe["model"]["target"].pop("path") == f"Qwen/Qwen3-{size.upper()}"
        for split in ("train", "validation"):  # folders, as `prepare` writes them
            assert recipe["data"].pop(split) == f"data/qwen3-{size}/{split}"
        assert recipe["model"]["relay"].pop("enabled") is method.endswith("dflow")
        head = recipe["model"]["causal_head"]
        assert head.pop("enabled") is method.startswith("domino")
        if method.startswith("domino"):
            assert (head["gru_hidden_dim"], head["emb_dim"]) == (1024, 256)
        del recipe["model"]["causal_head"]
        rollout = recipe.pop("rollout")
        rounds = 2 if method in ("dflash-sc", "dflow", "domino-dflow") else 0
        assert rollout["num_rounds"] == rounds
        if rounds:
            assert rollout["mode"] == ("off" if method == "dflash-sc" else "online")
            # 1/8 of the blocks taught the relay nothing (docs/results.md, share-1-8)
            assert 4 * rollout["num_anchors"] >= recipe["model"]["num_anchors"]
    first = recipes["8b-dflash"]
    assert all(recipe == first for recipe in recipes.values())


def test_qwen3_eagle3_recipes_have_the_data_steps_and_taps_of_the_others(
    launch: "Launcher",
) -> None:
    for size in SIZES:
        eagle3, dflash = (
            resolved(launch, ROOT / f"recipes/qwen3-{size}-{method}.yaml")
            for method in ("eagle3", "dflash")
        )
        for section in ("seed_everything", "data", "validation", "trainer"):
            assert eagle3[section] == dflash[section]
        assert eagle3["model"]["target"] == dflash["model"]["target"]
        assert eagle3["model"]["num_anchors"] == dflash["model"]["num_anchors"]
        assert eagle3["model"]["ttt_steps"] == eagle3["model"]["drafter"]["block_size"] - 1
        layers = {"1.7b": 28, "4b": 36, "8b": 36}[size]
        taps = eagle3["model"]["drafter"]["target_layer_ids"]
        assert taps == default_target_layer_ids(layers, 5)


def test_qwen3_recipes_have_the_published_settings(launch: "Launcher") -> None:
    printed = launch("fit", "--config", ROOT / "recipes/qwen3-8b-dflash.yaml", "--print_config").out
    recipe = yaml.safe_load(printed)
    model, trainer = recipe["model"], recipe["trainer"]
    assert (model["drafter"]["num_layers"], model["drafter"]["block_size"]) == (5, 16)
    assert model["drafter"]["target_layer_ids"] is None  # the published formula
    assert (model["num_anchors"], model["loss"]["gamma"]) == (512, 7.0)
    assert (model["optimizer"]["lr"], model["optimizer"]["warmup_ratio"]) == (6e-4, 0.04)
    assert model["optimizer"]["min_lr_ratio"] == model["optimizer"]["weight_decay"] == 0
    assert (recipe["data"]["max_length"], trainer["max_epochs"]) == (3072, 6)
    assert (trainer["gradient_clip_val"], trainer["precision"]) == (1.0, "bf16-mixed")


@pytest.mark.parametrize("overlay", OVERLAYS, ids=names(OVERLAYS))
def test_hardware_overlays_keep_the_rows_of_a_step(launch: "Launcher", overlay: Path) -> None:
    recipe = ROOT / "recipes/qwen3-8b-dflow.yaml"
    done = launch("fit", "--config", recipe, "--config", overlay, "--print_config")
    assert done.status == 0, done.err
    printed, alone = yaml.safe_load(done.out), yaml.safe_load(overlay.read_text())
    trainer, batch = printed["trainer"], printed["data"]["batch_size"]
    assert trainer["devices"] == int(overlay.stem.split("x")[0])
    rows = trainer["devices"] * batch * trainer["accumulate_grad_batches"]
    assert rows == (4 if trainer["accelerator"] == "cpu" else 32)
    # Only what depends on the hardware, and no lists: those would replace the recipe's.
    assert set(alone) == {"trainer", "data"}
    assert set(alone["data"]) == {"batch_size"}
    hardware = {"accelerator", "devices", "strategy", "accumulate_grad_batches"}
    assert set(alone["trainer"]) == hardware
    assert (trainer["max_epochs"], printed["model"]["num_anchors"]) == (6, 512)
    comment = "\n".join(line for line in overlay.read_text().splitlines() if line.startswith("#"))
    assert f"--config recipes/hardware/{overlay.name}" in comment
    assert f"(hardware/{overlay.name})" in (ROOT / "recipes/README.md").read_text()


@pytest.mark.parametrize("recipe", [*TINY, CARRYOVER], ids=names([*TINY, CARRYOVER]))
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
