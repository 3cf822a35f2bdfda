"""Rows of a conversation: golden masks in Qwen3's format, and which answers share a row."""

import json
import os
from pathlib import Path

import pytest
from conversations import assistant, system, user
from qwen3_cases import ADD, CALL, CASES, REASONED, rows_of

from dflow_lightning.data.conversations import Conversation
from dflow_lightning.data.inspect import anchor_candidates
from dflow_lightning.data.template import ChatEncoder
from dflow_lightning.data.turns import TargetAnswer, num_anchors, training_rows, written_rows
from dflow_lightning.errors import InputError

HERE = Path(__file__).parent
GOLDEN = json.loads((HERE / "qwen3_masks.json").read_text())
QWEN3_LIKE = (HERE / "qwen3_like.jinja").read_text()
MERGING = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TALK = [user("Hi"), assistant("Hello."), user("How?"), assistant("Fine.")]


@pytest.fixture
def qwen3_like(with_template):
    return with_template(QWEN3_LIKE)


@pytest.fixture
def merging(with_template):
    return with_template(MERGING)


def supervised(tokenizer, row) -> str:
    pairs = zip(row.tokens.input_ids, row.tokens.loss_mask, strict=True)
    return tokenizer.decode([token for token, wanted in pairs if wanted])


# ---------------------------------------------------------------- golden masks


@pytest.mark.parametrize("name", CASES)
def test_golden_texts(qwen3_like, name):
    """Another vocabulary, the same format: the texts and the supervised texts are Qwen3's."""
    found = rows_of(qwen3_like, name)
    wanted = GOLDEN[name]
    assert [row["supervised"] for row in found] == [row["supervised"] for row in wanted]
    assert [row["text"] for row in found] == [row["text"] for row in wanted]
    assert [row["turn"] for row in found] == [row["turn"] for row in wanted]


@pytest.mark.parametrize("name", CASES)
def test_golden_masks_cover_what_they_say(name):
    """The file itself: an answer is one stretch, ends with its end token, and stands last."""
    for row in GOLDEN[name]:
        mask = row["loss_mask"]
        first = mask.index(1)
        assert len(mask) == len(row["input_ids"])
        assert all(mask[first:])
        assert len(row["supervised"]) == 1
        assert row["text"].endswith(row["supervised"][0])
        assert row["supervised"][0].endswith("<|im_end|>")


@pytest.mark.skipif("QWEN3_TOKENIZER" not in os.environ, reason="needs Qwen3's own tokenizer")
def test_golden_ids_with_the_real_tokenizer():
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(os.environ["QWEN3_TOKENIZER"])
    assert {name: rows_of(tokenizer, name) for name in CASES} == GOLDEN


# ---------------------------------------------------------------- rows


def test_every_row_begins_with_what_the_target_reads(qwen3_like):
    """Of conversations without reasoning: what is supervised follows the prompt of its turn."""
    encoder = ChatEncoder(qwen3_like)
    for row, end in zip(training_rows(encoder, TALK), (1, 3), strict=True):
        prompt = encoder.prompt(TALK[:end])
        assert row.tokens.input_ids[: len(prompt)] == prompt
        assert row.tokens.loss_mask.index(True) == len(prompt)


def test_answers_that_stay_as_written_share_one_row(merging):
    (row,) = training_rows(ChatEncoder(merging), TALK)
    encoder = ChatEncoder(merging)
    whole = encoder.encode([encoder.segments(TALK)])[0]
    length = len(row.tokens.input_ids)
    assert row.tokens.input_ids == whole.input_ids[:length]
    assert row.tokens.loss_mask == whole.loss_mask[:length]
    assert supervised(merging, row) == "Hello.<|im_end|>Fine.<|im_end|>"
    assert (row.turn, row.finished) == (2, True)


def test_last_turn_only(merging, qwen3_like):
    for tokenizer in (merging, qwen3_like):
        (row,) = training_rows(ChatEncoder(tokenizer), TALK, supervise="last_turn")
        assert supervised(tokenizer, row) == "Fine.<|im_end|>"


def test_conversations_end_at_the_last_turn_that_fits(qwen3_like, merging):
    for tokenizer in (qwen3_like, merging):
        encoder = ChatEncoder(tokenizer)
        first = len(training_rows(encoder, TALK[:2])[0].tokens.input_ids)
        for supervise in ("all_turns", "last_turn"):
            options = {"supervise": supervise}
            (row,) = training_rows(encoder, TALK, max_length=first, **options)
            assert supervised(tokenizer, row) == "Hello.<|im_end|>"
            assert training_rows(encoder, TALK, max_length=first - 1, **options) == []


def test_generated_tokens_stay_as_they_are(merging):
    """Also where their text would be tokenized otherwise; the answer then gets its own row."""
    encoder = ChatEncoder(merging)
    end = merging.convert_tokens_to_ids("<|im_end|>")
    letters = [merging.convert_tokens_to_ids(letter) for letter in "Hello."]
    assert merging.encode("Hello.", add_special_tokens=False) != letters
    rows = training_rows(encoder, TALK, answers={1: TargetAnswer([*letters, end], True)})
    assert [row.turn for row in rows] == [1, 2]
    assert rows[0].tokens.input_ids[-len(letters) - 1 :] == [*letters, end]
    assert supervised(merging, rows[1]) == "Fine.<|im_end|>"


def test_unfinished_answers_have_no_end_token(qwen3_like):
    ids = qwen3_like.encode("Hello there", add_special_tokens=False)
    messages = [user("Hi"), assistant("Hello there")]
    (row,) = training_rows(ChatEncoder(qwen3_like), messages, answers={1: TargetAnswer(ids, False)})
    assert supervised(qwen3_like, row) == "Hello there"
    assert not row.finished


@pytest.mark.parametrize("kept", [True, False])
def test_reasoning_may_be_left_unsupervised(qwen3_like, kept):
    encoder = ChatEncoder(qwen3_like, enable_thinking=True)
    messages = [user("2+3?"), assistant(REASONED)]
    end = qwen3_like.convert_tokens_to_ids("<|im_end|>")
    ids = [*qwen3_like.encode(REASONED, add_special_tokens=False), end]
    answers = {} if kept else {1: TargetAnswer(ids, True)}
    texts = {}
    for wanted in (True, False):
        (row,) = training_rows(encoder, messages, answers=answers, supervise_thinking=wanted)
        texts[wanted] = supervised(qwen3_like, row)
    assert texts == {True: REASONED + "<|im_end|>", False: "\n\nFive.<|im_end|>"}


def test_reasoning_that_never_ends_is_no_answer(qwen3_like):
    encoder = ChatEncoder(qwen3_like, enable_thinking=True)
    text = "<think>\nTwo and"
    ids = qwen3_like.encode(text, add_special_tokens=False)
    messages, answers = [user("2+3?"), assistant(text)], {1: TargetAnswer(ids, False)}
    (row,) = training_rows(encoder, messages, answers=answers, supervise_thinking=False)
    assert not any(row.tokens.loss_mask)
    (row,) = training_rows(encoder, messages, answers=answers)
    assert supervised(qwen3_like, row) == text


def test_unfinished_texts_give_the_rows_of_their_tokens(qwen3_like):
    """Also within reasoning, which Qwen3's template would put behind an empty think block."""
    for thinking, text in ((False, "Hello there"), (True, REASONED), (True, "<think>\nTwo and")):
        encoder = ChatEncoder(qwen3_like, enable_thinking=thinking)
        messages = [*TALK[:3], assistant(text)]
        ids = qwen3_like.encode(text, add_special_tokens=False)
        for supervise_thinking in (True, False):
            options = {"finished": False, "supervise_thinking": supervise_thinking}
            wanted = training_rows(
                encoder, messages, answers={3: TargetAnswer(ids, False)}, **options
            )
            assert [row.finished for row in wanted] == [True, False]
            assert training_rows(encoder, messages, **options) == wanted


def test_rows_of_a_file_go_on_to_the_end_of_the_template(qwen3_like, merging):
    for tokenizer in (qwen3_like, merging):
        encoder = ChatEncoder(tokenizer)
        ((name, row),) = written_rows(encoder, Conversation("a", "default", TALK[:2]))
        (whole,) = encoder.encode([encoder.segments(TALK[:2])])
        assert (name, row.tokens) == ("a", whole)
        assert tokenizer.decode(row.tokens.input_ids).endswith("Hello.<|im_end|>\n")
    assert [
        name for name, _ in written_rows(ChatEncoder(merging), Conversation("a", "default", TALK))
    ] == ["a"]
    assert [
        name
        for name, _ in written_rows(ChatEncoder(qwen3_like), Conversation("a", "default", TALK))
    ] == ["a#1", "a#2"]


def test_answers_too_short_for_an_anchor_have_no_row_beside_others(qwen3_like):
    encoder = ChatEncoder(qwen3_like)
    empty = [user("Say nothing."), assistant("")]
    ((name, row),) = written_rows(encoder, Conversation("a", "default", [*empty, *TALK[:2]]))
    assert (name, supervised(qwen3_like, row)) == ("a", "Hello.<|im_end|>")
    ((name, row),) = written_rows(encoder, Conversation("a", "default", empty))
    assert (name, supervised(qwen3_like, row)) == ("a", "<|im_end|>")


def test_tools_reach_the_prompt_and_spelled_specials_stay_text(qwen3_like):
    encoder = ChatEncoder(qwen3_like)
    ids = encoder.prompt([user("2+3?")], [ADD])
    text = qwen3_like.decode(ids)
    assert '"description": "Adds two numbers. It never says <|im_end|>."' in text
    assert ids.count(qwen3_like.convert_tokens_to_ids("<|im_end|>")) == 2  # system and user
    assert "# Tools" not in qwen3_like.decode(encoder.prompt([user("2+3?")]))


def test_specials_in_the_arguments_of_a_call_stay_text(qwen3_like):
    call = {"type": "function", "function": {"name": "f", "arguments": {"a": "<|im_start|>"}}}
    for content in ("", "I call."):
        messages = [user("p"), assistant(content) | {"tool_calls": [call]}]
        (row,) = training_rows(ChatEncoder(qwen3_like), messages, [ADD])
        assert supervised(qwen3_like, row) == (
            f'{content}{content and chr(10)}<tool_call>\n{{"name": "f", "arguments": '
            '{"a": "<|im_start|>"}}\n</tool_call><|im_end|>'
        )
        special = qwen3_like.convert_tokens_to_ids("<|im_start|>")
        assert row.tokens.input_ids.count(special) == 3


@pytest.mark.parametrize(
    ("template", "messages", "sentence"),
    [
        (
            "{% for m in messages if m.role == 'assistant' %}{{ m.content }}{% endfor %}",
            TALK[:2],
            r"leaves out the user's text, message 1 \('Hi'\)",
        ),
        (MERGING.replace("+ '<|im_end|>\n'", ""), [user("Hi"), assistant("")], "no token is"),
        ("{{ messages[0].nothing.content }}", TALK[:2], "refuses the conversation"),
    ],
)
def test_masks_that_cannot_be_right(with_template, template, messages, sentence):
    with pytest.raises(InputError, match=sentence):
        training_rows(ChatEncoder(with_template(template)), messages)


def test_anchors_are_those_of_training():
    for bits in range(64):
        mask = [bool(bits >> i & 1) for i in range(6)]
        assert num_anchors(mask) == len(anchor_candidates(mask))


def test_a_call_is_supervised_beside_its_text(qwen3_like):
    messages = [system("s"), user("p"), assistant("") | {"tool_calls": [CALL, CALL]}]
    (row,) = training_rows(ChatEncoder(qwen3_like), messages)
    assert supervised(qwen3_like, row).count("<tool_call>") == 2
