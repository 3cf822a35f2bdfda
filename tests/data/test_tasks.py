"""Benchmark tasks: wording, sources, the subset, several turns, and what cannot be read."""

import json
import random
from pathlib import Path

import pytest
from conversations import assistant, user

from dflow_lightning.data.tasks import (
    TASKS,
    TaskRow,
    conversation_prompts,
    read_turns,
    task_prompts,
)
from dflow_lightning.data.template import ChatEncoder, render_prompt
from dflow_lightning.errors import InputError

# A row of each source's own shape, and what the target is asked.
BOXED = "\nPlease reason step by step, and put your final answer within \\boxed{}."
SHAPES = {
    "gsm8k": ({"question": "2+3?", "answer": "#### 5"}, ["2+3?" + BOXED]),
    "math500": ({"problem": "2+3?", "solution": "5", "level": 1}, ["2+3?" + BOXED]),
    "humaneval": (
        {"task_id": "0", "prompt": "def add(a, b):\n", "test": "x"},
        [
            "Write a solution to the following problem and make sure that it passes the tests:\n"
            "```python\ndef add(a, b):\n\n```"
        ],
    ),
    "mbpp": ({"prompt": "Write a function to add.", "code": "x", "test_list": ["y"]},
             ["Write a function to add."]),
    "mt-bench": ({"prompt": ["Name a colour.", "And another?"], "category": "x"},
                 ["Name a colour.", "And another?"]),
    "alpaca": ({"instruction": "Add.", "input": "2, 3", "output": "5"}, ["Add.\n\nInput:\n2, 3"]),
}  # fmt: skip


@pytest.fixture
def encoder(tokenizer) -> ChatEncoder:
    return ChatEncoder(tokenizer)


def write_tasks(folder: Path, count: int = 3) -> Path:
    folder.mkdir()
    for name, (row, _) in SHAPES.items():
        lines = [json.dumps(row | {"number": n}) + "\n" for n in range(count)]
        (folder / f"{name}.jsonl").write_text("".join(lines))
    return folder


@pytest.mark.parametrize("name", SHAPES)
def test_wording(name):
    row, turns = SHAPES[name]
    assert TASKS[name].turns(row) == turns


def test_alpaca_without_input():
    assert TASKS["alpaca"].turns({"instruction": "Add.", "input": ""}) == ["Add."]


def test_sources_are_the_fields():
    named = {name: (task.source, task.config, task.split) for name, task in TASKS.items()}
    assert named == {
        "gsm8k": ("openai/gsm8k", "main", "test"),
        "math500": ("HuggingFaceH4/MATH-500", None, "test"),
        "humaneval": ("openai/openai_humaneval", None, "test"),
        "mbpp": ("google-research-datasets/mbpp", "sanitized", "test"),
        "mt-bench": ("HuggingFaceH4/mt_bench_prompts", None, "train"),
        "alpaca": ("tatsu-lab/alpaca", None, "train"),
    }


def test_the_hub_is_asked_for_the_source(monkeypatch, encoder):
    asked = []

    def load_dataset(path, config, *, split):
        asked.append((path, config, split))
        return [SHAPES["mbpp"][0]]

    monkeypatch.setattr("datasets.load_dataset", load_dataset)
    found = task_prompts(["mbpp"], encoder)
    assert asked == [("google-research-datasets/mbpp", "sanitized", "test")]
    assert found.sources == {"mbpp": "google-research-datasets/mbpp sanitized test"}

    def offline(*args, **options):
        raise ConnectionError("offline\nmore")

    monkeypatch.setattr("datasets.load_dataset", offline)
    with pytest.raises(InputError, match=r"mbpp could not be read .*: offline\); give suite_dir"):
        task_prompts(["mbpp"], encoder)


def test_all_tasks_from_a_folder(tmp_path, encoder, tokenizer):
    folder = write_tasks(tmp_path / "suite")
    asked = []

    def answer(prompts):
        asked.extend(prompts)
        return ["Red."] * len(prompts)

    found = task_prompts(list(TASKS), encoder, suite_dir=folder, limit=2, answer=answer)
    families = [prompt.family for prompt in found.prompts]
    assert {name: families.count(name) for name in TASKS} == dict.fromkeys(TASKS, 2) | {
        "mt-bench": 4
    }
    assert found.left_out == {}
    first = [user("Name a colour.")]
    second = [*first, assistant("Red."), user("And another?")]
    talk = [prompt for prompt in found.prompts if prompt.family == "mt-bench"]
    assert [prompt.token_ids for prompt in talk] == [
        render_prompt(tokenizer, messages) for messages in (first, first, second, second)
    ]
    assert [prompt.id.partition("/")[2] for prompt in talk] == ["turn-1"] * 2 + ["turn-2"] * 2
    assert asked == [prompt.token_ids for prompt in talk[:2]]
    assert len({prompt.id for prompt in found.prompts}) == len(found.prompts)


def test_without_answers_only_first_turns_are_asked(encoder):
    rows = [TaskRow("a", "x", ["one", "two"]), TaskRow("b", "x", ["one"])]
    prompts, left_out = conversation_prompts(rows, encoder)
    assert [prompt.id for prompt in prompts] == ["a/turn-1", "b"]
    assert left_out == {}


def test_the_subset_is_that_of_seed_42(tmp_path, encoder):
    path = tmp_path / "mbpp.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"Task {n}"}) + "\n" for n in range(20)))
    order = list(range(20))
    random.Random(42).shuffle(order)
    found = task_prompts(["mbpp"], encoder, suite_dir=tmp_path, limit=5)
    assert [prompt.id for prompt in found.prompts] == [f"mbpp-{n}" for n in order[:5]]
    whole = task_prompts(["mbpp"], encoder, suite_dir=tmp_path)
    assert [prompt.id for prompt in whole.prompts] == [f"mbpp-{n}" for n in range(20)]
    assert whole.digest != found.digest
    again = task_prompts(["mbpp"], encoder, suite_dir=tmp_path, limit=5)
    assert again == found


def test_prompts_longer_than_the_context_are_counted(tmp_path, encoder):
    rows = [{"turns": ["word " * n]} for n in (1, 2, 60)] + [{"turns": ["a", "b " * 80]}]
    path = tmp_path / "mbpp.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    said = {"suite_dir": tmp_path, "max_length": 60, "answer": lambda asked: ["a"] * len(asked)}
    found = task_prompts(["mbpp"], encoder, **said)
    assert [prompt.id for prompt in found.prompts] == ["mbpp-0", "mbpp-1", "mbpp-3/turn-1"]
    assert found.left_out == {"mbpp": 2}
    assert len(task_prompts(["mbpp"], encoder, **said, limit=3).prompts) == 3
    with pytest.raises(InputError, match="no prompt of mbpp has at most 3 tokens"):
        task_prompts(["mbpp"], encoder, suite_dir=tmp_path, max_length=3)


def test_turns_hold_characters_that_other_readers_split_at(tmp_path):
    path = tmp_path / "x.jsonl"
    path.write_text('\ufeff{"turns": ["a\u2028b\x85c"]}\n\n', encoding="utf-8")
    assert read_turns(path, "x") == [TaskRow("x-0", "x", ["a\u2028b\x85c"])]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "is empty; it needs at least one row"),
        ('{"question"', r"line 1 of .* is no row of gsm8k \(the row is not valid JSON"),
        ("[1]", r"line 1 of .* is no row of gsm8k \(the row is a list instead of an object"),
        ('{"text": "x"}', r"is no row of gsm8k \(it has no 'question'\); give turns"),
        ('{"question": 5}', r"is no row of gsm8k \(turn 1 is not text\)"),
        ('{"turns": []}', r"is no row of gsm8k \(its turns are not a list of messages\)"),
        ('{"turns": ["a", 3]}', r"is no row of gsm8k \(turn 2 is a int; give it as text\)"),
        ('{"turns": [" "]}', r"is no row of gsm8k \(turn 1 is blank"),
        ('{"turns": ["\\ud800"]}', r"turn 1 has the character '\\ud800' in its text"),  # F39
        ("[" * 200_000, "is no row of gsm8k"),
        ('{"turns": ["a"], "family": "a/b"}', "has the family 'a/b'"),
        (b"\xff\xfe", "is UTF-16 text; save it as UTF-8"),
        (b'{"turns": ["\xff"]}', "the row is not UTF-8 text"),
    ],
)
def test_files_that_cannot_be_used(tmp_path, encoder, content, message):
    path = tmp_path / "gsm8k.jsonl"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(InputError, match=rf"suite_dir: .*{message}"):
        task_prompts(["gsm8k"], encoder, suite_dir=tmp_path)


def test_what_is_not_there(tmp_path, encoder):
    with pytest.raises(InputError, match=r"suite_dir: .* holds no gsm8k\.jsonl"):
        task_prompts(["gsm8k"], encoder, suite_dir=tmp_path)
    with pytest.raises(InputError, match="there is no task 'gsm9k'; choose of gsm8k, math500"):
        task_prompts(["gsm9k"], encoder)


def test_tasks_are_decoded_in_validation(make_data, write, tmp_path):
    folder = write_tasks(tmp_path / "suite")
    held_out = write({"id": "h", "prompt": "Held out?", "answer": "Yes."}, name="held.jsonl")
    data = make_data(
        validation=held_out,
        validation_tasks=["gsm8k", "mt-bench"],
        validation_suite_dir=folder,
    )
    prompts = data.prompts("validation", per_family=2)
    families = [prompt.family for prompt in prompts]
    assert families == ["default"] + ["gsm8k"] * 2 + ["mt-bench"] * 2
    assert data.prompts("validation", per_family=2) == prompts
    with pytest.raises(
        InputError, match=r"data\.validation_tasks are given but data\.validation is"
    ):
        make_data(validation_tasks=["gsm8k"])
