"""Arguments as people write them, help with an example, and errors in one sentence."""

import difflib
import inspect
import json
import re
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, get_args, get_origin, get_type_hints

import jsonargparse

from dflow_lightning.errors import InputError
from dflow_lightning.terminal import PLAIN_WIDTH, command

TINY = "--target data/tiny-qwen3"
RUN = "runs/tiny-dflow"
EXAMPLES = {
    "fit": "--config recipes/tiny-dflow.yaml --trainer.max_steps 3000",
    "validate": "--config recipes/tiny-dflow.yaml --ckpt_path best",
    "test": "--config recipes/tiny-dflow.yaml --ckpt_path best",
    "sweep": "--config recipes/ablations/*.yaml --seeds 3 --out runs/sweep",
    "plan": "--config recipes/tiny-dflow.yaml --gpus 1",
    "doctor": "--config recipes/tiny-dflow.yaml",
    "init": "--out dflow",
    "demo": "--out dflow-demo",
    "prepare": f"--data data/tiny-qwen3/prompts/test.jsonl {TINY} --out data/test --limit 8",
    "inspect": f"--data data/tiny-qwen3/prompts/train.jsonl --row 3 {TINY}",
    "export": f"--checkpoint {RUN}/checkpoints/best.ckpt --out {RUN}/export",
    "validate-export": f"--drafter data/tiny-drafters/dflow {TINY}",
    "serve-check": f"--drafter data/tiny-drafters/dflow {TINY}",
    "decode": f"{TINY} --drafter data/tiny-drafters/dflow --prompt 'What is 17 + 4?'",
    "bench": f"{TINY} --drafter data/tiny-drafters/dflow --suite tiny --per_family 4",
    "report": "--bench runs/bench.json --out runs/report.html",
    "replay": f"--file {RUN}/nonfinite/step47-rank0.pt",
    "ui": f"--run {RUN}",
    "sync": f"--run {RUN}",
}


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


def option_types(tool: Callable[..., Any]) -> dict[str, Any]:
    """The type of each option of a tool; strings, as annotations may be, are resolved."""
    hints = get_type_hints(tool)
    return {f"--{name}": hints.get(name, Any) for name in inspect.signature(tool).parameters}


def spell_out(types: Mapping[str, Any], args: Sequence[str]) -> list[str]:
    """Options as people write them, in the form that the parser reads.

    `--drafter A --drafter B` and `--temperature 0,1` become one JSON list each (paths are never cut
    at commas), `--quiet` becomes `--quiet=true`, and `--json` without a file is `--json=-`.

    Args:
        types: of the options that this is about.
    """
    kept: list[str] = []
    lists: dict[str, list[str]] = {}
    rest = list(args)
    while rest:
        option, equals, value = rest.pop(0).partition("=")
        kind = types.get(option)
        kinds, alone = (kind, *get_args(kind)), not rest or rest[0].startswith("--")
        if bool in kinds and not equals and rest[:1] not in (["true"], ["false"]):
            kept.append(f"{option}=true")
        elif option == "--json" and Path in kinds and not equals and alone:
            kept.append(f"{option}=-")
        elif get_origin(kind) is list:
            if not equals and rest:
                value = rest.pop(0)
            texts = get_args(kind) in ((Path,), (str,))
            items = [value.strip("[]")] if value.startswith("[") else None
            lists.setdefault(option, []).extend(
                items or ([json.dumps(value)] if texts else value.split(","))
            )
        else:
            kept.append(f"{option}{equals}{value}")
    return kept + [f"{option}=[{','.join(values)}]" for option, values in lists.items()]


class OneSentence:
    """Mix-in for parsers: a complaint becomes an `InputError` instead of usage and exit.

    Their help ends with an example.
    """

    prog: str

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Called by argparse and jsonargparse for every mistake on the command line."""
        parser: Any = getattr(ex, "subcommand_parser", None) or self
        known = parser.get_defaults(skip_validation=True).keys()
        raise InputError(explain(message, known)) from ex

    def format_help(self) -> str:
        """The help of the parser, and a command to try."""
        for action in self._actions:  # type: ignore[attr-defined]
            if get_origin(getattr(action, "_typehint", None)) is list:  # as `spell_out` takes it
                action.option_strings = [o for o in action.option_strings if not o.endswith("+")]
                action.metavar = action.dest.rpartition(".")[2].upper()
        text = "\n".join(line.rstrip() for line in super().format_help().splitlines())  # type: ignore[misc]
        name = self.prog.split()[-1]
        return text + "\n" + (example(name) if name in EXAMPLES else "")


def example(name: str) -> str:
    """The last lines of a command's help."""
    words = ["dflow-train", name, *shlex.split(EXAMPLES[name])]
    return f"\nexample:\n{command('  ', words, PLAIN_WIDTH)}\n"


class ToolParser(OneSentence, jsonargparse.ArgumentParser):  # type: ignore[misc]
    """The parser of the tools."""


def call_tool(name: str, tool: Callable[..., None], args: Sequence[str]) -> None:
    """Parse a tool's command line, its name first, and call it."""
    jsonargparse.auto_cli(
        {name: tool},
        args=spell_out(option_types(tool), args),
        as_positional=False,
        parser_class=ToolParser,
        prog="dflow-train",
    )
