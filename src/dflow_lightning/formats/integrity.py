"""What an export records about itself, so that a later change of the folder is noticed.

In `dflow_config` of config.json, beside what other modules write there:

    exported_config   the keys that engines read, once more: a key that was changed is named
    checksums         sha256 of model.safetensors, of relay/relay.safetensors,
                      carryover/carryover.safetensors and decode/draft.pt2 where they are, and of
                      `dflow_config` itself without its checksums, as JSON with sorted keys and no
                      spaces

Exports from before these, and folders that others published, are read without them.
"""

import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dflow_lightning.errors import InputError

PACKAGE_PATH = "decode/draft.pt2"
CARRYOVER_FILE = "carryover/carryover.safetensors"
FILES = ("model.safetensors", "relay/relay.safetensors", CARRYOVER_FILE, PACKAGE_PATH)
SECTION = "dflow_config"
PICKLED = {".bin", ".pkl", ".pickle", ".pt", ".pth", ".ckpt", ".joblib"}
CODE = {".py", ".pyc", ".so", ".pt2"}


def record(folder: Path, config: dict[str, Any]) -> None:
    """Complete the config of a new export whose weights lie in `folder` already."""
    section = config[SECTION]
    section["exported_config"] = {key: value for key, value in config.items() if key != SECTION}
    files = [name for name in FILES if (folder / name).is_file()]
    section["checksums"] = {name: file_sha256(folder / name) for name in files}
    section["checksums"][SECTION] = section_sha256(section)


def check_export_unchanged(folder: Path, config: dict[str, Any]) -> None:
    """Compare a folder with what it recorded when it was exported.

    Raises:
        InputError: a key of config.json or a file of weights is not the exported one.
    """
    section = config.get(SECTION) or {}
    checksums = section.get("checksums")
    if checksums is None:
        return
    if not isinstance(checksums, dict) or section_sha256(section) != checksums.get(SECTION):
        raise InputError(
            f"drafter: {SECTION} in {folder}/config.json was changed after the export (checksum); "
            "export the drafter again"
        )
    for change in changes(section["exported_config"], config):
        raise InputError(f"drafter: {folder}/config.json {change}; export the drafter again")
    for name in FILES:
        if (folder / name).is_file() and file_sha256(folder / name) != checksums.get(name):
            raise InputError(
                f"drafter: the checksum of {folder / name} is not that of the export; copy the "
                "folder again or export the drafter again"
            )


def changes(exported: dict[str, Any], found: dict[str, Any], where: str = "") -> Iterator[str]:
    """How `found` differs from `exported`, key by key; keys that were added are not looked at."""
    for key, value in exported.items():
        name = f"{where}{key}"
        if key not in found:
            yield f"lacks {name}, which was exported as {value}"
        elif isinstance(value, dict) and isinstance(found[key], dict):
            yield from changes(value, found[key], f"{name}.")
        elif found[key] != value:
            yield f"has {name} {found[key]}, which was exported as {value}"


def check_files(folder: Path) -> None:
    """Refuse files that no export writes and that somebody's loader might run, unpickle or follow.

    Raises:
        InputError: for the first of them.
    """
    root = folder.resolve()
    blobs = root.parent.parent / "blobs"  # a hub cache keeps every file there, behind a link
    homes = [root, blobs] if root.parent.name == "snapshots" else [root]
    for path in sorted(root.rglob("*")):
        name, real = path.relative_to(root), Path(os.path.realpath(path))
        if not any(real.is_relative_to(home) for home in homes):
            raise InputError(
                f"drafter: {folder} holds {name}, a link to {real} outside the folder; replace it "
                "by the file itself"
            )
        if path.suffix in PICKLED:
            raise InputError(
                f"drafter: {folder} holds {name}; only safetensors files are read, remove it"
            )
        if path.suffix in CODE and str(name) != PACKAGE_PATH:
            raise InputError(
                f"drafter: {folder} holds {name}; an export holds no other code, remove it"
            )
        if path.suffix == ".safetensors" and str(name) not in FILES:
            raise InputError(
                f"drafter: {folder} holds {name}, which no export wrote and engines would read; "
                "remove it"
            )


def file_sha256(path: Path) -> str:
    """Checksum of a file, read in pieces."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(1 << 20):
            digest.update(piece)
    return digest.hexdigest()


def section_sha256(section: dict[str, Any]) -> str:
    """Checksum of `dflow_config`, its checksums left out."""
    content = {key: value for key, value in section.items() if key != "checksums"}
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()
