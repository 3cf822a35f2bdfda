"""`make docker-check`: the Dockerfile linted, read, built and used, as far as this machine can.

hadolint and a few rules of our own need no engine. `buildah`, where it is installed, then builds
the image without a daemon and runs it: as the user of the image and as one that it does not know.
Its base is what the Dockerfile names, or with `--debian FOLDER` a Debian that debootstrap makes in
that folder, for a machine that reaches no image registry. What was not verified is listed; the
exit status is 1 if something failed.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DOCKERFILE = ROOT / "Dockerfile"
IMAGE, BASE = "localhost/dflow-check", "localhost/dflow-base"
USER, STRANGER = "10001:10001", "4711:4711"
UNWANTED = (  # folders and files that no image should hold
    *("root/.cache", "var/lib/apt/lists", "var/cache/apt/archives", "src"),
    *("app/data/build", "app/.git"),
)
DECODE = (
    *("decode", "--target", "data/tiny-qwen3", "--drafter", "data/tiny-drafters/dflow"),
    *("--prompt", "What is 6 times 7?", "--json"),
)
FIT = (
    *("fit", "--config", "recipes/tiny-dflow.yaml", "--trainer.max_steps", "3"),
    *("--trainer.limit_val_batches", "0", "--trainer.num_sanity_val_steps", "0"),
)


class StepError(Exception):
    """What did not come out as it should."""


@dataclass
class Table:
    """The steps and how they ended; a build that failed ends the list."""

    failed: list[str] = field(default_factory=list)

    def step(self, name: str, run: Callable[[], str]) -> bool:
        started = time.monotonic()
        try:
            good, said = True, run()
        except (StepError, OSError, subprocess.TimeoutExpired) as error:
            good, said = False, " ".join(str(error).split())[-600:]
            self.failed.append(name)
        mark = "ok" if good else "FAIL"
        print(f"{mark:<5} {name:<18} {time.monotonic() - started:7.1f} s  {said}", flush=True)
        return good


def call(*command: str | Path, timeout: float = 300, **extra: str) -> str:
    """Standard output of a command that ends well."""
    done = subprocess.run(
        [str(part) for part in command], cwd=ROOT, env=os.environ | extra, timeout=timeout,
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode:
        raise StepError(f"status {done.returncode}: {done.stdout[-300:]} {done.stderr[-300:]}")
    return done.stdout.strip()


# ---------------------------------------------------------------- without an engine


def instructions() -> list[tuple[str, str]]:
    """Name and arguments of each, comments and line breaks taken out."""
    lines = DOCKERFILE.read_text(encoding="utf-8").splitlines()
    text = "\n".join(line for line in lines if not line.lstrip().startswith("#"))
    whole = re.sub(r"\\\n\s*", " ", text).splitlines()
    return [(line.split()[0], line.partition(" ")[2].strip()) for line in whole if line.strip()]


def lint() -> str:
    hadolint = Path(sys.executable).with_name("hadolint")
    call(hadolint if hadolint.exists() else "hadolint", DOCKERFILE)
    return "hadolint has nothing to say"


def rules() -> str:
    """What the image promises: several stages, no root, pinned versions, a health check."""
    found = instructions()
    last = [index for index, (name, _) in enumerate(found) if name == "FROM"][-1]
    stage = found[last:]
    named = dict(stage)
    arguments = {a.partition("=")[0]: a.partition("=")[2] for n, a in found if n == "ARG"}
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    installs = [a for n, a in found if n == "RUN" and "pip install" in a]
    extras = [extra for extra in arguments["EXTRAS"].split(",") if extra]
    base = arguments["BASE"].rpartition(":")[2]
    promises = {
        "one stage alone": sum(name == "FROM" for name, _ in found) >= 2,
        f"runs as {named.get('USER')}": named.get("USER") == USER,
        f"base {base} names no version": bool(re.match(r"\d+\.\d+", base)),
        "no health check": "HEALTHCHECK" in named,
        f"entry point {named.get('ENTRYPOINT')}": named.get("ENTRYPOINT") == '["dflow-train"]',
        "pip without constraints": all("-c constraints/" in one for one in installs) and installs,
        "pip's cache is in a layer": all("type=cache" in one for one in installs),
        f"VERSION {arguments['VERSION']}": f'version = "{arguments["VERSION"]}"' in project,
        f"EXTRAS {extras}": all(f"\n{extra} = [" in project for extra in extras),
    }
    if wrong := [name for name, kept in promises.items() if not kept]:
        raise StepError("; ".join(wrong))
    return f"{len(promises)} promises kept"


def context() -> str:
    """What is copied exists in git, and .dockerignore lets it through."""
    shown = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    for name, argument in instructions():
        if name != "COPY" or argument.startswith("--from"):
            continue
        for source in argument.split()[:-1]:
            call("git", "ls-files", "--error-unmatch", source)
            if f"!{source}" not in shown:
                raise StepError(f".dockerignore hides {source}")
    if shown[0] != "*":
        raise StepError(".dockerignore does not begin with *")
    return "every source is in git and let through, all else is ignored"


# ---------------------------------------------------------------- with buildah


@dataclass(frozen=True)
class Builder:
    """buildah with a store of its own in a temporary folder."""

    folder: Path
    mounts: tuple[str, ...] = ()  # files of this machine that pip needs to reach a registry

    def __call__(self, *command: str | Path, timeout: float = 600) -> str:
        settings = self.folder / "storage.conf"
        if not settings.exists():
            settings.write_text(
                f'[storage]\ndriver = "overlay"\nrunroot = "{self.folder}/run"\n'
                f'graphroot = "{self.folder}/graph"\n'
            )
        return call(
            "buildah", *command, timeout=timeout,
            CONTAINERS_STORAGE_CONF=str(settings), BUILDAH_ISOLATION="chroot",
        )  # fmt: skip

    def debian(self, root: Path) -> str:
        """A small Debian of this machine's release, as an image; its folder is used again."""
        release = re.search(r"VERSION_CODENAME=(\w+)", Path("/etc/os-release").read_text())
        name = release[1] if release else "stable"
        if not (root / "usr/bin/python3").exists():
            include = "--include=python3,python3-venv,ca-certificates"
            call("debootstrap", "--variant=minbase", include, name, root, timeout=1800)
        for path in unwanted(root):
            path.unlink()  # what debootstrap has left, as an official image would not
        container = self("from", "scratch")
        self("add", container, root, "/")
        self("commit", "--rm", container, BASE)
        return f"Debian {name} with its own Python"

    def build(self, base: str | None) -> str:
        """The CPU variant."""
        arguments = [] if base is None else ["--build-arg", f"BASE={base}"]
        volumes = [part for one in self.mounts for part in ("--volume", f"{one}:{one}:ro")]
        self(
            "build", "--format", "docker", "--tag", IMAGE, *arguments, *volumes,
            "--file", DOCKERFILE, ROOT, timeout=3600,
        )  # fmt: skip
        images = json.loads(self("images", "--json", IMAGE))
        return f"image of {images[0]['size']}"

    def look(self) -> str:
        """What the image says of itself, and what is in its files."""
        about = json.loads(self("inspect", "--type", "image", IMAGE))["Docker"]["config"]
        health = about["Healthcheck"]["Test"]
        labels = {name.rpartition(".")[2]: value for name, value in about["Labels"].items()}
        if about["User"] != USER or health != ["CMD", "dflow-train", "--help"]:
            raise StepError(f"user {about['User']}, health check {health}")
        if "dflow-lightning" not in labels.get("title", "") or not labels.get("version"):
            raise StepError(f"labels {labels}")
        container = self("from", IMAGE)
        root = Path(self("mount", container))
        left = unwanted(root)
        self("umount", container)
        self("rm", container)
        if left:
            names = ", ".join(str(path.relative_to(root)) for path in left[:5])
            raise StepError(f"{len(left)} files are in the image: {names}")
        return f"user {about['User']}, health check, {len(labels)} labels, no caches or sources"

    def use(self, user: str, *command: str) -> str:
        """The entry point with a command, as this user, in a fresh container."""
        container = self("from", IMAGE)
        try:
            name = "dflow-train" if command[0] != "sh" else ""
            run = [part for part in (name, *command) if part]
            return self("run", "--user", user, container, "--", *run, timeout=1800)
        finally:
            self("rm", container)


def unwanted(root: Path) -> list[Path]:
    """Caches, package lists and sources below the root of an image."""
    return [path for name in UNWANTED for path in (root / name).rglob("*") if path.is_file()]


def decoded(builder: Builder, user: str) -> str:
    row = json.loads(builder.use(user, *DECODE))
    if not row["tau"] > 1:
        raise StepError(f"tau {row['tau']}")
    return f"tau {row['tau']:.2f}"


def health(builder: Builder) -> str:
    """The command of the health check, in its time."""
    started = time.monotonic()
    builder.use(USER, "--help")
    taken = time.monotonic() - started
    if taken > 30:
        raise StepError(f"{taken:.1f} s; the health check waits 30")
    return f"{taken:.1f} s, container included"


def who(builder: Builder) -> str:
    """It is not root, and cannot write beside its runs."""
    code = "id -u; touch runs/a && echo runs; touch /app/b /opt/dflow/c 2>/dev/null || echo only"
    said = builder.use(USER, "sh", "-c", code).split()
    if said != [USER.partition(":")[0], "runs", "only"]:
        raise StepError(" ".join(said))
    return "writes its runs and nothing else"


def build_and_use(table: Table, builder: Builder, debian: Path | None) -> None:
    if debian is not None and not table.step("base", partial(builder.debian, debian)):
        return
    if not table.step("build", partial(builder.build, BASE if debian else None)):
        return
    table.step("image", builder.look)
    table.step("health check", partial(health, builder))
    table.step("user", partial(who, builder))
    table.step("decode", partial(decoded, builder, USER))
    fit = partial(builder.use, STRANGER, *FIT)
    table.step(f"fit as {STRANGER}", lambda: next(x for x in fit().splitlines() if "finish" in x))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--debian", type=Path, help="folder of a Debian to build on, made there")
    parser.add_argument(
        "--mount", action="append", default=[], help="a file or folder that pip needs (repeat it)"
    )
    options = parser.parse_args()
    table, unseen = Table(), ["GPUs and the CUDA base"]
    table.step("lint", lint)
    table.step("rules", rules)
    table.step("context", context)
    if shutil.which("buildah") is None:
        unseen.append("that it builds and runs: buildah is not installed")
    else:
        with tempfile.TemporaryDirectory(prefix="dflow-image-") as name:
            build_and_use(table, Builder(Path(name), tuple(options.mount)), options.debian)
        if options.debian:
            unseen.append("the base that the Dockerfile names")
    print(f"\nfailed: {', '.join(table.failed) or 'none'}\nnot verified: {'; '.join(unseen)}")
    return 1 if table.failed else 0


if __name__ == "__main__":
    sys.exit(main())
