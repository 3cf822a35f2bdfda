"""An export as a version of a registered model, in the tracking store of the run it came from."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

from dflow_lightning.terminal import labelled
from dflow_lightning.tracking.address import sqlite_file
from dflow_lightning.tracking.callback import KEY, RUN_ID
from dflow_lightning.tracking.journal import TRACKING_FOLDER, Destination, read_state
from dflow_lightning.tracking.logger import store_address
from dflow_lightning.tracking.sender import reason
from dflow_lightning.tracking.store import KEY_TAG, TAG_LIMIT, RunStore, import_mlflow
from dflow_lightning.training.saved import Checkpoint
from dflow_lightning.training.validation import DECODED_KEY


def register_export(
    checkpoint: Checkpoint, out: Path, name: str | None = None, *, stream: TextIO | None = None
) -> None:
    """Uploads an export to its run and registers it, with its tau table as description.

    Prints what happened; a run without a record has nothing to print.

    Args:
        stream: where it prints, standard output by default.
    """
    destination = destination_of(checkpoint)
    if destination is None:
        return
    import_mlflow(destination.uri)
    name = name or model_name(destination.experiment, out)
    try:
        version = register_version(destination, checkpoint, out, name)
    except Exception as error:  # whatever a store, a disk or a network raises
        uri = destination.uri
        message = (
            f"not registered at {uri} ({reason(error, uri)}); the export is complete, and the same "
            "command registers it later"
        )
    else:
        message = f"registered as {name}, version {version}, at {destination.uri}"
    print(labelled("", message, stream), file=stream)


def destination_of(checkpoint: Checkpoint) -> Destination | None:
    """Where the run of a checkpoint is recorded."""
    content = checkpoint.content
    key, run_id = content.get(KEY), content.get(RUN_ID)
    if key is None and run_id is None:
        return None
    run_dir = checkpoint.path.absolute().parent.parent
    if (state := read_state(run_dir / TRACKING_FOLDER / f"{key}.jsonl")) is not None:
        return state[0]
    tracking = (content.get("recipe") or {}).get("tracking") or {}
    uri = store_address(run_dir, tracking.get("uri"))
    if (store := sqlite_file(uri)) is not None and not store.is_file():
        return None
    return Destination(key or "", uri, tracking.get("experiment") or "dflow", "", run_id)


def model_name(experiment: str, out: Path) -> str:
    """The experiment's name and the target's."""
    config = json.loads((out / "config.json").read_text(encoding="utf-8"))
    target = (config.get("dflow_config") or {}).get("target") or {}
    target_name = str(target.get("name") or "drafter").rstrip("/").rpartition("/")[2]
    return f"{experiment}-{target_name}"


def register_version(destination: Destination, checkpoint: Checkpoint, out: Path, name: str) -> str:
    """The number of the new version."""
    content, file = checkpoint.content, checkpoint.path
    from mlflow.exceptions import MlflowException

    store = RunStore(destination)
    run_id = store.existing_run()
    client = store.client
    # Part of an address: a checkpoint's file may have any name.
    plain = re.sub(r"[^\w.=-]", "-", file.stem, flags=re.ASCII)
    folder = f"drafter/{plain}-step{int(content.get('global_step') or 0):07}"
    client.log_artifacts(run_id, str(out), folder)
    try:
        client.create_registered_model(name)
    except MlflowException as error:
        if error.error_code != "RESOURCE_ALREADY_EXISTS":
            raise
    version = client.create_model_version(
        name,
        source=f"{client.get_run(run_id).info.artifact_uri}/{folder}",
        run_id=run_id,
        description=description(content, file.name),
        tags={
            KEY_TAG: destination.key,
            "step": str(content.get("global_step")),
            "checkpoint": file.name,
            **{name: f"{tau:.4f}" for name, tau in validation_taus(content).items()},
        },
    )
    return str(version.version)


def validation_taus(content: Mapping[str, Any]) -> dict[str, float]:
    """tau over all prompts with the relay on and off, where a validation measured it."""
    measured = (content.get(DECODED_KEY) or {}).get("metrics") or {}
    names = {"tau": "val/tau", "tau_relay_off": "val/tau_relay_off"}
    return {name: measured[key] for name, key in names.items() if key in measured}


def description(content: Mapping[str, Any], file: str) -> str:
    """The tau table in Markdown."""
    decoded = content.get(DECODED_KEY)
    head = f"Exported from `{file}` at step {content.get('global_step')}."
    if not decoded:
        return f"{head} No validation has decoded with it."
    metrics = decoded["metrics"]
    both = "val/tau_relay_off" in metrics
    lines = [
        f"{head} tau by real decoding of the validation prompts at step {decoded['step']}:",
        "",
        "| task | relay on | relay off |" if both else "| task | tau |",
        "|---|---|---|" if both else "|---|---|",
    ]
    for key, tau in metrics.items():
        parts = key.split("/")
        if parts[-1] == "tau":
            cells = ["/".join(parts[1:-1]) or "all prompts", f"{tau:.3f}"]
            cells += [f"{metrics[f'{key}_relay_off']:.3f}"] if both else []
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)[:TAG_LIMIT]
