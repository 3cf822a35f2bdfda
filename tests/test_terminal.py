"""What is printed on terminals and into pipes, examples, bare flags, and completion in bash."""

import io
import json
import os
import re
import select
import shlex
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

import pytest
from rich.progress import Progress
from rich.table import Table

from dflow_lightning import __main__ as entry
from dflow_lightning.commandline.arguments import EXAMPLES, option_types, spell_out
from dflow_lightning.commandline.json_output import JsonOutput
from dflow_lightning.completion import parsers_of_commands, script
from dflow_lightning.errors import InputError
from dflow_lightning.run.progress import LINE_SECONDS, Speed, by_round, measured
from dflow_lightning.run.summary import BestSoFar, FamilyTau, decoded, print_decoded
from dflow_lightning.sweep.command import SweepSettings
from dflow_lightning.terminal import (
    Screen,
    bar,
    command,
    is_live,
    labelled,
    pipe_is_broken,
    print_table,
    screen,
)

if TYPE_CHECKING:
    from launch import Launcher

pytest_plugins = ["launch"]
ROOT = Path(__file__).resolve().parents[1]


class Terminal(io.StringIO):
    """A terminal; its width is that of COLUMNS."""

    def isatty(self) -> bool:
        return True


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """A terminal of 40 columns."""
    for name in ("NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setenv("TERM", "xterm-256color")
    return Terminal()


# ---------------------------------------------------------------- folding and colours

WORDS = ["dflow-train", "export", "--checkpoint", "a run/best.ckpt", "--out", "a run/export"]


def test_text_is_folded_on_a_terminal_alone(terminal: Terminal) -> None:
    text = "one two three four five six seven eight nine ten"
    folded = labelled("numbers  ", text, terminal)
    assert folded.splitlines()[1].startswith(" " * 9 + "s")
    assert max(map(len, folded.splitlines())) <= 40
    assert folded.split() == ["numbers", *text.split()]
    assert labelled("numbers  ", text, io.StringIO()) == f"numbers  {text}"


def test_a_folded_command_can_be_pasted(
    terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdout", terminal)
    folded = command("  run  ", WORDS)
    assert max(map(len, folded.splitlines())) <= 40
    assert all(line.endswith(" \\") for line in folded.splitlines()[:-1])
    assert shlex.split(folded.removeprefix("  run  ").replace("\\\n", "")) == WORDS
    assert command("", WORDS, 200) == shlex.join(WORDS)


def a_table(console: Screen) -> str:
    rows = Table("name", "tau")
    rows.add_row("all", "3.2", style="bold green")
    print_table(console, rows)
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_colours(monkeypatch: pytest.MonkeyPatch, terminal: Terminal) -> None:
    green = "\x1b[1;32m"
    assert green in a_table(screen(terminal))
    assert "\x1b" not in a_table(screen(io.StringIO()))
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert green in a_table(screen(io.StringIO()))
    monkeypatch.delenv("FORCE_COLOR")
    monkeypatch.setenv("NO_COLOR", "1")
    assert "32m" not in a_table(screen(Terminal()))


def test_bars_are_for_terminals_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    assert is_live(Terminal())
    assert not is_live(io.StringIO())
    monkeypatch.setenv("TERM", "dumb")
    assert not is_live(Terminal())


def test_a_bar_leaves_what_goes_into_a_pipe_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bar on standard error; the answers on standard output must not be drawn above it."""
    monkeypatch.setattr(sys, "stderr", errors := Terminal())
    monkeypatch.setattr(sys, "stdout", pipe := io.StringIO())
    with bar(*Progress.get_default_columns(), stream=sys.stderr) as running:
        running.add_task("", total=1)
        print("an answer")
    assert pipe.getvalue() == "an answer\n"
    assert "an answer" not in errors.getvalue()


# ---------------------------------------------------------------- readers that go away


@pytest.mark.parametrize("words", [["--help"], ["ui", "--help"], ["nonsense"]])
def test_a_reader_that_has_gone_is_no_error(words: list[str]) -> None:
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(
        [sys.executable, "-m", "dflow_lightning", *words],
        stdout=write, stderr=subprocess.PIPE, text=True, check=False,
    )  # fmt: skip
    os.close(write)
    mistake = words == ["nonsense"]  # says so on standard error, and nothing was to be read
    # argparse drops what it cannot write by itself, and ends with 0.
    assert done.returncode in ((2,) if mistake else (0, 141))
    assert len(done.stderr.splitlines()) == mistake


def test_a_broken_connection_is_not_a_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(args: list[str]) -> int:
        raise BrokenPipeError

    monkeypatch.setattr(entry, "dispatch", fail)
    assert not pipe_is_broken()
    with pytest.raises(BrokenPipeError):
        entry.main([])


def test_a_server_ends_with_its_command(tmp_path: Path) -> None:
    """Terminated by SIGTERM, `ui` takes the server with it, and says nothing."""
    server = "import pathlib, os, time; pathlib.Path('pid').write_text(str(os.getpid())); "
    code = (
        "import sys; from dflow_lightning.tracking.ui import serve; "
        f"serve([sys.executable, '-c', {server + 'time.sleep(600)'!r}])"
    )
    done = subprocess.Popen([sys.executable, "-c", code], cwd=tmp_path, stderr=subprocess.PIPE)
    pid, end = tmp_path / "pid", time.monotonic() + 60
    while not (pid.exists() and pid.read_text()):
        assert time.monotonic() < end
        time.sleep(0.05)
    done.terminate()
    assert done.wait(60) == 143
    assert done.stderr is not None
    assert done.stderr.read() == b""
    done.stderr.close()
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid.read_text()), 0)


# ---------------------------------------------------------------- examples and flags


def test_every_example_is_understood(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    parsers = parsers_of_commands()
    assert EXAMPLES.keys() == parsers.keys()
    for name, words in EXAMPLES.items():
        tools = {"sweep": SweepSettings} | {tool: entry.load_tool(tool) for tool in entry.TOOLS}
        types = option_types(tools[name]) if name in tools else {}
        parsers[name].parse_args(spell_out(types, shlex.split(words)))


def test_bare_flags_of_a_module_with_postponed_annotations() -> None:
    module = ModuleType("postponed")
    sys.modules["postponed"] = module
    code = """
from __future__ import annotations
from pathlib import Path
def tool(*, fast: bool = False, maybe: bool | None = None, drafter: list[Path], json: Path): ...
"""
    exec(code, module.__dict__)
    types = option_types(module.tool)
    typed = ["--fast", "--drafter", "a,b", "--maybe", "--json"]
    expected = ["--fast=true", "--maybe=true", "--json=-", '--drafter=["a,b"]']
    assert spell_out(types, typed) == expected
    del sys.modules["postponed"]


def test_json_stands_alone(launch: "Launcher", run_options: list[str], recipe: Path) -> None:
    small = [o for o in run_options if not o.startswith("--tracking")]
    planned = json.loads(launch("plan", "--config", recipe, *small, "--json").out)
    assert planned["steps"] == 4
    assert planned["parameters"]["relay"] > 0
    data = next(o for o in run_options if o.startswith("--data.train")).partition("=")[2]
    target = next(o for o in run_options if o.startswith("--model.target")).partition("=")[2]
    shown = launch("inspect", "--data", data, "--row", 2, "--target", target, "--json")
    row = json.loads(shown.out)
    assert row["id"] == "train-1"
    assert len(row["input_ids"]) == len(row["loss_mask"])
    assert any(row["loss_mask"])
    assert not shown.err


def test_json_of_a_file_is_written_beside_the_text(
    launch: "Launcher", run_options: list[str], recipe: Path, tmp_path: Path
) -> None:
    small = [o for o in run_options if not o.startswith("--tracking")]
    small.append("--gpu_tflops=0.1")  # measured anew otherwise, and never twice the same
    file = tmp_path / "plan.json"
    plain = launch("plan", "--config", recipe, *small)
    assert launch("plan", "--config", recipe, *small, "--json", file).out == plain.out
    alone = launch("plan", "--config", recipe, *small, "--json")
    assert json.loads(file.read_text()) == json.loads(alone.out)
    assert alone.err == plain.out
    checked = launch("doctor", "--json", file)
    assert len(json.loads(file.read_text())["checks"]) == len(checked.out.splitlines()) - 2


def test_json_and_drafter_mean_one_thing_in_all_commands() -> None:
    for name in entry.TOOLS:
        types = option_types(entry.load_tool(name))
        assert types.get("--json", Path | None) == Path | None, name
        assert "--export" not in types, name
        assert types.get("--drafter", Path) in (Path, list[Path]), name


def test_lines_of_json_are_kept_as_they_come(tmp_path: Path) -> None:
    file = tmp_path / "new" / "rows.jsonl"
    file.parent.mkdir()
    file.write_text("of an earlier command\n")
    output = JsonOutput(file)
    for i in range(2):
        output.write_line({"row": i})
        assert len(file.read_text().splitlines()) == i + 1
    with pytest.raises(InputError, match=r"json: .* is a folder"):
        JsonOutput(tmp_path)


# ---------------------------------------------------------------- what a run shows


def test_metrics_of_rounds_in_their_order_and_of_none() -> None:
    metrics = {f"train/tau_round{i}": 1.0 + i for i in (10, 2, 0)}
    assert by_round(metrics, "tau") == [1.0, 3.0, 11.0]
    assert measured({"train/loss": 2.5}, object()) == ["loss 2.500"]  # a drafter without rounds


def test_time_left_counts_validations(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    speed = Speed()
    for now[0] in (1.0, 2.0):
        speed.count(100)
    assert (speed.tokens_per_second, speed.remaining(10)) == (100.0, 10.0)
    now[0] = 6.0
    speed.resume()
    assert (speed.tokens_per_second, speed.remaining(10)) == (100.0, 30.0)
    assert LINE_SECONDS[0] < LINE_SECONDS[1]


def test_best_so_far_of_each_family() -> None:
    best = BestSoFar()
    best.start(3.0)
    first = best.update({"math": FamilyTau(2.0, None), "all": FamilyTau(2.5, 2.0)}, 10)
    second = best.update({"math": FamilyTau(1.5, None), "all": FamilyTau(3.5, 2.0)}, 20)
    assert (first["math"], first["all"]) == ((2.0, 10), (3.0, None))
    assert (second["math"], second["all"]) == ((2.0, 10), (3.5, 20))


def test_table_with_and_without_relay() -> None:
    metrics = {"val/tau": 2.5, "val/tau_relay_off": 2.0, "val/math/tau": 2.5, "train/tau": 9.0}
    found = decoded(metrics, "val")
    assert found == {"math": (2.5, None), "all": (2.5, 2.0)}
    console = screen(io.StringIO())
    print_decoded(console, "step 7", found, BestSoFar().update(found, 7), 7)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert re.search(r"^all +2\.500 +2\.000 +\+25\.0% +2\.500 now$", text, re.M)
    assert re.search(r"^math +2\.500 +- +- +2\.500 now$", text, re.M)
    print_decoded(console, "", {"all": FamilyTau(2.0, None)})
    assert "relay" not in console.file.getvalue().partition("now\n")[2].partition("now")[2]  # type: ignore[attr-defined]


# ---------------------------------------------------------------- completion


def test_completion_in_bash(tmp_path: Path) -> None:
    """A real bash on a pseudo-terminal; a person types and presses Tab."""
    (tmp_path / "dflow-train.bash").write_text(script("bash"))
    (tmp_path / "my-recipe.yaml").touch()
    main, terminal = os.openpty()
    environment = {"PATH": os.environ["PATH"], "TERM": "dumb", "PS1": "$ ", "INPUTRC": "/dev/null"}
    shell = subprocess.Popen(
        ["bash", "--norc", "--noprofile", "-i"], cwd=tmp_path, env=environment,
        stdin=terminal, stdout=terminal, stderr=terminal, start_new_session=True,
    )  # fmt: skip
    os.close(terminal)

    def typed(keys: str, expected: str) -> None:
        os.write(main, keys.encode())
        seen, end = "", time.monotonic() + 20
        while not re.search(expected, seen):
            assert time.monotonic() < end, f"{keys!r} gave {seen!r}, and not {expected!r}"
            if select.select([main], [], [], 0.2)[0]:
                seen += os.read(main, 65536).decode()
        os.write(main, b"\x15")  # the line is dropped

    try:
        typed("source dflow-train.bash; echo re''ady\n", r"\nready\r\n")
        typed("dflow-train be\t", r"dflow-train bench ")
        typed("dflow-train validate-\t", r"validate-export ")
        typed("dflow-train bench --conc\t", r"--concurrency ")
        typed("dflow-train fit --model.relay.first\t", r"first_rejected ")
        typed("dflow-train fit --config my-\t", r"my-recipe\.yaml ")
        typed("dflow-train decode --target my-\t", r"my-recipe\.yaml ")
        typed("dflow-train decode --acceptance rej\t", r"rejection ")
    finally:
        shell.kill()
        shell.wait()
        os.close(main)


def test_completion_names_the_shells(launch: "Launcher") -> None:
    done = launch("completion", "bsh")
    assert (done.status, done.out) == (2, "")
    assert done.err.endswith("is not one of bash, zsh; did you mean 'bash'?\n")
    assert "example:" in launch("completion", "--help").out
    assert script("zsh").startswith("#compdef dflow-train")


def test_the_list_of_commands_fits_80_columns() -> None:
    assert max(map(len, entry.usage().splitlines())) <= 80
