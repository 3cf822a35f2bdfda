"""The fenced blocks of README and docs, and the commands in them.

A comment right before a block says what a test may do with it:

    <!-- run -->                  run it, small, in a folder that has `data` and `recipes`
    <!-- needs: gpu, hub -->      do not run it, because of what it needs (`NEEDS`)

Without a comment every command of a `bash` block has to be one that can be parsed
(`docs_parse.parse_problem`).
"""

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "recipes/README.md",
    ROOT / "data/README.md",
    *sorted((ROOT / "docs").glob("*.md")),
]
NEEDS = {"gpu", "hub", "network", "vllm", "time", "server"}
LANGUAGES = {"bash", "python", "yaml", "json", "text"}
FENCE = re.compile(r"^( *)```(\S*)[^\n]*\n(.*?)^\1```$", re.DOTALL | re.MULTILINE)
MARK = re.compile(r"<!-- *(run|needs: *[^>]*?) *-->\s*\Z")
ASSIGNED = re.compile(r"[A-Z_][A-Z0-9_]*=")


@dataclass(frozen=True)
class Block:
    """One fenced block."""

    page: Path
    line: int
    language: str
    text: str
    mark: str

    @property
    def where(self) -> str:
        """As an editor opens it."""
        return f"{self.page.relative_to(ROOT)}:{self.line}"

    @property
    def runs(self) -> bool:
        """Whether a test runs it."""
        return self.mark == "run"

    @property
    def needs(self) -> set[str]:
        """What a machine without GPU and network lacks for it."""
        if not self.mark.startswith("needs:"):
            return set()
        return {word.strip() for word in self.mark.removeprefix("needs:").split(",")}


def blocks(page: Path) -> list[Block]:
    """All fenced blocks of a page."""
    text = page.read_text(encoding="utf-8")
    found = []
    for fence in FENCE.finditer(text):
        before = text[: fence.start()]
        mark = MARK.search(before)
        indent = fence[1]
        body = "".join(row.removeprefix(indent) for row in fence[3].splitlines(keepends=True))
        line = before.count("\n") + 1
        found.append(Block(page, line, fence[2], body, mark[1] if mark else ""))
    return found


def commands(text: str) -> list[str]:
    """The commands of a shell script: continued lines joined, here-documents kept, no comments."""
    found: list[str] = []
    lines = iter(text.splitlines())
    for line in lines:
        command = line
        while command.endswith("\\"):
            command = command[:-1] + next(lines, "").lstrip()
        if here := re.search(r"<<'?(\w+)'?", command):
            for row in lines:
                command += f"\n{row}"
                if row == here[1]:
                    break
        if command.strip() and not command.lstrip().startswith("#"):
            found.append(command.strip())
    return found


def words(command: str) -> list[str]:
    """The first line of a command as words, without comment and without assigned variables."""
    split = shlex.split(command.partition("\n")[0], comments=True)
    while split and ASSIGNED.match(split[0]):
        split.pop(0)
    return split


def our_arguments(command: str) -> list[str] | None:
    """What follows `dflow-train` in a command, also behind `srun` or `torchrun`; None without."""
    split = words(command)
    names = [Path(word).name for word in split]
    return split[names.index("dflow-train") + 1 :] if "dflow-train" in names else None


def sentences(page: Path) -> list[str]:
    """Our commands with options inside the sentences and tables of a page, placeholders filled."""
    recipe = "recipes/tiny-dflow.yaml"
    filled = {
        "COMMAND": "fit",
        "RECIPE": recipe,
        "OVERLAY": "recipes/hardware/2xcpu.yaml",
        "...": recipe,
    }
    found = set()
    for span in re.findall(r"`(dflow-train [^`]* --[^`]*)`", FENCE.sub("", page.read_text())):
        if re.search(r"\S\.\.\.$", span):
            continue  # cut off, in a table of times
        command = re.sub(r"[\[\]]", "", " ".join(span.split())).replace("<name>", "tiny-dflow")
        for word, value in filled.items():
            command = re.sub(rf"(?<= ){re.escape(word)}(?= |$)", value, command)
        found.add(command)
    return sorted(found)
