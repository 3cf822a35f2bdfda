"""`dflow-train`: one command for training and for the tools around it."""

import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from io import TextIOWrapper
from signal import SIG_DFL, SIGINT, signal

from dflow_lightning.errors import InputError, RunError

RUNS = {
    "fit": "train a drafter from a recipe",
    "validate": "decode validation prompts with a checkpoint, relay on and off",
    "test": "the same on the test prompts",
    "sweep": "run recipes times seeds one after the other, and measure each",
    "plan": "say what a recipe needs before it is run",
    "doctor": "check this environment, and a recipe on one batch",
    "completion": "print a script that completes commands, options and paths",
}
TOOLS = {
    "init": (
        "dflow_lightning.embedded:init_command",
        "write the tiny target, its prompts, drafters and recipes",
    ),
    "demo": ("dflow_lightning.demo:demo_command", "the same, then train, export and measure"),
    "prepare": (
        "dflow_lightning.data.prepare:prepare_command",
        "let the target answer prompts, and write tokens to train on",
    ),
    "inspect": (
        "dflow_lightning.data.inspect:inspect_command",
        "show a row of data and what is learned from it",
    ),
    "export": ("dflow_lightning.export:export_command", "write a checkpoint in the export layout"),
    "validate-export": (
        "dflow_lightning.validate_export:validate_export_command",
        "prove an exported drafter before it is served",
    ),
    "serve-check": (
        "dflow_lightning.serving.check:serve_check_command",
        "serve an exported drafter with a real engine and compare",
    ),
    "decode": ("dflow_lightning.decode.command:decode_command", "answer prompts speculatively"),
    "bench": ("dflow_lightning.bench:bench_command", "measure tau and speed of drafters"),
    "report": ("dflow_lightning.report:report_command", "turn bench results into one page"),
    "replay": ("dflow_lightning.replay:replay_command", "see where a number was not finite"),
    "sync": (
        "dflow_lightning.sync:sync_command",
        "send what a run's record has not delivered yet",
    ),
    "ui": ("dflow_lightning.ui:ui_command", "open the dashboard of a run"),
}


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


def load_tool(name: str) -> Callable[..., None]:
    """A tool's typed function; only its module is imported."""
    module, _, function = TOOLS[name][0].partition(":")
    return getattr(import_module(module), function)


def run_tool(name: str, args: list[str]) -> None:
    """Calls a tool's typed function with parsed arguments."""
    from dflow_lightning.arguments import call_tool

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
        from dflow_lightning.completion import run as completion

        return completion(args[1:])
    elif command == "plan":
        from dflow_lightning.plan import run as plan

        return plan(args[1:])
    elif command == "sweep":
        from dflow_lightning.sweep import run as sweep

        return sweep(args[1:])
    elif command == "doctor":
        from dflow_lightning.doctor import run as doctor

        return doctor(args[1:])
    elif command in RUNS:
        from dflow_lightning.cli import run

        return run(args)
    else:
        from dflow_lightning.arguments import nearest

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
    print(f"error: {text}", file=sys.stderr)


def outcome(args: list[str]) -> int:
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


def main(args: Sequence[str] | None = None) -> int:
    """Runs a command line and returns its exit status.

    0, 2 for a user's mistake, 1 for a run that could not go on, 130 on Ctrl-C, 143 on SIGTERM, 141
    where nobody reads the output any more (`| head`). Any other exception is a defect and keeps its
    traceback (status 1).
    """
    for stream in (sys.stdout, sys.stderr):  # where a character cannot be written, its code is
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    try:
        status = outcome(list(sys.argv[1:] if args is None else args))
        sys.stdout.flush()
    except BrokenPipeError:
        from dflow_lightning.terminal import hush, reader_has_gone

        if not reader_has_gone():  # it was of another connection
            raise
        hush(sys.stdout)
        hush(sys.stderr)
        return 141
    if status == 130 and args is None:
        signal(SIGINT, SIG_DFL)  # pressed again, it ends the process, which has nothing left to do
    return status


if __name__ == "__main__":
    sys.exit(main())
