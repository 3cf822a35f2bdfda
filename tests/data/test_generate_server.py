"""Answers from servers: whatever one does, every row is there once or listed."""

import json
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path
from types import MappingProxyType

import pytest
from conversations import assistant, question, user
from stub_server import KINDS

from dflow_lightning.__main__ import main
from dflow_lightning.data.prepared import open_prepared, read_manifest
from dflow_lightning.prepare import from_server

ROOT = Path(__file__).resolve().parents[2]
TINY = ROOT / "data/tiny-qwen3"
TALK = [user("Hi."), assistant("Hello."), user("How are you?")]


@pytest.fixture
def stub():
    """Start a stub server with options; its address."""
    started = []

    def start(*options) -> str:
        command = [sys.executable, str(ROOT / "tests/data/stub_server.py"), *map(str, options)]
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        started.append(process)
        return f"http://127.0.0.1:{int(process.stdout.readline())}"

    yield start
    for process in started:
        process.kill()
        process.wait()
        process.stdout.close()


@pytest.fixture
def prepare(tmp_path, capsys, monkeypatch):
    """Run the command against servers; exit status, standard output and standard error."""
    monkeypatch.setattr(from_server, "FIRST_WAIT", 0.01)

    def run(data, *urls, options=(), out="out"):
        capsys.readouterr()
        servers = [part for url in urls for part in ("--server", url)]
        command = ["prepare", "--data", str(data), "--target", str(TINY), *servers]
        command += ["--out", str(tmp_path / out), "--timeout", "1", "--max_new_tokens", "32"]
        return main([*command, *map(str, options)]), *capsys.readouterr()

    return run


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def counts(url: str) -> dict[str, int]:
    with urllib.request.urlopen(f"{url}/counts") as response:
        return json.load(response)


def questions(count: int) -> list[dict]:
    return [{"id": f"q{n}", "prompt": f"What is {n}?"} for n in range(count)]


def test_every_failure_is_tried_again(prepare, stub, write, tmp_path):
    """Four of ten answers fail, each in one of eleven ways; the folder is that of a good server.

    F1: both refuse a request that leaves a sampling setting to them.
    """
    data = write(*questions(300), {"id": "talk", "messages": TALK})
    short = ("--longest", 20)  # no answer is cut off
    good, bad = stub(*short), stub(*short, "--fail", 0.4, "--slow", 1.5)
    assert prepare(data, f"{good}/v1", out="good")[0] == 0
    status, _, err = prepare(data, f"{bad}/v1", options=["--retries", 12, "--concurrency", 40])
    assert status == 0, err
    assert files(tmp_path / "out") == files(tmp_path / "good")
    failures = counts(bad)
    assert set(KINDS) < {*failures}
    assert failures["asked"] == 302 + sum(
        count for kind, count in failures.items() if kind not in ("asked", "most")
    )
    assert failures["most"] > 10
    rows = open_prepared(tmp_path / "out")
    assert rows["id"] == [*(f"q{n}" for n in range(300)), "talk#1", "talk#2"]
    assert read_manifest(tmp_path / "out")["generator"] == {"kind": "server", "model": "stub"}


def test_rows_without_an_answer_are_listed_or_stop_the_run(prepare, stub, write, tmp_path):
    data, url = write(*questions(60)), stub("--broken", 12)
    options = ["--retries", 1]
    status, _, err = prepare(data, f"{url}/v1", options=options)
    assert status == 2
    assert "got no answer, more than max_reject_share 0.01 allows" in err
    assert "has no choice with a text; run the same command again" in err
    status, _, _ = prepare(data, f"{url}/v1", options=[*options, "--max_reject_share", 0.3])
    assert status == 0
    lines = (tmp_path / "out/rejects.jsonl").read_text().splitlines()
    listed = [json.loads(line) for line in lines]
    assert {one["reason"] for one in listed} == {"not answered"}
    lost = {f"q{one['line'] - 1}" for one in listed}
    found = open_prepared(tmp_path / "out")["id"]
    assert 0 < len(lost) < 20
    assert sorted({*found} | lost) == sorted(one["id"] for one in questions(60))
    assert len(found) + len(lost) == 60


def test_answers_that_are_there_are_not_asked_again(prepare, stub, write):
    data, url = write(*questions(40)), stub()
    assert prepare(data, f"{url}/v1")[0] == 0
    assert counts(url)["asked"] == 40
    assert prepare(data, f"{url}/v1")[0] == 0
    assert counts(url)["asked"] == 40


def test_servers_take_turns(prepare, stub, write, tmp_path):
    urls = [stub(), stub()]
    assert prepare(write(*questions(40)), *(f"{url}/v1/" for url in urls))[0] == 0
    assert [counts(url)["asked"] for url in urls] == [20, 20]


def test_text_without_token_ids_is_counted(prepare, stub, write, tmp_path):
    url = stub("--token_ids", 0)
    status, out, _ = prepare(write(*questions(5)), f"{url}/v1")
    assert status == 0
    assert "5 conversations have tokens made from text" in out
    row = open_prepared(tmp_path / "out")[0]
    answer = [t for t, wanted in zip(row["input_ids"], row["loss_mask"], strict=True) if wanted]
    assert answer[-1] == 2025  # the end token, which a text does not have


def test_servers_that_cannot_be_used(prepare, stub, write, tmp_path):
    data, url = write(question(0)), stub()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        nobody = f"http://127.0.0.1:{free.getsockname()[1]}/v1"
    cases = {
        (nobody, ()): f"server: {nobody} does not answer (",
        (url, ()): f"server: {url}/models lists no models; give the address of",
        (f"{url}/v1", ("--model", "other")): f"model is other, but {url}/v1 serves stub; give one",
        (f"{url}/v1", ("--timeout", 0)): "timeout is 0.0; give a number of seconds above 0",
        (f"{url}/v1", ("--retries", -1)): "retries is -1; give 0 or more",
    }
    for (address, options), sentence in cases.items():
        status, _, err = prepare(data, address, options=options)
        assert status == 2
        assert err.startswith(f"error: {sentence}")
        assert err.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["rows.jsonl"]


@pytest.mark.parametrize(
    ("found", "sentence"),
    [
        ({"choices": [{"text": "x", "finish_reason": "stop"}], "usage": {"prompt_tokens": 1}},
         "read 1 tokens where"),
        (401, "refuses with status 401 (no); fix the key (the key is read from OPENAI_API_KEY)"),
        (404, "refuses with status 404 (no); fix the address or the model"),
    ],
)  # fmt: skip
def test_what_every_request_would_meet_stops_at_once(
    prepare, stub, write, monkeypatch, tmp_path, found, sentence
):
    class Response:
        status = found if isinstance(found, int) else 200
        headers = MappingProxyType[str, str]({})

        async def __aenter__(self):
            return self

        async def __aexit__(self, *_):
            return None

        async def json(self, **_):
            return found

        async def text(self, **_):
            return "no"

    url = stub()
    monkeypatch.setattr(from_server.aiohttp.ClientSession, "post", lambda *_, **__: Response())
    status, _, err = prepare(write(*questions(200)), f"{url}/v1")
    assert status == 2
    assert sentence in err


def test_answers_that_cannot_be_are_asked_again_by_the_next_run(prepare, stub, write, tmp_path):
    """F30: they were kept as answers, so that a repaired server was never asked."""
    data, broken = write(*questions(12)), stub("--ids", 10**6, 10**6 + 9)
    status, _, err = prepare(data, f"{broken}/v1", options=["--retries", 1])
    assert status == 2
    assert "tokens; run the same command again to try them again" in err
    assert 2 <= counts(broken)["asked"] <= 2 * 12
    good = stub()
    assert prepare(data, f"{good}/v1")[0] == 0
    assert counts(good)["asked"] == 12
    assert len(open_prepared(tmp_path / "out")) == 12


def test_a_prompt_that_no_try_can_cure_names_the_limit(prepare, stub, write, tmp_path):
    """F17, F35: the server's list of models has its limit; the advice is what to lower."""
    data, url = write(*questions(3)), stub("--limit", 60)
    status, _, err = prepare(data, f"{url}/v1", options=["--max_new_tokens", 50])
    assert status == 2
    assert err.endswith(
        "tokens and an answer of up to 50 exceed the context of the server, 60 tokens; lower "
        "max_length to 60\n"
    )
    assert counts(url)["asked"] == 0
    options = ["--max_new_tokens", 50, "--max_length", 60]
    assert prepare(data, f"{url}/v1", options=options)[0] == 0
    assert len(open_prepared(tmp_path / "out")) == 3


def test_the_same_sentence_in_this_process(write, tmp_path, capsys):
    """F35, where the target runs here: its context has 1,024 tokens."""
    command = ["prepare", "--data", str(write(question(0))), "--target", str(TINY)]
    assert main([*command, "--out", str(tmp_path / "out"), "--max_new_tokens", "1100"]) == 2
    err = capsys.readouterr().err
    assert "an answer of up to 1100 exceed the context of" in err
    assert err.endswith("1024 tokens; lower max_length to 1024\n")


def test_a_server_that_goes_away(prepare, stub, write, tmp_path):
    """The run stops instead of rejecting the rest; what was answered is kept."""
    data, url = write(*questions(120)), stub("--fail", 1, "--slow", 0)
    options = ["--retries", 0, "--concurrency", 4, "--max_reject_share", 1]
    status, _, err = prepare(data, f"{url}/v1", options=options)
    assert status == 2
    assert "conversations failed one after the other" in err
    assert not (tmp_path / "out").exists()
    options = ["--concurrency", 4, "--max_reject_share", 1]
    assert prepare(data, f"{stub()}/v1", options=options)[0] == 0
    assert len(open_prepared(tmp_path / "out")) == 120


@pytest.mark.slow
def test_killed_runs_end_the_same():
    """The small form of `make prepare-soak`."""
    script = ROOT / "scripts/prepare_soak.py"
    command = [sys.executable, str(script), "--rows", "600", "--kills", "2"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "byte-identical, every row once, memory flat" in done.stdout
