"""Recipes that change another one: `base: ../tiny-dflow.yaml`, and then what is different.

The base is read first and the recipe is laid over it, as if both had been given as `--config`. A
base may have a base. So a recipe like this is one file for every command that reads recipes, and
its keys are checked like those of any other.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from dflow_lightning.errors import InputError

KEY = "base"
OPTIONS = ("-c", "--config")


def with_bases(args: Sequence[str]) -> list[str]:
    """A command line in which every recipe stands behind its base.

    Raises:
        InputError: a base does not exist, or is the recipe itself.
    """
    expanded: list[str] = []
    rest = list(args)
    while rest:
        argument = rest.pop(0)
        option, equals, value = argument.partition("=")
        if option not in OPTIONS or not (equals or rest):
            expanded.append(argument)
            continue
        for content in layers(Path(value if equals else rest.pop(0))):
            expanded += ["--config", content]
    return expanded


def layers(path: Path, above: tuple[Path, ...] = ()) -> list[str]:
    """What to give as `--config` for a recipe, lowest first: paths, or text without its base.

    Args:
        above: the recipes that this one is the base of.
    """
    try:
        text = path.read_text(encoding="utf-8")
        content: Any = yaml.safe_load(text)
    except (OSError, ValueError, yaml.YAMLError):  # whoever parses it can say what is wrong
        return [str(path)]
    if not isinstance(content, dict) or KEY not in content:
        return [str(path)]
    named = content.pop(KEY)
    base = path.parent / str(named)
    chain = (*above, path.resolve())
    if not isinstance(named, str) or not base.is_file():
        raise InputError(
            f"{path}: {KEY} is {named!r}, which is no file beside it; give the path of a recipe, "
            "relative to this one"
        )
    if base.resolve() in chain:
        raise InputError(f"{path}: {KEY} {named} leads back to it; name a recipe below it")
    kept = [line for line in text.splitlines() if not line.startswith(f"{KEY}:")]
    if yaml.safe_load("\n".join(kept)) != (content or None):
        raise InputError(f"{path}: write {KEY}: {named} as one line of its own")
    return [*layers(base, chain), *(["\n".join(kept) + "\n"] if content else [])]
