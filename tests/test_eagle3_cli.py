"""EAGLE-3 through the command line: a run, its resume, its export and decoding, and mistakes."""

import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from test_bad_input import export_to

from dflow_lightning.training.eagle3_module import Eagle3Module

if TYPE_CHECKING:
    from launch import Launcher

pytest_plugins = ["launch"]


@pytest.fixture
def options(run_options: list[str]) -> list[str]:
    """Those of a small run, as far as an EAGLE-3 recipe has them."""
    kept = [one for one in run_options if "num_layers" not in one]
    return ["--config", "recipes/tiny-eagle3.yaml", *kept, "--model.ttt_steps=3"]


def test_a_stopped_run_goes_on_bit_for_bit_and_its_export_decodes(
    launch: "Launcher",
    options: list[str],
    run_options: list[str],
    recipe: Path,
    tiny_target_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert launch("fit", *options, "--run_dir", "whole").status == 0

    step = Eagle3Module.training_step

    def stopping(self, batch, batch_idx):
        if self.global_step == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return step(self, batch, batch_idx)

    with monkeypatch.context() as patch:
        patch.setattr(Eagle3Module, "training_step", stopping)
        stopped = launch("fit", *options, "--run_dir", "parts")
    assert "stopped by SIGTERM at step" in stopped.err
    assert launch("fit", *options, "--run_dir", "parts", "--ckpt_path", "last").status == 0
    whole, parts = (
        torch.load(f"{name}/checkpoints/last.ckpt", weights_only=True)
        for name in ("whole", "parts")
    )
    assert whole["global_step"] == parts["global_step"] == 4
    for name, tensor in whole["state_dict"].items():
        assert torch.equal(tensor, parts["state_dict"][name])
    moments = [content["optimizer_states"][0]["state"] for content in (whole, parts)]
    for one, other in zip(moments[0].values(), moments[1].values(), strict=True):
        assert torch.equal(one["exp_avg_sq"], other["exp_avg_sq"])

    block = launch("fit", "--config", recipe, *run_options, "--run_dir", "parts",
                   "--ckpt_path", "last")  # fmt: skip
    assert block.status == 2
    assert "resume with the same recipe" in block.err

    checkpoint = ("--checkpoint", "whole/checkpoints/last.ckpt")
    assert launch("export", *checkpoint, "--out", "export").status == 0
    decoding = ("--target", tiny_target_dir, "--drafter", "export", "--prompt", "2 + 2")
    ours = launch("decode", *decoding, "--max_new_tokens", 12)
    plain = launch("decode", *decoding, "--max_new_tokens", 12, "--plain")
    assert ours.status == plain.status == 0
    assert ours.out == plain.out
    for wrong in ("--compile", "--format=speculators"):
        done = launch("export", *checkpoint, "--out", "other", wrong)
        assert done.status == 2
        assert "an EAGLE-3 drafter has one format and no package" in done.err


def test_replay_finds_where_an_overflow_begins(launch: "Launcher", options: list[str]) -> None:
    extra = ("--model.optimizer.lr=1e30", "--trainer.val_check_interval=9", "--run_dir=run")
    failed = launch("fit", *options, *extra)
    assert failed.status == 1
    replayed = launch("replay", "--file", failed.err.split()[-1])
    assert replayed.status == 0, replayed.err
    assert "step 1 of rank 0 of 1" in replayed.out
    assert "weights        all finite" in replayed.out
    assert "first output   drafter." in replayed.out
    assert "is NOT finite" in replayed.out
    assert "loss           nan" in replayed.out


@pytest.mark.parametrize(
    ("extra", "sentence"),
    [
        (["--model.ttt_steps=0"], "model.ttt_steps is 0; give 1 or more"),
        (["--model.relay.enabled=true"], "unknown key 'model.relay"),
        (["--rollout.num_rounds=2"], "unknown key 'rollout"),
        (["--model.drafter.mask_token_id=3"], "unknown key 'model.drafter.mask_token_id'"),
        (["--model.drafter.target_layer_ids=[0,3]"], "drafter.target_layer_ids holds 3"),
        (["--method=eagle4"], "method is eagle4; choose of block, eagle3"),
        (["--method=block"], "unknown key 'model.ttt_steps'"),
        (["--model.init_from=dflash"], "model.init_from dflash is no EAGLE-3 drafter"),
    ],
)
def test_mistakes_are_one_sentence_and_status_2(
    launch: "Launcher", options: list[str], tiny_target, extra: list[str], sentence: str
) -> None:
    if "init_from" in extra[0]:
        export_to(launch.folder / "dflash", tiny_target)
    done = launch("fit", *options, *extra)
    assert done.status == 2
    assert done.err.startswith(f"error: {sentence}")
    assert len(done.err.splitlines()) == 1
