"""Argument errors in one sentence, with the nearest key that exists."""

import difflib
import inspect
import json
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NoReturn, get_args, get_origin

import jsonargparse

from dflow_lightning.errors import InputError


def nearest(key: str, known: Iterable[str]) -> str:
    """`; did you mean X?` for the known dotted key most like `key`, or nothing."""
    known = list(known)
    same_leaf = [name for name in known if name.rpartition(".")[2] == key.rpartition(".")[2]]
    matches = difflib.get_close_matches(
        key, same_leaf or known, n=1, cutoff=0.3 if same_leaf else 0.6
    )
    return f"; did you mean {matches[0]!r}?" if matches else ""


def explain(message: str, known: Iterable[str]) -> str:
    """One sentence for a message of jsonargparse."""
    unknown = re.search(r"unrecognized arguments: -*([^\s=]+)", message) or re.search(
        r"does not accept (?:option|nested key) '([^']+)'", message
    )
    if unknown:
        return f"unknown key {unknown[1]!r}{nearest(unknown[1], known)}"
    if missing := re.search(r"arguments are required: (\S+)", message):
        return f"{missing[1].rpartition('.')[2]} is missing: give --{missing[1].rpartition('.')[2]}"
    typed = re.search(r'Parser key "([^"]+)":?\s*(.*)', message, re.DOTALL)
    if typed and typed[2].endswith("Got value: None"):
        return f"{typed[1]} is missing: set it in the recipe or with --{typed[1]}"
    if typed:
        message = f"{typed[1]}: {typed[2]}"
    return " ".join(message.split())


def spell_out(tool: Callable, args: Sequence[str]) -> list[str]:
    """Options as people write them, in the form that the parser reads.

    `--drafter A --drafter B` and `--temperature 0,1` become one JSON list each (paths are never cut
    at commas), and `--quiet` becomes `--quiet=true`. Which is which stands in the tool's signature.
    """
    annotations = {f"--{p.name}": p.annotation for p in inspect.signature(tool).parameters.values()}
    kept: list[str] = []
    lists: dict[str, list[str]] = {}
    rest = list(args)
    while rest:
        option, equals, value = rest.pop(0).partition("=")
        annotation = annotations.get(option)
        if annotation is bool and not equals and rest[:1] not in (["true"], ["false"]):
            kept.append(f"{option}=true")
        elif get_origin(annotation) is list:
            if not equals and rest:
                value = rest.pop(0)
            texts = get_args(annotation) in ((Path,), (str,))
            items = [value.strip("[]")] if value.startswith("[") else None
            lists.setdefault(option, []).extend(
                items or ([json.dumps(value)] if texts else value.split(","))
            )
        else:
            kept.append(f"{option}{equals}{value}")
    return kept + [f"{option}=[{','.join(values)}]" for option, values in lists.items()]


class OneSentence:
    """Mix-in for parsers: a complaint becomes an `InputError` instead of usage and exit."""

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Called by argparse and jsonargparse for every mistake on the command line."""
        parser: Any = getattr(ex, "subcommand_parser", None) or self
        known = parser.get_defaults(skip_validation=True).keys()
        raise InputError(explain(message, known)) from ex


class ToolParser(OneSentence, jsonargparse.ArgumentParser):
    """The parser of the tools."""
