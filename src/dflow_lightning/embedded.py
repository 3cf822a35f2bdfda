"""The embedded default: where its files are, and `dflow-train init`, which writes them out.

A wheel carries them inside the package; a source checkout has them at its root, once.
"""

import filecmp
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from dflow_lightning.errors import InputError
from dflow_lightning.files import check_writable, staged_file

EMBEDDED = ("data/README.md", "data/tiny-qwen3", "data/tiny-drafters", "recipes")
IN_WHEEL = Path(__file__).parent / "embedded"
IN_CHECKOUT = Path(__file__).resolve().parents[2]


def root() -> Path:
    """The folder that `data/` and `recipes/` of the embedded default are in.

    Raises:
        InputError: the package was installed without them, by no wheel of ours.
    """
    for folder in (IN_WHEEL, IN_CHECKOUT):
        if (folder / EMBEDDED[1]).is_dir():
            return folder
    raise InputError(
        f"{Path(__file__).parent} lacks the embedded default; install the wheel, or the source "
        "checkout with pip install -e"
    )


def constraints_file() -> Path | None:
    """The constraints file with the exact versions that the tests run with, if it is present."""
    found = (folder / "constraints/cpu.txt" for folder in (IN_WHEEL, IN_CHECKOUT))
    return next((path for path in found if path.is_file()), None)


def files() -> Iterator[Path]:
    """The files of the embedded default, relative to `root`."""
    for part in EMBEDDED:
        start = root() / part
        for path in [start] if start.is_file() else sorted(start.rglob("*")):
            if path.is_file():
                yield path.relative_to(root())


def write_out(folder: Path) -> int:
    """Copy the embedded default into a folder; returns how many files it lacked.

    Raises:
        InputError: the folder cannot be written to, or a file of such a name and other content is
            in the way; then nothing is written.
    """
    check_writable(folder / "data.new", "out")
    missing = []
    for name in files():
        path = folder / name
        if not os.path.lexists(path):
            missing.append(name)
        elif not path.is_file() or not filecmp.cmp(root() / name, path, shallow=False):
            raise InputError(
                f"out: {path} is there and differs from the embedded default; move it away or name "
                "another folder"
            )
    for name in missing:
        with staged_file(folder / name) as staged:
            shutil.copyfile(root() / name, staged)
    return len(missing)


def init_command(*, out: Path = Path()) -> None:
    """Write the embedded default: a tiny target, its prompts, drafters for it, and all recipes.

    Commands of the documentation work in that folder. Files that are there already are left alone.

    Args:
        out: the folder that gets `data/` and `recipes/`.
    """
    count = write_out(out)
    size = sum((root() / name).stat().st_size for name in files())
    wrote = f"{count} files written" if count else "all files are there already"
    print(f"{out / 'data'} and {out / 'recipes'}: {wrote}, {size / 1e6:.1f} MB")
    print("train    dflow-train fit --config recipes/tiny-dflow.yaml")
    print(
        "decode   dflow-train decode --target data/tiny-qwen3 "
        '--drafter data/tiny-drafters/dflow --prompt "What is 6 times 7?"'
    )
    if out.resolve() != Path.cwd():
        print(f"in that folder: cd {out}")
