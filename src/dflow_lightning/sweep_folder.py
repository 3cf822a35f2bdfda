"""The folder of a sweep: what is in it, and who works in it."""

import fcntl
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dflow_lightning import atomic
from dflow_lightning.errors import InputError

RECORD, LOCK = "sweep.json", "sweep.lock"


@dataclass
class SweepFolder:
    """A folder that one sweep works in at a time.

    Attributes:
        lock: descriptor of the lock; a run inherits it, so that one that outlives its sweep keeps
            others out of the folder.
        record: what the sweep is of: recipes by name, options of trainings and measurements.
    """

    path: Path
    lock: int
    record: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def open(cls, path: Path) -> "SweepFolder":
        """Take the folder, new or of an earlier call.

        Raises:
            InputError: another sweep works in it, or it holds something else.
        """
        if path.exists() and not path.is_dir():
            raise InputError(f"out: {path} is a file; name a folder")
        record = path / RECORD
        held = path.is_dir() and any(one.name != LOCK for one in path.iterdir())
        if held and not record.is_file():
            raise InputError(
                f"out: {path} holds something that is no sweep; name a new folder, or that of a "
                "sweep to go on with"
            )
        atomic.check_writable(record, "out")
        path.mkdir(parents=True, exist_ok=True)
        lock = os.open(path / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(lock)
            raise InputError(
                f"out: another sweep works in {path}, or a run that one left behind; wait for it, "
                "or name another folder"
            ) from None
        try:
            content = json.loads(record.read_text(encoding="utf-8")) if held else {}
        except ValueError:
            os.close(lock)
            raise InputError(f"out: {record} cannot be read; name a new folder") from None
        return cls(path, lock, content)

    def __enter__(self) -> "SweepFolder":
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self.lock)

    def agree(
        self, recipes: dict[str, str], overrides: Sequence[str], bench_options: Sequence[str]
    ) -> None:
        """Add recipes to what the folder is of; its runs must stay comparable.

        Args:
            recipes: a hash of all their values, by name.

        Raises:
            InputError: earlier runs were made with other options or another recipe of that name.
        """
        found = {"overrides": list(overrides), "bench": list(bench_options)}
        for name, given in found.items():
            before = self.record.get(name, given)
            if before != given:
                said = " ".join(before) or "none"
                raise InputError(
                    f"out: {self.path} has runs with {name} options {said}, this command has "
                    f"{' '.join(given) or 'none'}; give the same, or name another folder"
                )
        known = self.record.get("recipes", {})
        for name, digest in recipes.items():
            if known.get(name, digest) != digest:
                raise InputError(
                    f"config: the recipe {name} has changed since its runs in {self.path} were "
                    f"made; name another folder, or remove {self.path / name}-* and its line in "
                    f"{RECORD}"
                )
        self.update(format=1, recipes=known | recipes, **found)

    def update(self, **values: Any) -> None:
        """Set values of the record and write it."""
        self.record |= values
        atomic.write_text(self.path / RECORD, json.dumps(self.record, indent=1) + "\n")
