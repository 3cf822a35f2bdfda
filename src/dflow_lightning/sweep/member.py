"""One run of a sweep: a training, its export and its bench, each a process of its own."""

import json
import resource
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from dflow_lightning import files

HANDED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Children:
    """Runs one process at a time, and hands on the signals that end a sweep.

    They are sessions of their own, so that a terminal's Ctrl-C comes to them once, from here.

    Attributes:
        stopped: the first ending signal that came; 0 for none.
    """

    def __init__(self, lock: int) -> None:
        self.stopped = 0
        self._told = False
        self._lock = lock
        self._process: subprocess.Popen | None = None
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> "Children":
        self._previous = {signum: signal.signal(signum, self._handle) for signum in HANDED_ON}
        return self

    def __exit__(self, *_: object) -> None:
        for signum, handler in self._previous.items():
            signal.signal(signum, handler)

    def run(self, arguments: Sequence[str], log: Path) -> tuple[int, float]:
        """One `dflow-train` command, its output appended to a file.

        Returns:
            its exit status, and the processor seconds it took.
        """
        if self.stopped:
            return 128 + self.stopped, 0.0
        log.parent.mkdir(parents=True, exist_ok=True)
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        with log.open("a") as file:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "dflow_lightning", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                start_new_session=True,
                pass_fds=(self._lock,),
            )
            if self._untold():
                self._process.send_signal(self._untold())
            status = self._process.wait()
        self._process = None
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return status, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    def _untold(self) -> int:
        """A signal that came while there was no process to tell; 0 for none."""
        return 0 if self._told else self.stopped

    def _handle(self, signum: int, _: FrameType | None) -> None:
        self.stopped = self.stopped or signum
        if self._process is not None:
            self._told = True
            # A training writes its checkpoint; at a second Ctrl-C it ends at once.
            self._process.send_signal(signal.SIGINT if signum == signal.SIGINT else signal.SIGTERM)


@dataclass(frozen=True)
class Outcome:
    """How a run of the sweep ended, for the one line that is printed of it."""

    message: str
    finished: bool = False
    failed: bool = False


@dataclass(frozen=True)
class Member:
    """A recipe with a seed; its folder has what a run of `scripts/compare.py` has.

    Args:
        out: the sweep's folder.
        overrides: options of the training.
        bench_options: options of the bench.
    """

    recipe: Path
    seed: int
    out: Path
    max_steps: int
    target: str
    overrides: list[str]
    bench_options: list[str]

    @property
    def name(self) -> str:
        return f"{self.recipe.stem}-{self.seed}"

    @property
    def folder(self) -> Path:
        return self.out / self.name

    @property
    def finished(self) -> bool:
        return (self.folder / "bench.json").is_file()

    def rows(self) -> list[dict]:
        """What the bench has measured; nothing before."""
        if not self.finished:
            return []
        return json.loads((self.folder / "bench.json").read_text(encoding="utf-8"))["rows"]

    def run(self, children: Children, tracking: Sequence[str]) -> Outcome:
        """What of this run is not done yet.

        Args:
            tracking: options that put the training into the sweep's store.
        """
        if self.finished:
            return Outcome("finished before", finished=True)
        log = self.folder.with_name(f"{self.name}.log")
        for stage, arguments, done in self.stages(tracking):
            if done.exists():
                continue
            status, seconds = children.run(arguments, log)
            if stage == "fit":
                self._note(seconds, whole=status == 0)
            if children.stopped:
                return Outcome(f"stopped at {stage}")
            if status:
                return Outcome(f"{stage} ended with status {status}, see {log}", failed=True)
        tau = next((row["tau"] for row in self.rows() if row["family"] == "pooled"), float("nan"))
        return Outcome(f"finished, tau {tau:.3f}", finished=True)

    def stages(self, tracking: Sequence[str]) -> list[tuple[str, list[str], Path]]:
        """Name and command line of each, and the file that says that it is done."""
        folder, seed = self.folder, str(self.seed)
        best = folder / "checkpoints" / "best.ckpt"
        checkpoint = best if best.exists() or not self._trained else best.with_name("last.ckpt")
        fit = [
            "fit",
            "--config",
            str(self.recipe),
            "--run_dir",
            str(folder),
            "--seed_everything",
            seed,
            "--model.seed",
            seed,
            "--data.seed",
            seed,
            *tracking,
            *self.overrides,
            "--ckpt_path",
            "auto",
        ]
        export = ["export", "--checkpoint", str(checkpoint), "--out", str(folder / "export")]
        bench = [
            "bench",
            "--target",
            self.target,
            "--drafter",
            str(folder / "export"),
            *self.bench_options,
            "--json",
            str(folder / "bench.json"),
            "--quiet",
        ]
        return [
            ("fit", fit, folder / "seconds.json"),
            ("export", export, folder / "export" / "config.json"),
            ("bench", bench, folder / "bench.json"),
        ]

    @property
    def _trained(self) -> bool:
        return (self.folder / "seconds.json").exists()

    def _note(self, seconds: float, *, whole: bool) -> None:
        """Add the processor seconds of a part of the training, and say when it is whole."""
        if not self.folder.is_dir():
            return
        spent = self.folder / "spent.json"
        before = json.loads(spent.read_text())["seconds"] if spent.exists() else 0.0
        content = {"seconds": before + seconds, "steps": self.max_steps}
        path = self.folder / "seconds.json" if whole else spent
        files.write_text(path, json.dumps(content))
