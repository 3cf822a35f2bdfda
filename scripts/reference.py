"""Write the reference pages of the docs from what the command line reads: `make reference`.

docs/reference-config.md holds every key of a recipe, docs/reference-commands.md every option of a
command. Both come from the signatures and docstrings that build the parsers, so they are made again
after a change and never edited; a test compares them with what this script makes.
"""

import argparse
import contextlib
import dataclasses
import inspect
import io
import os
import re
import sys
import types
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import docstring_parser

from dflow_lightning.__main__ import RUNS, TOOLS, usage
from dflow_lightning.__main__ import main as main_command
from dflow_lightning.data.datamodule import ChatDataModule
from dflow_lightning.run import fit
from dflow_lightning.run.fit import SECTIONS
from dflow_lightning.training.module import DrafterModule

MODULES = getattr(fit, "MODULES", {"block": DrafterModule})  # what `model` is, by method
LINKED = {"data.tokenizer"}  # set from another key, never by a recipe
CONFIG = Path("docs/reference-config.md")
COMMANDS = Path("docs/reference-commands.md")
MADE = "<!-- made by scripts/reference.py: change the docstring there and run `make reference` -->"
CONFIG_HEAD = f"""# Configuration reference

{MADE}

Every key of a recipe, beside `trainer`. A value is set in the recipe, in an overlay (a further
`--config`) or on the command line, as `--model.drafter.block_size 8`; an unknown key is an error
that names the nearest one. `dflow-train fit --config RECIPE --print_config` prints all of them with
the values that a run would have.

`trainer` is Lightning's `Trainer`: `accelerator`, `devices`, `precision`, `max_steps`,
`max_epochs`, `val_check_interval`, `accumulate_grad_batches`, `gradient_clip_val`,
`log_every_n_steps`, ...; what `trainer.strategy` may be is in [Several processes](distributed.md).
Beside the sections there are `seed_everything` (0), `run_dir` (where everything of the run goes;
`runs/RECIPE` by default) and `ckpt_path` (`last`, `best`, `auto` or a file:
[continue a run](resume.md)).
"""
COMMANDS_HEAD = f"""# Command reference

{MADE}

`dflow-train COMMAND --help` prints the same in a terminal. Options of a switch may stand alone
(`--quiet`) or with `true` or `false`; lists are given by repeating the option, numbers also with
commas. The exit status is 0 when all went well, 1 when a check failed or a run could not go on, 2
for a mistake in command or recipe, 130 after Ctrl-C and 143 after SIGTERM.
"""
KEYS_TOO = "Every key of the [configuration](reference-config.md) is an option, and so are\n"
LIGHTNING = {  # whose words are about more than we have
    "print_config": "print all settings as one recipe, and stop",
    "seed_everything": "seeds Python, NumPy and torch",
    "ckpt_path": "`last`, `best`, `auto` or a file: the checkpoint to continue from, or to measure",
}
SKIPPED = {
    "help",
    "weights_only",
    "verbose",
    "model",
    "data",
    "trainer",
    "optimizer",
    "lr_scheduler",
    *SECTIONS,
}
HELP_LINES = 60  # a longer help lists every key of a recipe, which has a page of its own


@dataclasses.dataclass(frozen=True)
class Key:
    """One setting: its dotted name, its type, its default as YAML, and what it is for."""

    name: str
    type: str
    default: str
    text: str


def type_name(kind: Any) -> str:
    """A type as a reader of YAML knows it."""
    if kind is type(None):
        return "null"
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Literal:
        return ", ".join(f"`{value}`" for value in arguments)
    if origin in (Union, types.UnionType):
        return " or ".join(type_name(one) for one in arguments)
    if origin in (list, tuple, set):
        inner = [type_name(one) for one in arguments if one is not Ellipsis]
        return f"list of {inner[0]}" if len(set(inner)) == 1 else f"list ({', '.join(inner)})"
    if origin is dict:
        return "mapping"
    plain = {bool: "true or false", int: "integer", float: "number", str: "text", Path: "path"}
    return plain.get(kind, getattr(kind, "__name__", str(kind)))


def default_text(value: Any) -> str:
    """A default as a recipe would say it."""
    if value is inspect.Parameter.empty:
        return "required"
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        value = list(value)
    if isinstance(value, float) and (value == 0 or 1e-3 <= abs(value) < 1e5):
        return str(value)
    return f"{value:g}" if isinstance(value, float) else str(value)


def documented(kind: Callable) -> dict[str, str]:
    """What the docstrings of a class and its constructor, or of a function, say of arguments."""
    texts: dict[str, str] = {}
    sources = [kind.__doc__, kind.__init__.__doc__ if inspect.isclass(kind) else None]
    for source in filter(None, sources):
        for parameter in docstring_parser.parse(source).params:
            texts[parameter.arg_name] = " ".join((parameter.description or "").split())
    return texts


def headline(kind: Callable) -> str:
    """The docstring up to its arguments."""
    parsed = docstring_parser.parse(kind.__doc__ or "")
    parts = (parsed.short_description, parsed.long_description)
    return "\n\n".join(" ".join(part.split()) for part in parts if part)


def own_dataclass(kind: Any) -> Any:
    """The dataclass among a type's choices whose fields are keys of their own."""
    choices = get_args(kind) if get_origin(kind) in (Union, types.UnionType) else (kind,)
    return next((one for one in choices if dataclasses.is_dataclass(one)), None)


def keys(kind: Callable, prefix: str) -> Iterator[Key]:
    """Every key that a class or function takes, dataclasses opened up."""
    target = kind.__init__ if inspect.isclass(kind) else kind
    hints, texts = get_type_hints(target), documented(kind)
    for name, parameter in inspect.signature(kind).parameters.items():
        hint = hints.get(name, parameter.annotation)
        dotted = f"{prefix}{name}"
        if dotted in LINKED:
            continue
        if (group := own_dataclass(hint)) is not None:
            yield from keys(group, f"{dotted}.")
            continue
        default = parameter.default
        yield Key(dotted, type_name(hint), default_text(default), texts.get(name, ""))


def table(rows: list[Key], *, option: str = "") -> list[str]:
    """Keys as a Markdown table; with `option` as command-line options."""
    lines = [f"| {'option' if option else 'key'} | type | default | |", "|---|---|---|---|"]
    for key in rows:
        name = f"`{option}{key.name}`"
        default = key.default if key.default == "required" else f"`{key.default}`"
        cells = [name, key.type, default, sentence(key.text)]
        lines.append("| " + " | ".join(plain(cell) for cell in cells) + " |")
    return lines


def plain(cell: str) -> str:
    """Text that Markdown takes for neither a new cell nor HTML."""
    return cell.replace("|", "\\|").replace("<", "&lt;")


def sentence(text: str) -> str:
    """With a small first letter, as the cells of our tables have, and no full stop after one."""
    if (
        text[1:2].islower()
        and text.partition(" ")[0].istitle()
        and text[:4] not in ("Fals", "True")
    ):
        text = text[0].lower() + text[1:]
    return text.removesuffix(".")


def config_page() -> str:
    """docs/reference-config.md."""
    lines = [CONFIG_HEAD]
    first, *others = MODULES.items()
    sections = [("model", first[1]), ("data", ChatDataModule), *SECTIONS.items()]
    titled = [(section, section, kind) for section, kind in sections]
    titled += [(f"model, method {method}", "model", kind) for method, kind in others]
    for title, section, kind in titled:
        lines += [f"## {title}", "", headline(kind), ""]
        groups: dict[str, list[Key]] = {}
        for key in keys(kind, f"{section}."):
            groups.setdefault(key.name.rpartition(".")[0], []).append(key)
        for group, rows in sorted(groups.items(), key=lambda item: item[0] != section):
            if group != section:
                lines += [f"### {group}", "", headline(group_class(kind, section, group)), ""]
            lines += [*table(rows), ""]
    return "\n".join(lines).rstrip() + "\n"


def group_class(kind: Callable, section: str, group: str) -> Callable:
    """The dataclass behind `model.relay`, and behind `model.relay.x` if there were one."""
    for name in group.removeprefix(f"{section}.").split("."):
        found = own_dataclass(get_type_hints(kind.__init__)[name])
        assert found is not None
        kind = found
    return kind


def commands_page() -> str:
    """docs/reference-commands.md."""
    lines = [COMMANDS_HEAD, "```text", usage(), "```", ""]
    for name, text in RUNS.items():
        lines += [f"## dflow-train {name}", "", f"{text[0].upper()}{text[1:]}.", ""]
        lines += [own_options(name)]
    for name, (path, _) in TOOLS.items():
        module, _, function = path.partition(":")
        tool = getattr(import_module(module), function)
        lines += [f"## dflow-train {name}", "", headline(tool), "", *examples(tool)]
        lines += [*table(list(keys(tool, "")), option="--"), ""]
    return "\n".join(lines).rstrip() + "\n"


def examples(tool: Callable) -> list[str]:
    """The examples of a docstring, if it has any."""
    found = docstring_parser.parse(tool.__doc__ or "").examples
    texts = [inspect.cleandoc(one.description or "") for one in found]
    return ["```text", *texts, "```", ""] if texts else []


def own_options(name: str) -> str:
    """The options of a command that reads a recipe, from its help; keys of recipes left out."""
    text = help_text(name)
    if len(text.splitlines()) <= HELP_LINES:
        return f"```text\n{text.strip()}\n```\n"
    rows = []
    for option, said in re.findall(r"^ {2}--(\w+)(?: .*)?\n?((?: {10,}.*\n)*)", text, re.M):
        words = re.sub(r"^.*? {2,}", "", option_line(text, option)) + " " + said
        words, _, default = " ".join(words.split()).partition(" (type: ")
        default = default.partition("default: ")[2].rstrip(")")
        if option not in SKIPPED and words not in ("", "Not used here."):
            rows.append(Key(option, "", default or "null", LIGHTNING.get(option, words)))
    body = [f"| `--{key.name}` | `{key.default}` | {plain(sentence(key.text))} |" for key in rows]
    return "\n".join([KEYS_TOO, "| option | default | |", "|---|---|---|", *body, ""])


def option_line(text: str, option: str) -> str:
    """The rest of the line on which the help of an option begins."""
    found = re.search(rf"^ {{2}}--{option}\b(.*)$", text, re.M)
    return found[1] if found and re.search(r" {2,}\S", found[1]) else ""


def help_text(name: str) -> str:
    """What `dflow-train NAME --help` prints on a terminal of 100 columns, without colours."""
    os.environ |= {"COLUMNS": "100", "NO_COLOR": "1"}
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        main_command([name, "--help"])
    return printed.getvalue()


def main() -> int:
    """Writes both pages; with `--check` compares them and returns 1 where one differs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args().check
    stale = 0
    for path, text in {CONFIG: config_page(), COMMANDS: commands_page()}.items():
        if check and path.read_text() != text:
            print(f"{path} is not what the code says: run make reference")
            stale = 1
        elif not check:
            path.write_text(text)
            print(path)
    return stale


if __name__ == "__main__":
    sys.exit(main())
