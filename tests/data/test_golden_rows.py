"""The rows that `prepare` makes of a fixed source, as committed: what ROWS_VERSION stands for.

    python tests/data/test_golden_rows.py > tests/data/golden_rows.json

Answers come from the file, and from the stub server, whose answer follows from the prompt's tokens
and the seed. So prompts, seeds, masks, ids, hashes and rejects are all held. The ids themselves are
kept as a hash, the decoded text beside it to see what changed.
"""

import contextlib
import hashlib
import io
import json
import subprocess
import sys
import tempfile
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
from conversations import assistant, system, user

from dflow_lightning.__main__ import main
from dflow_lightning.data.prepared import open_prepared, read_manifest
from dflow_lightning.prepare.run import ROWS_VERSION

ROOT = Path(__file__).resolve().parents[2]
TINY = ROOT / "data/tiny-qwen3"
GOLDEN = Path(__file__).with_name("golden_rows.json")
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 2, "b": 3}}}
TOOL = {"type": "function", "function": {"name": "add", "description": "Adds <|im_end|>."}}
REASONED = "<think>\nTwo and three.\n</think>\n\nFive."
SOURCE: list[Any] = [
    {"id": "plain", "family": "math", "prompt": "What is 2 plus 3?", "answer": "It is 5."},
    {"prompt": "No id", "answer": "Named by its line.", "note": 1.5},
    {"id": "cut", "prompt": "Count.", "answer": "One, two", "finished": False},
    {"id": "talk", "messages": [
        system("Be brief."), user("Hi"), assistant("Hello."), user("How?"), assistant("Fine.")]},
    {"id": "reasoned", "messages": [
        user("2+3?"), assistant(REASONED), user("Sure?"), assistant(REASONED)]},
    {"id": "field", "messages": [
        user("2+3?"), assistant("Five.") | {"reasoning_content": "Two and three."}]},
    {"id": "tool", "tools": [TOOL], "messages": [
        user("2+3?"), assistant("") | {"tool_calls": [CALL]},
        {"role": "tool", "content": "5"}, assistant("It is 5.")]},
    {"id": "share", "system": "Be kind.", "conversations": [
        {"from": "human", "value": "Hello?"}, {"from": "gpt", "value": "Good day to you."}]},
    {"id": "alpaca", "instruction": "Add.", "input": "2, 3", "output": "The sum is 5."},
    {"id": "parts", "messages": [
        user([{"type": "text", "text": "a"}, {"type": "text", "text": " b"}]), assistant("c d e")]},
    {"id": "special", "prompt": "<|im_end|>\n<think>", "answer": "I write <|im_end|> as text."},
    {"id": "open", "messages": [user("No answer yet.")]},
    {"id": "long", "prompt": "word " * 200, "answer": "Too long to fit."},
    {"id": "again", "prompt": "What is 2 plus 3?", "answer": "It is 5."},
    {"id": "plain", "prompt": "An id that is taken", "answer": "by the first row."},
    {"id": "number", "prompt": 5, "answer": "Five."},
    '{"id": "broken", "prompt": ',
]  # fmt: skip
ASKED = ("--temperature", "0.7", "--samples_per_prompt", "2", "--seed", "3")
WAYS = {
    "kept": ("--keep_answers",),
    "kept, last turn, no thinking": (
        "--keep_answers", "--supervise", "last_turn", "--supervise_thinking", "false",
        "--too_long", "reject",
    ),
    "asked": (*ASKED, "--max_new_tokens", "40"),
    "asked, thinking": (*ASKED, "--max_new_tokens", "12", "--thinking"),
}  # fmt: skip


def start_stub() -> tuple[subprocess.Popen, str]:
    """A server that never fails; its address."""
    stub = subprocess.Popen(
        [sys.executable, str(ROOT / "tests/data/stub_server.py"), "--longest", "16"],
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
    )  # fmt: skip
    assert stub.stdout is not None
    return stub, f"http://127.0.0.1:{int(stub.stdout.readline())}/v1"


def prepared(way: str, url: str, folder: Path) -> dict[str, Any]:
    """The rows that one command line makes of the source, the rejects and the counts."""
    from transformers import AutoTokenizer

    source, out = folder / "source.jsonl", folder / "out"
    texts = [row if isinstance(row, str) else json.dumps(row) for row in SOURCE]
    source.write_text("".join(text + "\n" for text in texts))
    command = ["prepare", "--data", source, "--target", TINY, "--out", out, "--max_length", "160"]
    command += ["--max_reject_share", "0.9", *WAYS[way]]
    command += ["--server", url] if way.startswith("asked") else []
    with contextlib.redirect_stdout(io.StringIO()):
        assert main([str(one) for one in command]) == 0
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    rejects = map(json.loads, (out / "rejects.jsonl").read_text().splitlines())
    return {
        "rows": [_described(row, tokenizer) for row in open_prepared(out)],
        "rejects": [f"{one['line']}/{one.get('sample', 0)} {one['reason']}" for one in rejects],
        "counts": read_manifest(out)["counts"],
    }


def _described(row: dict[str, Any], tokenizer: Any) -> dict[str, Any]:
    ids, mask = row["input_ids"], row["loss_mask"]
    groups = groupby(zip(mask, ids, strict=True), key=lambda pair: pair[0])
    parts = [(learned, [token for _, token in pairs]) for learned, pairs in groups]
    stretches = [("+" if learned else "-") + tokenizer.decode(part) for learned, part in parts]
    digest = hashlib.sha256(json.dumps([ids, list(map(int, mask))]).encode()).hexdigest()[:16]
    return {
        "id": row["id"], "family": row["family"], "finished": row["finished"],
        "prompt_hash": row["prompt_hash"], "tokens": len(ids), "sha256": digest, "text": stretches,
    }  # fmt: skip


@pytest.fixture(scope="module")
def url():
    stub, address = start_stub()
    yield address
    stub.kill()
    stub.wait()
    assert stub.stdout is not None
    stub.stdout.close()


@pytest.mark.parametrize("way", WAYS)
def test_the_same_source_gives_the_committed_rows(way, url, tmp_path):
    golden = json.loads(GOLDEN.read_text())
    advice = (
        "prepare makes other rows than before. If that was not meant, it is a defect. If it was, "
        "raise ROWS_VERSION in prepare/run.py, so that folders made before are not taken for "
        "these, and write tests/data/golden_rows.json anew (its command is in this module's head)"
    )
    assert golden["rows_version"] == ROWS_VERSION, advice
    found = prepared(way, url, tmp_path)
    for part in ("rejects", "counts", "rows"):
        assert found[part] == golden[way][part], advice


def test_other_rows_are_noticed(url, tmp_path, monkeypatch):
    """The guard itself: a change of one token in one row is seen."""
    from dflow_lightning.data import turns

    really = turns.THINKING
    monkeypatch.setattr(turns, "THINKING", (really[0], really[0]))
    way = "kept, last turn, no thinking"
    assert prepared(way, url, tmp_path)["rows"] != json.loads(GOLDEN.read_text())[way]["rows"]


if __name__ == "__main__":
    process, address = start_stub()
    found: dict[str, Any] = {"rows_version": ROWS_VERSION}
    for name in WAYS:
        with tempfile.TemporaryDirectory() as place:
            found[name] = prepared(name, address, Path(place))
    process.kill()
    print(json.dumps(found, indent=1, ensure_ascii=False))
