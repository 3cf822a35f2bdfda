"""How the package is kept: counts by AST. `make house`, or `scripts/house.py --src OTHER/src/...`.

Circles of files and imports against the order of folders come from tests/test_imports.py, so that
the numbers and the test cannot differ.
"""

import argparse
import ast
import io
import sys
import tokenize
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SRC = ROOT / "src" / "dflow_lightning"


def called(node: ast.AST) -> str:
    """The dotted name that a call calls, or nothing."""
    return ast.unparse(node.func) if isinstance(node, ast.Call) else ""


def functions(tree: ast.AST) -> Iterator[ast.FunctionDef]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            yield node


def opens_checkpoint(tree: ast.AST) -> int:
    """Calls of `torch.load`."""
    return sum(called(node) == "torch.load" for node in ast.walk(tree))


def scans_arguments(tree: ast.AST) -> int:
    """Functions that go through words of a command line: a loop beside a cut at `=`."""
    found = 0
    for function in functions(tree):
        nodes = list(ast.walk(function))
        loops = any(isinstance(node, ast.For | ast.While) for node in nodes)
        cuts = any(
            called(node).endswith(".partition")
            and [ast.unparse(one) for one in node.args] == ["'='"]  # type: ignore[attr-defined]
            for node in nodes
        )
        found += loops and cuts
    return found


def reads_recipe(tree: ast.AST) -> int:
    """Functions in which a parser takes a recipe: `parse_args`, or LightningCLI stopped."""
    found = 0
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            text = ast.unparse(node)
            found += "parse_args(" in text and ("with_bases(" in text or "self.arguments(" in text)
        elif isinstance(node, ast.ClassDef):
            bases = [ast.unparse(base) for base in node.bases]
            found += "TrainCLI" in bases  # a subclass that stops LightningCLI half-way
    return found


def builds_step(tree: ast.AST) -> int:
    """Calls that make a rollout of a training step: `Rollout(...)` with its settings."""
    return sum(called(node).split(".")[-1] == "Rollout" for node in ast.walk(tree))


COUNTS: dict[str, Callable[[ast.AST], int]] = {
    "open a .ckpt (torch.load)": opens_checkpoint,
    "scan argv": scans_arguments,
    "read a recipe": reads_recipe,
    "build a training step (Rollout(...))": builds_step,
}


def public_names(tree: ast.Module) -> Iterator[str]:
    """Functions and classes at the top level, and constants given there."""
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names = [node.name]
        elif isinstance(node, ast.Assign):
            names = [one.id for one in node.targets if isinstance(one, ast.Name)]
        else:
            names = []
        yield from (name for name in names if not name.startswith("_"))


def text_lines(source: str, tree: ast.AST) -> tuple[int, int]:
    """Lines with a comment, and lines of docstrings."""
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    comments = len({token.start[0] for token in tokens if token.type == tokenize.COMMENT})
    docs = 0
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and node.body:
            first = node.body[0]
            if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
                docs += (first.end_lineno or first.lineno) - first.lineno + 1
    return comments, docs


def main(src: Path) -> None:
    sys.path.insert(0, str(ROOT / "tests"))
    import test_imports as order

    files = order.package(src)
    sources = {name: path.read_text(encoding="utf-8") for name, path in files.items()}
    trees = {name: ast.parse(source) for name, source in sources.items()}
    lines = sum(source.count("\n") for source in sources.values())
    print(f"lines of src                      {lines:,} in {len(files)} files")
    print(f"modules at the top                {sum(path.parent == src for path in files.values())}")
    print(f"files in circles, or above one    {len(order.circles(files))}")
    try:
        print(f"imports against the order         {len(order.against_the_order(files))}")
    except AssertionError as error:  # an older tree
        print(f"imports against the order         not counted: {error}")
    for title, count in COUNTS.items():
        places = {name: count(tree) for name, tree in trees.items() if count(tree)}
        where = ", ".join(f"{name} {n}" if n > 1 else name for name, n in places.items())
        print(f"places that {title}: {sum(places.values())} ({where})")
    texts = [text_lines(sources[name], tree) for name, tree in trees.items()]
    comments, docs = (100 * sum(one) / lines for one in zip(*texts, strict=True))
    print(f"per 100 lines                     {comments:.1f} comments, {docs:.1f} of docstrings")
    defined = defaultdict(list)
    for name, tree in trees.items():
        for public in set(public_names(tree)):
            defined[public].append(name)
    twice = {name: where for name, where in sorted(defined.items()) if len(where) > 1}
    print(f"public names in several modules   {len(twice)}")
    for name, modules in twice.items():
        print(f"  {name:<28}{', '.join(modules)}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--src", type=Path, default=SRC, help="the package to count")
    main(parser.parse_args().src.resolve())
