"""`dflow-train prepare` from files to folders: answers of the target, and those of the file."""

import json
from dataclasses import asdict
from pathlib import Path

import datasets
import pyarrow as pa
import pytest
from conversations import assistant, system, user
from pyarrow import parquet

from dflow_lightning.__main__ import main
from dflow_lightning.data.conversations import Conversation
from dflow_lightning.data.prepared import open_prepared, read_manifest
from dflow_lightning.data.template import ChatEncoder, render_prompt
from dflow_lightning.data.turns import written_rows
from dflow_lightning.decode.engine import Engine
from dflow_lightning.decode.request import Request
from dflow_lightning.decode.state import Models
from dflow_lightning.models.target import FrozenTarget
from dflow_lightning.prepare import from_engine
from dflow_lightning.prepare.verify import read_on_policy

TINY = Path(__file__).resolve().parents[2] / "data/tiny-qwen3"
QUESTIONS = [
    {"id": f"q{n}", "family": "math", "prompt": f"What is {n} plus {n * 7 % 5}?"} for n in range(6)
]
TALK = [user("Hi."), assistant("Hello."), user("How are you?"), assistant("Fine.")]
KEEP = ("--keep_answers",)


@pytest.fixture(scope="session")
def target():
    return FrozenTarget.load(str(TINY))


@pytest.fixture
def prepare(tmp_path, capsys, monkeypatch, target):
    """Run the command; exit status, standard output and standard error."""
    monkeypatch.setattr(FrozenTarget, "load", lambda *_, **__: target)

    def run(data, *options, out="out"):
        capsys.readouterr()
        given = ["--data", str(data)] if data is not None else []
        command = ["prepare", *given, "--target", str(TINY), "--out", str(tmp_path / out)]
        status = main([*command, "--max_new_tokens", "24", *map(str, options)])
        return status, *capsys.readouterr()

    return run


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def supervised(tokenizer, row) -> str:
    pairs = zip(row["input_ids"], row["loss_mask"], strict=True)
    return tokenizer.decode([token for token, wanted in pairs if wanted])


def rejects(folder: Path) -> list[tuple[int, str]]:
    lines = (folder / "rejects.jsonl").read_text().splitlines()
    return [(one["line"], one["reason"]) for one in map(json.loads, lines)]


# ---------------------------------------------------------------- answers of the target


def test_rows_are_the_prompt_and_what_the_target_says(prepare, write, tmp_path, target):
    status, out, err = prepare(write(*QUESTIONS), "--concurrency", 2)
    assert status == 0, err
    rows = open_prepared(tmp_path / "out")
    engine = Engine(Models(target, None), num_slots=1, max_length=256)
    for row, question in zip(rows, QUESTIONS, strict=True):
        prompt = render_prompt(target.tokenizer, [user(question["prompt"])])
        answer = engine.run([Request(prompt_ids=prompt, max_new_tokens=24)])[0]
        assert (row["id"], row["family"]) == (question["id"], "math")
        assert row["input_ids"] == prompt + answer.token_ids
        assert row["loss_mask"] == [False] * len(prompt) + [True] * len(answer.token_ids)
        assert row["finished"] == (answer.finish_reason == "stop")
    manifest = read_manifest(tmp_path / "out")
    assert manifest["target"]["weights"] == target.fingerprint
    assert manifest["generator"] == {"kind": "engine", "dtype": "float32"}
    assert manifest["counts"]["unfinished"] == sum(not row["finished"] for row in rows)
    assert "6 rows of 6 in the source" in out
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "rows.jsonl"]


def test_an_interrupted_run_goes_on_and_ends_the_same(prepare, write, tmp_path, monkeypatch):
    data = write(*QUESTIONS)
    sampled = ("--temperature", 0.8, "--samples_per_prompt", 2, "--concurrency", 2)
    assert prepare(data, *sampled, out="calm")[0] == 0
    really_step, asked = Engine.step, []

    def step(self):
        updates = really_step(self)
        if sum(update.completion is not None for update in updates) and len(asked) in (3, 9):
            asked.append(None)
            raise KeyboardInterrupt
        asked.extend(update for update in updates if update.completion)
        return updates

    monkeypatch.setattr(Engine, "step", step)
    for _ in range(2):
        status, _, err = prepare(data, *sampled)
        assert status == 130
        assert "the same command goes on" in err
        assert not (tmp_path / "out").exists()
    assert prepare(data, *sampled)[0] == 0
    assert files(tmp_path / "out") == files(tmp_path / "calm")
    names = open_prepared(tmp_path / "out")["id"]
    assert names == [f"q{n}@{sample}" for n in range(6) for sample in (0, 1)]


def test_samples_differ_and_depend_on_the_seed(prepare, write, tmp_path):
    data = write(*QUESTIONS[:2])
    options = ("--temperature", 1.5, "--samples_per_prompt", 2)
    for out, seed in (("a", 0), ("b", 1)):
        assert prepare(data, *options, "--seed", seed, out=out)[0] == 0
    texts = {tuple(row["input_ids"]) for out in "ab" for row in open_prepared(tmp_path / out)}
    assert len(texts) == 8


def test_turns_are_answered_one_after_the_other(prepare, write, tmp_path, target):
    """Each prompt has the target's own earlier answers, as the template shows them."""
    data = write({"id": "talk", "messages": [system("Be brief."), *TALK]})
    assert prepare(data, "--max_new_tokens", 100)[0] == 0
    first, second = open_prepared(tmp_path / "out")
    assert (first["id"], second["id"]) == ("talk#1", "talk#2")
    said = supervised(target.tokenizer, first).removesuffix("<|im_end|>")
    messages = [system("Be brief."), TALK[0], assistant(said), TALK[2]]
    prompt = render_prompt(target.tokenizer, messages)
    assert second["input_ids"][: len(prompt)] == prompt
    assert second["loss_mask"].index(True) == len(prompt)
    assert first["prompt_hash"] == second["prompt_hash"]


def test_a_conversation_ends_where_it_cannot_go_on(prepare, write, tmp_path):
    """After an answer that was cut off; before a tool's result that belongs to another call."""
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 2}}}
    tooled = [user("2+3?"), assistant(None) | {"tool_calls": [call]}]
    tooled += [{"role": "tool", "content": "5"}, assistant("5")]
    data = write({"id": "cut", "messages": TALK}, {"id": "tool", "messages": tooled})
    assert prepare(data, "--max_new_tokens", 2)[0] == 0
    rows = open_prepared(tmp_path / "out")
    assert rows["id"] == ["cut", "tool"]
    assert rows["finished"] == [False, False]
    assert read_manifest(tmp_path / "out")["counts"]["cut"] == 2


def test_prompts_without_room_are_rejects(prepare, write, tmp_path):
    data = write(QUESTIONS[0], {"prompt": "word " * 60})
    status, _, err = prepare(data, "--max_length", 60)
    assert status == 2
    assert "1 of 2 rows" in err
    assert "'too long'" in err
    status, _, _ = prepare(data, "--max_length", 60, "--max_reject_share", 0.5)
    assert status == 0
    assert rejects(tmp_path / "out") == [(2, "too long")]
    assert max(map(len, open_prepared(tmp_path / "out")["input_ids"])) <= 60


# ---------------------------------------------------------------- answers of the file


def test_kept_answers_are_those_of_training(prepare, write, tmp_path, target):
    data = write({"id": "a", "prompt": "Hi", "answer": "Hello."}, {"id": "b", "messages": TALK})
    assert prepare(data, *KEEP)[0] == 0
    rows = open_prepared(tmp_path / "out")
    assert rows["id"] == ["a", "b#1", "b#2"]
    assert [supervised(target.tokenizer, row) for row in rows] == [
        f"{text}<|im_end|>" for text in ("Hello.", "Hello.", "Fine.")
    ]
    encoder = ChatEncoder(target.tokenizer)
    found = {row["id"]: (row["input_ids"], row["loss_mask"], row["finished"]) for row in rows}
    for name, messages in {"a": [user("Hi"), TALK[1]], "b": TALK}.items():
        for identity, row in written_rows(encoder, Conversation(name, "default", messages)):
            ids, mask, finished = found.pop(identity)
            end = len(ids)  # the file's row has the template's line break after it
            assert (ids, mask) == (row.tokens.input_ids[:end], row.tokens.loss_mask[:end])
            assert not any(row.tokens.loss_mask[end:])
            assert finished
    assert not found


def test_kept_answers_that_are_unfinished_have_no_end_token(prepare, write, tmp_path, target):
    last = {"messages": TALK, "finished": False, "id": "b"}
    data = write({"prompt": "Hi", "answer": "Hello.", "finished": False, "id": "a"}, last)
    assert prepare(data, *KEEP)[0] == 0
    rows = open_prepared(tmp_path / "out")
    assert [(row["id"], row["finished"], supervised(target.tokenizer, row)) for row in rows] == [
        ("a", False, "Hello."), ("b#1", True, "Hello.<|im_end|>"), ("b#2", False, "Fine.")
    ]  # fmt: skip


SHAPES = {
    "messages": {"messages": TALK[:2]},
    "sharegpt": {
        "conversations": [{"from": "human", "value": "Hi."}, {"from": "gpt", "value": "Hello."}]
    },
    "alpaca": {"instruction": "Hi.", "input": "", "output": "Hello."},
    "prompt": {"prompt": "Hi.", "answer": "Hello."},
}


@pytest.mark.parametrize("suffix", ["jsonl", "json", "parquet", "hub"])
@pytest.mark.parametrize("shape", SHAPES)
def test_every_shape_in_every_file(prepare, tmp_path, monkeypatch, target, shape, suffix):
    row = SHAPES[shape] | {"id": "x"}
    path: Path | str = tmp_path / f"rows.{suffix}"
    if suffix == "parquet":
        parquet.write_table(pa.Table.from_pylist([row]), path)
    elif suffix == "hub":
        path, stored = "someone/some-set", datasets.Dataset.from_list([row])
        monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: stored)
    else:
        path.write_text(json.dumps([row] if suffix == "json" else row))
    status, _, err = prepare(path, *KEEP)
    assert status == 0, err
    (found,) = open_prepared(tmp_path / "out")
    assert supervised(target.tokenizer, found) == "Hello.<|im_end|>"
    text = target.tokenizer.decode(found["input_ids"])
    assert text.startswith("<|im_start|>user\nHi.<|im_end|>\n<|im_start|>assistant\n")


def test_hub_names_that_do_not_exist(prepare):
    status, _, err = prepare("someone/no-such-set", *KEEP)
    assert status == 2
    assert err.startswith("error: data: someone/no-such-set is no file and no data set")
    assert err.count("\n") == 1


# ---------------------------------------------------------------- checks


def test_what_is_left_out_is_listed(prepare, write, tmp_path):
    data = write(
        {"id": "a", "prompt": "Hi.", "answer": "Hello."},
        {"id": "b", "prompt": "Hi.", "answer": "Hello."},
        {"id": "c", "prompt": "Hi.", "answer": "Another answer."},
        {"id": "d", "prompt": 5},
        {"id": "e", "prompt": "No answer."},
        {"id": "a", "prompt": "Other", "answer": "words."},
    )
    assert prepare(data, *KEEP)[0] == 2
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == []
    status, out, _ = prepare(data, *KEEP, "--max_reject_share", 0.5)
    assert status == 0
    assert rejects(tmp_path / "out") == [
        (2, "duplicate"), (4, "not text"), (5, "no answer"), (6, "duplicate id"),
    ]  # fmt: skip
    assert open_prepared(tmp_path / "out")["id"] == ["a", "c"]
    assert "rejected 1: duplicate\n" in out


def test_held_out_prompts_are_not_trained_on(prepare, write, tmp_path):
    held = write(*QUESTIONS[:2], name="held.jsonl")
    assert prepare(held, out="held")[0] == 0
    again = [{"prompt": one["prompt"], "answer": "x y z"} for one in QUESTIONS]
    status, _, _ = prepare(write(*again), *KEEP, "--held_out", tmp_path / "held")
    assert status == 0
    assert rejects(tmp_path / "out") == [(1, "held out"), (2, "held out")]
    status, _, err = prepare(held, *KEEP, "--held_out", tmp_path / "held", out="none")
    assert status == 2
    assert "no row of" in err


def test_short_answers_have_no_anchor(prepare, write, tmp_path, with_template):
    data = write({"prompt": "Hi", "answer": "Yes."}, {"prompt": "a", "answer": "b"})
    assert prepare(data, *KEEP)[0] == 0
    assert read_manifest(tmp_path / "out")["counts"]["anchors"] > 0
    status, _, err = prepare(data, "--max_new_tokens", 1, out="short")
    assert status == 2
    assert "no row of" in err
    assert "no anchor" in err


def test_a_special_token_inside_an_answer_is_a_reject(
    prepare, write, tmp_path, monkeypatch, target
):
    start = target.tokenizer.convert_tokens_to_ids("<|im_start|>")
    really = from_engine.TargetAnswer

    for bad, sentence in (
        (start, "'<|im_start|>' stands inside it"),
        (len(target.tokenizer), "is outside the target's"),
    ):

        def answer(token_ids, finished, bad=bad):
            return really([token_ids[0], bad, *token_ids[1:]], finished)

        monkeypatch.setattr(from_engine, "TargetAnswer", answer)
        status, _, err = prepare(write(*QUESTIONS[:1]), out=f"out{bad}")
        assert status == 2
        assert sentence in err


def test_the_same_command_again_does_nothing(prepare, write, tmp_path):
    data = write(*QUESTIONS[:2])
    assert prepare(data, *KEEP)[0] == 2  # no answers to keep
    assert prepare(data)[0] == 0
    before = files(tmp_path / "out")
    status, out, err = prepare(data)
    assert (status, err) == (0, "")
    assert "is prepared already" in out
    status, _, err = prepare(data, "--max_length", 50)
    assert status == 2
    assert "was made with rows.max_length 3072 and is now asked for 50" in err
    assert files(tmp_path / "out") == before
    assert prepare(data, "--max_length", 50, "--overwrite")[0] == 0
    assert read_manifest(tmp_path / "out")["rows"]["max_length"] == 50


def test_another_source_template_or_code_is_another_folder(prepare, write, monkeypatch):
    data = write(*QUESTIONS[:2])
    assert prepare(data)[0] == 0
    write(*QUESTIONS[1:3])
    assert "source.sha256" in prepare(data)[2]
    write(*QUESTIONS[:2])
    assert "enable_thinking False and is now asked for True" in prepare(data, "--thinking")[2]
    monkeypatch.setattr("dflow_lightning.prepare.run.ROWS_VERSION", 9)
    assert "rows_version" in prepare(data)[2]


def test_an_unfinished_run_with_other_settings(prepare, write, tmp_path, monkeypatch):
    really = Engine.step

    def interrupt(self):
        if answered:
            raise KeyboardInterrupt
        updates = really(self)
        answered.extend(update for update in updates if update.completion)
        return updates

    monkeypatch.setattr(Engine, "step", interrupt)
    data, answered = write(*QUESTIONS[:2]), []
    assert prepare(data, "--concurrency", 1)[0] == 130
    monkeypatch.setattr(Engine, "step", really)
    status, _, err = prepare(data, "--temperature", 1)
    assert status == 2
    assert "was begun with sampling.temperature 0.0 and is now asked for 1.0" in err
    assert prepare(data, "--temperature", 1, "--overwrite")[0] == 0
    assert not (tmp_path / "out.partial").exists()


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--samples_per_prompt", 2], "samples_per_prompt is 2, but at temperature 0"),
        (["--temperature", -1], "temperature is -1.0; give 0 or a positive number"),
        (["--top_p", 0], "top_p is 0.0; give a number above 0, up to 1"),
        (["--max_new_tokens", 0], "max_new_tokens is 0; give 1 or more"),
        (["--concurrency", 0], "concurrency is 0; give 1 or more"),
        (["--limit", 0], "limit is 0; give 1 or more"),
        (["--max_reject_share", 2], "max_reject_share is 2.0; give a share"),
        (["--keep_answers", "--server", "http://x/v1"], "server is given, but keep_answers"),
        (["--server", "x"], "server is x; give an address such as"),
        (["--supervise", "none"], "supervise: "),
        (["--held_out", "nowhere"], "held_out: nowhere holds no manifest.json"),
        (["--kept"], "unknown key 'kept'"),
    ],
)
def test_mistakes_are_one_sentence(prepare, write, tmp_path, options, sentence):
    status, out, err = prepare(write(*QUESTIONS), *options)
    assert (status, out) == (2, "")
    assert err.startswith("error: " + sentence)
    assert err.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["rows.jsonl"]


def test_folders_of_others_are_left_alone(prepare, write, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out/precious").write_text("x")
    status, _, err = prepare(write(*QUESTIONS), "--overwrite")
    assert status == 2
    assert "is there and holds no prepared data; choose another folder" in err
    assert files(tmp_path / "out") == {"precious": b"x"}


# ---------------------------------------------------------------- on policy


def test_on_policy_tells_own_answers_from_others(prepare, write, tmp_path, target):
    lines = (TINY / "prompts/test.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines[:6]]
    assert prepare(write(*rows), "--max_new_tokens", 160, "--verify")[0] == 0
    found = json.loads((tmp_path / "out/on_policy.json").read_text())
    assert found["agreement"] > 0.999
    assert found["mean_logprob"] > -found["mean_entropy"]
    assert found["weights"] == target.fingerprint
    assert asdict(read_on_policy(tmp_path / "out")).items() <= found.items()
    others = [row | {"answer": "I do not know what you are talking about."} for row in rows]
    data = write(*others, name="others.jsonl")
    status, out, _ = prepare(data, *KEEP, "--verify", out="others")
    assert status == 0
    assert "no fingerprint of the target's weights" in out
    assert "warning: that is less than min_agreement 0.8" in out
    assert "let it answer again" in out
    worse = json.loads((tmp_path / "others/on_policy.json").read_text())
    assert worse["agreement"] < 0.5
    assert worse["mean_logprob"] < -1


def test_verify_a_folder_that_is_there(prepare, write):
    assert prepare(write(*QUESTIONS[:2]))[0] == 0
    status, out, err = prepare(None, "--verify", "--verify_rows", 1)
    assert (status, err) == (0, "")
    assert "(1 rows)" in out
    assert "no fingerprint" not in out
    status, _, err = prepare(None)
    assert (status, err) == (2, "error: data is missing: give --data\n")


def test_agreement_is_that_of_single_rows(target):
    """The batched pass against one row at a time, position by position."""
    import torch

    from dflow_lightning.prepare.verify import on_policy

    rows = []
    for n in range(5):
        ids = [(7 * n + 3 * i) % 1900 for i in range(6 + 5 * n)]
        rows.append({"id": str(n), "input_ids": ids, "loss_mask": [i > n for i in range(len(ids))]})
    found = on_policy(target, datasets.Dataset.from_list(rows), 5)
    equal, logprob, count = 0, 0.0, 0
    for row in rows:
        logits_SV = target.model(torch.tensor([row["input_ids"]])).logits[0].log_softmax(-1)
        for i in range(1, len(row["input_ids"])):
            if row["loss_mask"][i]:
                token = row["input_ids"][i]
                equal += int(logits_SV[i - 1].argmax()) == token
                logprob += float(logits_SV[i - 1, token])
                count += 1
    assert found.tokens == count
    assert found.agreement == pytest.approx(equal / count)
    assert found.mean_logprob == pytest.approx(logprob / count, abs=1e-5)


# ---------------------------------------------------------------- inspect


def test_inspect_shows_a_prepared_row(prepare, write, tmp_path, capsys, target):
    data = write({"id": "a", "prompt": "Hi", "answer": "Yes."}, {"id": "b", "messages": TALK})
    assert prepare(data, *KEEP)[0] == 0
    folder = str(tmp_path / "out")
    assert main(["inspect", "--data", folder, "--row", "3"]) == 0
    out = capsys.readouterr().out
    row = open_prepared(tmp_path / "out")[2]
    assert "id b#2, family default" in out
    assert "«Fine.<|im_end|>»" in out
    assert out.count("«") == 2
    listed = out.partition("\ntoken ids\n")[2].replace("«", "").replace("»", "")
    assert [int(one) for one in listed.split()] == row["input_ids"]
    assert main(["inspect", "--data", folder, "--row", "4"]) == 2
    assert "row is 4;" in capsys.readouterr().err
