"""Arguments as people write them, help with an example, and errors in one sentence."""

import difflib
import inspect
import json
import math
import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, get_args, get_origin, get_type_hints

import jsonargparse

from dflow_lightning.errors import InputError
from dflow_lightning.terminal import PLAIN_WIDTH, command

TINY = "--target data/tiny-qwen3"
RUN = "runs/tiny-dflow"
LARGEST_SEED = 2**32 - 1  # what NumPy's generators take
SHORT = ("-c", "-h")  # options with one dash
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
        r"(?:does not accept (?:option|nested key)|Option) '([^']+)'(?: is not accepted)?", message
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


@dataclass(frozen=True)
class Option:
    """An option as it stands on a command line, and the words up to the next one.

    Attributes:
        name: with its dashes; empty for words before any option.
        attached: what follows `=`.
    """

    name: str
    attached: str | None
    words: list[str]

    @property
    def value(self) -> str | None:
        """What is attached, or the first word; None where there is neither."""
        return self.attached if self.attached is not None else next(iter(self.words), None)

    def spelled(self) -> list[str]:
        """The option as it was written."""
        name = self.name if self.attached is None else f"{self.name}={self.attached}"
        return [*([name] if name else []), *self.words]


def split_options(args: Sequence[str]) -> list[Option]:
    """A command line as its options; nothing else in this package looks for them."""
    options: list[Option] = []
    for word in args:
        name, equals, value = word.partition("=")
        if word.startswith("--") or name in SHORT:
            options.append(Option(name, value if equals else None, []))
        else:
            if not options:
                options.append(Option("", None, []))
            options[-1].words.append(word)
    return options


def spell_out(types: Mapping[str, Any], args: Sequence[str]) -> list[str]:
    """Options as people write them, in the form that the parser reads.

    `--drafter A --drafter B` and `--temperature 0,1` become one JSON list each (paths are never cut
    at commas), `--quiet` becomes `--quiet=true`, and `--json` without a file is `--json=-`.

    Args:
        types: of the options that this is about.
    """
    kept: list[str] = []
    lists: dict[str, list[str]] = {}
    for option in split_options(args):
        kind = types.get(option.name)
        kinds = (kind, *get_args(kind))
        if bool in kinds and option.value not in ("true", "false") and option.attached is None:
            kept += [f"{option.name}=true", *option.words]
        elif option.name == "--json" and Path in kinds and option.value is None:
            kept.append("--json=-")
        elif get_origin(kind) is list and (value := option.value) is not None:
            texts = get_args(kind) in ((Path,), (str,))
            items = [value.strip("[]")] if value.startswith("[") else None
            lists.setdefault(option.name, []).extend(
                items or ([json.dumps(value)] if texts else value.split(","))
            )
            kept += option.words[option.attached is None :]
        else:
            kept += option.spelled()
    return kept + [f"{option}=[{','.join(values)}]" for option, values in lists.items()]


def check_values(config: Any) -> None:
    """Refuse numbers that no setting can take: those that are not finite, seeds out of range.

    Raises:
        InputError: for the first of them.
    """
    if command := config.get("subcommand"):
        config = config[command]
    for key, value in flat(config.as_dict()):
        leaf = key.rpartition(".")[2]
        if isinstance(value, float) and not math.isfinite(value):
            raise InputError(f"{key} is {value}; give a finite number")
        seed = leaf in ("seed", "seed_everything") and type(value) is int
        if seed and not 0 <= value <= LARGEST_SEED:
            raise InputError(f"{key} is {value}; give a number from 0 to {LARGEST_SEED}")
        if key == "trainer.val_check_interval" and value is not None and value <= 0:
            raise InputError(
                f"{key} is {value}; give a number of steps, or a share of an epoch above 0; "
                "data.validation null trains without validation"
            )


def check_empty(config: Any, parser: Any) -> None:
    """Refuse null for a setting that needs a value; the parser takes it for one not given.

    Raises:
        InputError: for the first of them.
    """
    if command := config.get("subcommand"):
        config = config[command]
    types = {action.dest: getattr(action, "_typehint", None) for action in parser._actions}
    for key, value in flat(config.as_dict()):
        kind = types.get(key)
        if value is None and kind not in (None, Any) and type(None) not in get_args(kind):
            raise InputError(f"{key} is null; give it a value, or take the key out")


def flat(content: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    """The values of nested mappings by dotted key; a list's items have the list's key."""
    for name, value in content.items():
        key = f"{above}{name}"
        if isinstance(value, Mapping):
            yield from flat(value, f"{key}.")
        else:
            for item in value if isinstance(value, list) else [value]:
                yield key, item


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

    def parse_args(self, *args: Any, **kwargs: Any) -> Any:
        """Parse, and check the numbers that all tools share."""
        config = super().parse_args(*args, **kwargs)
        check_values(config)
        return config


def call_tool(name: str, tool: Callable[..., None], args: Sequence[str]) -> None:
    """Parse a tool's command line, its name first, and call it."""
    jsonargparse.auto_cli(
        {name: tool},
        args=spell_out(option_types(tool), args),
        as_positional=False,
        parser_class=ToolParser,
        prog="dflow-train",
    )
