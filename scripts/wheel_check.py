"""`make wheel-check`: build wheel and sdist, install them in an empty environment, and use them.

Nothing of the repository is in reach of what runs: the environment, the working folder and the home
folder are in a temporary one. One line a step, its seconds and what it showed; the exit status is 1
if a step failed.
"""

import argparse
import json
import os
import subprocess
import sys
import tarfile
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CONSTRAINTS = ROOT / "constraints" / "cpu.txt"
HELP_WITHIN = 2.0  # seconds
LARGEST = 20e6  # bytes of a wheel
PROMPTS = (
    "What can I cook with rice and beans?",
    "What is 6 times 7?",
    "Write a Python dataclass called Book with the fields title and pages.",
    "How do I keep bread fresh?",
)
DRAFTER = ("--target", "data/tiny-qwen3", "--drafter", "data/tiny-drafters/dflow")
SHORT = (
    *("--trainer.max_steps", "20", "--trainer.val_check_interval", "20"),
    *("--validation.prompts_per_family", "1", "--data.limit_validation", "4"),
)
API = """
from dflow_lightning import load_decoder
answer = load_decoder("data/tiny-drafters/dflow").answer("What is 6 times 7?")
print(f"tau {answer.tau:.2f}")
"""


class StepError(Exception):
    """What did not come out as it should."""


@dataclass
class Table:
    """The steps and how they ended; after a failure the others still run."""

    rows: list[tuple[str, float, bool, str]] = field(default_factory=list)

    def step(self, name: str, run: Callable[[], str]) -> None:
        started = time.monotonic()
        try:
            good, said = True, run()
        except (StepError, OSError, subprocess.TimeoutExpired) as error:
            good, said = False, " ".join(str(error).split())[-400:]
        self.rows.append((name, time.monotonic() - started, good, said))
        print(self.line(self.rows[-1]), flush=True)

    @staticmethod
    def line(row: tuple[str, float, bool, str]) -> str:
        name, seconds, good, said = row
        return f"{'ok' if good else 'FAIL':<5} {name:<20} {seconds:7.1f} s  {said}"


def call(*command: str | Path, cwd: Path, env: dict[str, str], timeout: float = 1200) -> str:
    """Standard output of a command that ends well."""
    done = subprocess.run(
        [str(part) for part in command], cwd=cwd, env=env, timeout=timeout,
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode:
        raise StepError(f"status {done.returncode}: {done.stdout[-200:]} {done.stderr}")
    return done.stdout


@dataclass(frozen=True)
class Place:
    """A temporary folder: `venv` with the package, `work` to run in, `home`."""

    folder: Path

    @property
    def work(self) -> Path:
        return self.folder / "work"

    @property
    def python(self) -> Path:
        return self.folder / "venv" / "bin" / "python"

    @property
    def env(self) -> dict[str, str]:
        """A user's environment: what names Python paths, other environments or servers is gone."""
        gone = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "MLFLOW_TRACKING_URI", "HF_HUB_OFFLINE")
        kept = {name: value for name, value in os.environ.items() if name not in gone}
        path = f"{self.python.parent}:{os.defpath}"
        return kept | {"PATH": path, "HOME": str(self.folder / "home"), "DO_NOT_TRACK": "true"}

    def make(self) -> None:
        for folder in (self.work, self.folder / "home"):
            folder.mkdir()
        subprocess.run([sys.executable, "-m", "venv", self.folder / "venv"], check=True)

    def install(self, *what: str | Path) -> str:
        """By pip, as this machine has it set up."""
        pip = (self.python, "-m", "pip", "install", "-q", "-c", CONSTRAINTS)
        call(*pip, *what, cwd=self.work, env=dict(os.environ) | {"PYTHONPATH": ""}, timeout=3600)
        sizes = (path.lstat().st_size for path in (self.folder / "venv").rglob("*"))
        return f"an environment of {sum(sizes) / 1e9:.1f} GB"

    def dflow_train(self, *arguments: str) -> str:
        return call("dflow-train", *arguments, cwd=self.work, env=self.env)


# ---------------------------------------------------------------- the two files


def build(out: Path) -> str:
    """By the module `build`, each in an environment of its own; the wheel comes from the sdist."""
    call(sys.executable, "-m", "build", "--outdir", out, ROOT, cwd=ROOT, env=dict(os.environ))
    return ", ".join(f"{p.name} {p.stat().st_size / 1e6:.1f} MB" for p in sorted(out.iterdir()))


def one(folder: Path, pattern: str) -> Path:
    found = list(folder.glob(pattern))
    if len(found) != 1:
        raise StepError(f"{len(found)} files {pattern} in {folder}")
    return found[0]


def contents(dist: Path) -> str:
    """What is inside, and what must not be."""
    wheel, sdist = one(dist, "*.whl"), one(dist, "*.tar.gz")
    with zipfile.ZipFile(wheel) as packed:
        in_wheel = {name: packed.read(name) for name in packed.namelist()}
    with tarfile.open(sdist) as archive:
        members = [member for member in archive.getmembers() if member.isfile()]
        in_sdist = {m.name.partition("/")[2]: read_member(archive, m) for m in members}
    if wheel.stat().st_size > LARGEST:
        raise StepError(f"the wheel has {wheel.stat().st_size / 1e6:.1f} MB")
    check_names(in_wheel, in_sdist)
    check_default(in_wheel)
    for files in (in_wheel, in_sdist):
        check_words(files)
    return f"{len(in_wheel)} and {len(in_sdist)} files"


def read_member(archive: tarfile.TarFile, member: tarfile.TarInfo) -> bytes:
    file = archive.extractfile(member)
    return file.read() if file else b""


def check_names(in_wheel: Iterable[str], in_sdist: Iterable[str]) -> None:
    """The package, its metadata and licence; no tests, runs or scripts."""
    roots = {name.partition("/")[0] for name in in_wheel}
    info = next(root for root in roots if root.endswith(".dist-info"))
    if roots != {"dflow_lightning", info}:
        raise StepError(f"the wheel installs {sorted(roots)}")
    for name in ("dflow_lightning/py.typed", f"{info}/licenses/LICENSE"):
        if name not in in_wheel:
            raise StepError(f"the wheel lacks {name}")
    wanted = {"src", "data", "recipes", "constraints"}
    folders = {name.partition("/")[0] for name in in_sdist if "/" in name}
    if folders != wanted:
        raise StepError(f"the sdist has the folders {sorted(folders)} instead of {sorted(wanted)}")


def check_default(in_wheel: dict[str, bytes]) -> None:
    """Every file of the embedded default that git knows, byte for byte."""
    listed = subprocess.run(
        ["git", "ls-files", "data", "recipes"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split()
    for name in listed:
        if name.startswith("data/build/"):
            continue
        if in_wheel.get(f"dflow_lightning/embedded/{name}") != (ROOT / name).read_bytes():
            raise StepError(f"the wheel has no {name}, or another")


def check_words(files: dict[str, bytes]) -> None:
    """No path of this machine, and no address of a package registry that it was built with."""
    forbidden = {str(ROOT), str(Path.home()) + "/", tempfile.gettempdir() + "/"}
    forbidden |= set(registries())
    for name, content in files.items():
        for word in forbidden:
            if word.encode() in content:
                raise StepError(f"{name} contains {word!r}")


def registries() -> Iterable[str]:
    """Addresses in pip's settings."""
    listed = call(sys.executable, "-m", "pip", "config", "list", cwd=ROOT, env=dict(os.environ))
    for line in listed.splitlines():
        key, _, value = line.partition("=")
        if key.split(".")[-1] in ("index-url", "extra-index-url", "find-links", "trusted-host"):
            yield from value.strip("'\"").split()


def linters(dist: Path) -> str:
    """twine (metadata and README) and check-wheel-contents (what a wheel should not install)."""
    wheel, sdist = one(dist, "*.whl"), one(dist, "*.tar.gz")
    env = dict(os.environ)
    call(sys.executable, "-m", "twine", "check", "--strict", wheel, sdist, cwd=dist, env=env)
    # W002 is about equal files: exports are whole folders, and two have equal relay settings.
    ignored = ("--ignore", "W002")
    call(sys.executable, "-m", "check_wheel_contents", *ignored, wheel, cwd=dist, env=env)
    return "twine check --strict, check-wheel-contents"


# ---------------------------------------------------------------- what is installed


def imported(place: Place) -> str:
    """From where, without the repository on the path."""
    code = "import sys, dflow_lightning; print(dflow_lightning.__file__); print(sys.path)"
    where, path = call(place.python, "-c", code, cwd=place.work, env=place.env).splitlines()
    if not where.startswith(str(place.folder / "venv")) or str(ROOT) in path:
        raise StepError(f"imported from {where} with {path}")
    return where.removeprefix(str(place.folder) + "/")


def help_in_time(place: Place) -> str:
    """The first call counts, and two more are shown."""
    taken = []
    for _ in range(3):
        started = time.monotonic()
        place.dflow_train("--help")
        taken.append(time.monotonic() - started)
    said = ", ".join(f"{seconds:.2f}" for seconds in taken) + f" s (first <= {HELP_WITHIN:g})"
    if taken[0] > HELP_WITHIN:
        raise StepError(said)
    return said


def decode(place: Place) -> str:
    """Two prompts with the shipped drafter: the same tokens as plain decoding, in fewer rounds."""
    said = []
    for prompt in PROMPTS[:2]:
        ask = ("decode", *DRAFTER, "--prompt", prompt, "--json")
        drafted = json.loads(place.dflow_train(*ask))
        plain = json.loads(place.dflow_train(*ask, "--plain"))
        if drafted["token_ids"] != plain["token_ids"] or drafted["tau"] <= 1:
            raise StepError(f"{drafted} is not {plain}")
        said.append(f"{drafted['tau']:.2f}")
    return f"tau {', '.join(said)}, as plain decoding"


def bench(place: Place) -> str:
    """Four prompts, relay on and off."""
    prompts = place.work / "four.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": one}) + "\n" for one in PROMPTS))
    place.dflow_train("bench", *DRAFTER, "--suite", prompts.name, "--json", "bench.json")
    rows = json.loads((place.work / "bench.json").read_text())["rows"]
    if any(row["lossless"] is False for row in rows):
        raise StepError("not lossless")
    return f"{len(rows)} rows, lossless"


def doctor(place: Place, *options: str) -> str:
    found = json.loads(place.dflow_train("doctor", "--json", *options))
    doubts = [check["name"] for check in found["checks"] if check["status"] == "warn"]
    return f"{len(found['checks'])} checks, none failed, warnings: {', '.join(doubts) or 'none'}"


def last_line(place: Place, *command: str) -> str:
    lines = [line for line in place.dflow_train(*command).splitlines() if line.strip()]
    return lines[-1].strip()


def use(table: Table, place: Place) -> None:
    """What a user does first, in an empty folder."""
    short, export = "runs/short", "runs/short/export"
    recipe = ("--config", "recipes/tiny-dflow.yaml")
    best = f"{short}/checkpoints/best.ckpt"
    table.step("import", lambda: imported(place))
    table.step("--help", lambda: help_in_time(place))
    table.step("init", lambda: place.dflow_train("init").splitlines()[0])
    table.step("decode", lambda: decode(place))
    table.step(
        "fit, 20 steps", lambda: last_line(place, "fit", *recipe, "--run_dir", short, *SHORT)
    )
    table.step("export", lambda: last_line(place, "export", "--checkpoint", best, "--out", export))
    table.step("bench, 4 prompts", lambda: bench(place))
    table.step("doctor", lambda: doctor(place))
    table.step("doctor, recipe", lambda: doctor(place, *recipe))
    table.step(
        "load_decoder", lambda: call(place.python, "-c", API, cwd=place.work, env=place.env).strip()
    )
    table.step(
        "demo, 20 steps", lambda: last_line(place, "demo", "--steps", "20", "--per_family", "1")
    )


def use_sdist(table: Table, place: Place, dist: Path) -> None:
    """Installed in place of the wheel; pip builds it in an environment of its own."""
    table.step(
        "install the sdist",
        lambda: place.install("--no-deps", "--force-reinstall", one(dist, "*.tar.gz")),
    )
    table.step("sdist: import", lambda: imported(place))
    table.step("sdist: --help", lambda: help_in_time(place))
    table.step("sdist: decode", lambda: decode(place))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dist", type=Path, help="use the two files of this folder")
    parser.add_argument("--files", action="store_true", help="build and look inside, no more")
    options = parser.parse_args()
    table = Table()
    with tempfile.TemporaryDirectory(prefix="dflow-wheel-") as name:
        folder = Path(name)
        dist = folder / "dist" if options.dist is None else options.dist.resolve()
        if options.dist is None:
            dist.mkdir()
            table.step("build", lambda: build(dist))
        table.step("contents", lambda: contents(dist))
        table.step("linters", lambda: linters(dist))
        if not options.files:
            place = Place(folder)
            place.make()
            table.step("install the wheel", lambda: place.install(one(dist, "*.whl")))
            use(table, place)
            use_sdist(table, place, dist)
    failed = [row[0] for row in table.rows if not row[2]]
    print(f"\n{len(table.rows)} steps, failed: {', '.join(failed) or 'none'}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
