"""`dflow-train`: one command for training and for the tools around it."""

import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from io import TextIOWrapper
from signal import SIG_DFL, SIGINT, signal

from dflow_lightning.commands import RUNS, TOOLS, load_tool
from dflow_lightning.errors import InputError, RunError


def usage() -> str:
    """The text of `dflow-train --help`; written by hand, so that it answers at once."""
    tools = {name: text for name, (_, text) in TOOLS.items()}
    lines = [f"  {name:<17}{text}" for name, text in (RUNS | tools).items()]
    return "\n".join(
        [
            "usage: dflow-train <command> [options]",
            "",
            "Train, measure and export speculative drafters.",
            "",
            *lines,
            "",
            "dflow-train demo                                    start with this",
            "dflow-train <command> --help                        all options of a command",
        ]
    )


def run_tool(name: str, args: list[str]) -> None:
    """Calls a tool's typed function with parsed arguments."""
    from dflow_lightning.commandline.arguments import call_tool

    call_tool(name, load_tool(name), args)


def dispatch(args: list[str]) -> int:
    """Runs one command; anything that goes wrong is raised."""
    if not args or args[0] in ("-h", "--help", "help"):
        print(usage())
        return 0 if args else 2
    command = args[0]
    if command in TOOLS:
        run_tool(command, args)
    elif command == "completion":
        from dflow_lightning.completion import print_completion

        return print_completion(args[1:])
    elif command == "plan":
        from dflow_lightning.plan.command import plan_command

        return plan_command(args[1:])
    elif command == "sweep":
        from dflow_lightning.sweep.command import run_sweep

        return run_sweep(args[1:])
    elif command == "doctor":
        from dflow_lightning.doctor.command import doctor_command

        return doctor_command(args[1:])
    elif command in RUNS:
        from dflow_lightning.run.fit import run

        return run(args)
    else:
        from dflow_lightning.commandline.arguments import nearest

        raise InputError(
            f"unknown command {command!r}{nearest(command, [*RUNS, *TOOLS])} "
            "(dflow-train --help lists them)"
        )
    return 0


def complain(error: Exception) -> None:
    """Print an error: one line, folded on a terminal."""
    text = str(error)
    if sys.stderr.isatty():
        from dflow_lightning.terminal import labelled

        text = labelled("error: ", text, sys.stderr).removeprefix("error: ")
    with suppress(OSError):  # standard error may lie on the same full disk
        print(f"error: {text}", file=sys.stderr)


def exit_status(args: list[str]) -> int:
    """The exit status of a command line; a user's mistake is printed as one line."""
    try:
        return dispatch(args)
    except InputError as error:
        complain(error)
        return 2
    except RunError as error:
        complain(error)
        return 1
    except KeyboardInterrupt:
        # The terminal has echoed ^C where the cursor was.
        print("\ninterrupted" if sys.stderr.isatty() else "interrupted", file=sys.stderr)
        return 130
    except SystemExit as stop:  # argparse leaves this way, after --help for one
        return stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except BrokenPipeError:
        raise
    except Exception as error:
        from dflow_lightning.files import refusal

        said = refusal(error)
        if said is None:
            raise
        complain(InputError(said))
        return 2


def flushed(status: int) -> int:
    """The exit status once the output is written: 2 where its disk is full."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        from dflow_lightning.terminal import hush

        if status != 2:  # else it is said already
            complain(InputError(f"standard output: {error.strerror}; what it got is not whole"))
        hush(sys.stdout)
        return 2
    return status


def open_what_is_closed() -> None:
    """Lead standard streams that the caller has closed (`>&-`) to nowhere.

    Else the next file that is opened gets such a stream's number, and what a library prints.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number, which is this one
        if getattr(sys, name) is None:
            mode = "w" if number else "r"
            setattr(sys, name, os.fdopen(number, mode, encoding="utf-8", closefd=False))


def main(args: Sequence[str] | None = None) -> int:
    """Runs a command line and returns its exit status.

    0, 2 for a user's mistake, 1 for a run that could not go on, 130 on Ctrl-C, 143 on SIGTERM, 141
    where nobody reads the output any more (`| head`). Any other exception is a defect and keeps its
    traceback (status 1).
    """
    open_what_is_closed()
    for stream in (sys.stdout, sys.stderr):  # where a character cannot be written, its code is
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    try:
        status = exit_status(list(sys.argv[1:] if args is None else args))
        status = flushed(status)
    except BrokenPipeError:
        from dflow_lightning.terminal import hush, pipe_is_broken

        if not pipe_is_broken():  # it was of another connection
            raise
        hush(sys.stdout)
        hush(sys.stderr)
        return 141
    if status == 130 and args is None:
        signal(SIGINT, SIG_DFL)  # pressed again, it ends the process, which has nothing left to do
    return status


if __name__ == "__main__":
    sys.exit(main())
