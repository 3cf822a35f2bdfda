"""`serve-check`: its mistakes, its counting, and what docs/serve-vllm.md says of it."""

import json
import re
import shlex
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from dflow_lightning.__main__ import main
from dflow_lightning.errors import InputError
from dflow_lightning.serving.check import Counts, ServeCheck, own_counts
from dflow_lightning.serving.server import ServerSettings, VllmServer, last_error
from dflow_lightning.serving.vllm.versions import SUPPORTED

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/serve-vllm.md").read_text()


def test_the_command_of_the_page_is_understood(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    line = re.search(r"^dflow-train (serve-check .*)$", PAGE, re.M)
    assert line
    missing = str(tmp_path / "python")
    assert main([*shlex.split(line[1]), "--python", missing]) == 2
    assert f"python: {missing} does not exist" in capsys.readouterr().err
    assert main([*shlex.split(line[1]), "--num_prompts", "0"]) == 2
    assert "num_prompts is 0; give 1 or more" in capsys.readouterr().err
    assert main([*shlex.split(line[1]), "--max_new_tokens", "1"]) == 2  # F44, as in bench
    assert "max_new_tokens is 1; give 2 or more" in capsys.readouterr().err


def test_the_server_of_the_page_is_the_one_that_is_started() -> None:
    text = re.search(r"^VLLM_CPU_KVCACHE_SPACE=1 .*?'\}?.*?'$", PAGE, re.M | re.S)
    assert text
    words = shlex.split(text[0].replace("\\\n", " "))[1:]
    settings = ServerSettings(
        python=Path(".venv-vllm/bin/python"), target="data/tiny-qwen3", num_draft_tokens=7,
        drafter=Path("data/tiny-drafters/dflow"),
    )  # fmt: skip
    started = settings.command(0)
    for ours in ("--host", "127.0.0.1", "--port", "0"):  # of the check alone
        started.remove(ours)
    assert words == started


def test_the_page_names_the_releases_of_the_table() -> None:
    row = re.search(r"^\| (0\.\d+(?:, 0\.\d+)*) \| ran", PAGE, re.M)
    assert row
    assert row[1].split(", ") == sorted(SUPPORTED)


def test_f1_the_check_leaves_no_sampling_setting_to_the_server(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The model's generation_config.json would fill in what is missing: Qwen2.5 has penalties."""
    sent = []

    def post(self: VllmServer, path: str, content: dict) -> dict:
        sent.append(content)
        return {"choices": [{"token_ids": [5]}]}

    monkeypatch.setattr(VllmServer, "post", post)
    server = VllmServer(ServerSettings(python=Path("python"), target="t"))
    assert server.complete_all([[1, 2]], concurrency=1, temperature=0.0, max_tokens=4) == [[5]]
    server.close()
    neutral = {
        "temperature": 0.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0,
        "presence_penalty": 0.0, "frequency_penalty": 0.0, "seed": 0, "max_tokens": 4,
    }  # fmt: skip
    assert neutral.items() <= sent[0].items()


def test_the_switch_is_passed_on() -> None:
    command = ServerSettings(python=Path("python"), target="t", relay=False).command(1)
    assert json.loads(command[command.index("--additional-config") + 1]) == {"dflow_relay": False}
    assert "--speculative-config" not in command


def test_rounds_are_counted_to_the_end_of_an_answer() -> None:
    """The last round counts whole, those that begin behind the end do not."""
    found = {(1,): [3, 0, 6, 2], (2,): [1, 1]}
    decoder = SimpleNamespace(
        drafter=SimpleNamespace(dims=SimpleNamespace(block_size=8)),
        generate=lambda prompts, **_: [SimpleNamespace(accepted=found[tuple(p)]) for p in prompts],
    )
    # 1 + 4 + 1 = 6 tokens before the third round, which passes the end at 8 and counts.
    counts = own_counts(decoder, [[1], [2]], [[0] * 8, [0]], relay=True)  # type: ignore[arg-type]
    assert counts == Counts(rounds=3, accepted=9)
    assert counts.tau == 4
    assert Counts(0, 0).tau == 1


@pytest.mark.parametrize(
    ("log", "wanted"),
    [
        ("Traceback\nx.InputError: drafter: no, or so\nRuntimeError: x\n", "drafter: no, or so"),
        ("(A pid=1) ERROR 1 [c.py:1] ValueError: no memory\nmore\n", "ValueError: no memory"),
        ("first\nlast line\n\n", "last line"),
        ("", "its log is empty"),
    ],
)  # fmt: skip
def test_the_sentence_of_a_log(log: str, wanted: str) -> None:
    assert last_error(log) == wanted


def test_our_models_leave_the_gpu_while_a_server_runs() -> None:
    """And come back to where they were, whatever the server ended with."""
    moves: list[tuple[str, object]] = []

    def part(name: str) -> SimpleNamespace:
        return SimpleNamespace(device=torch.device("cpu"), to=lambda d: moves.append((name, d)))

    check = object.__new__(ServeCheck)
    check.decoder = SimpleNamespace(  # type: ignore[assignment]
        target=part("target"), drafter=part("drafter"), relay=None
    )

    def serve() -> None:
        with check._on_the_host():
            assert moves == [("target", "cpu"), ("drafter", "cpu")]
            raise InputError("the server ended")

    with pytest.raises(InputError, match="the server ended"):
        serve()
    assert moves[2:] == [("target", torch.device("cpu")), ("drafter", torch.device("cpu"))]
