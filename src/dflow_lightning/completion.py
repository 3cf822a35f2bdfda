"""`dflow-train completion`: a script with which the shell completes commands, options and paths.

It is made once, from the parsers of all commands, and answers without starting Python.
"""

import argparse
import difflib
from collections.abc import Sequence
from os import PathLike
from typing import Any, Literal, get_args, get_origin

import shtab
from jsonargparse import ActionConfigFile, capture_parser

from dflow_lightning.commandline.arguments import call_tool
from dflow_lightning.commands import RUNS, TOOLS, load_tool
from dflow_lightning.errors import InputError
from dflow_lightning.plan.command import plan_parser
from dflow_lightning.run.fit import COMMANDS, recipe_parser
from dflow_lightning.sweep.command import sweep_parser
from dflow_lightning.training.base import BLOCK

SHELLS = ("bash", "zsh")
# Options that are text, since a hub id will do as well, but mostly name a file or a folder.
ALSO_PATHS = {"target", "tokenizer", "data", "suite", "path", "ckpt_path", "init_from"}
_USAGE = """usage: dflow-train completion bash|zsh

Print a script that completes commands, options, choices and paths. It takes some seconds to make:
save it where the shell looks for it, and again after an update.

  bash   ~/.local/share/bash-completion/completions/dflow-train
  zsh    a file _dflow-train in a folder of $fpath

example:
  dflow-train completion bash > ~/.dflow-completion; source ~/.dflow-completion"""


def print_completion(args: Sequence[str]) -> int:
    """Print the script of a shell; returns the exit status."""
    if not args or args[0] in ("-h", "--help"):
        print(_USAGE)
        return 0 if args else 2
    if args[0] not in SHELLS or len(args) > 1:
        near = difflib.get_close_matches(args[0], SHELLS, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise InputError(f"shell: {' '.join(args)!r} is not one of {', '.join(SHELLS)}{hint}")
    print(script(args[0]))
    return 0


def script(shell: str) -> str:
    """What the shell has to read; see `SHELLS`."""
    root = argparse.ArgumentParser(prog="dflow-train")
    commands = root.add_subparsers(dest="command")
    about = RUNS | {name: text for name, (_, text) in TOOLS.items()}
    parsers = parsers_of_commands()
    for name, text in about.items():
        command = commands.add_parser(name, help=plain(text))
        for action in parsers[name]._actions if name in parsers else ():
            add_option(command, action)
    commands.choices["completion"].add_argument("shell", choices=SHELLS)
    return shtab.complete(root, shell=shell)


def parsers_of_commands() -> dict[str, Any]:
    """The parser of every command that has options."""
    parsers = {name: recipe_parser(BLOCK, name) for name in COMMANDS}
    parsers["sweep"] = sweep_parser()
    parsers["plan"] = parsers["doctor"] = plan_parser()
    for name in TOOLS:
        tool = load_tool(name)
        root = capture_parser(lambda name=name, tool=tool: call_tool(name, tool, [name]))
        parsers[name] = next(
            action for action in root._actions if isinstance(action, argparse._SubParsersAction)
        ).choices[name]
    return parsers


def add_option(command: argparse.ArgumentParser, action: argparse.Action) -> None:
    """The names of an option, its choices, and whether it is a path."""
    names = [name for name in action.option_strings if not name.endswith(("+", ".help"))]
    if not names or action.help == argparse.SUPPRESS or "--help" in names:
        return
    kind = getattr(action, "_typehint", None)
    added: Any = command.add_argument(
        *names,
        choices=choices(kind),
        help=plain(action.help or ""),
        metavar="VALUE",
    )
    if isinstance(action, ActionConfigFile) or is_path(kind) or _leaf(names[-1]) in ALSO_PATHS:
        added.complete = shtab.FILE


def choices(kind: Any) -> list[str] | None:
    """The values of a bool or a `Literal`; None where a value may be anything."""
    kinds = [one for one in get_args(kind) or (kind,) if one is not type(None)]
    if get_origin(kind) is Literal:
        return [str(value) for value in get_args(kind)]
    if kinds == [bool]:
        return ["true", "false"]
    return choices(kinds[0]) if len(kinds) == 1 and get_origin(kinds[0]) is Literal else None


def is_path(kind: Any) -> bool:
    """Whether a type is that of a path, of several, or of a path that may be left out."""
    if isinstance(kind, type) and issubclass(kind, PathLike):
        return True
    return any(is_path(one) for one in get_args(kind))


def plain(text: str) -> str:
    """The first sentence of a help text, without what shells and argparse read in it."""
    sentence = text.split(". ")[0].split(" (")[0]
    return "".join(letter for letter in sentence if letter.isalnum() or letter in " -,./_")


def _leaf(name: str) -> str:
    return name.lstrip("-").rpartition(".")[2]
