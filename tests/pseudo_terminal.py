"""Commands in a pseudo-terminal, and what a person would see of them.

The terminal says that it has some columns, but what is printed is drawn on a much wider screen: a
line that would have wrapped stands out beyond the columns, and is seen.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from fcntl import ioctl
from pty import fork as fork_in_terminal
from struct import pack
from termios import TIOCSWINSZ

import pyte

WIDE, TALL = 400, 200
FRAME_SECONDS = 0.5


class Paper(pyte.Screen):
    """A screen that remembers what was drawn beyond the columns that a program knows of."""

    def __init__(self, columns: int) -> None:
        super().__init__(WIDE, TALL)
        self.told = columns
        self.wide: dict[int, str] = {}

    def draw(self, data: str) -> None:
        """Characters at the cursor."""
        super().draw(data)
        if self.cursor.x > self.told:
            line = self.buffer[self.cursor.y]
            self.wide[self.cursor.y] = "".join(line[x].data for x in range(self.cursor.x))

    def text_lines(self) -> list[str]:
        """What stands there, without the empty rest."""
        return "\n".join(line.rstrip() for line in self.display).rstrip().split("\n")


def displayed(text: str, columns: int) -> Paper:
    """The screen after a program printed this to a terminal of so many columns."""
    paper = Paper(columns)
    pyte.Stream(paper).feed(text.replace("\r\n", "\n").replace("\n", "\r\n"))
    return paper


@dataclass
class Seen:
    """What a command printed and how it ended; negative for the number of a signal."""

    paper: Paper
    raw: bytes = b""
    status: int | None = None
    frames: list[list[str]] = field(default_factory=list)


def call(work: Callable[[], int]) -> None:
    """In a forked child: run with fresh streams, and end without the parent's clean-up."""
    for number, name in ((1, "stdout"), (2, "stderr")):
        setattr(sys, name, os.fdopen(os.dup(number), "w", buffering=1, encoding="utf-8"))
        os.set_inheritable(number, True)
    sys.__stdout__, sys.__stderr__ = sys.stdout, sys.stderr
    status = 70
    try:
        status = work()
    except BaseException:
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(status)


def in_terminal(
    work: Callable[[], int],
    columns: int,
    *,
    limit: float = 600.0,
    keys: Callable[[Seen], bytes] = lambda _: b"",
) -> Seen:
    """Run a function in a child process on a terminal of so many columns and 24 lines.

    Args:
        limit: seconds after which it is killed.
        keys: asked after each piece of output for what a person types then.
    """
    pid, terminal = fork_in_terminal()
    if not pid:
        # A shell's children do not inherit what a test runner ignores.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        call(work)
    ioctl(terminal, TIOCSWINSZ, pack("HHHH", 24, columns, 0, 0))
    seen, end, shot = Seen(Paper(columns)), time.monotonic() + limit, 0.0
    stream = pyte.ByteStream(seen.paper)
    while True:
        if time.monotonic() > end:
            os.kill(pid, signal.SIGKILL)
        readable, _, _ = select.select([terminal], [], [], 0.2)
        try:
            piece = os.read(terminal, 65536) if readable else b""
        except OSError:  # the child has ended
            break
        if readable and not piece:
            break
        if piece:
            seen.raw += piece
            stream.feed(piece)
            if time.monotonic() - shot > FRAME_SECONDS:
                seen.frames.append(seen.paper.text_lines())
                shot = time.monotonic()
        if typed := keys(seen):
            os.write(terminal, typed)
    os.close(terminal)
    seen.status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return seen


def piped(work: Callable[[], int], *, limit: float = 600.0) -> tuple[int, str, str]:
    """Run a function in a child process on two pipes; status, standard output, standard error."""
    pipes = [os.pipe(), os.pipe()]
    pid = os.fork()
    if not pid:
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        for number, (_, write) in enumerate(pipes, start=1):
            os.dup2(write, number)
        for read, write in pipes:
            os.close(read)
            os.close(write)
        call(work)
    for _, write in pipes:
        os.close(write)
    texts, end = {read: b"" for read, _ in pipes}, time.monotonic() + limit
    waiting = list(texts)
    while waiting:
        if time.monotonic() > end:
            os.kill(pid, signal.SIGKILL)
        for read in select.select(waiting, [], [], 0.2)[0]:
            piece = os.read(read, 65536)
            texts[read] += piece
            if not piece:
                waiting.remove(read)
                os.close(read)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    out, err = (text.decode() for text in texts.values())
    return status, out, err
