"""`dflow-train doctor`: will a training run here, and does it compute what it should?

Without a recipe it checks the environment alone (`environment.py`), in seconds. With `--config` it
also checks the recipe's data and target (`recipe.py`), the loaded models (`models.py`) and, on one
batch, that a step runs under the recipe's strategy (`step.py`) and that they learn and decode
losslessly (`trial.py`). Each check is one line, and a failed one
does not stop the others.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

from dflow_lightning.checks import Check, Step, run_checks, run_one
from dflow_lightning.commandline.json_output import JsonOutput
from dflow_lightning.doctor.environment import ENVIRONMENT, Environment
from dflow_lightning.terminal import STDOUT, labelled

DOCTOR_USAGE = """usage: dflow-train doctor [--config RECIPE [--key value ...]] [--json [FILE]]

Check this environment and, with a recipe, everything that it needs, on one batch.

  -c, --config RECIPE    a recipe, then overlays; keys and values as for fit
  --json [FILE]          also write the checks to this file as JSON; without a file name print
                         them on standard output and everything else on standard error

Each line is ok, warn, FAIL or skip, and says how to fix what it names. The exit status is 0 when
nothing failed, also with warnings, and 1 otherwise.

example:
  dflow-train doctor --config recipes/tiny-dflow.yaml"""


def doctor_command(args: Sequence[str]) -> int:
    """Print the checks of a command line; returns the exit status."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("-h", "--help", action="store_true")
    parser.add_argument("--json", type=Path, nargs="?", const=STDOUT)
    options, rest = parser.parse_known_args(list(args))
    if options.help:
        print(DOCTOR_USAGE)
        return 0
    result_json = JsonOutput(options.json)
    text, checks = result_json.text, []
    for check in examine(rest):
        print(line(check, text), file=text, flush=True)
        checks.append(check)
    failed, doubts = (sum(one.status == kind for one in checks) for kind in ("FAIL", "warn"))
    rows = [{"name": c.name, "status": c.status, "detail": c.detail} for c in checks]
    result_json.write({"ok": not failed, "checks": rows})
    print(f"\n{len(checks)} checks, {failed} failed, {doubts} warnings", file=text)
    return 1 if failed else 0


def line(check: Check, stream: IO[str]) -> str:
    """One line; on a terminal it is folded, so that the columns stay."""
    return labelled(f"{check.status:<5} {check.name:<14} ", check.detail, stream)


def examine(args: Sequence[str]) -> Iterator[Check]:
    """All checks of a recipe's command line; those of the environment where it is empty."""
    if not args:
        yield from run_checks(ENVIRONMENT, Environment())
        return
    recipe, read = read_recipe(args)
    environment = Environment() if recipe is None else Environment(recipe, run_dir(recipe, args))
    yield from run_checks(ENVIRONMENT, environment)
    yield read
    if recipe is not None:
        from dflow_lightning.doctor.models import Loaded
        from dflow_lightning.doctor.recipe import RECIPE

        yield from run_checks(RECIPE | model_checks(), Loaded(environment))


def model_checks() -> dict[str, Step]:
    """The checks of the loaded models; imported only where there is a recipe."""
    from dflow_lightning.doctor import models, step, trial

    built = ("drafter", "weights")
    return {
        "drafter": Step(models.check_drafter, ("target", "template", "batches", "mask id")),
        "weights": Step(models.check_weights, ("drafter",)),
        "on policy": Step(models.check_on_policy, built),
        "taps": Step(models.check_taps, built),
        "positions": Step(models.check_positions, built),
        "RoPE": Step(models.check_rope, built),
        "final norm": Step(models.check_final_norm, built),
        "attention": Step(models.check_attention, built),
        "step": Step(step.check_step, (*built, "masks")),
        "overfit": Step(trial.check_overfit, (*built, "masks")),
        "lossless": Step(trial.check_lossless, built),
    }


def read_recipe(args: Sequence[str]) -> tuple[Any, Check]:
    """The recipe as `fit` reads it; None where it cannot be read, which the check then says."""
    found: list[Any] = []

    def read(_: Any) -> str:
        from dflow_lightning.plan.command import parse
        from dflow_lightning.run.fit import check_sections, quiet

        quiet()
        found.append(parse(args))
        check_sections(found[0])
        return "all keys are known, all values of the right kind"

    check = run_one("recipe", Step(read), None)
    return (found[0] if found else None), check


def run_dir(recipe: Any, args: Sequence[str]) -> Path:
    """Where `fit` would write."""
    from dflow_lightning.commandline.recipe import Recipe
    from dflow_lightning.run.fit import default_run_dir

    given = recipe.run_dir or recipe.trainer.default_root_dir
    return Path(given or default_run_dir(Recipe.read(args).name, None, fresh=True))
