"""The Python interface: `train` is `fit`, decoding takes three lines; the README's own lines."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lightning as L
import plants
import pytest
import torch
from targets import ROOT

import dflow_lightning
from dflow_lightning import (
    ChatDataModule,
    DrafterConfig,
    DrafterModule,
    InputError,
    OnlineRollout,
    RelayConfig,
    RunError,
    SpeculativeDecoder,
    TargetConfig,
    load_decoder,
    train,
)

if TYPE_CHECKING:
    from launch import Launcher

pytest_plugins = ["launch"]
README = (ROOT / "README.md").read_text()
SNIPPETS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


@pytest.fixture
def settings(run_options: list[str]) -> dict[str, Any]:
    """`run_options` as a person writes them in Python."""
    given = dict(option.removeprefix("--").split("=", 1) for option in run_options)
    given |= {"model.drafter.target_layer_ids": [0, 1, 2], "tracking.enabled": False}
    numbers = {key: int(value) for key, value in given.items() if str(value).isdigit()}
    paths = {key: Path(value) for key, value in given.items() if str(value).startswith("/")}
    return given | numbers | paths


@pytest.fixture
def losses(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The losses of all training batches from now on, bit for bit."""
    seen: list[str] = []
    own = DrafterModule.objective

    def objective(self: DrafterModule, *args: Any, **named: Any) -> Any:
        loss, sums = own(self, *args, **named)
        if self.training:
            seen.append(float(loss.detach()).hex())
        return loss, sums

    monkeypatch.setattr(DrafterModule, "objective", objective)
    return seen


# ---------------------------------------------------------------- train


def test_train_is_fit(
    launch: "Launcher", recipe: Path, run_options: list[str], settings: dict, losses: list[str]
) -> None:
    assert launch("fit", "--config", recipe, *run_options, "--run_dir", "by-command").status == 0
    by_command = losses.copy()
    losses.clear()
    torch.use_deterministic_algorithms(False)
    run = train(recipe, settings, run_dir="by-python")
    assert losses == by_command
    assert len(losses) == 4
    assert not torch.are_deterministic_algorithms_enabled()  # a notebook goes on as it was

    files = [launch.folder / name / "checkpoints/last.ckpt" for name in ("by-command", "by-python")]
    ours, theirs = (torch.load(path, weights_only=True)["state_dict"] for path in files)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert all(torch.equal(ours[name], value) for name, value in run.module.state_dict().items())

    assert run.folder == Path("by-python")
    assert run.checkpoint == launch.folder / "by-python/checkpoints/best.ckpt"
    assert run.tau is not None
    assert 1 <= run.tau <= 4
    assert {"train/loss", "train/tau_round2", "val/tau"} <= run.metrics.keys()
    assert run.trainer.global_step == 4
    assert not run.module.training


def test_a_run_is_exported_decoded_and_continued(
    launch: "Launcher", recipe: Path, settings: dict
) -> None:
    run = train(recipe, settings)
    out = run.export("drafter", dtype="float32")
    decoder = load_decoder(out, run.module.target)
    assert decoder.target is run.module.target
    prompt = "train 0: 1 + 2"
    answer = decoder.answer(prompt, max_new_tokens=12)
    plain = decoder.answer(prompt, max_new_tokens=12, speculative=False)
    assert answer.completion.token_ids == plain.completion.token_ids
    assert (str(answer), plain.tau) == (plain.text, 1.0)
    assert answer.tau == pytest.approx(
        1 + sum(answer.completion.accepted) / len(answer.completion.accepted)
    )
    named = load_decoder(out)  # the export names its target
    assert named.answer(prompt, max_new_tokens=12).text == answer.text

    longer = train(recipe, settings | {"trainer.max_steps": 6}, run_dir=run.folder, resume="last")
    assert longer.trainer.global_step == 6


def test_recipes_are_laid_over_each_other(launch: "Launcher", recipe: Path, settings: dict) -> None:
    overlay = launch.folder / "overlay.yaml"
    overlay.write_text("trainer:\n  max_steps: 1\nvalidation:\n  max_new_tokens: 4\n")
    del settings["trainer.max_steps"]
    sets = [settings["data.train"]]
    settings |= {"trainer.enable_checkpointing": False, "data.train": sets}
    run = train([recipe, overlay], settings)
    assert run.trainer.global_step == 1
    assert run.data.paths["train"] == sets
    assert (run.checkpoint, run.tau) == (None, None)
    with pytest.raises(InputError, match=r"wrote none; train with trainer.enable_checkpointing"):
        run.export("drafter")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"model.drafter.blocksize": 8}, "unknown key .*; did you mean 'model.drafter.block_size'"),
        ({"trainer.max_steps": "many"}, "trainer.max_steps"),
        ({"data.train": "nowhere.jsonl"}, "data.train: nowhere.jsonl does not exist"),
        ({"model.seed": object()}, "which no recipe can hold"),
    ],
)
def test_mistakes_are_one_sentence(
    launch: "Launcher", recipe: Path, settings: dict, change: dict, says: str
) -> None:
    with pytest.raises(InputError, match=says) as raised:
        train(recipe, settings | change)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("given", ["recipes/none.yaml", []])
def test_a_recipe_that_is_not_there(launch: "Launcher", given: Any) -> None:
    with pytest.raises(InputError, match="recipe"):
        train(given)


@pytest.mark.parametrize(
    ("signum", "raised"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, RunError)]
)
def test_a_signal_writes_a_checkpoint_and_raises(
    launch: "Launcher",
    recipe: Path,
    settings: dict,
    monkeypatch: pytest.MonkeyPatch,
    signum: int,
    raised: type[BaseException],
) -> None:
    monkeypatch.setattr(DrafterModule, "objective", DrafterModule.objective)  # taken back after
    plants.signal_at(signum, step=1)
    with pytest.raises(raised, match=r'at step 2; continue with resume="last"'):
        train(recipe, settings, run_dir="stopped")
    assert (launch.folder / "stopped/checkpoints/last.ckpt").is_file()
    monkeypatch.undo()
    os.chdir(launch.folder)
    assert train(recipe, settings, run_dir="stopped", resume="last").trainer.global_step == 4


# ---------------------------------------------------------------- a trainer of one's own


def test_the_parts_work_in_a_trainer_of_lightning(
    launch: "Launcher", tiny_target_dir: Path, data_dir: Path
) -> None:
    module = DrafterModule(
        target=TargetConfig(path=str(tiny_target_dir)),
        drafter=DrafterConfig(num_layers=1, block_size=4, target_layer_ids=[0, 1, 2]),
        relay=RelayConfig(enabled=True),
        num_anchors=4,
    )
    data = ChatDataModule(
        train=str(data_dir / "train.jsonl"), tokenizer=str(tiny_target_dir), batch_size=4
    )
    trainer = L.Trainer(
        max_steps=2, accelerator="cpu", logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
        callbacks=[OnlineRollout(num_rounds=2, num_anchors=2)],
    )  # fmt: skip
    trainer.fit(module, data)
    assert trainer.global_step == 2
    assert "train/tau_round2" in trainer.callback_metrics
    decoder = module.eval().decoder()
    assert isinstance(decoder, SpeculativeDecoder)
    assert decoder.answer("1 + 2", max_new_tokens=4).completion.token_ids


# ---------------------------------------------------------------- load_decoder


def test_decoders_of_what_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"drafter: .* does not exist; give a folder"):
        load_decoder(tmp_path / "nowhere")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(InputError, match=r"target is missing: .* names none; give"):
        load_decoder(tmp_path)
    with pytest.raises(InputError, match=r"target: .* does not exist"):
        load_decoder(tmp_path, target=tmp_path / "nowhere")


def test_an_empty_prompt_is_a_mistake(tiny_target: Any, tiny_drafter: Any) -> None:
    decoder = SpeculativeDecoder(tiny_target, tiny_drafter)
    with pytest.raises(InputError, match="prompt is empty; say something"):
        decoder.answer("  ")
    messages = [{"role": "user", "content": "1 + 2"}]
    assert decoder.encode(messages) == decoder.encode("1 + 2")


# ---------------------------------------------------------------- names and the README


def test_every_name_is_there_and_says_what_it_is() -> None:
    assert sorted(dflow_lightning.__all__) == dflow_lightning.__all__
    for name in dflow_lightning.__all__:
        assert getattr(dflow_lightning, name).__doc__
        assert name in dir(dflow_lightning)
        if not name.startswith("_"):
            assert re.search(rf"\b{name}\b", dflow_lightning.__doc__ or "") or name in (
                "Answer", "Completion", "TrainedRun",
            )  # fmt: skip
    with pytest.raises(AttributeError, match="no attribute 'Drafters'"):
        _ = dflow_lightning.Drafters


@pytest.mark.slow
def test_the_lines_of_the_readme_run(
    launch: "Launcher", monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (launch.folder / "data").symlink_to(ROOT / "data")
    decode, learn = SNIPPETS
    assert [len(one.strip().splitlines()) for one in SNIPPETS] == [5, 5]  # one of them empty
    names: dict[str, Any] = {}
    exec(decode, names)
    shown = capsys.readouterr().out
    assert names["answer"].text in shown
    assert names["answer"].tau > 1.3
    exec(learn, names)
    assert names["run"].trainer.global_step == 20
    assert (launch.folder / "runs/from-python/config.json").is_file()


@pytest.mark.slow
def test_the_lines_of_the_readme_are_typed(tmp_path: Path) -> None:
    """mypy knows what they make: nothing of it is `Any`."""
    known = {
        "decoder": "SpeculativeDecoder", "answer": "Answer", "run": "TrainedRun",
        "answer.text": "str", "run.metrics": "dict[str, float]",
    }  # fmt: skip
    # The sources of torch and others are not read: that takes nearly all of the time.
    config = tmp_path / "mypy.ini"
    outside = ("torch", "lightning", "transformers", "deepspeed", "mlflow", "datasets", "numpy")
    config.write_text(
        "[mypy]\nignore_missing_imports = true\n"
        + "".join(f"[mypy-{name}.*]\nfollow_imports = skip\n" for name in outside)
    )
    file = tmp_path / "lines.py"
    file.write_text(
        "from typing_extensions import assert_type\nfrom dflow_lightning import *\n"
        + "\n".join(SNIPPETS)
        + "".join(f"assert_type({name}, {kind})\n" for name, kind in known.items())
    )
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--config-file", config, "--cache-dir", tmp_path, file],
        capture_output=True, text=True, check=False, env=os.environ | {"MYPYPATH": f"{ROOT}/src"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
