"""`dflow-train decode`: what it prints and what it refuses."""

import json
from pathlib import Path

import pytest

from dflow_lightning.decode.command import decode_command
from dflow_lightning.errors import InputError
from dflow_lightning.export.write import export_drafter
from dflow_lightning.terminal import STDOUT


@pytest.fixture
def given(tmp_path, tiny_target_dir, tiny_target, tiny_drafter, tiny_relay) -> dict:
    export_drafter(tiny_drafter, tiny_relay, tiny_target, tmp_path / "dflow", dtype="float32")
    return {"target": str(tiny_target_dir), "drafter": tmp_path / "dflow", "max_new_tokens": 8}


def prompt_file(folder: Path, *rows: dict) -> Path:
    path = folder / "prompts.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def decode(capsys, **options) -> list[dict]:
    decode_command(json=STDOUT, **options)
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_text_goes_to_stdout_and_what_it_took_to_stderr(given, capsys):
    decode_command(prompt="hello", **given)
    captured = capsys.readouterr()
    assert captured.out.strip()
    assert "tau" not in captured.out
    for part in ("tau ", " rounds", "relay on", " tokens/s"):
        assert part in captured.err


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_all_ways_give_the_same_tokens(given, capsys, temperature):
    options = given | {"prompt": "hello", "temperature": temperature, "seed": 3}
    (on,) = decode(capsys, **options)
    (off,) = decode(capsys, relay="off", **options)
    (plain,) = decode(capsys, plain=True, **options)
    (tree,) = decode(capsys, tree_nodes=6, **options)
    assert on["token_ids"] == off["token_ids"] == plain["token_ids"] == tree["token_ids"]
    assert (on["tree_nodes"], tree["tree_nodes"]) == (None, 6)
    assert [one["relay"] for one in (on, off, plain)] == ["on", "off", "off"]
    assert (plain["tau"], plain["accepted"]) == (None, None)
    assert on["acceptance"] == ("greedy" if temperature == 0 else "sample_match")
    assert on["tau"] == pytest.approx(1 + sum(on["accepted"]) / on["rounds"])


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ({"acceptance": "rejection"}, "acceptance is rejection"),
        ({"backend": "compiled"}, "backend is compiled"),
        ({"plain": True}, "plain decoding drafts nothing"),
    ],
)
def test_what_a_tree_cannot_do_is_refused_before_anything_is_loaded(option, said):
    with pytest.raises(InputError, match=said):
        decode_command(
            target="nowhere", drafter=Path("nowhere"), prompt="hello", tree_nodes=8, **option
        )


def test_a_file_is_answered_in_its_order(given, capsys, tmp_path):
    chat = [
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "two"},
        {"role": "user", "content": "three"},
    ]
    path = prompt_file(
        tmp_path,
        {"id": "z", "prompt": "hello"},
        {"id": "a", "family": "math", "prompt": "hello", "answer": "x"},
        {"messages": chat},
    )
    rows = decode(capsys, prompts=path, **given)
    assert [row["id"] for row in rows[:2]] == ["z", "a"]
    assert rows[0]["token_ids"] == rows[1]["token_ids"] != rows[2]["token_ids"]


def test_thinking_changes_the_prompt(given, capsys):
    (off,) = decode(capsys, prompt="hello", **given)
    (on,) = decode(capsys, prompt="hello", thinking=True, **given)
    assert on["token_ids"] != off["token_ids"]


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({}, "one of --prompt and --prompts"),
        ({"prompt": "a", "prompts": Path("x")}, "one of --prompt and --prompts"),
        ({"prompt": " "}, "prompt is empty"),
        ({"prompts": Path("missing.jsonl")}, "missing.jsonl does not exist"),
        ({"prompt": "a", "temperature": -0.5}, "temperature is -0.5"),
        ({"prompt": "a", "max_new_tokens": 0}, "max_new_tokens is 0"),
        ({"prompt": "a" * 600}, "the context of .* ends at 512"),
        ({"prompt": "a", "drafter": Path("missing")}, "missing does not exist"),
        ({"prompt": "a", "target": "./missing"}, "missing does not exist"),
    ],
)
def test_bad_input(given, change, expected):
    with pytest.raises(InputError, match=expected) as caught:
        decode_command(**given | change)
    assert "\n" not in str(caught.value)


def test_an_answer_of_one_token_has_no_rate(given, capsys):
    """F44 of the list of faults: it was 1,000,000,000 tokens/s."""
    (row,) = decode(capsys, prompt="hello", **given | {"max_new_tokens": 1})
    assert (len(row["token_ids"]), row["rounds"], row["tokens_per_second"]) == (1, 0, None)
    decode_command(prompt="hello", **given | {"max_new_tokens": 1})
    assert "1 tokens]" in capsys.readouterr().err


def test_an_empty_file(given, tmp_path):
    with pytest.raises(InputError, match="is empty"):
        decode_command(prompts=prompt_file(tmp_path), **given)
