"""The check for a GPU, read through without one: its commands parse and its files exist."""

import os
import shlex
import subprocess
from pathlib import Path

import pytest

from dflow_lightning.__main__ import main

ROOT = Path(__file__).resolve().parents[2]
OUT = "runs/gpu-check"


@pytest.fixture(scope="module")
def commands() -> list[list[str]]:
    """As the script would run them on a GPU."""
    done = subprocess.run(
        ["bash", "tests/gpu/check.sh", "--dry"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    return [shlex.split(line) for line in done.stdout.splitlines()]


def test_every_command_of_the_package_parses(commands, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    found = [words[3:] for words in commands if words[1:3] == ["-m", "dflow_lightning"]]
    assert {words[0] for words in found} == {"fit", "export", "bench"}
    for words in found:
        status = main([*words, "--print_config"])
        said = capsys.readouterr()
        assert status == 0, f"{words}: {said.err}"


def test_a_wrong_option_would_be_seen(commands, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    bench = next(words[3:] for words in commands if "bench" in words)
    assert main([*bench, "--devise=cuda", "--print_config"]) != 0
    assert "devise" in capsys.readouterr().err


def test_every_file_is_there(commands):
    words = [word for command in commands for word in command]
    paths = [word for word in words if "/" in word and "python" not in word and " " not in word]
    read = [word for word in paths if not word.startswith(OUT)]
    assert len(read) > 5
    assert [word for word in read if not (ROOT / word).exists()] == []


def test_all_steps_together_end_within_eight_minutes(commands):
    text = (ROOT / "tests/gpu/check.sh").read_text()
    limits = [
        int(line.split()[2]) for line in text.splitlines() if line.lstrip().startswith("step ")
    ]
    assert len(limits) == len(commands)
    assert sum(limits) <= 8 * 60


def test_steps_for_a_gpu_alone_are_named_on_a_cpu(tmp_path):
    """Every command is replaced by one that does nothing."""
    script = tmp_path / "tests/gpu/check.sh"
    script.parent.mkdir(parents=True)
    script.write_text((ROOT / "tests/gpu/check.sh").read_text())
    done = subprocess.run(
        ["bash", str(script), "--device", "cpu"],
        env=os.environ | {"PYTHON": "true"}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    said = {line.split()[1]: line for line in done.stdout.splitlines()}
    skipped = [name for name, line in said.items() if "skipped, for a GPU alone" in line]
    assert skipped == ["bench-compiled:", "tests:"]
    assert len([line for line in said.values() if ": ok, " in line]) == 7
    assert (tmp_path / "runs/gpu-check/page.txt").read_text() == done.stdout


def test_an_unknown_option_is_refused():
    done = subprocess.run(
        ["bash", "tests/gpu/check.sh", "--fast"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 2
    assert "usage" in done.stderr
