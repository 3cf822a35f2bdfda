"""Run the commands of the documentation as they stand, as a reader would: `make docs-commands`.

Each page gets a fresh folder that has `data` and `recipes`, and every block that is marked to run,
or to need nothing but time (tests/docs_blocks.py), goes to a shell, command by command. The table
has the seconds of each, by the clock and by the processor; the exit status is 1 if a command
failed.

    python tests/run_docs.py --page docs/getting-started.md
"""

import argparse
import os
import resource
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from docs_blocks import PAGES, ROOT, Block, blocks, commands

RAW = argparse.RawTextHelpFormatter
NAME = 74  # characters of a command in the table


@dataclass(frozen=True)
class Timed:
    """One command that ran."""

    command: str
    status: int
    clock: float
    processor: float

    def row(self) -> str:
        """As a row of the table."""
        first = " ".join(self.command.partition("\n")[0].split())
        first = first if len(first) <= NAME else first[: NAME - 3] + "..."
        status = "" if self.status == 0 else f" (status {self.status})"
        return f"| `{first}`{status} | {self.clock:.0f} | {self.processor:.0f} |"


def run(command: str, folder: Path, log: Path) -> Timed:
    """Runs a command in bash, with this interpreter's programs first."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {"PATH": path, "HF_HUB_OFFLINE": "1", "DO_NOT_TRACK": "true"}
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    with log.open("a") as output:
        output.write(f"$ {command}\n")
        output.flush()
        done = subprocess.run(
            ["bash", "-ec", command], cwd=folder, env=os.environ | environment, check=False,
            stdout=output, stderr=subprocess.STDOUT,
        )  # fmt: skip
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return Timed(command, done.returncode, time.monotonic() - start, used)


def run_page(page: Path, marked: list[Block], out: Path) -> list[Timed]:
    """Runs the blocks of a page one after the other; a failure ends the page."""
    folder = out / page.relative_to(ROOT).with_suffix("").as_posix().replace("/", "-")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for name in ("data", "recipes"):
        (folder / name).symlink_to(ROOT / name)
    if (trained := out / "README" / "runs").is_dir() and page.stem != "README":
        (folder / "runs").symlink_to(trained)
    done: list[Timed] = []
    for block in marked:
        python = [f"python - <<'END'\n{block.text}END"]
        for command in python if block.language == "python" else commands(block.text):
            done.append(run(command, folder, folder / "log.txt"))
            print(done[-1].row(), flush=True)
            if done[-1].status:
                print(f"see {folder / 'log.txt'}")
                return done
    return done


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=RAW)
    parser.add_argument("--page", action="append", type=Path, help="by default every page")
    parser.add_argument("--out", type=Path, default=ROOT / "build/docs-commands")
    arguments = parser.parse_args()
    chosen = [ROOT / page for page in arguments.page or PAGES]
    failed = 0
    for page in chosen:
        marked = [block for block in blocks(page) if block.runs or block.needs == {"time"}]
        if not marked:
            continue
        print(f"\n{page.relative_to(ROOT)}")
        done = run_page(page, marked, arguments.out)
        failed += any(one.status for one in done)
        total = (sum(one.clock for one in done), sum(one.processor for one in done))
        print(f"| **all of it** | **{total[0]:.0f}** | **{total[1]:.0f}** |")
    print(f"\n{failed} pages with a command that failed" if failed else "\nall commands ran")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
