"""`--json`, which means one thing in all commands.

`--json FILE` writes the result to a file, beside what is printed. Without a file (or as `--json -`)
it goes to standard output, and everything else that the command prints to standard error.
"""

import json
import sys
from pathlib import Path
from typing import Any

from dflow_lightning.files import check_writable, refused_by_name, write_text
from dflow_lightning.terminal import STDOUT, print_json

HELP = (
    "Also write the result to this file as JSON; without a file name print it on standard output "
    "and everything else on standard error."
)


class JsonOutput:
    """Where a command's JSON goes, if anywhere.

    Attributes:
        text: the stream of everything else: standard error where JSON has standard output.

    Raises:
        InputError: the file cannot be written.
    """

    def __init__(self, path: Path | None) -> None:
        if path is not None and path != STDOUT:
            check_writable(path, "json")
        self._path, self._stdout = path, sys.stdout
        self._begun = False
        self.on_stdout = path == STDOUT
        self.text = sys.stderr if self.on_stdout else sys.stdout

    def write(self, content: Any) -> None:
        """Write the one JSON value of a command."""
        if self.on_stdout:
            print_json(content, stream=self._stdout)
        elif self._path is not None:
            write_text(self._path, json.dumps(content, indent=1) + "\n")

    def write_line(self, content: Any) -> None:
        """Write one of several JSON values on a line of its own.

        Lines are written as they come, so that an interrupted command keeps those it has.
        """
        if self.on_stdout:
            print_json(content, indent=None, stream=self._stdout)
        elif self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            mode = "a" if self._begun else "w"
            with refused_by_name(self._path), self._path.open(mode, encoding="utf-8") as file:
                file.write(json.dumps(content, ensure_ascii=False) + "\n")
            self._begun = True
