"""`dflow-train fit | validate | test`: LightningCLI over this package's fixed classes."""

import logging
import sys
import warnings
from collections.abc import Sequence
from inspect import signature
from pathlib import Path
from typing import Any

import yaml
from jsonargparse import ActionConfigFile
from lightning.pytorch import Trainer
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_only

from dflow_lightning.commandline.arguments import OneSentence, spell_out
from dflow_lightning.commandline.recipe import Recipe
from dflow_lightning.data.datamodule import ChatDataModule
from dflow_lightning.errors import InputError, RunError
from dflow_lightning.files import check_no_chain
from dflow_lightning.models.device import device_of, run_on
from dflow_lightning.run.checkpoint import CHECKPOINT_FOLDER, Checkpointing, find_checkpoint
from dflow_lightning.run.guards import Guards, out_of_memory
from dflow_lightning.run.progress import RunProgress
from dflow_lightning.run.resume import SavedRun
from dflow_lightning.run.signals import GracefulStop, Signals, Stopped
from dflow_lightning.run.strategy import check_name, check_precision
from dflow_lightning.run.summary import decoded, print_decoded
from dflow_lightning.terminal import command, labelled, screen, shown
from dflow_lightning.tracking.callback import RecipeRecord, Tracking
from dflow_lightning.training.base import BLOCK, Method
from dflow_lightning.training.eagle3_module import Eagle3Module
from dflow_lightning.training.module import DrafterModule
from dflow_lightning.training.rollout import OnlineRollout
from dflow_lightning.training.saved import open_checkpoint
from dflow_lightning.training.validation import ValidationDecoding

RUNS_FOLDER = Path("runs")
SECTIONS = {
    "rollout": OnlineRollout,
    "validation": ValidationDecoding,
    "tracking": Tracking,
    "guards": Guards,
    "checkpoint": Checkpointing,
}
MODULES: dict[Method, type] = {"block": DrafterModule, "eagle3": Eagle3Module}
TRAINER_DEFAULTS = {
    "deterministic": True,
    "enable_model_summary": False,
    "log_every_n_steps": 10,
}
INTERPOLATION = {"parser_mode": "omegaconf+"}  # plain `omegaconf` leaves stale values behind
COMMANDS = ("fit", "validate", "test")
METHOD_HELP = (
    "What to train: `block` is a block drafter (DFlash, DFlow), `eagle3` the autoregressive "
    "baseline. It determines which settings `model` accepts."
)


class RunParser(OneSentence, LightningArgumentParser):  # type: ignore[misc]
    """LightningCLI's parser with errors in one sentence."""


class TrainCLI(LightningCLI):
    """Fixed model and data classes; the callbacks that a run needs have sections of their own."""

    def __init__(self, args: Sequence[str], signals: Signals):
        self._signals = signals
        self._recipe = Recipe.read(args)
        self._method = method_of(self._recipe)
        super().__init__(
            MODULES[self._method],
            ChatDataModule,
            args=list(args),
            parser_class=RunParser,
            parser_kwargs={
                "prog": "dflow-train",
                **INTERPOLATION,
                **{command: dict(INTERPOLATION) for command in COMMANDS},
            },
            save_config_callback=RecipeRecord,
            save_config_kwargs={"save_to_log_dir": False},
            seed_everything_default=0,
            trainer_defaults=TRAINER_DEFAULTS,
            auto_configure_optimizers=False,
        )

    @staticmethod
    def subcommands() -> dict[str, set[str]]:
        """The trainer's commands that make sense for a drafter."""
        return {k: v for k, v in LightningCLI.subcommands().items() if k in COMMANDS}

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """The sections beside model, data and trainer, and the values that must agree."""
        add_own_arguments(parser, self._method)

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        """Parses, and settles which folder and which checkpoint this run is about."""
        self.config = self._recipe.parse(parser, self._parser(args[0]))
        command = self.config.subcommand
        self._settings = self.config[command]
        name = self._settings.ckpt_path
        folder = self._settings.run_dir or self._settings.trainer.default_root_dir
        folder = folder or default_run_dir(
            self._recipe.name, None if name is None else str(name), fresh=command == "fit"
        )
        self._settings.run_dir = self.run_dir = Path(folder)
        check_no_chain(self.run_dir, "run_dir")
        self.resumed: SavedRun | None = None
        if name is not None:
            path = find_checkpoint(self.run_dir, str(name))
            self._settings.ckpt_path = None if path is None else str(path)
            if path is not None:
                check_no_chain(path, "ckpt_path")
                # Opened here for every command: Lightning ends in a traceback where it cannot.
                saved = open_checkpoint(path, "ckpt_path")
                self.resumed = SavedRun.of(saved) if command == "fit" else None

    def _parse_ckpt_path(self) -> None:
        """Lightning would let the checkpoint's values win over the command line in silence."""
        if self.resumed:
            parser = self._parser(self.config.subcommand)
            settings = (self._settings, parser.get_defaults(skip_validation=True))
            recipe, defaults = (
                yaml.safe_load(
                    parser.dump(one, skip_none=False, format="yaml", skip_validation=True)
                )
                for one in settings
            )
            for warning in self.resumed.compare(recipe, defaults):
                if rank_zero_only.rank == 0:  # type: ignore[attr-defined]
                    print(labelled("warning: ", warning, sys.stderr), file=sys.stderr)

    def instantiate_classes(self) -> None:
        """Builds everything; the target's type is that of the trainer's device."""
        with run_on(device_of(self._settings.trainer.accelerator)):
            super().instantiate_classes()

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        """The trainer of this run folder, with the record and the progress display."""
        settings = self.config_init[self.subcommand]
        check_name(settings.trainer.strategy)
        check_precision(settings.trainer.strategy, settings.trainer.precision)
        if settings.trainer.enable_checkpointing is False:
            self._parser(self.subcommand).callback_keys.remove("checkpoint")
        kwargs["callbacks"] = [*as_list(settings.trainer.callbacks), GracefulStop(self._signals)]
        if settings.quiet:
            kwargs["enable_progress_bar"] = False
        elif settings.trainer.enable_progress_bar is not False:
            kwargs["callbacks"].append(RunProgress())
        if self.subcommand == "fit" and self._settings.data.validation is None:
            kwargs["limit_val_batches"] = 0
        kwargs["default_root_dir"] = str(self.run_dir)
        kwargs["logger"] = self._loggers(settings)
        try:
            return super().instantiate_trainer(**kwargs)
        except MisconfigurationException as error:
            raise InputError(f"trainer: {wrong_setting(error)}") from error

    def _loggers(self, settings: Any) -> Any:
        """The recipe's own loggers and ours; `trainer.logger: false` means none at all."""
        chosen = settings.trainer.logger
        if chosen is False or not settings.tracking.enabled:
            return chosen or False
        resumed = self.resumed
        names = (resumed.run_id, resumed.tracking_key) if resumed else (None, None)
        suffix = "" if self.subcommand == "fit" else f"-{self.subcommand}"
        own = settings.tracking.open(self.run_dir, names[0], suffix, names[1])
        return [own] if chosen is True else [own, *as_list(chosen)]

    def after_fit(self) -> None:
        """Prints what the run has written and the commands to use it."""
        if not self.trainer.is_global_zero or self._settings.quiet:
            return
        best = getattr(self.trainer.checkpoint_callback, "best_model_path", "")
        score = getattr(self.trainer.checkpoint_callback, "best_model_score", None)
        last = getattr(self.trainer.checkpoint_callback, "last_model_path", "")
        print(f"finished at step {self.trainer.global_step:,}")
        if score is not None:
            print(f"  best {self.trainer.checkpoint_callback.monitor:<9}{float(score):.3f}")  # type: ignore[union-attr]
        if checkpoint := best or last:
            print(labelled("  checkpoint    ", shown(checkpoint)))
            out = shown(self.run_dir / "export")
            words = ["dflow-train", "export", "--checkpoint", shown(checkpoint), "--out", out]
            print(command("  export        ", words))
        if (self.run_dir / "mlflow.db").exists():
            words = ["dflow-train", "ui", "--run", shown(self.run_dir)]
            print(command("  dashboard     ", words))

    def after_validate(self) -> None:
        """Prints the decoded tau."""
        self._print_decoded("val")

    def after_test(self) -> None:
        """Prints the decoded tau."""
        self._print_decoded("test")

    def _print_decoded(self, prefix: str) -> None:
        found = decoded(self.trainer.callback_metrics, prefix)
        if found and self.trainer.is_global_zero and not self._settings.quiet:
            print_decoded(screen(), f"tau of decoded {prefix} prompts", found)


def sections(method: Method) -> dict[str, Any]:
    """The sections of a method's recipe beside model, data and trainer."""
    return {k: v for k, v in SECTIONS.items() if method == BLOCK or k != "rollout"}


def add_own_arguments(parser: LightningArgumentParser, method: Method) -> None:
    """Add the sections beside model, data and trainer, and what belongs to the run itself."""
    for section, callback in sections(method).items():
        parser.add_lightning_class_args(callback, section)
    parser.add_argument("--method", type=Method, default=BLOCK, help=METHOD_HELP)
    parser.add_argument(
        "--run_dir",
        type=Path | None,
        default=None,
        help="Run folder: checkpoints, resolved recipe and MLflow store. By default a new folder "
        "runs/<recipe name>; a folder given here is used as it is.",
    )
    parser.add_argument("--quiet", type=bool, default=False, help="Print warnings and errors only.")
    parser.link_arguments("model.target.path", "data.tokenizer")


def recipe_parser(method: Method, command: str = "fit", prog: str | None = None) -> Any:
    """The parser of a command's settings, without LightningCLI, which would also run it.

    For the commands that only look at a recipe: `plan`, `doctor`, `sweep` and `completion`.
    """
    name = prog or f"dflow-train {command}"
    made: Any = RunParser(prog=name, **INTERPOLATION)  # type: ignore[arg-type]
    made.add_argument(
        "-c", "--config", action=ActionConfigFile, help="A recipe; repeat it for overlays."
    )
    made.add_argument(
        "--seed_everything", type=bool | int, default=0, help="Random seed of the run."
    )
    made.add_lightning_class_args(Trainer, "trainer")
    made.set_defaults({f"trainer.{key}": value for key, value in TRAINER_DEFAULTS.items()})
    made.add_lightning_class_args(MODULES[method], "model")
    made.add_lightning_class_args(ChatDataModule, "data")
    add_own_arguments(made, method)
    made.add_method_arguments(Trainer, command, skip=LightningCLI.subcommands()[command])
    return made


def check_sections(recipe: Any) -> None:
    """Refuse what `fit` would refuse before it loads anything; for commands that do not train.

    Args:
        recipe: the parsed settings, a section each.

    Raises:
        InputError: a section has a value out of its range, or two do not fit each other.
    """
    check_name(recipe.trainer.strategy)
    check_precision(recipe.trainer.strategy, recipe.trainer.precision)
    ChatDataModule(**recipe.data.as_dict())
    built = {name: of(**recipe[name].as_dict()) for name, of in sections(recipe.method).items()}
    if isinstance(rollout := built.get("rollout"), OnlineRollout):
        model = recipe.model
        rollout.check(model.num_anchors, model.relay.enabled, model.drafter.carryover)


def method_of(recipe: Recipe) -> Method:
    """The method that recipes and command line name, the last one; it decides on the parser.

    Raises:
        InputError: there is no such method.
    """
    found = recipe.setting("method", BLOCK)
    if not isinstance(found, str) or found not in MODULES:
        message = f"method is {found}; choose of {', '.join(MODULES)}"
        raise InputError(recipe.located(message))
    return found


def as_list(value: Any) -> list[Any]:
    """None, one thing or a list of things as a list."""
    return [] if value is None else list(value) if isinstance(value, list | tuple) else [value]


def default_run_dir(name: str, ckpt_path: str | None, *, fresh: bool) -> Path:
    """The folder of a run that names none.

    The folder that the checkpoint it reads was written to; for `last`, `best` and `auto` the newest
    folder of that name. A new training, and a checkpoint that lies in no run folder, get a folder
    that no other training uses, so that nothing is written over.
    """
    if ckpt_path is not None and ckpt_path not in ("last", "best", "auto"):
        folder = Path(ckpt_path).absolute().parent
        if folder.name == CHECKPOINT_FOLDER:
            return folder.parent
        fresh, ckpt_path = True, None
    folder, number, newest = RUNS_FOLDER / name, 1, None
    while (folder / CHECKPOINT_FOLDER).exists():
        number, newest = number + 1, folder
        folder = RUNS_FOLDER / f"{name}-{number}"
    return folder if newest is None or (fresh and ckpt_path is None) else newest


def quiet() -> None:
    """Leaves the terminal to what `progress.py` prints, and to warnings."""
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel("WARNING")
    for name in ("lightning.pytorch.loggers.mlflow", "alembic"):
        logging.getLogger(name).setLevel("ERROR")
    # Lightning against a newer torch; nothing a user can change.
    warnings.filterwarnings("ignore", message=r".*isinstance\(treespec, LeafSpec\)")
    # DeepSpeed against a newer torch.
    warnings.filterwarnings("ignore", message=r".*all_gather_into_tensor.* is deprecated")


def wrong_setting(error: Exception) -> str | None:
    """What Lightning says of the trainer's settings, in one line; None for any other error.

    It judges some of them only when the data are known, and then by a ValueError or TypeError
    that names the setting in backquotes.
    """
    text = " ".join(str(error).split())
    names = (f"`{name}`" for name in signature(Trainer.__init__).parameters)
    judged = isinstance(error, ValueError | TypeError) and any(name in text for name in names)
    return text if judged or isinstance(error, MisconfigurationException) else None


def start(args: Sequence[str]) -> TrainCLI:
    """Runs a `fit`, `validate` or `test` command line to its end; a signal raises `Stopped`."""
    quiet()
    with Signals() as signals:
        try:
            return TrainCLI(spell_out({"--quiet": bool}, args), signals)
        except Stopped:
            raise
        except SystemExit as stop:
            if isinstance(stop.__context__, KeyboardInterrupt):  # Lightning makes it exit 1
                raise KeyboardInterrupt from stop
            raise
        except Exception as error:
            if said := out_of_memory(error, signals.failed_step):
                raise RunError(said) from error
            if said := wrong_setting(error):
                raise InputError(f"trainer: {said}") from error
            raise


def run(args: Sequence[str]) -> int:
    """Runs such a command line and returns the exit status."""
    try:
        start(args)
    except Stopped as stop:
        if rank_zero_only.rank == 0:  # type: ignore[attr-defined]
            print(stop.said, file=sys.stderr)
        return int(stop.code or 0)
    return 0
