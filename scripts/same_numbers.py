"""Does a change of the code change numbers? The working tree beside an earlier commit.

    python scripts/same_numbers.py --base e31da42

Both train 60 steps of three recipes (weights and optimizer bit for bit), export the checkpoints
(every file byte for byte) and decode the 96 test prompts with the shipped drafters at temperature 0
and 1 (rounds and accepted drafts of every family). The earlier commit is checked out as a worktree
in `--out` and imported from there, in this environment. Exit status 1 when anything differs.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
RECIPES = ("tiny-dflow", "tiny-domino-dflow", "tiny-eagle3")
STEPS = 60
# Keys of a bench row that depend on tokens and not on the clock.
COUNTED = ("drafter", "relay", "temperature", "family", "rounds", "tokens", "tau", "histogram")


def main(base: str, out: Path) -> int:
    """Run both sides and compare; returns the exit status."""
    out = out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    before = out / "base"
    if not before.exists():
        git("worktree", "add", "--detach", str(before), base)
    sides = {"before": before, "after": ROOT}
    for name, tree in sides.items():
        for recipe in RECIPES:
            folder = out / f"{recipe}-{name}"
            if name == "after":  # the working tree may have changed since; the commit has not
                shutil.rmtree(folder, ignore_errors=True)
            train(tree, recipe, folder)
        if name == "after":
            (out / "bench-after.json").unlink(missing_ok=True)
        bench(tree, out / f"bench-{name}.json")
    same = [
        *(compare_checkpoints(out, recipe) for recipe in RECIPES),
        *(compare_exports(out, recipe) for recipe in RECIPES),
        compare_rounds(out),
    ]
    print("nothing changed" if all(same) else "something changed")
    return not all(same)


def git(*args: str) -> None:
    subprocess.run(["git", "-C", str(ROOT), *args], check=True)


def run(tree: Path, *args: object) -> None:
    """One command of `dflow-train` as the code of a tree has it."""
    environment = os.environ | {"PYTHONPATH": str(tree / "src"), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "dflow_lightning", *map(str, args)]
    done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} in {tree} failed:\n{done.stderr[-2000:]}")


def train(tree: Path, recipe: str, folder: Path) -> None:
    """`STEPS` steps and an export, kept if they are there."""
    if not (folder / "export/config.json").is_file():
        run(
            tree, "fit", "--config", f"recipes/{recipe}.yaml", "--run_dir", folder,
            "--trainer.max_steps", STEPS, "--tracking.enabled", "false", "--quiet",
        )  # fmt: skip
        checkpoint = folder / "checkpoints/last.ckpt"
        run(tree, "export", "--checkpoint", checkpoint, "--out", folder / "export",
            "--register", "false")  # fmt: skip


def bench(tree: Path, file: Path) -> None:
    if not file.is_file():
        drafters = sorted((tree / "data/tiny-drafters").iterdir())
        arguments = [part for one in drafters for part in ("--drafter", one.relative_to(tree))]
        run(tree, "bench", "--target", "data/tiny-qwen3", "--suite", "tiny", "--temperature", "0,1",
            "--concurrency", 8, *arguments, "--json", file)  # fmt: skip


def differing(one: Any, two: Any, at: str = "") -> list[str]:
    """Where two nested values differ; tensors bit for bit."""
    if isinstance(one, torch.Tensor) and isinstance(two, torch.Tensor):
        return [] if torch.equal(one, two) and one.dtype == two.dtype else [at]
    if isinstance(one, dict) and isinstance(two, dict) and one.keys() == two.keys():
        return [d for key in one for d in differing(one[key], two[key], f"{at}.{key}")]
    if isinstance(one, list | tuple) and isinstance(two, list | tuple) and len(one) == len(two):
        pairs = enumerate(zip(one, two, strict=True))
        return [d for i, (a, b) in pairs for d in differing(a, b, f"{at}[{i}]")]
    return [] if one == two else [at]


def compare_checkpoints(out: Path, recipe: str) -> bool:
    """Weights, optimizer and scheduler after the last step."""
    one, two = (
        torch.load(out / f"{recipe}-{side}/checkpoints/last.ckpt", weights_only=True)
        for side in ("before", "after")
    )
    keys = ("state_dict", "optimizer_states", "lr_schedulers", "global_step")
    wrong = [d for key in keys for d in differing(one[key], two[key], key)]
    print(f"{recipe}: {STEPS} steps, {len(one['state_dict'])} tensors and optimizer state:",
          f"differ at {wrong[0]}" if wrong else "bitwise equal")  # fmt: skip
    return not wrong


def compare_exports(out: Path, recipe: str) -> bool:
    """Every file; the model card names the run's folder, which differs by the side's name."""
    folders = [out / f"{recipe}-{side}/export" for side in ("before", "after")]
    files = [{p.relative_to(f): p for p in f.rglob("*") if p.is_file()} for f in folders]
    wrong = sorted(map(str, files[0].keys() ^ files[1].keys()))
    for name in files[0].keys() & files[1].keys():
        one, two = (side[name].read_bytes() for side in files)
        wrong += [str(name)] * (one != two.replace(b"-after", b"-before"))
    print(f"{recipe}: export of {len(files[0])} files:", f"{wrong} differ" if wrong else "equal")
    return not wrong


def compare_rounds(out: Path) -> bool:
    """Every row of the two benches."""
    sides = [json.loads((out / f"bench-{s}.json").read_text()) for s in ("before", "after")]
    rows = [[{key: row.get(key) for key in COUNTED} for row in side["rows"]] for side in sides]
    wrong = [a for a, b in zip(*rows, strict=True) if a != b]
    print(f"decoding: {len(rows[0])} rows, rounds and accepted drafts:",
          f"{len(wrong)} differ, first {wrong[0]}" if wrong else "equal")  # fmt: skip
    return not wrong


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--base", default="HEAD", help="the commit to compare with")
    parser.add_argument("--out", type=Path, default=ROOT / "runs/same-numbers")
    given = parser.parse_args()
    sys.exit(main(given.base, given.out))
