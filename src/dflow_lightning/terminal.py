"""What is printed, on a terminal and in a pipe: the one place that knows which of them it is.

On a terminal lines are folded to its width and may be coloured. In a pipe every line is whole, and
there are no escape codes and no carriage returns. NO_COLOR and FORCE_COLOR decide about colours
alone, never about bars.
"""

import json
import os
import select
import shlex
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from io import StringIO
from pathlib import Path
from typing import IO, Any

from rich import box
from rich.console import Console
from rich.progress import Progress, ProgressColumn
from rich.table import Table
from rich.text import Text

PLAIN_WIDTH = 80
STDOUT = Path("-")  # as the name of a file to write
NARROWEST = 20  # cells that text is folded to at least, beside its label


class Screen(Console):
    """A rich console that raises BrokenPipeError, as `print` does."""

    def on_broken_pipe(self) -> None:
        """Raise it again; rich would exit with status 1."""
        raise


def is_live(stream: IO[str]) -> bool:
    """Whether lines of the stream can be written again: a terminal that moves its cursor."""
    return stream.isatty() and os.environ.get("TERM", "").lower() not in ("dumb", "unknown")


def screen(stream: IO[str] | None = None) -> Screen:
    """The console of a stream, standard output by default; in a pipe it is 80 wide."""
    stream = sys.stdout if stream is None else stream
    return Screen(file=stream, width=None if stream.isatty() else PLAIN_WIDTH)


def bar(
    *columns: ProgressColumn,
    stream: IO[str],
    kind: type[Progress] = Progress,
    transient: bool = False,
) -> Any:
    """A progress bar on a terminal; only what goes to a terminal too is printed above it."""
    return kind(
        *columns,
        console=screen(stream),
        expand=True,
        transient=transient,
        redirect_stdout=sys.stdout.isatty(),
        redirect_stderr=sys.stderr.isatty(),
    )


def table(console: Console, **options: Any) -> Table:
    """A table with a rule below its head on a terminal, plain columns in a pipe."""
    plain = {"box": None, "padding": (0, 2, 0, 0), "pad_edge": False}
    return Table(**({"box": box.SIMPLE_HEAD} if console.is_terminal else plain) | options)


def print_table(console: Console, rows: Table) -> None:
    """Print a table; in a pipe without the spaces that fill its last column."""
    if console.is_terminal:
        console.print(rows)
        return
    with console.capture() as captured:
        console.print(rows)
    lines = (line.rstrip() for line in captured.get().splitlines())
    console.out("\n".join(lines), highlight=False)


def shown(path: str | Path) -> str:
    """A path as the user would type it: relative to where we are, if it lies below."""
    path, here = Path(path).resolve(), Path.cwd()
    return str(path.relative_to(here) if here in path.parents else path)


def labelled(label: str, text: str, stream: IO[str] | None = None) -> str:
    """A label and its text; on a terminal what does not fit is folded below the text's beginning.

    Args:
        label: with the spaces that follow it.
        stream: where it will be printed, standard output by default.
    """
    stream = sys.stdout if stream is None else stream
    if not stream.isatty():
        return label + text
    console = screen(stream)
    lines = Text(text).wrap(console, max(NARROWEST, console.width - len(label)), overflow="fold")
    return label + ("\n" + " " * len(label)).join(line.plain.rstrip() for line in lines)


def command(label: str, words: Sequence[str], width: int | None = None) -> str:
    """A shell command to copy; lines that do not fit end with a backslash.

    Args:
        label: with the spaces that follow it.
        width: by default that of standard output on a terminal, and no limit in a pipe.
    """
    if width is None:
        width = screen().width if sys.stdout.isatty() else 10_000
    room = width - len(label) - len(" \\")
    lines, quoted = [""], [shlex.quote(word) for word in words]
    while quoted:
        pair = " ".join(quoted[:2])  # an option stays beside its value where there is room
        paired = len(quoted) > 1 and quoted[0].startswith("-") and len(pair) + 2 <= room
        part = pair if paired else quoted[0]
        quoted = quoted[1 + paired :]
        if lines[-1] and len(lines[-1]) + 1 + len(part) > room:
            lines.append("  " + part)
        else:
            lines[-1] = f"{lines[-1]} {part}".lstrip(" " if len(lines) == 1 else "")
    return label + (" \\\n" + " " * len(label)).join(lines)


def print_json(content: Any, *, indent: int | None = 1, stream: IO[str] | None = None) -> None:
    """Print one JSON value, on standard output by default; nothing else may be printed there."""
    print(json.dumps(content, ensure_ascii=False, indent=indent), file=stream, flush=True)


def pipe_is_broken() -> bool:
    """Whether standard output or standard error is a pipe whose reader has closed it."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):
            poll = select.poll()
            poll.register(stream.fileno(), 0)
            if any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0)):
                return True
    return False


class _Nowhere(StringIO):
    def write(self, text: str) -> int:
        return len(text)


def hush(stream: IO[str]) -> None:
    """Whatever is printed to the stream from now on is dropped, at the interpreter's end too."""
    with suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)
        return
    name = "stdout" if stream is sys.stdout else "stderr"  # a stream without a file behind it
    setattr(sys, name, _Nowhere())


def shielded(write: Callable[[], Any]) -> bool:
    """Call what prints; False where it cannot be printed any more, which is then dropped.

    A long run outlives its log: a broken pipe, a closed terminal, a full disk.
    """
    try:
        write()
        sys.stdout.flush()
    except OSError as error:
        hush(sys.stdout)
        with suppress(OSError):
            print(
                f"standard output is gone ({error.strerror or error}); the run goes on without it",
                file=sys.stderr,
            )
        return False
    return True
