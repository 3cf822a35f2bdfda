"""The command line: exit codes, one-sentence errors, run folders, resume, progress."""

import io
import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
import yaml
from pseudo_terminal import displayed

from dflow_lightning import __main__ as entry
from dflow_lightning.commandline.arguments import explain, nearest
from dflow_lightning.errors import InputError
from dflow_lightning.run.fit import default_run_dir, recipe_parser
from dflow_lightning.run.resume import SavedRun, rule_of
from dflow_lightning.training.base import Method
from dflow_lightning.training.validation import ValidationDecoding

if TYPE_CHECKING:
    from launch import Launcher

pytest_plugins = ["launch"]

# ---------------------------------------------------------------- the entry point


def test_help_lists_every_command_and_imports_nothing_heavy() -> None:
    code = (
        "import sys; from dflow_lightning.__main__ import main; status = main(['--help']); "
        "print(sorted({'torch', 'lightning', 'transformers', 'jsonargparse'} & set(sys.modules))); "
        "sys.exit(status)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
    for command in (*entry.RUNS, *entry.TOOLS):
        assert re.search(rf"^  {command} +\w", done.stdout, re.MULTILINE)


def test_no_command_is_a_mistake(launch: "Launcher") -> None:
    assert launch().status == 2
    assert "usage" in launch("help").out


def test_unknown_command_suggests_the_nearest(launch: "Launcher") -> None:
    done = launch("fti")
    assert (done.status, done.out) == (2, "")
    assert done.err.startswith("error: unknown command 'fti'; did you mean 'fit'?")


@pytest.mark.parametrize(
    ("raised", "status"), [(InputError("x: no"), 2), (KeyboardInterrupt(), 130), (SystemExit(3), 3)]
)
def test_exit_status_of_what_a_command_raises(
    raised: BaseException, status: int, monkeypatch: pytest.MonkeyPatch, launch: "Launcher"
) -> None:
    def fail(args: list[str]) -> int:
        raise raised

    monkeypatch.setattr(entry, "dispatch", fail)
    done = launch("fit")
    assert done.status == status
    assert "Traceback" not in done.err


def test_a_defect_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(args: list[str]) -> int:
        raise ZeroDivisionError

    monkeypatch.setattr(entry, "dispatch", fail)
    with pytest.raises(ZeroDivisionError):
        entry.main([])


@pytest.mark.parametrize("tool", entry.TOOLS)
def test_every_tool_prints_its_options(tool: str, launch: "Launcher") -> None:
    done = launch(tool, "--help")
    assert done.status == 0
    assert f"dflow-train [options] {tool}" in done.out
    assert f"\nexample:\n  dflow-train {tool} -" in done.out


def test_tool_errors_are_one_sentence(launch: "Launcher") -> None:
    assert launch("ui").err == "error: run is missing: give --run\n"
    assert launch("ui", "--rnu", "x").err == "error: unknown key 'rnu'; did you mean 'run'?\n"
    done = launch("ui", "--run", "nowhere")
    assert done.status == 2
    assert done.err.startswith("error: run: nowhere has no mlflow.db")


@pytest.mark.parametrize(
    ("tracking", "variable", "sentence"),
    [
        ({"enabled": False}, "", "was not recorded, since tracking.enabled was false"),
        ({"uri": "http://there:5000"}, "http://other", "is at http://there:5000; open that"),
        ({"uri": None}, "http://there:5000", "is at http://there:5000; open that in a browser"),
        ({}, None, "went to the server that MLFLOW_TRACKING_URI named"),
        ({"uri": "sqlite:////a/sweep/mlflow.db"}, None, "is in /a/sweep/mlflow.db; give --run /a/"),
    ],
)
def test_ui_says_where_a_record_is(
    tracking: dict,
    variable: str | None,
    sentence: str,
    launch: "Launcher",
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if variable is not None:
        monkeypatch.setenv("MLFLOW_TRACKING_URI", variable)
    (launch.folder / "run").mkdir()
    (launch.folder / "run/config.yaml").write_text(yaml.safe_dump({"tracking": tracking}))
    done = launch("ui", "--run", "run")
    assert done.status == 2
    assert done.err.startswith("error: run: run has no mlflow.db; ")
    assert sentence in done.err
    assert len(done.err.splitlines()) == 1


def test_explain_and_nearest() -> None:
    known = ["model.optimizer.lr", "model.drafter.block_size", "run_dir"]
    assert nearest("model.lr", known) == "; did you mean 'model.optimizer.lr'?"
    assert nearest("zzz", known) == ""
    assert explain('Parser key "a.b":\n  Expected a <int>. Got value: x', known) == (
        "a.b: Expected a <int>. Got value: x"
    )


# ---------------------------------------------------------------- mistakes in a run


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (
            ["--model.drafter.blocksize=3"],
            "unknown key 'model.drafter.blocksize'; did you mean 'model.drafter.block_size'?",
        ),
        (["--model.lr", "3"], "unknown key 'model.lr'; did you mean 'model.optimizer.lr'?"),
        (["--model.relay.enabled=maybe"], "model.relay.enabled: Expected a <class 'bool'>"),
        (["--model.drafter.block_size=1"], "drafter.block_size is 1; "),  # raised on instantiation
        (["--data.train=nowhere.jsonl"], "data.train: nowhere.jsonl"),  # raised inside trainer.fit
        (["--trainer.accelerator=gpu"], "trainer: No supported gpu backend"),
        (["--ckpt_path=nowhere.ckpt"], "ckpt_path: nowhere.ckpt does not exist"),
        (["--ckpt_path=last"], "ckpt_path: last (runs/small/checkpoints/last.ckpt) does not exist"),
        (["--validation.batch_size=0"], "validation.batch_size is 0; give 1 or more"),
        (["--checkpoint.monitor=val/tua"], "checkpoint.monitor is val/tua, which is not logged"),
    ],
)
def test_mistakes_are_one_sentence_and_status_2(
    options: list[str], sentence: str, launch: "Launcher", recipe: Path, run_options: list[str]
) -> None:
    if "gpu" in options[0] and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    done = launch("fit", "--config", recipe, *run_options, *options)
    assert done.status == 2
    assert done.err.startswith(f"error: {sentence}")
    assert len(done.err.splitlines()) == 1


def test_unknown_key_in_a_recipe(launch: "Launcher", recipe: Path) -> None:
    recipe.write_text(recipe.read_text().replace("num_rounds", "numrounds"))
    line = 1 + recipe.read_text().splitlines().index("  numrounds: 2")
    done = launch("fit", "--config", recipe)
    assert done.err == (
        f"error: {recipe}: line {line}: unknown key 'rollout.numrounds'; "
        "did you mean 'rollout.num_rounds'?\n"
    )


def test_missing_value_names_its_key(launch: "Launcher") -> None:
    assert launch("fit").err.startswith("error: model.target.path is missing: set it in the recipe")


# ---------------------------------------------------------------- a run


def weights(path: Path) -> dict[str, torch.Tensor]:
    return torch.load(path, weights_only=True)["state_dict"]


def test_plain_output_checkpoints_and_recipe(
    launch: "Launcher", recipe: Path, run_options: list[str]
) -> None:
    done = launch("fit", "--config", recipe, *run_options)
    assert done.status == 0, done.err
    assert "\x1b" not in done.out + done.err
    assert "\r" not in done.out + done.err
    assert done.err == ""
    for line in (
        r"train       DFlow: .+",
        r"drafter     trained parameters: drafter [\d,]+, relay [\d,]+; 1 layer, block size 4, .+",
        r"data        .+train.jsonl: 24 rows, [\d,]+ tokens",
        r"validation  every 2 steps: loss, and 1 prompt of each family decoded, relay on and off",
        r"steps       4 \(0.7 epochs\); 4 rows a step",
        r"folder      runs/small, a new run",
        r"step 4/4  loss [\d.]+  tau( [\d.]+){3}  accepted \d+%  [\d,]+ tokens/s  mem [\d.]+ GiB  "
        r"eta 0:00",
        r"step 4 validation: loss [\d.]+, tau of decoded prompts",
        *(rf"{family} +[\d.]+ +[\d.]+ +[+-][\d.]+% +[\d.]+ (now|at step 2)"
          for family in ("chat", "code", "math", "all")),
        r"  best val/tau  [\d.]+",
    ):  # fmt: skip
        assert re.search(f"^{line}$", done.out, re.M), line
    assert not re.search(" $", done.out, re.M)
    assert "export --checkpoint runs/small/checkpoints/best.ckpt" in done.out

    folder = launch.folder / "runs/small"
    assert {path.name for path in (folder / "checkpoints").iterdir()} == {"best.ckpt", "last.ckpt"}
    checkpoint = torch.load(folder / "checkpoints/last.ckpt", weights_only=True)
    assert not any("target" in name for name in checkpoint["state_dict"])
    assert checkpoint["recipe"]["rollout"]["num_anchors"] == 4
    # The saved recipe is a recipe: rerun, it makes a new run with the same numbers.
    again = launch("fit", "--config", folder / "config.yaml")
    assert again.status == 0, again.err
    assert "folder      runs/small-2, a new run" in again.out
    first = weights(launch.folder / "runs/small/checkpoints/last.ckpt")
    second = weights(launch.folder / "runs/small-2/checkpoints/last.ckpt")
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_resume_is_exact_and_refuses_another_recipe(
    launch: "Launcher", recipe: Path, run_options: list[str]
) -> None:
    fit = ("fit", "--config", recipe, *run_options)
    schedule = (
        "--model.optimizer.warmup_ratio=1e-9"  # min_lr_ratio 1: no step count in the schedule
    )
    fit = (*fit, schedule, "--model.optimizer.min_lr_ratio=1.0")
    assert launch(*fit, "--run_dir=whole").status == 0
    assert launch(*fit, "--run_dir=half", "--trainer.max_steps=2").status == 0
    refused = launch(*fit, "--run_dir=half", "--ckpt_path=last", "--model.optimizer.lr=0.5")
    assert refused.status == 2
    assert "was trained with model.optimizer.lr = 0.0006, this command says 0.5" in refused.err
    resumed = launch(*fit, "--run_dir=half", "--ckpt_path=last", "--validation.max_new_tokens=6")
    assert resumed.status == 0, resumed.err
    assert "folder      half, resumed from half/checkpoints/last.ckpt at step 2" in resumed.out
    assert "finished at step 4" in resumed.out
    whole = weights(launch.folder / "whole/checkpoints/last.ckpt")
    half = weights(launch.folder / "half/checkpoints/last.ckpt")
    assert all(torch.equal(whole[name], half[name]) for name in whole)


@pytest.mark.parametrize(
    ("key", "old", "new", "said"),
    [
        ("trainer.accumulate_grad_batches", 1, 2, None),
        ("trainer.gradient_clip_val", None, 1.0, None),
        ("trainer.precision", None, "bf16-mixed", None),
        ("trainer.precision", None, "32-true", ""),  # the same, spelled out
        ("trainer.max_steps", 10, 20, "the learning rate's schedule follows it"),
        ("trainer.strategy", "auto", "deepspeed_stage_2", "rounded otherwise"),
        ("trainer.of_a_later_release", None, 1, "is not known"),
        ("validation.max_new_tokens", 96, 32, "measured otherwise"),
        ("checkpoint.monitor", "val/tau", "val/math/tau", "the best score so far is forgotten"),
        ("tracking.experiment", "a", "b", ""),
        ("model.of_a_later_release", None, 1, None),
    ],
)
def test_f34_what_a_resume_does_with_a_changed_value(key, old, new, said) -> None:
    """F34: another number of rows a step, other clipping or precision was taken without a word."""
    section, name = key.split(".")
    saved = SavedRun(Path("last.ckpt"), {section: {name: old}}, None, None)
    assert saved.compare({section: {name: old}}, {}) == []
    if said is None:
        with pytest.raises(InputError, match=rf"trained with {key} = .*, this command says {new}"):
            saved.compare({section: {name: new}}, {})
        return
    warnings = saved.compare({section: {name: new}}, {})
    assert len(warnings) == bool(said)
    assert all(one.startswith(f"{key} was ") and said in one for one in warnings)


def test_f44_a_validation_of_one_token_measures_nothing() -> None:
    """F44: the first token comes with the prompt, so that tau was 1 whatever the drafter."""
    with pytest.raises(InputError, match=r"validation\.max_new_tokens is 1; give 2 or more"):
        ValidationDecoding(max_new_tokens=1)


@pytest.mark.parametrize("method", ["block", "eagle3"])
def test_f34_every_key_has_a_rule(method: Method) -> None:
    """F34: those of recipes are among them, since a recipe with any other key is refused."""
    parser = recipe_parser(method)
    keys = [
        key for key in parser.get_defaults(skip_validation=True).keys()  # noqa: SIM118
        if key != "config"
    ]  # fmt: skip
    assert len(keys) > 90
    assert [key for key in keys if rule_of(key) is None] == []
    assert rule_of("trainer") is None  # whose keys come from Lightning: each needs a thought


def test_f6_a_moved_run_keeps_its_best_checkpoint(
    launch: "Launcher", recipe: Path, run_options: list[str]
) -> None:
    """Lightning forgets the best score where the folder's absolute path differs."""
    schedule = ("--model.optimizer.warmup_ratio=1e-9", "--model.optimizer.min_lr_ratio=1.0")
    fit = ("fit", "--config", recipe, *run_options, *schedule)
    assert launch(*fit, "--run_dir=here", "--trainer.max_steps=2").status == 0
    (launch.folder / "here").rename(launch.folder / "there")
    best, last = (launch.folder / "there/checkpoints" / name for name in ("best.ckpt", "last.ckpt"))
    checkpoint = torch.load(last, weights_only=True)
    (scores,) = (one for one in checkpoint["callbacks"].values() if "best_model_score" in one)
    unbeatable = torch.tensor(99.0)
    scores |= {"best_model_score": unbeatable, "kth_value": unbeatable}
    scores["best_k_models"] = dict.fromkeys(scores["best_k_models"], unbeatable)
    torch.save(checkpoint, last)
    before = best.read_bytes()
    resumed = launch(*fit, "--run_dir=there", "--ckpt_path=last")
    assert resumed.status == 0, resumed.err
    assert "finished at step 4" in resumed.out
    assert best.read_bytes() == before
    after = torch.load(last, weights_only=True)["callbacks"].values()
    (kept,) = (one for one in after if "best_model_score" in one)
    assert kept["best_model_score"] == 99
    assert kept["best_model_path"] == str(best.resolve())
    assert list(kept["best_k_models"]) == [str(best.resolve())]


def test_f28_a_checkpoint_from_elsewhere_gets_a_new_run_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was resumed into the folder of the recipe's name, over another training."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs/small/checkpoints").mkdir(parents=True)
    for fresh in (True, False):
        new = default_run_dir("small", "elsewhere/my.ckpt", fresh=fresh)
        assert new == Path("runs/small-2")
        own = default_run_dir("small", "runs/other/checkpoints/last.ckpt", fresh=fresh)
        assert own == tmp_path / "runs/other"
    assert default_run_dir("other", "elsewhere/my.ckpt", fresh=True) == Path("runs/other")
    assert default_run_dir("small", "last", fresh=True) == Path("runs/small")


def test_checkpoint_never_overrides_the_command_line(
    launch: "Launcher", recipe: Path, run_options: list[str]
) -> None:
    """Lightning would adopt the checkpoint's values; ours wins or the command is refused."""
    options = ("--config", recipe, *run_options)
    assert launch("fit", *options).status == 0
    done = launch("test", *options, "--ckpt_path=best", "--model.drafter.block_size=8")
    assert done.status == 2
    assert "block_size is 8 but the checkpoint has 4" in done.err
    tested = launch("test", *options, "--ckpt_path=best")
    assert tested.status == 0, tested.err
    assert re.search(
        r"^tau of decoded test prompts$.*^all +[\d.]+ +[\d.]+ ", tested.out, re.M | re.S
    )
    validated = launch("validate", *options, "--ckpt_path=runs/small/checkpoints/last.ckpt")
    assert validated.status == 0, validated.err
    assert not (launch.folder / "runs/small-2").exists()


def test_last_is_written_between_validations_and_at_the_end(
    launch: "Launcher", recipe: Path, run_options: list[str]
) -> None:
    done = launch(
        "fit",
        "--config",
        recipe,
        *run_options,
        "--trainer.max_steps=3",
        "--checkpoint.save_top_k=2",
    )
    assert done.status == 0, done.err
    files = sorted(path.name for path in (launch.folder / "runs/small/checkpoints").iterdir())
    assert files[0] == "last.ckpt"
    assert re.fullmatch(r"step2-[\d.]+\.ckpt", files[1])
    assert (
        torch.load(launch.folder / "runs/small/checkpoints/last.ckpt", weights_only=True)[
            "global_step"
        ]
        == 3
    )


def test_without_validation_data_the_last_checkpoint_counts(
    launch: "Launcher", recipe: Path, run_options: list[str]
) -> None:
    options = [
        o for o in run_options if not o.startswith(("--data.validation", "--trainer.val_check"))
    ]
    done = launch("fit", "--config", recipe, *options)
    assert done.status == 0, done.err
    assert "checkpoint    runs/small/checkpoints/last.ckpt" in done.out


class Terminal(io.StringIO):
    """A terminal for what is printed; its width is that of COLUMNS."""

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("columns", [80, 200])
def test_what_a_person_sees_of_a_run(
    columns: int,
    launch: "Launcher",
    recipe: Path,
    run_options: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    for name, value in {"TERM": "xterm-256color", "COLUMNS": str(columns)}.items():
        monkeypatch.setenv(name, value)
    assert launch("fit", "--config", recipe, *run_options).status == 0
    assert "\x1b[" in terminal.getvalue()
    paper = displayed(terminal.getvalue(), columns)
    assert not paper.wide
    seen = "\n".join(paper.text_lines())
    beside = (
        r" +" if columns == 200 else r" +100%  0:00 left\n"
    )  # below the bar where there is no room
    state = r"loss [\d.]+  tau( [\d.]+){3}  accepted \d+%  [\d,]+ tokens/s"
    assert re.search(rf"step 4/4 ━+{beside}{state}", seen), seen
    assert seen.index("validation: loss") < seen.index("step 4/4")  # tables above the bar


def test_quiet_prints_nothing(launch: "Launcher", recipe: Path, run_options: list[str]) -> None:
    done = launch("fit", "--config", recipe, *run_options, "--quiet")
    assert (done.status, done.out, done.err) == (0, "", "")


class Gone(io.StringIO):
    """A pipe whose reader leaves after the first line."""

    def write(self, text: str) -> int:
        if "\n" in self.getvalue():
            raise BrokenPipeError(32, "Broken pipe")
        return super().write(text)


def test_a_run_outlives_its_reader(
    launch: "Launcher", recipe: Path, run_options: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdout", Gone())
    done = launch("fit", "--config", recipe, *run_options)
    assert done.status == 0
    assert done.err == "standard output is gone (Broken pipe); the run goes on without it\n"
    last = torch.load(launch.folder / "runs/small/checkpoints/last.ckpt", weights_only=True)
    assert last["global_step"] == 4


def test_interrupt_ends_with_130(
    launch: "Launcher", recipe: Path, run_options: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from dflow_lightning.training.module import DrafterModule

    def interrupt(*args: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(DrafterModule, "training_step", interrupt)
    done = launch("fit", "--config", recipe, *run_options)
    assert done.status == 130
    assert "Traceback" not in done.err


# ---------------------------------------------------------------- files that are no checkpoint


def truncated(path: Path) -> None:
    """A checkpoint of a run that was copied halfway."""
    content = {"state_dict": {"weight": torch.ones(500)}, "recipe": {}, "global_step": 1}
    torch.save(content, path)
    path.write_bytes(path.read_bytes()[:-700])


NO_CHECKPOINT = {
    "truncated": (truncated, "cannot be read (it is truncated)"),
    "folder": (Path.mkdir, "is a folder"),
    "empty": (Path.touch, "cannot be read (it is empty)"),
    "README": (lambda path: path.write_text("# A run"), "cannot be read (it is not a checkpoint)"),
    "other weights": (lambda path: torch.save({"model": {}}, path), "is not of a run"),
    "code": (lambda path: torch.save({"state_dict": print}, path), "pickled code, which is never"),
}


@pytest.mark.parametrize("kind", NO_CHECKPOINT)
def test_no_checkpoint_is_one_sentence_wherever_one_is_taken(
    kind: str, launch: "Launcher", recipe: Path, run_options: list[str]
) -> None:
    """Fault F32 of the audit: `fit` and `validate` ended in a traceback where `export` did not."""
    make, expected = NO_CHECKPOINT[kind]
    make(launch.folder / "bad.ckpt")
    for command in ("fit", "validate", "test"):
        done = launch(command, "--config", recipe, *run_options, "--ckpt_path=bad.ckpt")
        assert done.status == 2
        assert done.err.startswith("error: ckpt_path: bad.ckpt ")
        assert expected in done.err
        assert done.err.endswith("give the .ckpt file of a run\n")
        assert len(done.err.splitlines()) == 1
    (launch.folder / "drafter").mkdir()
    of_export = ("export", "--checkpoint", "bad.ckpt", "--out", "out")
    of_validation = ("validate-export", "--drafter", "drafter", "--target", "x",
                     "--checkpoint", "bad.ckpt")  # fmt: skip
    for arguments in (of_export, of_validation):
        done = launch(*arguments)
        assert done.status == 2
        assert done.err.startswith("error: checkpoint: bad.ckpt ")
        assert expected in done.err
        assert len(done.err.splitlines()) == 1
