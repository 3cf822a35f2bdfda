"""The commands of `dflow-train`, and where each is; importing this costs nothing."""

from collections.abc import Callable
from importlib import import_module

RUNS = {
    "fit": "train a drafter from a recipe",
    "validate": "decode validation prompts with a checkpoint, relay on and off",
    "test": "decode test prompts with a checkpoint, relay on and off",
    "sweep": "train and measure several recipes with several seeds",
    "plan": "estimate memory and time of a recipe before it runs",
    "doctor": "check this environment, and a recipe on one batch",
    "completion": "print a shell completion script for bash or zsh",
}
TOOLS = {
    "init": (
        "dflow_lightning.embedded:init_command",
        "write the tiny target, its prompts, drafters and recipes",
    ),
    "demo": ("dflow_lightning.demo:demo_command", "train, export and measure a tiny drafter"),
    "prepare": (
        "dflow_lightning.prepare.command:prepare_command",
        "generate answers with the target and write training data",
    ),
    "inspect": (
        "dflow_lightning.data.inspect:inspect_command",
        "show a row of data and which tokens are supervised",
    ),
    "export": (
        "dflow_lightning.export.command:export_command",
        "convert a checkpoint to the layout that engines load",
    ),
    "validate-export": (
        "dflow_lightning.export.validate:validate_export_command",
        "check an exported drafter before serving it",
    ),
    "serve-check": (
        "dflow_lightning.serving.check:serve_check_command",
        "serve an exported drafter with vLLM and compare tau",
    ),
    "decode": (
        "dflow_lightning.decode.command:decode_command",
        "answer prompts with speculative decoding",
    ),
    "bench": ("dflow_lightning.bench.command:bench_command", "measure tau and speed of drafters"),
    "report": (
        "dflow_lightning.report.command:report_command",
        "render bench results as an HTML page",
    ),
    "replay": (
        "dflow_lightning.run.replay:replay_command",
        "rerun a non-finite step and locate the first bad tensor",
    ),
    "sync": (
        "dflow_lightning.tracking.sync:sync_command",
        "send tracking records that are still queued in a run",
    ),
    "ui": ("dflow_lightning.tracking.ui:ui_command", "open the dashboard of a run"),
}


def load_tool(name: str) -> Callable[..., None]:
    """A tool's typed function; only its module is imported."""
    module, _, function = TOOLS[name][0].partition(":")
    return getattr(import_module(module), function)
