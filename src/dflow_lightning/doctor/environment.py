"""The checks of `dflow-train doctor` that need no model: packages, GPUs, disk, tracking server.

    packages   installed in the range of pyproject.toml, and as tested (constraints/cpu.txt)
    deepspeed  importable, where trainer.strategy asks for it
    GPUs       what torch sees, and whether it is what the recipe asks for
    disk       room for the checkpoints of the run folder
    tracking   the MLflow store answers

Only the check of the GPUs imports torch: a GPU that the driver sees and torch does not is no use.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import urllib.error
import urllib.request
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import PackageNotFoundError, requires, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement

from dflow_lightning import embedded
from dflow_lightning.checks import DoubtError, FailedError, SkippedError, Step
from dflow_lightning.terminal import shown
from dflow_lightning.tracking.address import sqlite_file

PACKAGE = "dflow-lightning"
TESTED = embedded.constraints_file()
LITTLE_DISK = 5e9  # bytes; checkpoints of a small drafter and its record
ANSWER_WITHIN = 5.0  # seconds, of a tracking server
IMPORT_WITHIN = 120.0  # seconds


def install_command(extra: str = "") -> str:
    """The command that brings the tested versions, for a source checkout or an installed wheel."""

    def quoted(name: str) -> str:
        return f"'{name}[{extra}]'" if extra else name

    if TESTED is None or TESTED.is_relative_to(embedded.IN_CHECKOUT / "constraints"):
        return f"pip install -c constraints/cpu.txt -e {quoted('.')}"
    return f"pip install -c {TESTED} {quoted(PACKAGE)}"


INSTALL = install_command()


@dataclass(frozen=True)
class Environment:
    """This machine, and the recipe that is to run on it, where one was given.

    Args:
        recipe: as `plan.parse` reads it.
        run_dir: where the run would write.
    """

    recipe: Any = None
    run_dir: Path = Path("runs")

    @cached_property
    def plan(self) -> Any:
        """The recipe's `Plan`; None without a recipe or with one that the target check refuses."""
        if self.recipe is None:
            return None
        from dflow_lightning.errors import InputError
        from dflow_lightning.plan.command import make_plan

        try:
            return make_plan(self.recipe)
        except InputError:
            return None

    @property
    def strategy(self) -> str:
        """The name of trainer.strategy, or of its class."""
        if self.recipe is None:
            return ""
        chosen = self.recipe.trainer.strategy
        return chosen if isinstance(chosen, str) else getattr(chosen, "class_path", "")

    @property
    def tracking_uri(self) -> str | None:
        """The MLflow store that is not in the run folder."""
        from_recipe = None if self.recipe is None else self.recipe.tracking.uri
        return from_recipe or os.environ.get("MLFLOW_TRACKING_URI")


def check_packages(environment: Environment) -> str:
    """Installed versions against the declared ranges and against the tested ones."""
    missing, outside = [], []
    for wanted in declared():
        try:
            found = version(wanted.name)
        except PackageNotFoundError:
            missing.append(str(wanted))
            continue
        if not wanted.specifier.contains(found, prereleases=True):
            outside.append(f"{wanted.name} {found} is installed, {wanted.specifier} is needed")
    if missing:
        raise FailedError(f"{', '.join(missing)} is not installed; {INSTALL}")
    if outside:
        raise FailedError(f"{', '.join(outside)}; {INSTALL}")
    tested, other = tested_versions(), []
    for name, wanted_version in tested.items():
        try:
            if version(name).partition("+")[0] != wanted_version:
                other.append(f"{name} {version(name)} (tested: {wanted_version})")
        except PackageNotFoundError:  # of an extra
            continue
    about = f"python {platform.python_version()}, torch {version('torch')}"
    if other:
        raise DoubtError(f"{', '.join(other)}; if something fails, {INSTALL}")
    return f"{about}, all as tested" if tested else f"{about}, all in the declared ranges"


def declared() -> list[Requirement]:
    """What the installed package requires, without its extras."""
    try:
        lines = requires(PACKAGE) or []
    except PackageNotFoundError as error:
        raise DoubtError(f"{PACKAGE} runs from a source tree; {INSTALL}") from error
    found = [Requirement(line) for line in lines]
    return [one for one in found if one.marker is None or one.marker.evaluate({"extra": ""})]


def tested_versions() -> dict[str, str]:
    """Exact versions of the test environment; empty if the constraints file is missing."""
    if TESTED is None:
        return {}
    lines = (line.partition("#")[0].strip() for line in TESTED.read_text("utf-8").splitlines())
    found = [Requirement(line) for line in lines if line]
    wanted = [one for one in found if one.marker is None or one.marker.evaluate()]
    return {one.name: next(iter(one.specifier)).version for one in wanted}


def check_deepspeed(environment: Environment) -> str:
    """Found, and imported where the recipe uses it: that takes seconds and compiles nothing."""
    wanted = "zero" in environment.strategy.lower()
    fix = install_command("deepspeed")
    if find_spec("deepspeed") is None:
        if wanted:
            raise FailedError(
                f"trainer.strategy is {environment.strategy}, but deepspeed is not installed; "
                + fix
            )
        raise DoubtError(f"not installed, so trainer.strategy cannot be zero1, 2 or 3; {fix}")
    if not wanted:
        return f"{version('deepspeed')} is installed; this setup does not use it"
    command = [sys.executable, "-c", "import deepspeed"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=IMPORT_WITHIN)
    except subprocess.TimeoutExpired as error:
        raise FailedError(f"import deepspeed takes more than {IMPORT_WITHIN:g} s; {fix}") from error
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise FailedError(f"import deepspeed fails ({last[:150]}); {fix}")
    return f"{version('deepspeed')} can be imported"


def check_gpus(environment: Environment) -> str:
    """What torch sees; a GPU that only the driver sees is a fault of the installation."""
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    there = Path("/dev/nvidia0").exists()
    if there and not count:
        cause = f"torch {torch.__version__} sees none"
        if torch.version.cuda is None:
            raise FailedError(f"a GPU is there, but {cause}: a CPU build; install a CUDA build")
        raise FailedError(
            f"a GPU is there, but {cause}; look at nvidia-smi, CUDA_VISIBLE_DEVICES and whether "
            f"the driver is new enough for CUDA {torch.version.cuda}"
        )
    wanted = wanted_gpus(environment.recipe)
    if wanted > count:
        raise FailedError(
            f"trainer.accelerator is {environment.recipe.trainer.accelerator} with "
            f"{environment.recipe.trainer.devices} devices, but torch sees {count} GPUs; set "
            + ("trainer.devices to that" if count else "--trainer.accelerator cpu, or find a GPU")
        )
    if not count:
        found = f"none; {os.cpu_count()} CPU cores"
        if environment.recipe is not None and environment.recipe.trainer.accelerator != "cpu":
            raise DoubtError(f"{found}; set --trainer.accelerator cpu if that is meant")
        return found
    sizes = [torch.cuda.get_device_properties(index) for index in range(count)]
    memory = min(size.total_memory for size in sizes) / 2**30
    if environment.plan is not None and environment.recipe.trainer.accelerator != "cpu":
        environment.plan.refuse_what_does_not_fit(memory)
    if not torch.cuda.is_bf16_supported(including_emulation=False):
        raise DoubtError(
            f"{sizes[0].name} has no bfloat16; set --trainer.precision 32-true and "
            "--model.target.dtype float32"
        )
    return f"{count} x {sizes[0].name}, {memory:.0f} GiB each"


def wanted_gpus(recipe: Any) -> int:
    """GPUs of this machine that a recipe cannot do without."""
    if recipe is None or recipe.trainer.accelerator not in ("gpu", "cuda"):
        return 0
    devices = recipe.trainer.devices
    if isinstance(devices, list):
        return max(devices, default=0) + 1
    return int(devices) if str(devices).isdigit() else 1


def check_run_dir(environment: Environment) -> str:
    """Room in the run folder: for a recipe's checkpoints, or for any."""
    folder = environment.run_dir.absolute()
    existing = next(path for path in (folder, *folder.parents) if path.is_dir())
    if not os.access(existing, os.W_OK):
        raise FailedError(f"{existing} is not writable; choose another --run_dir")
    free = shutil.disk_usage(existing).free
    summary = f"{free / 1e9:.1f} GB free at {shown(existing)}"
    plan = environment.plan
    if plan is None:
        if free < LITTLE_DISK:
            raise DoubtError(f"{summary}; free some space, or choose a --run_dir on another disk")
        return summary
    from dflow_lightning.run.checkpoint import CHECKPOINT_FOLDER, require_room

    replaced = sum(path.stat().st_size for path in (folder / CHECKPOINT_FOLDER).glob("*.ckpt"))
    files = max(0, environment.recipe.checkpoint.save_top_k) + 2
    needed = plan.checkpoint()
    if environment.recipe.trainer.enable_checkpointing is not False:
        require_room(folder / CHECKPOINT_FOLDER, needed=needed, free=free + replaced, files=files)
    return f"{summary}, checkpoints take {files * needed / 1e9:.2f}"


def check_tracking(environment: Environment) -> str:
    """The MLflow server answers; a store in a file can be written."""
    if environment.recipe is not None and not environment.recipe.tracking.enabled:
        raise SkippedError("tracking.enabled is false")
    uri = environment.tracking_uri
    if uri is None:
        return "mlflow.db in the run folder"
    if (store := sqlite_file(uri)) is not None:
        folder = store.parent
        if not folder.is_dir() or not os.access(folder, os.W_OK):
            raise FailedError(f"{uri}: {folder} is not writable; make the folder")
        return f"{uri} is writable"
    if not uri.startswith(("http://", "https://")):
        raise DoubtError(f"{uri} is neither a server nor an sqlite file; check it yourself")
    fix = "start the server, or correct tracking.uri or MLFLOW_TRACKING_URI"
    try:
        urllib.request.urlopen(f"{uri.rstrip('/')}/health", timeout=ANSWER_WITHIN).close()
    except urllib.error.HTTPError as error:
        if error.code in (401, 403):
            raise DoubtError(
                f"{uri} asks for a login; set MLFLOW_TRACKING_USERNAME and _PASSWORD"
            ) from error
        raise FailedError(f"{uri} answers with status {error.code}; {fix}") from error
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", error)
        raise FailedError(f"{uri} does not answer ({reason}); {fix}") from error
    return f"{uri} answers"


ENVIRONMENT = {
    "packages": Step(check_packages),
    "deepspeed": Step(check_deepspeed),
    "GPUs": Step(check_gpus),
    "disk": Step(check_run_dir),
    "tracking": Step(check_tracking),
}
