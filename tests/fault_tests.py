"""`make fault-tests`: each case of the list of faults, and the tests that hold what is right.

Nothing is typed twice: a test holds a case when it names it, as `f12` in its own name or as `F12`
in its docstring, its decorators, or a table that a decorator uses.
"""

import ast
import re
import sys
from collections import defaultdict
from pathlib import Path

import yaml

TESTS = Path(__file__).parent
FAULTS = TESTS / "data" / "faults.yaml"
CASE = re.compile(r"(?<![A-Za-z0-9])[Ff](\d{1,2})(?![A-Za-z0-9])")


def tests_by_case(folder: Path) -> dict[str, list[str]]:
    """`{"F12": ["tests/test_x.py::test_y"]}` of every test below `folder`."""
    found = defaultdict(list)
    for path in sorted(folder.rglob("test_*.py")):
        source = path.read_text()
        tree = ast.parse(source)
        tables = {
            target.id: ast.get_source_segment(source, node) or ""
            for node in tree.body
            if isinstance(node, ast.Assign)
            for target in node.targets
            if isinstance(target, ast.Name)
        }
        for node in tree.body:
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                for case in sorted(_named(node, source, tables)):
                    found[case].append(f"{path.relative_to(folder.parent)}::{node.name}")
    return found


def _named(test: ast.FunctionDef, source: str, tables: dict[str, str]) -> set[str]:
    lines = source.splitlines()
    # Lines, not syntax: a case of a table may be named in a comment beside it.
    texts = [
        "\n".join(lines[node.lineno - 1 : node.end_lineno or node.lineno])
        for node in test.decorator_list
    ]
    for node in test.decorator_list:
        used = {part.id for part in ast.walk(node) if isinstance(part, ast.Name)}
        texts += [tables[name] for name in used if name in tables]
    texts += [test.name.replace("_", " "), ast.get_docstring(test) or ""]
    return {f"F{number}" for text in texts for number in CASE.findall(text)}


def main() -> int:
    """Print the table; exit status 1 when a case has no test."""
    right = yaml.safe_load(FAULTS.read_text())
    held = tests_by_case(TESTS)
    for case, line in right.items():
        print(f"{case:4} {line}")
        for test in held.get(case) or ["NO TEST NAMES IT"]:
            print(f"       {test}")
    missing = [case for case in right if case not in held]
    unknown = sorted(set(held) - set(right))
    if unknown:
        print(f"tests name {', '.join(unknown)}, which tests/data/faults.yaml does not have")
    print(f"{len(right) - len(missing)} of {len(right)} cases have a test", end="")
    print(f"; without: {', '.join(missing)}" if missing else "")
    return 1 if missing or unknown else 0


if __name__ == "__main__":
    sys.exit(main())
