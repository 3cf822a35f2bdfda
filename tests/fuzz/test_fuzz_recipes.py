"""Whatever a recipe says is what the run is told, or one sentence; no value is left at its default.

Recipes are the shipped tiny one with keys set, added, moved and broken, as text: what YAML makes of
a text is half of what can go wrong.
"""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from effort import check_sentence, examples
from hypothesis import example, given
from hypothesis import strategies as st

from dflow_lightning.commandline.recipe import Recipe, sections_of
from dflow_lightning.errors import InputError
from dflow_lightning.run.fit import MODULES, method_of, recipe_parser

ROOT = Path(__file__).resolve().parents[2]
TINY = (ROOT / "recipes/tiny-dflow.yaml").read_text()
VALUES = (
    "1", "0", "-1", "2.5", "1e3", "1.5e-3", "1e400", ".inf", "-.inf", ".nan", "0x10", "0o7", "010",
    "1_000", "12:30:45", "99999999999999999999", "true", "yes", "No", "on", "null", "~", "", "''",
    "'1'", '"a"', "auto", "cpu", "float32", "[1, 2]", "[]", "[[1]]", "[a, 1]", "{}", "{a: 1}",
    "{a: {b: 1}}", "2024-01-01", "!!str 3", "!!int '3'", "!!python/object:os.system x", "!custom 1",
    "&a 1", "*a", "${model.num_anchors}", "${nothing.here}", "${oc.env:HOME}",
    "${oc.env:NOT_THERE}",
    "${a", "'${model.seed}0'", "|\n  text", ">\n  1", "a: b", "- 1", "é", "@x", "%y",
    "`z`", "#", "? a",
    "'a\tb'", '"\\ud800"', '"\\0"', "path with spaces", "-", "=", "<<", "/dev/null",
    "nowhere.jsonl",
    "recipes/tiny-dflow.yaml", "class_path: a.B", "{class_path: a.B}", "{class_path: pathlib.Path}",
)  # fmt: skip
LINES = (
    "model:", "model: 1", "model: []", "trainer: null", "data: {}", "rollout: [1]", "tracking:",
    "1: 2", "null: 3", "true: 4", "[a]: b", "{a: b}: c", "? x", "model.num_anchors: 4", "a.b: 1",
    "<<: {seed_everything: 3}", "<<: *a", "- 1", "---", "...", "%YAML 1.2", "\ttab: 1",
    "  indent: 1",
    "base: recipes/tiny-dflow.yaml", "base: 3", "config: other.yaml", "help: true",
    "method: eagle3",
    "method: dflash", "fit: {seed_everything: 2}", "print_config: 1", "seed_everything: 5", "\x00",
    "ckpt_path: best", "run_dir: a", "quiet: maybe", "optimizer: {class_path: Adam}", "é: 1",
)  # fmt: skip


PARSERS = {method: recipe_parser(method) for method in MODULES}
KEYS = sorted(PARSERS["block"].get_defaults(skip_validation=True).keys())
SECTIONS = sections_of(KEYS)


def with_value(text: str, key: str, value: str) -> str:
    """The text with `key: value` in its section, in place of the line that gives it, if any."""
    *above, name = key.split(".")
    lines, at = text.splitlines(), 0
    for depth, section in enumerate(above):
        wanted = f"{'  ' * depth}{section}:"
        found = [i for i in range(at, len(lines)) if lines[i].split(" #")[0].rstrip() == wanted]
        if not found:
            lines.insert(at, wanted)
            found = [at]
        at = found[0] + 1
    pad = "  " * len(above)
    for i in range(at, len(lines)):
        if lines[i] and not lines[i].startswith(pad):
            break
        if lines[i].startswith(f"{pad}{name}:"):
            del lines[i]
            break
    body = value.replace("\n", "\n" + pad)
    lines.insert(at, f"{pad}{name}: {body}")
    return "\n".join(lines) + "\n"


@st.composite
def recipes(draw: st.DrawFn) -> bytes:
    """A recipe's bytes, with one to three things done to the shipped one."""
    text = TINY
    for _ in range(draw(st.integers(1, 3))):
        kind = draw(
            st.sampled_from(["value", "value", "value", "line", "delete", "repeat", "name"])
        )
        lines = text.splitlines()
        at = draw(st.integers(0, max(0, len(lines) - 1)))
        if kind == "value":
            text = with_value(text, draw(st.sampled_from(KEYS)), draw(st.sampled_from(VALUES)))
            continue
        if kind == "line":
            lines.insert(at, draw(st.sampled_from(LINES)))
        elif kind == "delete" and lines:
            del lines[at : at + draw(st.integers(1, 12))]
        elif kind == "repeat" and lines:
            lines.append(lines[at])
        elif lines:
            lines[at] = lines[at].replace(":", draw(st.sampled_from(["s:", ".x:", " :", ""])), 1)
        text = "\n".join(lines) + "\n"
    content = text.encode("utf-8", "surrogatepass")
    way = draw(st.sampled_from(["", "", "", "", "", "mark", "utf-16", "lines", "cut", "byte"]))
    if way == "byte":
        at = draw(st.integers(0, len(content)))
        return content[:at] + draw(st.binary(min_size=1, max_size=2)) + content[at:]
    changed = {
        "mark": b"\xef\xbb\xbf" + content, "utf-16": text.encode("utf-16", "surrogatepass"),
        "lines": content.replace(b"\n", b"\r\n"), "cut": content[: len(content) // 2],
    }  # fmt: skip
    return changed.get(way, content)


def leaves(value: Any, above: str = "") -> Iterator[tuple[str, Any]]:
    """Values below a parsed recipe, by dotted name; an empty section has none."""
    if not isinstance(value, dict) or not above.count(".") < 3:
        yield above, value
        return
    for key, one in value.items():
        yield from leaves(one, f"{above}.{key}" if above else str(key))


def same(given: Any, told: Any) -> bool:
    """Whether a setting is what the recipe gave, in the type that it should have."""
    if isinstance(given, str) and "${" in given:
        return True  # an interpolation of another key
    if isinstance(given, list | tuple):
        many = isinstance(told, list | tuple) and len(given) == len(told)
        return many and all(map(same, given, told))
    if isinstance(given, dict):
        told = told.as_dict() if hasattr(told, "as_dict") else told
        return isinstance(told, dict) and all(same(given[key], told.get(key)) for key in given)
    if isinstance(given, bool) or given is None or told is None:
        return given is told
    try:
        return math.isclose(float(given), float(told))
    except (TypeError, ValueError, OverflowError):
        return str(given).strip() == str(told[0] if isinstance(told, list) else told).strip()


def check(path: Path, content: bytes) -> Any:
    """The settings of a recipe; None if it is refused."""
    path.write_bytes(content)
    try:
        recipe = Recipe.read(["--config", str(path)])
        parser = PARSERS[method_of(recipe)]
        config = recipe.parse(parser)
    except InputError as error:
        check_sentence(error)
        return None
    said = yaml.safe_load(content.decode("utf-8-sig"))
    for key, value in leaves(said):
        empty_section = value in (None, {}) and key in SECTIONS
        assert empty_section or same(value, config[key]), (key, value, config[key])
    return config


@given(recipes())
@example(b"config: 2.5\n")
@example(TINY.encode() + b"model.num_anchors: 4\n")
@example(TINY.replace("lr: 1.5e-3", "lr: null").encode())
@example(TINY.encode() + b"method: {}\n")
@examples(30)
def test_a_recipe_is_what_the_run_is_told_or_one_sentence(
    tmp_path_factory: pytest.TempPathFactory, content: bytes
) -> None:
    check(tmp_path_factory.getbasetemp() / "recipe.yaml", content)
