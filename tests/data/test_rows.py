import pytest
from conversations import assistant, system, user

from dflow_lightning.data.rows import check_disjoint, read_rows
from dflow_lightning.errors import InputError

GOOD = {"id": "a", "prompt": "Hi", "answer": "Hello."}


def conversation(*messages) -> dict:
    return {"id": "a", "messages": [*messages]}


def test_both_shapes(write):
    path = write(
        {
            "id": 7,
            "family": "math",
            "template": "t",
            "temperature": 1,
            "prompt": "p",
            "answer": "a",
        },
        "",
        {"messages": [system("s"), user("p"), assistant("a")]},
    )
    first, second = read_rows(path, field="data.train")
    assert (first.id, first.family) == ("7", "math")
    assert first.messages == [user("p"), assistant("a")]
    assert second.family == "default"
    assert second.prompt == [system("s"), user("p")]
    assert second.where == f"data.train: line 3 of {path}"


def test_reasoning_is_kept(write):
    answer = assistant("Five.") | {"reasoning_content": "Two plus three.", "tool_calls": None}
    (row,) = read_rows(write(conversation(user("p"), answer)), field="data.train")
    assert row.messages[1] == assistant("Five.") | {"reasoning_content": "Two plus three."}


def test_prompts_need_no_answer(write):
    path = write({"prompt": "p"}, conversation(user("p"), assistant("a"), user("q")))
    first, second = read_rows(path, field="prompts", need_answer=False)
    assert not first.is_answered
    assert second.prompt == second.messages


def test_rows_without_id_are_named_by_their_content(write):
    nameless = {"prompt": "p", "answer": "a"}
    first, second, third = read_rows(write(nameless, nameless, GOOD), field="data.train")
    assert first.id == second.id != third.id
    assert read_rows(write(GOOD, nameless), field="data.train")[1].id == first.id


def test_byte_order_mark_and_windows_line_ends(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(
        b'\xef\xbb\xbf{"prompt": "p", "answer": "a"}\r\n{"prompt": "q", "answer": "b"}\r\n'
    )
    assert len(read_rows(path, field="data.train")) == 2


BAD_ROWS = {
    "malformed JSON": ('{"id": "a", "prompt": }', "line 2 of .* is not valid JSON"),
    "cut short": ('{"id": "b", "prompt": "x', "line 2 of .* is not valid JSON"),
    "not an object": ('["a"]', "line 2 of .* is not a JSON object"),
    "no prompt": ({"id": "b", "answer": "a"}, r"line 2 of .* \(id 'b'\) has no prompt"),
    "no answer": ({"id": "b", "prompt": "p"}, r"\(id 'b'\) has no answer"),
    "null answer": ({"id": "b", "prompt": "p", "answer": None}, "has no answer"),
    "blank answer": ({"id": "b", "prompt": "p", "answer": " \n"}, "has a blank answer"),
    "blank id": (GOOD | {"id": ""}, "line 2 of .* has a blank id"),
    "number as prompt": ({"id": "b", "prompt": 3, "answer": "a"}, "has a prompt of type int"),
    "same id": (GOOD | {"prompt": "other"}, "line 2 of .* has the id 'a' of an earlier line"),
    "tools": (GOOD | {"id": "b", "tools": [{}]}, r"\(id 'b'\) has tools; let dflow-train prepare"),
    "finished": (GOOD | {"id": "b", "finished": "no"}, "has the finished 'no'; give true or false"),
    "family": (GOOD | {"id": "b", "family": "a/b c"}, "has the family 'a/b c'"),
    "both shapes": (conversation(user("p"), assistant("a")) | GOOD, "has both messages and prompt"),
    "no messages": (conversation(), "has no messages"),
    "message is text": (conversation("p"), "message 1 is a str"),
    "message without role": (conversation({"content": "p"}), "message 1 has no role"),
    "message without content": (conversation({"role": "user"}), "message 1 has no content"),
    "blank content": (conversation(user(" ")), "message 1 has a blank content"),
    "content in parts": (
        conversation({"role": "user", "content": [{"text": "p"}]}),
        "has a content of type list",
    ),
    "tool call": (conversation(user("p") | {"tool_calls": [1]}), "message 1 has 'tool_calls'"),
    "no supervised token": (conversation(user("p")), r"\(id 'a'\) has no supervised token"),
    "only system": (conversation(system("s")), "has no supervised token"),
    "assistant first": (conversation(assistant("a")), "message 1 has the role 'assistant'"),
    "two users": (
        conversation(user("p"), user("p"), assistant("a")),
        "message 2 has the role 'user' instead of 'assistant'",
    ),
    "late system": (
        conversation(user("p"), assistant("a"), system("s")),
        "message 3 has the role 'system' instead of 'user'",
    ),
    "unknown role": (conversation({"role": "tool", "content": "p"}, assistant("a")), "role 'tool'"),
    "ends with user": (
        conversation(user("p"), assistant("a"), user("q")),
        "ends with a message of the user",
    ),
}


@pytest.mark.parametrize("name", BAD_ROWS)
def test_bad_row(write, name):
    row, message = BAD_ROWS[name]
    with pytest.raises(InputError, match=message) as caught:
        read_rows(write(GOOD, row), field="data.train")
    assert str(caught.value).startswith("data.train: line 2 of ")
    assert "\n" not in str(caught.value)


def test_bad_files(tmp_path):
    with pytest.raises(InputError, match=r"data\.train: .*nowhere\.jsonl does not exist; give"):
        read_rows(tmp_path / "nowhere.jsonl", field="data.train")
    with pytest.raises(InputError, match="is a directory; give a JSONL file in it"):
        read_rows(tmp_path, field="data.train")
    empty = tmp_path / "empty.jsonl"
    for content in (b"", b"\n \n"):
        empty.write_bytes(content)
        with pytest.raises(InputError, match=r"empty\.jsonl is empty; it needs at least one row"):
            read_rows(empty, field="data.train")
    empty.write_bytes(b'{"prompt": "p", "answer": "a"}\n{"prompt": "\xff"}\n')
    with pytest.raises(InputError, match=r"line 2 of .* is not UTF-8"):
        read_rows(empty, field="data.train")


def test_held_out_prompts_may_not_be_trained_on(write):
    train = read_rows(write(GOOD, {"prompt": "q", "answer": "a"}), field="data.train")
    same_prompt = {"id": "z", "prompt": "Hi", "answer": "Another answer."}
    held_out = read_rows(write(same_prompt, {"prompt": "r", "answer": "a"}), field="data.test")
    with pytest.raises(InputError, match=r"data\.test: 1 of 2 prompts .* first 'z'"):
        check_disjoint(train, held_out, "data.test")
    check_disjoint(train, held_out[1:], "data.test")
