"""Dataclasses as groups of options: flat on the command line, grouped in the function."""

from dataclasses import dataclass, field
from typing import Any

import pytest

from dflow_lightning.commandline.arguments import call_tool, option_types
from dflow_lightning.commandline.grouped import grouped
from dflow_lightning.errors import InputError


@dataclass(frozen=True, kw_only=True)
class Server:
    """Where to ask.

    Args:
        server: an address; may be given several times.
        width: shared with the other group.
    """

    server: list[str] = field(default_factory=list)
    width: int = 3

    def __post_init__(self) -> None:
        if self.width < 1:
            raise InputError(f"width is {self.width}; give 1 or more")


@dataclass(frozen=True, kw_only=True)
class Target:
    """What to load.

    Args:
        target: hub id or folder.
        quiet: say nothing.
    """

    target: str
    quiet: bool = False
    width: int = 3


CALLED: list[Any] = []


@grouped
def tool(*, target: Target, out: str, server: Server, tries: int = 1) -> None:
    """Do something.

    Args:
        out: where to.
        tries: how often.
    """
    CALLED.append((target, out, server, tries))


def test_options_are_flat_and_arguments_grouped():
    """Also where a group has the name of one of its options, and where two share an option."""
    words = "--target T --server a --server b --width 5 --quiet --out O"
    call_tool("tool", tool, ["tool", *words.split()])
    assert CALLED.pop() == (
        Target(target="T", quiet=True, width=5), "O", Server(server=["a", "b"], width=5), 1
    )  # fmt: skip
    call_tool("tool", tool, ["tool", "--target", "T", "--out", "O"])
    assert CALLED.pop() == (Target(target="T"), "O", Server(), 1)
    assert option_types(tool) == {
        "--target": str, "--quiet": bool, "--width": int, "--out": str, "--server": list[str],
        "--tries": int,
    }  # fmt: skip


def test_help_has_the_text_of_every_option(capsys):
    with pytest.raises(SystemExit):
        call_tool("tool", tool, ["tool", "--help"])
    text = " ".join(capsys.readouterr().out.split())
    for phrase in ("hub id or folder", "say nothing", "an address;", "shared with", "how often"):
        assert phrase in text


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("--out O", "target is missing: give --target"),
        ("--target T --out O --width 0", "width is 0; give 1 or more"),
        ("--target T --out O --with 2", "unknown key 'with'; did you mean 'width'"),
        ("--target T --out O --width x", "width: "),
    ],
)
def test_mistakes_name_the_option(words, sentence):
    with pytest.raises(InputError, match=sentence):
        call_tool("tool", tool, ["tool", *words.split()])


def test_a_call_from_python_fills_in_the_defaults_of_the_fields():
    """Each call with lists of its own, so that a command which changes one changes no other."""
    tool(target="T", out="O")
    target, out, server, tries = CALLED.pop()
    assert (target, out, server, tries) == (Target(target="T"), "O", Server(), 1)
    server.server.append("a")
    tool(target="T", out="O", width=4)
    assert CALLED.pop() == (Target(target="T", width=4), "O", Server(width=4), 1)


@pytest.mark.parametrize("given", [{"out": "O"}, {"target": "T", "out": "O", "wide": 4}])
def test_a_call_from_python_with_missing_or_unknown_options(given):
    with pytest.raises(TypeError, match=r"'target'|'wide'"):
        tool(**given)
    assert not CALLED


def test_groups_that_share_an_option_share_its_default():
    @dataclass(frozen=True, kw_only=True)
    class Wider:
        width: int = 4

    def command(*, server: Server, wider: Wider) -> None: ...

    command.__annotations__ = {"server": Server, "wider": Wider}
    with pytest.raises(TypeError, match="width has a default of its own in wider"):
        grouped(command)
