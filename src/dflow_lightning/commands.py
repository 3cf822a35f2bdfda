"""The commands of `dflow-train`, and where each is; importing this costs nothing."""

from collections.abc import Callable
from importlib import import_module

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
        "dflow_lightning.prepare.command:prepare_command",
        "let the target answer prompts, and write tokens to train on",
    ),
    "inspect": (
        "dflow_lightning.data.inspect:inspect_command",
        "show a row of data and what is learned from it",
    ),
    "export": (
        "dflow_lightning.export.command:export_command",
        "write a checkpoint in the export layout",
    ),
    "validate-export": (
        "dflow_lightning.export.validate:validate_export_command",
        "prove an exported drafter before it is served",
    ),
    "serve-check": (
        "dflow_lightning.serving.check:serve_check_command",
        "serve an exported drafter with a real engine and compare",
    ),
    "decode": ("dflow_lightning.decode.command:decode_command", "answer prompts speculatively"),
    "bench": ("dflow_lightning.bench.command:bench_command", "measure tau and speed of drafters"),
    "report": ("dflow_lightning.report.command:report_command", "turn bench results into one page"),
    "replay": ("dflow_lightning.run.replay:replay_command", "see where a number was not finite"),
    "sync": (
        "dflow_lightning.tracking.sync:sync_command",
        "send what a run's record has not delivered yet",
    ),
    "ui": ("dflow_lightning.tracking.ui:ui_command", "open the dashboard of a run"),
}


def load_tool(name: str) -> Callable[..., None]:
    """A tool's typed function; only its module is imported."""
    module, _, function = TOOLS[name][0].partition(":")
    return getattr(import_module(module), function)
