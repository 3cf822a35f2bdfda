"""Which prompts a bench asks, and that numbers of other conditions never share a table."""

import json

import pytest

from dflow_lightning.bench.suite import SuiteChoice, read_suite
from dflow_lightning.data.template import render_prompt
from dflow_lightning.decode import SpeculativeDecoder
from dflow_lightning.errors import InputError


@pytest.fixture
def decoder(tiny_target, tiny_drafter) -> SpeculativeDecoder:
    return SpeculativeDecoder(tiny_target, tiny_drafter)


@pytest.fixture
def folder(tmp_path):
    rows = {
        "gsm8k": [{"question": f"What is {n} + {n}?"} for n in range(5)],
        "mt-bench": [{"prompt": [f"Name {n}.", "Again."]} for n in range(3)],
    }
    for name, some in rows.items():
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(r) + "\n" for r in some))
    return tmp_path


def test_second_turns_stand_behind_the_targets_own_answers(tiny_target, decoder, folder):
    choice = SuiteChoice(suite="mt-bench", suite_dir=folder, limit=2, max_new_tokens=6)
    suite = read_suite(choice, tiny_target, decoder)
    first, second = suite.prompts[:2], suite.prompts[2:]
    assert [one.id.split("/")[0] for one in first] == [one.id.split("/")[0] for one in second]
    for before, after in zip(first, second, strict=True):
        (answer,) = decoder.generate_plain([before.token_ids], max_new_tokens=6)
        text = tiny_target.tokenizer.decode(answer.token_ids, skip_special_tokens=True)
        number = before.id.split("/")[0].removeprefix("mt-bench-")
        messages = [
            {"role": "user", "content": f"Name {number}."},
            {"role": "assistant", "content": text},
            {"role": "user", "content": "Again."},
        ]
        assert after.token_ids == render_prompt(tiny_target.tokenizer, messages)


def test_a_suite_says_what_it_asked(tiny_target, decoder, folder):
    choice = SuiteChoice(suite="gsm8k,mt-bench", suite_dir=folder, max_new_tokens=4)
    suite = read_suite(choice, tiny_target, decoder)
    asked, how = suite.lines()
    assert how == f"template {suite.template}, thinking off"
    assert "gsm8k 5, mt-bench 6 prompts" in asked
    assert suite.sources["gsm8k"] == str(folder / "gsm8k.jsonl")
    thinking = SuiteChoice(suite="gsm8k", suite_dir=folder, thinking=True)
    other = read_suite(thinking, tiny_target, decoder)
    assert "thinking on" in other.lines()[1]
    assert other.prompts[0].token_ids != suite.prompts[0].token_ids


def test_a_file_of_turns_is_a_suite(tiny_target, decoder, tmp_path):
    path = tmp_path / "own.jsonl"
    rows = [{"turns": [f"Q{n}", "And?"], "family": f"f{n % 2}"} for n in range(6)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    choice = SuiteChoice(suite=str(path), limit=2, max_new_tokens=3)
    families = [one.family for one in read_suite(choice, tiny_target, decoder).prompts]
    assert {name: families.count(name) for name in set(families)} == {"f0": 4, "f1": 4}


def test_tasks_without_a_file_are_left_out_and_named(tiny_target, decoder, folder):
    """F26 of the list of faults: it was refused."""
    choice = SuiteChoice(suite="all", suite_dir=folder, limit=2, max_new_tokens=3)
    choice.check()
    suite = read_suite(choice, tiny_target, decoder)
    assert {prompt.family for prompt in suite.prompts} == {"gsm8k", "mt-bench"}
    left_out = "left out, no file in suite_dir: math500, humaneval, mbpp, alpaca"
    assert left_out in suite.lines()
    with pytest.raises(InputError, match=r"suite_dir: .* holds none of humaneval"):
        SuiteChoice(suite="humaneval", suite_dir=folder).check()


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        ({"suite": "all", "limit": 4}, "concurrency holds 8, but limit leaves 4 prompts of gsm8k"),
        ({"suite": "tiny", "per_family": 4}, "concurrency holds 8, but per_family is 4"),
        ({"suite": "tiny", "per_family": 8}, None),
        ({"suite": "mt-bench", "limit": 4}, None),  # two prompts a conversation
    ],
)
def test_a_concurrency_that_is_not_reached_is_refused_before_loading(choice, message):
    """F22 of the list of faults."""
    if message is None:
        SuiteChoice(**choice).check(8)
        return
    with pytest.raises(InputError, match=message):
        SuiteChoice(**choice).check(8)


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        ({"suite": "all", "limit": 0}, "limit is 0; give 1 or more"),
        ({"suite": "tiny", "per_family": 0}, "per_family is 0; give 1 or more"),
        ({"suite": "tiny", "suite_dir": "x"}, "suite_dir is given but suite tiny names no task"),
        ({"suite": "gsm8k,gsm8k"}, "names a task twice"),
    ],
)
def test_choices_that_do_not_fit(choice, message):
    with pytest.raises(InputError, match=message):
        SuiteChoice(**choice).check()
