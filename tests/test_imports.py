"""What may import what: the order of folders, no circle of files, and what stays free of Lightning.

Every import counts: those inside functions and those for type checkers too.
"""

import ast
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

SRC = Path(__file__).resolve().parents[1] / "src" / "dflow_lightning"
# Folders and the files beside them. Each imports from itself and from lines above its own.
LAYERS = (
    ("errors", "terminal", "html", "stopwatch", "commands"),
    ("files", "checks", "tensors"),
    ("embedded", "models", "commandline"),
    ("formats", "demo"),
    ("data",),
    ("decode",),
    ("prepare", "training", "bench"),
    ("tracking",),
    ("run", "export", "report"),
    ("plan", "sweep", "api", "serving"),
    ("doctor", "completion"),
    ("__main__",),
)
TRAINING_ONLY = ("lightning", "pytorch_lightning", "deepspeed", "mlflow")
MOST_AT_THE_TOP = 15


def dotted(path: Path, src: Path) -> str:
    parts = path.relative_to(src).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def package(src: Path) -> dict[str, Path]:
    """Dotted names below the package, without the package itself."""
    return {dotted(path, src): path for path in sorted(src.rglob("*.py")) if path.parent != src
            or path.stem != "__init__"}  # fmt: skip


def imported(path: Path, files: Mapping[str, Path]) -> set[str]:
    """Modules of this package that a file imports, wherever the import stands."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            if f"{node.module}.".startswith("dflow_lightning."):
                module = (node.module or "").removeprefix("dflow_lightning").removeprefix(".")
                for alias in node.names:
                    inside = f"{module}.{alias.name}".removeprefix(".")
                    names.add(inside if inside in files else module)
        elif isinstance(node, ast.Import):
            assert not any(alias.name.startswith("dflow_lightning") for alias in node.names)
    return {name for name in names if name in files and files[name] != path}


def layer(name: str) -> int:
    """The line of `LAYERS` that holds a dotted name."""
    part = name.split(".")[0]
    found = [i for i, members in enumerate(LAYERS) if part in members]
    assert found, f"{part} belongs to no layer; add it to LAYERS"
    return found[0]


def against_the_order(files: Mapping[str, Path]) -> list[str]:
    """Every import that points up, or to another folder of the same line."""
    wrong = []
    for name, path in files.items():
        for other in imported(path, files):
            up = layer(other) > layer(name)
            beside = layer(other) == layer(name) and other.split(".")[0] != name.split(".")[0]
            if up or beside:
                wrong.append(f"{name} imports {other}")
    return wrong


def circles(files: Mapping[str, Path]) -> set[str]:
    """Files that import each other, and those that need them."""
    graph = {name: imported(path, files) for name, path in files.items()}
    while free := {name for name, needs in graph.items() if not needs & graph.keys()}:
        graph = {name: needs for name, needs in graph.items() if name not in free}
    return set(graph)


FILES = package(SRC)


def test_imports_follow_the_order_of_folders() -> None:
    assert against_the_order(FILES) == []


def test_no_circle_of_files() -> None:
    assert circles(FILES) == set()


def test_few_modules_at_the_top() -> None:
    at_the_top = [name for name, path in FILES.items() if path.parent == SRC]
    assert len(at_the_top) <= MOST_AT_THE_TOP, at_the_top
    assert {name.split(".")[0] for name in FILES} == {part for line in LAYERS for part in line}


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("models.target", "from dflow_lightning.training import module"),
        ("models.target", "def f():\n    from dflow_lightning.training.module import x"),
        ("prepare.run", "from dflow_lightning.bench import row"),
    ],
)
def test_a_planted_import_is_found(name: str, line: str, tmp_path: Path) -> None:
    planted = tmp_path / "planted.py"
    planted.write_text(FILES[name].read_text(encoding="utf-8") + "\n" + line, encoding="utf-8")
    assert len(against_the_order({**FILES, name: planted})) == 1


def test_a_planted_circle_is_found(tmp_path: Path) -> None:
    planted = tmp_path / "planted.py"
    planted.write_text("def f():\n    from dflow_lightning.models import drafter", encoding="utf-8")
    assert {"models.layers", "models.drafter"} <= circles({**FILES, "models.layers": planted})


def run_python(code: str) -> None:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_package_itself_imports_nothing_heavy() -> None:
    heavy = "{'torch', 'transformers', 'lightning', 'mlflow', 'jsonargparse', 'numpy'}"
    run_python(f"import sys, dflow_lightning; assert not {heavy} & set(sys.modules)")


def test_decoding_needs_no_training_framework() -> None:
    names = [n for n in FILES if n.split(".")[0] in ("decode", "models") or n == "serving"]
    assert {"decode.engine", "models.relay"} <= set(names)
    imports = "; ".join(f"import dflow_lightning.{name}" for name in names)
    blocked = f"for name in {TRAINING_ONLY}: sys.modules[name] = None"
    run_python(f"import sys\n{blocked}\n{imports}")


@pytest.mark.parametrize(
    "name", [n for n in FILES if n.split(".")[0] in ("decode", "models", "serving")]
)
def test_decoding_names_no_training_framework(name: str) -> None:
    """Not inside functions either; serving may need an engine that is not installed here."""
    for node in ast.walk(ast.parse(FILES[name].read_text(encoding="utf-8"))):
        modules = [a.name for a in node.names] if isinstance(node, ast.Import) else []
        modules += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        assert not [m for m in modules if m.split(".")[0] in TRAINING_ONLY]


@pytest.mark.parametrize("name", [n for n in FILES if n.startswith("serving.vllm")])
def test_the_plug_in_needs_few_modules(name: str) -> None:
    """vLLM's environment has torch and safetensors, and none of what training needs."""
    known = {"errors", "files", "models.relay", "models.fingerprint", "formats.relay_folder"}
    known |= {"formats.integrity"} | {n for n in FILES if n.startswith("serving.vllm")}
    assert imported(FILES[name], FILES) <= known
