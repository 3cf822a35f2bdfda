"""Provenance of a run: command, versions, code, machine, and fingerprints of its inputs."""

import getpass
import json
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from dflow_lightning.data.prepared import MANIFEST
from dflow_lightning.formats.integrity import file_sha256

PACKAGES = (
    "dflow-lightning",
    "torch",
    "lightning",
    "transformers",
    "deepspeed",
    "mlflow",
    "datasets",
)
GIT_WITHIN = 5.0  # seconds; a repository on a slow disk is then not described
DIGEST_LENGTH = 36  # the most that MLflow keeps of a dataset's digest
DIFF_LIMIT = 500_000  # characters


def run_tags(world_size: int) -> dict[str, str]:
    """Command, versions, machine and git commit, as tags."""
    tags = {
        "command": shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "mlflow.source.name": "dflow-train",
        "mlflow.source.type": "LOCAL",
    }
    with suppress(Exception):  # no user database, as in some containers
        tags["mlflow.user"] = getpass.getuser()
    for name in PACKAGES:
        with suppress(PackageNotFoundError):
            tags[f"version.{name}"] = version(name)
    tags["version.python"] = platform.python_version()
    return tags | hardware_tags(world_size) | git_state()


def hardware_tags(world_size: int) -> dict[str, str]:
    """Processors, memory and GPUs of this machine, and how many processes train together."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    tags = {
        "hardware.host": platform.node(),
        "hardware.cpu": f"{len(os.sched_getaffinity(0))} x {processor()}",
        "hardware.memory": f"{memory / 1e9:.0f} GB",
        "hardware.processes": str(world_size),
    }
    if torch.cuda.is_available():
        names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
        tags["hardware.gpu"] = ", ".join(f"{names.count(n)} x {n}" for n in sorted(set(names)))
        tags["version.cuda"] = str(torch.version.cuda)
    return tags


def processor() -> str:
    """The processor's name on Linux, elsewhere its architecture."""
    with suppress(OSError), Path("/proc/cpuinfo").open(encoding="utf-8") as file:
        for line in file:
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()


def git(*args: str) -> str | None:
    """Output of a git command in the working directory; None outside a repository."""
    with suppress(OSError, subprocess.SubprocessError, UnicodeError):
        done = subprocess.run(
            ["git", *args], capture_output=True, text=True, check=True, timeout=GIT_WITHIN
        )
        return done.stdout.strip()
    return None


def git_state() -> dict[str, str]:
    """Commit and branch of the working directory, and whether files differ from it."""
    commit = git("rev-parse", "HEAD")
    if commit is None:
        return {}
    changed = git("status", "--porcelain", "--untracked-files=no")
    state = "unknown" if changed is None else "changed" if changed else "as committed"
    branch = git("rev-parse", "--abbrev-ref", "HEAD")
    tags = {"git.commit": commit, "git.files": state, "mlflow.source.git.commit": commit}
    return tags | ({"git.branch": branch} if branch else {})


def git_diff() -> str | None:
    """The difference to the commit; None if there is none, or more than `DIFF_LIMIT`."""
    diff = git("diff", "HEAD")
    return diff + "\n" if diff and len(diff) < DIFF_LIMIT else None


def fingerprints(module: Any, data: Any) -> tuple[dict[str, str], list[dict[str, str]]]:
    """Tags with the fingerprints of target and data sets, and the data sets for MLflow.

    Of a prepared folder the manifest is hashed: it holds the checksums of the other files.
    """
    target, sets = module.target, list[dict[str, str]]()
    tags = {"target.name": target.name, "target.fingerprint": target.fingerprint}
    for split, paths in data.paths.items():
        digests = []
        for path in paths:
            file = path / MANIFEST if path.is_dir() else path
            if not file.is_file():
                continue
            digests.append(file_sha256(file))
            profile = json.dumps({"bytes": size_of(path)})
            sets.append(
                {
                    "name": path.name,
                    "digest": digests[-1][:DIGEST_LENGTH],
                    "source": str(path.resolve()),
                    "context": split,
                    "profile": profile,
                }
            )
        if digests:
            tags[f"data.{split}.sha256"] = ", ".join(digests)
    return tags, sets


def size_of(path: Path) -> int:
    """Bytes of a file, or of the files of a folder."""
    files: Sequence[Path] = list(path.iterdir()) if path.is_dir() else [path]
    return sum(file.stat().st_size for file in files if file.is_file())
