"""`dflow-train`: one command for training and for the tools around it."""

import sys
from collections.abc import Sequence
from importlib import import_module

from dflow_lightning.errors import InputError, RunError

RUNS = {
    "fit": "train a drafter from a recipe",
    "validate": "decode the validation prompts with a checkpoint, relay on and off",
    "test": "the same on the test prompts",
    "sweep": "run recipes times seeds one after the other, and measure each",
    "plan": "say what a recipe needs before it is run",
    "doctor": "check this environment, and a recipe on one batch",
}
TOOLS = {
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
            "dflow-train fit --config recipes/tiny-dflow.yaml    start with this",
            "dflow-train <command> --help                        all options of a command",
        ]
    )


def run_tool(name: str, args: list[str]) -> None:
    """Calls a tool's typed function with parsed arguments; only this tool is imported."""
    from jsonargparse import auto_cli

    from dflow_lightning.arguments import ToolParser, spell_out

    module, _, function = TOOLS[name][0].partition(":")
    tool = getattr(import_module(module), function)
    auto_cli(
        {name: tool},
        args=spell_out(tool, args),
        as_positional=False,
        parser_class=ToolParser,
        prog="dflow-train",
    )


def dispatch(args: list[str]) -> int:
    """Runs one command; anything that goes wrong is raised."""
    if not args or args[0] in ("-h", "--help", "help"):
        print(usage())
        return 0 if args else 2
    command = args[0]
    if command in TOOLS:
        run_tool(command, args)
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


def main(args: Sequence[str] | None = None) -> int:
    """Runs a command line and returns its exit status.

    0, 2 for a user's mistake, 1 for a run that could not go on, 130 on Ctrl-C, 143 on SIGTERM. Any
    other exception is a defect and keeps its traceback (status 1).
    """
    try:
        return dispatch(list(sys.argv[1:] if args is None else args))
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except RunError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except SystemExit as stop:  # argparse leaves this way, after --help for one
        return stop.code if isinstance(stop.code, int) else int(stop.code is not None)


if __name__ == "__main__":
    sys.exit(main())
