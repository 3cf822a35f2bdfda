"""A run that ends too early and goes on: exact resume, signals, kill -9, changed settings.

`make resume` prints the whole table; here are the cells that can break in different ways.
"""

import errno
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from lightning.pytorch import Trainer
from processes import Plant, Server, steps_of, tensors_of, wait_until
from resume_table import CUT, Case, compare, differences, record_of, whole_run, write_data
from targets import random_target

from dflow_lightning.errors import InputError
from dflow_lightning.run import checkpoint
from dflow_lightning.run.checkpoint import require_room
from dflow_lightning.run.resume import filled

if TYPE_CHECKING:
    from launch import Launcher

pytest_plugins = ["launch"]
ONE = Case("1 process", 0, 2)


@pytest.fixture(scope="module")
def server() -> Server:
    return Server()


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Target, data and runs that nothing stops."""
    folder = tmp_path_factory.mktemp("resume")
    random_target(folder / "target")
    write_data(folder)
    return folder


@pytest.fixture
def start(server: Server, shared: Path, tmp_path: Path) -> Callable[..., Any]:
    """Starts a run of one process in the folder `parts`, recorded."""

    def start(*plants: Plant, case: Case = ONE, **options: Any) -> Any:
        args = case.options(shared, run_dir="parts", **options)
        record = Plant("record", {"path": str(tmp_path / "parts")})
        return server.start(args, tmp_path, ranks=case.ranks, plants=(record, *plants))

    return start


# ---------------------------------------------------------------- exact resume


@pytest.mark.parametrize(
    "case",
    [
        Case("1 process", 2, 2),
        pytest.param(Case("DDP x2", 2, 2), marks=pytest.mark.slow),
        pytest.param(Case("ZeRO-2 x2", 2, 2), marks=pytest.mark.slow),
        pytest.param(Case("ZeRO-3 x2", 0, 1), marks=pytest.mark.slow),
    ],
    ids=lambda case: f"{case.name}-{case.workers}-{case.accumulate}",
)
def test_ten_steps_are_four_and_six(
    case: Case, server: Server, shared: Path, tmp_path: Path
) -> None:
    assert compare(server, shared, tmp_path, case) == []
    assert min(steps_of(record_of(tmp_path / "parts", 0))[1]) == CUT


def test_the_comparison_sees_one_bit(server: Server, shared: Path, tmp_path: Path) -> None:
    whole, wrong = whole_run(server, shared, ONE)
    assert not wrong
    assert differences(1, whole, whole) == []
    last = "checkpoints/last.ckpt"
    (tmp_path / "other" / last).parent.mkdir(parents=True)
    content = torch.load(whole / last, weights_only=True)
    weight = content["state_dict"]["drafter.fc.weight"]
    weight[0, 0] = torch.nextafter(weight[0, 0], torch.tensor(torch.inf))
    torch.save(content, tmp_path / "other" / last)
    text = record_of(whole, 0).read_text()
    record_of(tmp_path / "other", 0).write_text(text)
    assert differences(1, whole, tmp_path / "other") == ["state_dict.drafter.fc.weight"]
    record_of(tmp_path / "other", 0).write_text(text[:50] + text[text.index("\n") :])
    assert "rank 0: steps [0] never finished" in differences(1, whole, tmp_path / "other")


def test_the_batch_of_a_failed_step_is_read_again(
    server: Server, shared: Path, tmp_path: Path, start: Callable[..., Any]
) -> None:
    """A checkpoint from within a step stands at the step before, whoever writes it."""
    on_exception = {
        "trainer.callbacks": "lightning.pytorch.callbacks.OnExceptionCheckpoint",
        "trainer.callbacks.dirpath": "saved",
    }
    run = start(Plant("fail_at", {"step": 3, "batch": 1}), **on_exception)
    assert run.wait() == [1]
    assert "ZeroDivisionError: planted" in run.output()
    run = start(ckpt_path="saved/on_exception.ckpt")
    assert run.wait() == [0], run.output()
    assert min(steps_of(record_of(tmp_path / "parts", 0))[1]) == 3
    assert differences(1, whole_run(server, shared, ONE)[0], tmp_path / "parts") == []


# ---------------------------------------------------------------- signals


def test_an_interrupt_writes_one_checkpoint_and_ends_with_130(
    tmp_path: Path, start: Callable[..., Any]
) -> None:
    begun = time.monotonic()
    run = start(Plant("signal_at", {"signum": int(signal.SIGINT), "step": 5}))
    assert run.wait() == [130]
    assert time.monotonic() - begun < 60
    assert "stopped by SIGINT at step 5; continue with --ckpt_path last" in run.output()
    assert "Traceback" not in run.output()
    saved = torch.load(tmp_path / "parts/checkpoints/last.ckpt", weights_only=True)
    assert saved["global_step"] == 5


def test_a_second_interrupt_ends_at_once(tmp_path: Path, start: Callable[..., Any]) -> None:
    run = start(Plant("hang_at", {"step": 1, "end_within": 60.0}))
    wait_until((tmp_path / "hanging").exists)
    run.signal(signal.SIGINT)
    time.sleep(0.5)
    assert run.processes[0].exitcode is None
    run.signal(signal.SIGINT)
    assert run.wait(10) == [130]
    assert "ending at once" in run.output()


def test_a_process_that_waits_for_another_ends_in_time(
    tmp_path: Path, start: Callable[..., Any]
) -> None:
    run = start(Plant("hang_at", {"step": 1, "end_within": 0.5}))
    wait_until((tmp_path / "hanging").exists)
    run.signal(signal.SIGTERM)
    run.signal(signal.SIGTERM)  # schedulers repeat it
    assert run.wait(20) == [143]
    assert "not ended 0 s after the signal" in run.output()


def test_a_signal_during_validation_does_not_wait_for_its_end(
    launch: "Launcher", recipe: Path, run_options: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from dflow_lightning.decode import SpeculativeDecoder

    calls = []

    def generate(self: Any, prompts: list[Any], **options: Any) -> list[Any]:
        calls.append(len(prompts))
        signal.raise_signal(signal.SIGTERM)
        time.sleep(0.2)  # a decoder takes longer than the thread needs to hear of it
        return [SimpleNamespace(accepted=[1], token_ids=[1, 2]) for _ in prompts]

    monkeypatch.setattr(SpeculativeDecoder, "generate", generate)
    options = ["--validation.batch_size=1", "--trainer.num_sanity_val_steps=0"]
    done = launch("fit", "--config", recipe, *run_options, *options)
    assert done.status == 143
    assert "stopped by SIGTERM at step 2" in done.err
    assert calls == [1]  # of three prompts, with and without relay
    saved = torch.load(launch.folder / "runs/small/checkpoints/last.ckpt", weights_only=True)
    assert saved["global_step"] == 2


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["DDP x2", "ZeRO-2 x2"])
def test_a_rank_that_fails_in_validation_ends_all(strategy: str, start: Callable[..., Any]) -> None:
    run = start(Plant("fail_in_validation", rank=1), case=Case(strategy, 0, 1))
    codes = run.wait(60)
    assert all(codes)
    assert "ZeroDivisionError: planted" in run.output(1)


# ---------------------------------------------------------------- kill -9 and a full disk


@pytest.mark.parametrize("share", [0.5, 1])
def test_kill_9_in_a_checkpoint_leaves_the_one_before(
    share: float, server: Server, shared: Path, tmp_path: Path, start: Callable[..., Any]
) -> None:
    auto = {"checkpoint.every_n_steps": 2, "ckpt_path": "auto"}  # which also starts a run
    run = start(Plant("kill_in_save", {"number": 2, "share": share}), **auto)
    assert run.wait() == [128 + signal.SIGKILL]
    before = torch.load(tmp_path / "parts/checkpoints/last.ckpt", weights_only=True)
    run = start(**auto)
    assert run.wait() == [0], run.output()
    assert min(steps_of(record_of(tmp_path / "parts", 0))[1]) == before["global_step"] == 2
    assert differences(1, whole_run(server, shared, ONE)[0], tmp_path / "parts") == []
    folder = tmp_path / "parts/checkpoints"
    assert {path.name for path in folder.iterdir()} == {"best.ckpt", "last.ckpt"}


def test_a_full_disk_leaves_the_checkpoint_before(
    launch: "Launcher", recipe: Path, run_options: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    save = Trainer.save_checkpoint

    def full(self: Trainer, path: Any, *args: Any) -> None:
        if self.global_step == 2:
            Path(path).write_bytes(b"half")
            raise OSError(errno.ENOSPC, "No space left on device")
        save(self, path, *args)

    monkeypatch.setattr(Trainer, "save_checkpoint", full)
    done = launch("fit", "--config", recipe, *run_options, "--checkpoint.every_n_steps=1")
    assert done.status == 2
    assert "is full at step 2; make room and continue with --ckpt_path last" in done.err
    folder = launch.folder / "runs/small/checkpoints"
    assert [path.name for path in folder.iterdir()] == ["last.ckpt"]
    assert torch.load(folder / "last.ckpt", weights_only=True)["global_step"] == 1


def test_checkpoints_that_will_not_fit_are_refused_before_the_first_step(
    launch: "Launcher", recipe: Path, run_options: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint.shutil, "disk_usage", lambda _: SimpleNamespace(free=10**6))
    done = launch("fit", "--config", recipe, *run_options)
    assert done.status == 2
    assert "has room for 0.00 GB but this run writes" in done.err
    assert "make room, name another run_dir, or lower checkpoint.save_top_k" in done.err
    assert "step 1" not in done.out


def test_bytes_of_a_checkpoint_are_foreseen(server: Server, shared: Path) -> None:
    whole, _ = whole_run(server, shared, ONE)
    file = whole / "checkpoints/last.ckpt"
    tensors = sum(t.numel() * t.element_size() for t in tensors_of(file).values())
    weights = torch.load(file, weights_only=True)["state_dict"].values()
    foreseen = checkpoint.COPIES * sum(t.numel() * t.element_size() for t in weights)
    assert foreseen <= tensors <= 1.01 * foreseen  # and the optimizer's counts of steps
    require_room(file, needed=10, free=30, files=3)
    with pytest.raises(InputError, match=r"3 checkpoints of 0\.00 GB"):
        require_room(file, needed=10, free=29, files=3)


# ---------------------------------------------------------------- what a resume may not change


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the run that the next fixture makes is kept for all tests."""
    return tmp_path_factory.mktemp("kept") / "run"


@pytest.fixture
def saved(launch: "Launcher", recipe: Path, run_options: list[str], kept: Path) -> list[str]:
    """The command that resumes a run of two steps to four."""
    fit = ["fit", "--config", str(recipe), *run_options, "--run_dir=run"]
    if not kept.exists():
        done = launch(*fit, "--trainer.max_steps=2", "--trainer.val_check_interval=9")
        assert done.status == 0, done.err
        shutil.copytree(launch.folder / "run", kept)
    shutil.copytree(kept, launch.folder / "run", dirs_exist_ok=True)
    return [*fit, "--ckpt_path=last"]


CHANGED = {
    "--model.drafter.mask_token_id=300": "mask_token_id = null, this command says 300",
    "--model.drafter.target_layer_ids=[0,2]": "[0, 1, 2], this command says [0, 2]",
    "--model.drafter.block_size=8": "model.drafter.block_size = 4, this command says 8",
    "--model.relay.hidden_size=7": "model.relay.hidden_size = ",
    "--model.seed=3": "model.seed = 0, this command says 3",
    "--data.batch_size=3": "data.batch_size = 4, this command says 3",
    "--rollout.num_rounds=1": "rollout.num_rounds = 2, this command says 1",
}


@pytest.mark.parametrize("option", CHANGED)
def test_a_changed_recipe_is_refused_with_both_values(
    option: str, launch: "Launcher", saved: list[str]
) -> None:
    done = launch(*saved, option)
    assert done.status == 2
    assert CHANGED[option] in done.err
    assert len(done.err.splitlines()) == 1


NEW_KEYS = {  # that recipes did not have at first, and the section of the checkpoint they stand in
    "model.loss.kind": None,
    "model.loss.dpace_alpha": None,
    "model.relay.terms": "relay",
    "model.drafter.carryover": "drafter",
    "model.causal_head": None,
    "tracking.tags": None,
    "quiet": None,
    "method": None,
}


def of_an_earlier_release(path: Path) -> None:
    """Take from a checkpoint what was not in it before those keys."""
    content = torch.load(path, weights_only=True)
    for key, section in NEW_KEYS.items():
        *above, name = key.split(".")
        recipe = content["recipe"]
        for part in above:
            recipe = recipe[part]
        del recipe[name]
        if section is not None:
            del content["dflow"][section][name]
    del content["dflow"]["causal_head"]
    for name, state in content["callbacks"].items():
        if "dirpath" in state:  # the fixture has copied the run
            content["callbacks"][name]["dirpath"] = str(path.parent.resolve())
    torch.save(content, path)


def test_a_run_of_an_earlier_release_goes_on(launch: "Launcher", saved: list[str]) -> None:
    path = launch.folder / "run/checkpoints/last.ckpt"
    of_an_earlier_release(path)
    for option, sentence in {
        "--model.loss.kind=dpace": "model.loss.kind = cross_entropy, this command says dpace",
        "--model.drafter.carryover=true": "carryover = False, this command says True",
        "--model.causal_head.enabled=true": "causal_head.enabled = False, this command says True",
    }.items():
        refused = launch(*saved, option)
        assert refused.status == 2
        assert sentence in refused.err
    done = launch(*saved)
    assert done.status == 0, done.err
    assert "resumed from run/checkpoints/last.ckpt at step 2" in done.out + done.err
    assert torch.load(path, weights_only=True)["global_step"] == 4
    of_an_earlier_release(path)
    exported = launch("export", "--checkpoint", path, "--out", "export")
    assert exported.status == 0, exported.err


def test_null_in_a_saved_recipe_is_a_value() -> None:
    assert filled({"a": None, "b": {"c": 1}}, {"a": 2, "b": {"c": 3, "d": 4}, "e": 5}) == {
        "a": None, "b": {"c": 1, "d": 4}, "e": 5
    }  # fmt: skip


def target_with(folder: Path, change: str) -> Path:
    """The tests' target under its name, with another seed, vocabulary or tokenizer."""
    from transformers import AutoTokenizer, Qwen3ForCausalLM

    random_target(folder, seed=int(change == "weights"))
    if change == "vocabulary":
        model = Qwen3ForCausalLM.from_pretrained(folder)
        model.resize_token_embeddings(384)
        model.save_pretrained(folder)
    if change == "tokenizer":
        tokenizer = AutoTokenizer.from_pretrained(folder)
        tokenizer.add_tokens(["<|new|>"])
        tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ("weights", "is not the target of the checkpoint"),
        ("vocabulary", "drafter.vocab_size is 384 but the checkpoint has 320"),
        ("tokenizer", "drafter.mask_token_id is 262 but the checkpoint has 261"),
    ],
)
def test_another_target_of_the_same_name_is_refused(
    change: str, sentence: str, launch: "Launcher", saved: list[str], tiny_target_dir: Path
) -> None:
    other = target_with(launch.folder / "elsewhere" / tiny_target_dir.name, change)
    done = launch(*saved, f"--model.target.path={other}")
    assert done.status == 2
    *warned, line = done.err.splitlines()  # of the schedule, which goes on to another length
    assert sentence in line
    assert all(text.startswith("warning: trainer.max_steps was ") for text in warned)


def test_another_number_of_processes_is_refused(
    launch: "Launcher", saved: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = launch.folder / "run/checkpoints/last.ckpt"
    content = torch.load(path, weights_only=True)
    torch.save(content | {checkpoint.PROCESSES_KEY: 8}, path)
    done = launch(*saved)
    assert done.status == 2
    assert "the run had 8 processes, this command has 1" in done.err
