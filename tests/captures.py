"""Every command on a terminal of 80 and of 200 columns and in a pipe: `make captures`.

Screens are written to runs/captures/. Checked is that no line is wider than the terminal, that a
pipe gets no escape codes, carriage returns or trailing spaces, that nothing is cut off, that JSON
stands alone, and that Ctrl-C ends every command with 130 and one line. Exit status 1 if anything
fails. The heavy imports are made once; every command is a child process of its own.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path

from pseudo_terminal import Seen, in_terminal, piped

ROOT = Path(__file__).resolve().parents[1]
OUT = ROOT / "runs/captures"
TARGET, DRAFTER = "data/tiny-qwen3", "data/tiny-drafters/dflow"
WIDTHS = (80, 200)
INTERRUPTED = 130

SMALL = """--config recipes/tiny-dflow.yaml --trainer.val_check_interval 10
    --validation.prompts_per_family 1 --validation.max_new_tokens 16 --data.limit_validation 2"""
COMMANDS = {
    "help": "--help",
    "fit-help": "fit --help",
    "bench-help": "bench --help",
    "mistake": "fit --config recipes/tiny-dflow.yaml --model.drafter.blocksize 3",
    "fit": f"fit {SMALL} --run_dir WORK/run --trainer.max_steps 20",
    "resume": f"fit {SMALL} --run_dir WORK/run --trainer.max_steps 30 --ckpt_path last",
    "plan": "plan --config recipes/qwen3-8b-dflow.yaml --target_config WORK/qwen3-8b --rows 800000",
    "plan-tiny": "plan --config recipes/tiny-dflow.yaml --gpus 1 --measure",
    "doctor": "doctor",
    "doctor-recipe": "doctor --config recipes/tiny-dflow.yaml",
    "prepare": f"prepare --data {TARGET}/prompts/test.jsonl --target {TARGET} --out WORK/prepared "
    "--limit 8 --max_new_tokens 32 --verify",
    "inspect": f"inspect --data {TARGET}/prompts/train.jsonl --row 3 --target {TARGET}",
    "export": "export --checkpoint WORK/run/checkpoints/best.ckpt --out WORK/export",
    "decode": f"decode --target {TARGET} --drafter {DRAFTER} --prompt 'What_is_17_+_4?' "
    "--max_new_tokens 32",
    "bench": f"bench --target {TARGET} --drafter data/tiny-drafters/dflash --drafter {DRAFTER} "
    "--suite tiny --per_family 2 --max_new_tokens 24 --temperature 0,1 --json WORK/bench.json",
    "report": "report --bench WORK/bench.json --out WORK/report.html",
}
JSON = {
    "plan-json": "plan --config recipes/tiny-dflow.yaml --json",
    "doctor-json": "doctor --json",
    "prepare-json": f"prepare --data {TARGET}/prompts/test.jsonl --target {TARGET} "
    "--out WORK/prepared-json --limit 4 --max_new_tokens 16 --json",
    "inspect-json": f"inspect --data {TARGET}/prompts/train.jsonl --row 3 --target {TARGET} --json",
    "export-json": "export --checkpoint WORK/run/checkpoints/best.ckpt --out WORK/export --json",
    "validate-export-json": f"validate-export --drafter {DRAFTER} --target {TARGET} "
    "--num_prompts 2 --max_new_tokens 8 --json",
    "decode-json": f"decode --target {TARGET} --drafter {DRAFTER} --prompt Hi --max_new_tokens 8 "
    "--json",
    "bench-json": f"bench --target {TARGET} --drafter {DRAFTER} --suite tiny --per_family 1 "
    "--max_new_tokens 8 --json",
}
TEXTS = ("inspect", "decode")  # what they show may end with a space itself
QUIET = {"fit-quiet": f"fit {SMALL} --run_dir WORK/quiet --trainer.max_steps 2 --quiet"}
# When a person presses Ctrl-C: as soon as this is on the screen.
INTERRUPTS = {
    "fit": (f"fit {SMALL} --run_dir WORK/stopped --trainer.max_steps 3000", r"loss \d"),
    "fit-early": (f"fit {SMALL} --run_dir WORK/early --trainer.max_steps 3000", ""),
    "prepare": (
        f"prepare --data {TARGET}/prompts/train.jsonl --target {TARGET} --out WORK/stopped-data",
        r"answers",
    ),
    "bench": (
        f"bench --target {TARGET} --drafter {DRAFTER} --suite tiny --json WORK/stopped.json",
        r"\d%",
    ),
    "decode": (
        f"decode --target {TARGET} --drafter {DRAFTER} --prompts {TARGET}/prompts/train.jsonl",
        r"tokens/s",
    ),
    "doctor": ("doctor --config recipes/tiny-dflow.yaml", r"packages"),
}
CUT = re.compile(r"…|\ufffd|Traceback|Exception ignored")


def dflow_train(words: str, work: Path) -> Callable[[], int]:
    """A command line as a function for a child process; `_` is a space inside quotes."""

    def run() -> int:
        from dflow_lightning.__main__ import main

        given = [word.replace("WORK", str(work.relative_to(ROOT))) for word in words.split()]
        given = [w.strip("'").replace("_", " ") if w.startswith("'") else w for w in given]
        sys.argv = ["dflow-train", *given]
        return main(given)

    return run


def check_terminal(seen: Seen, columns: int) -> list[str]:
    """What is wrong with a screen."""
    # argparse does not break an option and its value, nor a section's title; ^C is the terminal's.
    fine = re.compile(rf" *\[--\S+ \S+\] *|[A-Z].*:|.{{,{columns}}}\^C")
    wide = [line for line in seen.paper.wide.values() if not fine.fullmatch(line)]
    found = [f"too wide: {line}" for line in wide[:3]]
    found += [f"cut: {line}" for line in seen.paper.text_lines() if CUT.search(line)]
    return found + ([] if seen.status in (0, 2) else [f"status {seen.status}"])


def check_pipe(status: int, out: str, err: str, *, spaces: bool = False) -> list[str]:
    """What is wrong with what went into pipes; whether lines may end with spaces."""
    both = out + err
    found = [f"{both.count(letter)} {name}" for letter, name in
             (("\x1b", "escape codes"), ("\r", "carriage returns")) if letter in both]  # fmt: skip
    lines = both.splitlines()
    found += [f"cut: {line}" for line in lines if CUT.search(line)]
    if not spaces:
        found += [f"trailing space: {line!r}" for line in lines if line != line.rstrip()][:1]
    return found + ([] if status in (0, 2) else [f"status {status}"])


def capture(name: str, words: str, work: Path) -> dict[str, list[str]]:
    """Run one command in all three ways; what is wrong, by way."""
    found = {}
    for columns in WIDTHS:
        clean(name, work)
        seen = in_terminal(dflow_train(words, work), columns)
        parts = [seen.paper.text_lines()]
        running = [frame for frame in seen.frames if any("━" in line for line in frame)]
        if running:
            title = f"{'  while it ran  ':=^{columns}}"
            parts.append(["", title, *running[len(running) // 2]])
        write(f"{name}-{columns}", [line for part in parts for line in part])
        found[str(columns)] = check_terminal(seen, columns)
    clean(name, work)
    status, out, err = piped(dflow_train(words, work))
    write(f"{name}-piped", [*out.splitlines(), *(f"err| {line}" for line in err.splitlines())])
    found["piped"] = check_pipe(status, out, err, spaces=name in TEXTS)
    return found


def clean(name: str, work: Path) -> None:
    """Every way of running a command finds the same folder."""
    if name == "fit":
        shutil.rmtree(work / "run", ignore_errors=True)
    if name == "prepare":
        shutil.rmtree(work / "prepared", ignore_errors=True)


def check_json(words: str, work: Path) -> list[str]:
    """What is wrong with the JSON on standard output; a terminal gets the rest."""
    status, out, err = piped(dflow_train(words, work))
    found = check_pipe(status, out, err)
    try:
        json.loads(out)
    except ValueError as error:
        found.append(f"no JSON: {error}: {out[:60]!r}")
    return found


def check_interrupt(name: str, words: str, pattern: str, work: Path) -> list[str]:
    """Press Ctrl-C once the pattern is seen: one line more, status 130, nothing half-written."""
    pressed: list[int] = []

    def keys(seen: Seen) -> bytes:
        if pressed or not re.search(pattern, "\n".join(seen.paper.text_lines())):
            return b""
        if not pattern and not (started := time.monotonic() - began > 1.0):
            return b"" if not started else b"\x03"
        pressed.append(len(seen.raw))
        return b"\x03"

    began = time.monotonic()
    seen = in_terminal(dflow_train(words, work), 80, keys=keys)
    write(f"ctrl-c-{name}", seen.paper.text_lines())
    after = seen.raw[pressed[0] :].decode(errors="replace") if pressed else ""
    found = check_terminal(seen, 80)[:-1] if seen.status else ["it ended before Ctrl-C"]
    if seen.status != INTERRUPTED:
        found.append(f"status {seen.status}")
    said = [line for line in ("interrupted", "stopped by SIGINT") if line in after]
    if len(said) != 1:
        found.append(f"said {said} after Ctrl-C")
    half = [p for p in work.rglob("*.partial*") if p.is_file() and "sqlite" not in p.name]
    return found + [f"half-written: {path}" for path in half if path.parent.name != "stopped-data"]


def write(name: str, lines: list[str]) -> None:
    """One capture."""
    (OUT / f"{name}.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")


def preload() -> None:
    """What every command would import by itself; before any thread, since children are forked."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import dflow_lightning.bench.command
        import dflow_lightning.completion
        import dflow_lightning.doctor.models
        import dflow_lightning.export.validate  # noqa: F401


def main(names: list[str]) -> int:
    """Print a line a capture; returns the exit status."""
    os.chdir(ROOT)
    for variable in ("COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR", "MLFLOW_TRACKING_URI"):
        os.environ.pop(variable, None)
    os.environ |= {"TERM": "xterm-256color", "TOKENIZERS_PARALLELISM": "false"}
    OUT.mkdir(parents=True, exist_ok=True)
    work = OUT / "work"
    if not names:
        shutil.rmtree(work, ignore_errors=True)
    write_target_config(work / "qwen3-8b")
    preload()
    checks: dict[str, Callable[[], dict[str, list[str]]]] = {}
    for name, words in COMMANDS.items():
        checks[name] = partial(capture, name, words, work)
    for name, words in JSON.items():
        checks[name] = lambda words=words: {"json": check_json(words, work)}
    for name, words in QUIET.items():
        checks[name] = lambda words=words: {"quiet": quiet(words, work)}
    for name, (words, pattern) in INTERRUPTS.items():
        checks[f"ctrl-c-{name}"] = lambda name=name, words=words, pattern=pattern: {
            "ctrl-c": check_interrupt(name, words, pattern, work)
        }
    wrong = 0
    for name in names or checks:
        began = time.monotonic()
        found = checks[name]()
        good = not any(found.values())
        wrong += not good
        ways = " ".join(f"{way}:{'ok' if not said else 'FAIL'}" for way, said in found.items())
        print(
            f"{'ok' if good else 'FAIL':<5}{name:<24}{ways:<32}{time.monotonic() - began:>6.1f} s"
        )
        for way, said in found.items():
            for line in said:
                print(f"     {way}: {line}")
        sys.stdout.flush()
    print(f"{wrong} failed; the screens are in {OUT.relative_to(ROOT)}")
    return 1 if wrong else 0


def quiet(words: str, work: Path) -> list[str]:
    """Nothing is printed at all."""
    status, out, err = piped(dflow_train(words, work))
    return check_pipe(status, out, err) + ([f"printed {out + err!r}"] if out + err else [])


def write_target_config(folder: Path) -> None:
    """The config.json of a large target, which a plan needs and nothing else."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 4096,
        "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32,
        "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936, "rms_norm_eps": 1e-6,
        "max_position_embeddings": 40960, "rope_theta": 1000000, "eos_token_id": 151645,
        "tie_word_embeddings": False, "hidden_act": "silu", "torch_dtype": "bfloat16",
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
