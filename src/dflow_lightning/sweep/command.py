"""`dflow-train sweep`: recipes times seeds, trained, exported and measured one after the other.

Each is a process of its own, so that a crash ends one run and not the sweep. What is finished is
kept; a second call resumes where the first one stopped.
"""

import hashlib
import itertools
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console

from dflow_lightning.bench.measure import BenchSettings
from dflow_lightning.bench.suite import SuiteChoice, suite_path
from dflow_lightning.commandline.arguments import (
    ToolParser,
    option_types,
    spell_out,
    split_options,
)
from dflow_lightning.commandline.recipe import Recipe
from dflow_lightning.errors import InputError, check_counts
from dflow_lightning.html import with_spread
from dflow_lightning.models.device import Dtype, choose_device
from dflow_lightning.models.pretrained import read_config
from dflow_lightning.run.fit import check_sections, method_of, quiet, recipe_parser
from dflow_lightning.sweep.folder import SweepFolder, SweepStore
from dflow_lightning.sweep.member import Children, Member, Outcome
from dflow_lightning.terminal import print_table, screen, table

# The sweep gives these to each run itself.
OURS = (
    "run_dir",
    "ckpt_path",
    "seed_everything",
    "model.seed",
    "data.seed",
    "tracking.uri",
    "tracking.experiment",
    "tracking.run_name",
    "tracking.tags",
)


@dataclass(kw_only=True)
class SweepSettings:
    """Options of a sweep; all other options are passed to each training.

    Args:
        config: recipes; list several, or repeat `--config`.
        seeds: number of seeds, from 0; a seed sets weights, anchors and data order.
        out: sweep folder: one folder per run, and one MLflow store for all.
        suite: prompts to measure with, see `bench`.
        per_family: prompts per family, for the suite `tiny` or a file.
        limit: conversations per task, for other suites.
        temperature: one or more, comma-separated.
        concurrency: requests in flight at once.
        max_new_tokens: maximum length of an answer, in tokens.
        device: where drafters are measured, see `bench`; training follows `--trainer.accelerator`.
        dtype: of the target when drafters are measured, see `bench`.
    """

    config: list[Path]
    seeds: int = 3
    out: Path = Path("runs/sweep")
    suite: str = "tiny"
    per_family: int = 32
    limit: int | None = None
    temperature: list[float] = field(default_factory=lambda: [0.0, 1.0])
    concurrency: int = 8
    max_new_tokens: int = 128
    device: str = "auto"
    dtype: Dtype = "auto"

    def __post_init__(self) -> None:
        if not self.config:
            raise InputError("config: no recipe given; name one or more files")
        # What `bench` would refuse is refused before anything is trained.
        choose_device(self.device)
        check_counts(seeds=self.seeds)
        BenchSettings(
            temperature=self.temperature, concurrency=[self.concurrency],
            max_new_tokens=self.max_new_tokens,
        ).check()  # fmt: skip
        self._choice.check(self.concurrency)
        stems: dict[str, Path] = {}
        for path in self.config:
            if not path.is_file():
                raise InputError(f"config: {path} does not exist; name a recipe that does")
            if path.stem in stems:
                raise InputError(
                    f"config: {stems[path.stem]} and {path} have the same name, and so would "
                    "their run folders; rename one, or give each recipe once"
                )
            stems[path.stem] = path

    @property
    def _choice(self) -> SuiteChoice:
        return SuiteChoice(suite=self.suite, per_family=self.per_family, limit=self.limit)

    def check_target(self, path: str) -> None:
        """Raise `InputError` where a recipe's target can't be read, or has no prompts."""
        read_config(path)
        if not self._choice.tasks:
            suite_path(self.suite, path)

    def bench_options(self) -> list[str]:
        """How every drafter of the sweep is measured."""
        options = [
            "--suite",
            self.suite,
            "--per_family",
            str(self.per_family),
            "--temperature",
            ",".join(f"{t:g}" for t in self.temperature),
            "--concurrency",
            str(self.concurrency),
            "--max_new_tokens",
            str(self.max_new_tokens),
        ]
        options += [] if self.limit is None else ["--limit", str(self.limit)]
        options += [] if self.device == "auto" else ["--device", self.device]
        options += [] if self.dtype == "auto" else ["--dtype", self.dtype]
        return options


def sweep_parser() -> ToolParser:
    """Of the sweep's own options."""
    parser = ToolParser(prog="dflow-train sweep", description=SweepSettings.__doc__)
    parser.add_class_arguments(SweepSettings)
    return parser


def run_sweep(args: Sequence[str]) -> int:
    """Train, export and measure every recipe with every seed; 0 when all are finished."""
    own, overrides = split(args)
    parser = sweep_parser()
    settings = parser.instantiate_classes(
        parser.parse_args(spell_out(option_types(SweepSettings), own))
    )
    settings = SweepSettings(**vars(settings))
    recipes = {path.stem: read_settings(path, overrides) for path in settings.config}
    for recipe in recipes.values():
        settings.check_target(recipe["model"]["target"]["path"])
    command = shlex.join(["dflow-train", "sweep", *args])
    with SweepFolder.open(settings.out) as folder:
        folder.agree(
            {name: recipe_hash(recipe) for name, recipe in recipes.items()},
            overrides,
            settings.bench_options(),
        )
        members = [
            member_of(path, seed, recipes[path.stem], settings, overrides)
            for seed, path in itertools.product(range(settings.seeds), settings.config)
        ]
        tracked = all(recipe["tracking"]["enabled"] for recipe in recipes.values())
        store = SweepStore.open(folder, command) if tracked else None
        return run_members(members, Children(folder.lock), store, command)


def member_of(
    path: Path, seed: int, recipe: dict[str, Any], settings: SweepSettings, overrides: list[str]
) -> Member:
    """A run of the sweep, from its resolved recipe."""
    return Member(
        path,
        seed,
        settings.out,
        recipe["trainer"]["max_steps"],
        recipe["model"]["target"]["path"],
        overrides,
        settings.bench_options(),
    )


def run_members(
    members: list[Member], children: Children, store: SweepStore | None, command: str
) -> int:
    """Run every unfinished member, until all are finished or a signal arrives."""
    outcomes: dict[str, Outcome] = {}
    with children:
        for number, member in enumerate(members, start=1):
            print(f"[{number}/{len(members)}] {member.name}", flush=True)
            outcomes[member.name] = member.run(children, store.options() if store else [])
            print(f"  {outcomes[member.name].message}", flush=True)
            if store and outcomes[member.name].finished:
                store.record(member.name, member.rows())
            if children.stopped:
                break
    finished = [member for member in members if member.finished]
    failed = [name for name, outcome in outcomes.items() if outcome.failed]
    show_taus([(member.recipe.stem, member.seed, member.rows()) for member in finished])
    print(f"{len(finished)} of {len(members)} runs finished")
    for name in failed:
        print(f"  failed: {name}, see {members[0].folder.parent / name}.log")
    if len(finished) < len(members):
        print(f"resume with: {command}")
    if store:
        store.end("KILLED" if children.stopped else "FAILED" if failed else "FINISHED")
    if children.stopped:
        return 128 + children.stopped
    return 0 if len(finished) == len(members) else 1


def split(args: Sequence[str]) -> tuple[list[str], list[str]]:
    """The sweep's own options, and those of the trainings.

    Several files may follow one `--config`, as a shell makes of `recipes/*.yaml`.

    Raises:
        InputError: an option is one that the sweep gives to each run itself.
    """
    known = SweepSettings.__dataclass_fields__
    own: list[str] = []
    overrides: list[str] = []
    for option in split_options(args):
        name = {"-c": "config", "-h": "help"}.get(option.name, option.name.removeprefix("--"))
        values = [*([] if option.attached is None else [option.attached]), *option.words]
        if name in OURS:
            raise InputError(f"{name} is set by the sweep for each run; leave it out")
        if name == "config":
            own += [part for value in values or [""] for part in ("--config", value)]
        elif name in known or name == "help":
            own += [f"--{name}", *values]
        else:
            overrides += option.spelled()
    return own, overrides


def read_settings(path: Path, overrides: Sequence[str]) -> dict[str, Any]:
    """All values of a recipe, as `fit` would use them.

    Raises:
        InputError: it cannot be read, or holds a key or a value that `fit` refuses.
    """
    quiet()
    recipe = Recipe.read(["--config", str(path), *overrides])
    parser = recipe_parser(method_of(recipe))
    try:
        found = recipe.parse(parser)
        check_sections(found)
    except InputError as error:
        message = str(error)
        raise InputError(message if str(path) in message else f"{path}: {message}") from error
    return yaml.safe_load(parser.dump(found, skip_none=False, format="yaml"))


def recipe_hash(recipe: dict[str, Any]) -> str:
    """A hash of all values, to notice a recipe that was changed between two calls."""
    text = yaml.safe_dump(recipe | {"run_dir": None}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def show_taus(
    finished: Sequence[tuple[str, int, list[dict]]], console: Console | None = None
) -> None:
    """A line for each recipe and relay setting; columns: pooled tau by temperature.

    Args:
        finished: name of the recipe, seed, and rows of the bench.
    """
    if not finished:
        return
    taus: dict[tuple[str, str], dict[float, list[float]]] = {}
    for name, _, rows in finished:
        for row in rows:
            if row["family"] == "pooled":
                cells = taus.setdefault((name, row["relay"]), {})
                cells.setdefault(row["temperature"], []).append(row["tau"])
    console = console or screen()
    temperatures = sorted({t for cells in taus.values() for t in cells})
    lines = table(console)
    lines.add_column("recipe", overflow="fold")
    lines.add_column("relay")
    lines.add_column("seeds", justify="right")
    for temperature in temperatures:
        lines.add_column(f"tau, T={temperature:g}", justify="right", no_wrap=True)
    for (name, relay), cells in taus.items():
        seeds = max(len(values) for values in cells.values())
        lines.add_row(
            name, relay, str(seeds), *(with_spread(cells.get(t, []), "+-") for t in temperatures)
        )
    console.print("mean over seeds +- (largest - smallest), all families", highlight=False)
    print_table(console, lines)
