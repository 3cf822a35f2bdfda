"""Whether a command of the documentation would be understood, without running it."""

import functools
import re
from collections.abc import Callable
from importlib import import_module
from unittest.mock import patch

from docs_blocks import ROOT, our_arguments, words

from dflow_lightning.__main__ import RUNS, TOOLS

Call = Callable[..., tuple[int, str, str]]  # runs `dflow-train`: status, stdout, stderr


def parse_problem(command: str, call: Call) -> str | None:
    """What is wrong with a command, or None. The working directory is the repository."""
    arguments = our_arguments(command)
    if arguments is not None:
        return our_problem(arguments, call)
    split = words(command)
    if not split or split[0] in (".", "source"):
        return None  # the environment of `make env`
    if split[0] == "make":
        return make_problem(split[1:])
    files = [word for word in split[1:] if word.endswith(".py")]
    if split[0].rpartition("/")[2] in ("python", "pytest") and files:
        gone = [word for word in files if not (ROOT / word).exists()]
        return f"{gone[0]} does not exist" if gone else None
    return "neither dflow-train nor make; mark the block with what it needs, or let it run"


def make_problem(targets: list[str]) -> str | None:
    """Which target the Makefile does not have."""
    known = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    gone = [target for target in targets if "=" not in target and target not in known]
    return f"make has no {gone[0]}" if gone else None


def our_problem(arguments: list[str], call: Call) -> str | None:
    """Parses the arguments of `dflow-train` as its command does."""
    name, rest = (arguments or ["--help"])[0], arguments[1:]
    if name in TOOLS:
        module, _, function = TOOLS[name][0].partition(":")
        tool = getattr(import_module(module), function)
        with patch(f"{module}.{function}", functools.wraps(tool)(lambda **_: None)):
            status, _, err = call(name, *rest)
        return err.strip() if status else None
    if name in ("fit", "validate", "test", "plan"):
        status, _, err = call(name, *rest, "--print_config")
        return err.strip() if status else None
    if name in RUNS:  # a command with a parser of its own: are its options in its help?
        _, out, _ = call(name, "--help")
        options = [word for word in rest if word.startswith("--") and "." not in word]
        gone = [option for option in options if option.partition("=")[0] not in out]
        return f"{name} has no {gone[0]}" if gone else None
    return None if name in ("help", "--help") else f"no command {name}"
