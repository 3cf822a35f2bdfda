"""What may import what: the layers, and what decoding and serving stay free of."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

SRC = Path(__file__).resolve().parents[1] / "src" / "dflow_lightning"
# Each file or sub-package belongs to one layer and imports from its own or a lower one.
LAYERS = [
    {
        *("errors", "atomic", "checks", "embedded", "fingerprint", "report_page"),
        *("stopwatch", "terminal"),
    },
    {
        *("acceptance", "attention", "blocks", "flex_blocks"),
        *("loss", "metrics", "overlap_record", "soft_targets"),
    },
    {
        *("target", "slot_cache", "dims", "drafter", "norm", "rope"),
        *("relay", "carryover", "causal_head", "eagle3"),
    },
    {
        *("draft", "drafter_folder", "relay_folder", "integrity", "rollout", "decode", "data"),
        *("step_inputs", "tap_fingerprint"),
    },
    {"module", "eagle3_module", "optimizer", "trained", "training_module"},
    {
        *("validation", "strategy", "ranks", "samples", "plots"),
        *("progress", "progress_plan", "progress_table"),
        *("tracking", "tracking_journal", "tracking_store", "tracking_sender"),
        *("tracking_logger", "tracking_delivery"),
        *("provenance", "meters"),
    },
    {
        *("checkpoint", "export", "eagle3_export", "export_config", "export_speculators"),
        *("engine_contract", "engine_tensors", "model_card"),
        *("signals", "guards", "replay"),
        *("bench", "bench_row", "bench_suite", "bench_table", "measure", "equality", "overlap"),
        *("report", "report_overlap", "report_runs", "report_plots"),
        *("charts", "ui", "registry", "sync"),
        *("sweep_folder", "sweep_member", "sweep_store", "sweep_table"),
        *("serving", "validate_export", "validate_subject"),
        *("validate_folder", "validate_decoding"),
    },
    {
        *("completion", "demo", "recipe_base", "training_run"),
        *("arguments", "cli", "plan", "__main__"),
        *("plan_bytes", "plan_measure", "plan_memory", "plan_work"),
        "sweep",
        *(
            "doctor",
            "doctor_check",
            "doctor_environment",
            "doctor_recipe",
            "doctor_loaded",
            "doctor_model",
            "doctor_try",
        ),
    },
]
TRAINING_ONLY = ("lightning", "pytorch_lightning", "deepspeed", "mlflow")


def layer(name: str) -> int:
    """The layer of a dotted module name below the package."""
    part = name.split(".")[0]
    found = [i for i, members in enumerate(LAYERS) if part in members]
    assert found, f"{part} belongs to no layer; add it to LAYERS"
    return found[0]


def dotted(path: Path) -> str:
    parts = path.relative_to(SRC).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


FILES = {dotted(path): path for path in sorted(SRC.rglob("*.py")) if path != SRC / "__init__.py"}


def imported(path: Path) -> set[str]:
    """Modules of this package that a file imports when it is itself imported."""
    names: set[str] = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            if node.module and node.module.startswith("dflow_lightning."):
                module = node.module.removeprefix("dflow_lightning.")
                parts = {f"{module}.{alias.name}" for alias in node.names} & FILES.keys()
                names |= parts or {module}  # a module of a package, or something inside one
        elif isinstance(node, ast.Import):
            assert not any(alias.name.startswith("dflow_lightning") for alias in node.names)
    return names


@pytest.mark.parametrize("name", FILES)
def test_imports_point_one_way(name: str) -> None:
    for other in imported(FILES[name]):
        assert layer(other) <= layer(name), f"{name} imports {other}, which stands above it"


def test_no_cycles() -> None:
    graph = {name: imported(path) & FILES.keys() for name, path in FILES.items()}
    while graph:
        free = {name for name, needs in graph.items() if not needs & graph.keys() - {name}}
        assert free, f"these import each other: {sorted(graph)}"
        graph = {name: needs for name, needs in graph.items() if name not in free}


def run_python(code: str) -> None:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_package_itself_imports_nothing_heavy() -> None:
    heavy = "{'torch', 'transformers', 'lightning', 'mlflow', 'jsonargparse', 'numpy'}"
    run_python(f"import sys, dflow_lightning; assert not {heavy} & set(sys.modules)")


def test_decoding_needs_no_training_framework() -> None:
    names = [n for n in FILES if n.split(".")[0] in ("decode", "relay") or n == "serving"]
    assert {"decode.engine", "relay"} <= set(names)
    imports = "; ".join(f"import dflow_lightning.{name}" for name in names)
    blocked = f"for name in {TRAINING_ONLY}: sys.modules[name] = None"
    run_python(f"import sys\n{blocked}\n{imports}")


@pytest.mark.parametrize(
    "name", [n for n in FILES if n.split(".")[0] in ("decode", "relay", "serving")]
)
def test_decoding_names_no_training_framework(name: str) -> None:
    """Not inside functions either; serving may need an engine that is not installed here."""
    for node in ast.walk(ast.parse(FILES[name].read_text(encoding="utf-8"))):
        modules = [a.name for a in node.names] if isinstance(node, ast.Import) else []
        modules += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        assert not [m for m in modules if m.split(".")[0] in TRAINING_ONLY]
