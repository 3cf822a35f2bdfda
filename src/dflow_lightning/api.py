"""Training from Python: what `dflow-train fit` does, called as a function."""

import json
import os
import signal
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from lightning.pytorch import Trainer

from dflow_lightning.data.datamodule import ChatDataModule
from dflow_lightning.errors import InputError, RunError
from dflow_lightning.export.command import export_command
from dflow_lightning.run.fit import TrainCLI, start
from dflow_lightning.run.signals import Stopped
from dflow_lightning.training.module import DrafterModule


@dataclass(frozen=True)
class TrainedRun:
    """A training that has ended.

    Attributes:
        folder: the run folder: checkpoints, `config.yaml` with all settings, the MLflow store.
        checkpoint: the checkpoint of the highest decoded tau, or the last one where nothing was
            validated; None where the recipe writes none.
        tau: the acceptance length that validation decoded with that checkpoint, in tokens a target
            forward; None where nothing was validated.
        metrics: what was logged last, by name: `train/loss` in nats a token, `train/tau_round0` and
            `val/tau` in tokens a target forward, ...
        module: the drafter, relay and target, with the weights of the last step.
        data: the loaders.
        trainer: Lightning's trainer, at the end of `fit`.
    """

    folder: Path
    checkpoint: Path | None
    tau: float | None
    metrics: dict[str, float]
    module: DrafterModule
    data: ChatDataModule
    trainer: Trainer

    def export(
        self, out: str | Path, *, dtype: Literal["bfloat16", "float32"] = "bfloat16"
    ) -> Path:
        """Write `checkpoint` in the layout that SGLang, vLLM and `load_decoder` read.

        Args:
            out: folder to write; an earlier export there is replaced in one step.
            dtype: how the weights are stored.

        Returns:
            `out`, the export read back and compared.

        Raises:
            InputError: there is no checkpoint, or something else is at `out`.
        """
        if self.checkpoint is None:
            raise InputError(
                f"checkpoint: the run in {self.folder} wrote none; train with "
                "trainer.enable_checkpointing true"
            )
        target = self.module.target_config.path
        export_command(checkpoint=self.checkpoint, out=Path(out), dtype=dtype, target=target)
        return Path(out)


def train(
    recipe: str | Path | Sequence[str | Path],
    settings: Mapping[str, Any] | None = None,
    *,
    run_dir: str | Path | None = None,
    resume: str | Path | None = None,
) -> TrainedRun:
    """Train a drafter from a recipe: `dflow-train fit --config RECIPE --key value ...`.

    Example:
        >>> run = train("recipes/tiny-dflow.yaml", {"trainer.max_steps": 300})
        >>> run.metrics["train/tau_round0"]

    For a recipe of several processes Lightning starts the calling script once more for each; a
    notebook is not a script, so it trains in one process, and `dflow-train fit` in several. The
    random generators are seeded with `seed_everything` of the recipe.

    Args:
        recipe: path of a recipe, or of several: each is laid over those before it.
        settings: values by dotted key, as on the command line. A list replaces the recipe's.
        run_dir: where checkpoints and records go; by default a new folder `runs/<recipe name>`.
        resume: `last`, `best`, `auto` or a checkpoint file to continue from.

    Raises:
        InputError: an unknown key, a value of the wrong kind, or files that do not fit.
        RunError: the run could not go on, or the process was told to end; a checkpoint is written.
        KeyboardInterrupt: after Ctrl-C or the notebook's stop button; a checkpoint is written.
    """
    given: Any = settings
    if given is not None and not isinstance(given, Mapping):
        raise InputError(f"settings is {settings!r}; give a dict of values by dotted key")
    args = arguments(recipe, dict(settings or {}), run_dir, resume)
    with settings_of_torch_kept():
        try:
            cli = start(["fit", *args])
        except Stopped as stop:
            said = stop.said.replace("--ckpt_path last", 'resume="last"')
            raise (KeyboardInterrupt if stop.signum == signal.SIGINT else RunError)(said) from stop
    score = getattr(cli.trainer.checkpoint_callback, "best_model_score", None)
    return TrainedRun(
        folder=cli.run_dir,
        checkpoint=checkpoint_of(cli),
        tau=None if score is None else float(score),
        metrics={name: float(value) for name, value in cli.trainer.callback_metrics.items()},
        module=cli.model.eval(),
        data=cli.datamodule,
        trainer=cli.trainer,
    )


def arguments(
    recipe: str | Path | Sequence[str | Path],
    settings: Mapping[str, Any],
    run_dir: str | Path | None = None,
    resume: str | Path | None = None,
) -> list[str]:
    """The command line of a training, after its `fit`."""
    recipes = [recipe] if isinstance(recipe, str | Path) else list(recipe or ())
    if not recipes:
        raise InputError(f"recipe is {recipe!r}; give the path of a recipe")
    for path in map(Path, recipes):
        if not path.is_file():
            raise InputError(
                f"recipe: {path} does not exist; `dflow-train init` writes the shipped recipes"
            )
    own = {"run_dir": run_dir, "ckpt_path": resume}
    values = dict(settings) | {key: value for key, value in own.items() if value is not None}
    return [
        *(f"--config={path}" for path in recipes),
        *(f"--{key}={text(key, value)}" for key, value in values.items()),
    ]


def text(key: str, value: Any) -> str:
    """A value as the command line has it."""
    if isinstance(value, str | Path):
        return str(value)
    try:
        return json.dumps(value, default=os.fspath)  # paths, in lists too
    except TypeError as error:
        raise InputError(
            f"{key} is {value!r}, which no recipe can hold; give a number, a text, a list or a dict"
        ) from error


def checkpoint_of(cli: TrainCLI) -> Path | None:
    """The best checkpoint of a run, else its last one."""
    callback = cli.trainer.checkpoint_callback
    for name in ("best_model_path", "last_model_path"):
        if path := getattr(callback, name, ""):
            return Path(path)
    return None


@contextmanager
def settings_of_torch_kept() -> Iterator[None]:
    """Take back what a training sets for its whole process, which a notebook goes on with."""
    strict = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    with warnings.catch_warnings():
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(strict, warn_only=warn_only)
