"""Recipes and the options beside them: the one place that reads them from a command line.

A recipe may change another one: `base: ../tiny-dflow.yaml`, and then what differs. The base is read
first and the recipe is laid over it, as if both had been given as `--config`; a base may have a
base. What YAML accepts and a user hardly means is refused here, by file and line: a key given
twice, a number that is not one, an encoding that is not UTF-8.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml
from omegaconf.errors import OmegaConfBaseException

from dflow_lightning.commandline.arguments import Option, check_empty, check_values, split_options
from dflow_lightning.errors import InputError

BASE = "base"
CONFIG = ("-c", "--config")
NOT_A_NUMBER = (".nan", ".NaN", ".NAN")


@dataclass(frozen=True)
class Layer:
    """One file of a recipe.

    Attributes:
        text: what it holds, without its base.
        content: the same, parsed.
        lines: the line of each key, by dotted name.
        empty: where in `text` a key has no value, by dotted name: start and end.
        changed: whether `text` differs from the file.
    """

    path: Path
    text: str
    content: dict[str, Any]
    lines: dict[str, int]
    empty: dict[str, tuple[int, int]]
    changed: bool = False

    def argument(self, sections: set[str]) -> str:
        """What to give as `--config`: the path, or a text that differs from the file.

        Args:
            sections: names that hold settings. One without any, whose keys are all commented out,
                would be null; it means its defaults.
        """
        empty = [span for name, span in self.empty.items() if name in sections]
        if not empty and not self.changed:
            return str(self.path)
        text = self.text
        for start, end in sorted(empty, reverse=True):
            text = f"{text[:start]} {{}}{text[end:]}"
        return text + "\n"


@dataclass(frozen=True)
class Recipe:
    """The recipes of a command line, each behind its base, and its other options, in their order.

    Attributes:
        paths: the files that were named, in order; bases are not among them.
    """

    parts: tuple[Option | Layer, ...]
    paths: tuple[Path, ...] = field(default=())

    @classmethod
    def read(cls, args: Sequence[str]) -> "Recipe":
        """Read a command line and the recipes that it names.

        Raises:
            InputError: a recipe cannot be read, gives a key twice or holds NaN; a
                base does not exist, or is the recipe itself.
        """
        parts: list[Option | Layer] = []
        paths: list[Path] = []
        for option in split_options(args):
            path = option.value
            if option.name not in CONFIG or path is None:
                parts.append(option)
                continue
            paths.append(Path(path))
            parts += read_layers(Path(path))
            if rest := option.words[option.attached is None :]:
                parts.append(Option("", None, rest))
        return cls(tuple(parts), tuple(paths))

    @property
    def layers(self) -> list[Layer]:
        """The files, bases before what changes them."""
        return [part for part in self.parts if isinstance(part, Layer)]

    @property
    def name(self) -> str:
        """The first file's name; its folder's name for the `config.yaml` of an earlier run."""
        if not self.paths:
            return "run"
        path = self.paths[0]
        return path.absolute().parent.name if path.name == "config.yaml" else path.stem

    def setting(self, name: str, default: Any) -> Any:
        """A setting at the top level, from whichever file or option gives it last."""
        value = default
        for part in self.parts:
            if isinstance(part, Layer):
                value = part.content.get(name, value)
            elif part.name == f"--{name}":
                value = part.value
        return value

    def arguments(self, sections: set[str]) -> list[str]:
        """The command line that a parser of recipes reads; see `Layer.argument`."""
        words: list[str] = []
        for part in self.parts:
            if isinstance(part, Layer):
                words += ["--config", part.argument(sections)]
            else:
                words += part.spelled()
        return words

    def parse(self, parser: Any, settings: Any = None) -> Any:
        """All settings, defaults included; a complaint names the file and line that it is about.

        Args:
            parser: of a command, whose name may be the first word.
            settings: the parser of that command's settings, where it is another one.

        Raises:
            InputError: an unknown key, or a value that cannot be.
        """
        known = (settings or parser).get_defaults(skip_validation=True).keys()
        try:
            config = parser.parse_args(self.arguments(sections_of(known)))
            check_values(config)
            check_empty(config, settings or parser)
        except InputError as error:
            raise InputError(self.located(str(error))) from error
        except OmegaConfBaseException as error:  # an interpolation of what is not there
            names = ", ".join(map(str, self.paths))
            raise InputError(f"{names}: {str(error).splitlines()[0]}") from error
        return config

    def located(self, message: str) -> str:
        """A complaint about a key, with the place where a file gives it."""
        found = re.match(r"unknown key '([^']+)'|([\w.]+)(?=:| is )", message)
        key = found and (found[1] or found[2])
        given = {part.name for part in self.parts if isinstance(part, Option)}
        if not key or f"--{key}" in given:
            return message
        for layer in reversed(self.layers):
            for name, line in layer.lines.items():
                if name == key or name.endswith(f".{key}"):
                    return f"{layer.path}: line {line}: {message}"
        return message


def sections_of(keys: Any) -> set[str]:
    """The names before a dot of dotted keys: `model`, `model.target`, ..."""
    return {".".join(key.split(".")[:i]) for key in keys for i in range(1, key.count(".") + 1)}


def read_layers(path: Path, above: tuple[Path, ...] = ()) -> list[Layer]:
    """A recipe behind its base and that one's base, lowest first.

    Args:
        above: the recipes that this one is the base of.

    Raises:
        InputError: see `Recipe.read`.
    """
    layer = read_layer(path)
    if BASE not in layer.content:
        return [layer]
    named = layer.content[BASE]
    base = path.parent / str(named)
    chain = (*above, path.resolve())
    if not isinstance(named, str) or not base.is_file():
        raise InputError(
            f"{path}: {BASE} is {named!r}, which is not a file; give the path of a recipe, "
            "relative to this one"
        )
    if base.resolve() in chain:
        raise InputError(f"{path}: {BASE} {named} is circular; name a recipe not based on it")
    content = {key: value for key, value in layer.content.items() if key != BASE}
    # Blanked and not removed, so that positions and line numbers stay those of the file.
    text = re.sub(rf"(?m)^{BASE}:.*$", lambda line: " " * len(line[0]), layer.text)
    if yaml.safe_load(text) != (content or None):
        raise InputError(f"{path}: write {BASE}: {named} as one line of its own")
    below = read_layers(base, chain)
    if not content:
        return below
    return [*below, Layer(path, text, content, layer.lines, layer.empty, changed=True)]


def read_layer(path: Path) -> Layer:
    """One file, its base not followed.

    Raises:
        InputError: see `Recipe.read`.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        content = yaml.safe_load(text) if root is not None else None
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is not UTF-8 text; save it as UTF-8") from error
    except OSError as error:
        reason = "does not exist" if isinstance(error, FileNotFoundError) else "cannot be read"
        raise InputError(
            f"config: {path} {reason}; `dflow-train init` writes the shipped recipes"
        ) from error
    except (yaml.YAMLError, ValueError) as error:  # ValueError: a date that is none
        raise InputError(f"{path}: {yaml_problem(error)}") from error
    if root is None:
        raise InputError(f"{path} is empty; give a recipe with model, data and trainer")
    if not isinstance(content, dict):
        raise InputError(f"{path} is not a recipe: it holds no keys with values")
    layer = Layer(path, text, content, {}, {})
    index_keys(layer, root)
    if "config" in content:  # of the command line; a parser would read the file that it names
        raise InputError(
            f"{path}: line {layer.lines['config']}: config is no key of a recipe; name the recipe "
            f"that this one changes as {BASE}"
        )
    return layer


def yaml_problem(error: Exception) -> str:
    """One sentence for what is wrong with a YAML text, and where."""
    mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None)
    place = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
    if problem and "'\\t'" in problem:
        return f"{place.partition(',')[0]}: a tab where YAML wants spaces; indent with spaces"
    return f"{place}not valid YAML: {problem or ' '.join(str(error).split())}"


def index_keys(layer: Layer, node: yaml.Node, above: str = "") -> None:
    """Note the line of every key below a node, and keys without a value.

    Raises:
        InputError: a key is given twice, or a value is not a number.
    """
    if isinstance(node, yaml.SequenceNode):
        for item in node.value:
            # Every item has keys of its own.
            index_keys(replace(layer, lines={}, empty={}), item, above)
        return
    if isinstance(node, yaml.ScalarNode):
        if node.value in NOT_A_NUMBER and node.tag.endswith(":float"):
            line = node.start_mark.line + 1
            raise InputError(
                f"{layer.path}: line {line}: {above[:-1]} is {node.value}; give a finite number"
            )
        return
    for key, value in node.value:
        if not isinstance(key, yaml.ScalarNode):
            continue  # no setting has such a name; the parser says so
        name, line = f"{above}{key.value}", key.start_mark.line + 1
        if name in layer.lines:  # also as `model.seed:` beside `model:`
            raise InputError(
                f"{layer.path}: line {line}: {name} is given twice, first on line "
                f"{layer.lines[name]}; keep one"
            )
        layer.lines[name] = line
        if value.tag.endswith(":null"):
            layer.empty[name] = (value.start_mark.index, value.end_mark.index)
        index_keys(layer, value, f"{name}.")
