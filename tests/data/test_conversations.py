"""Foreign files: what they become, and that whatever is wrong with them is said and counted."""

import errno
import gzip
import json
import os
import tracemalloc
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from conversations import assistant, system, user
from pyarrow import parquet

from dflow_lightning.data.conversations import (
    MAX_ROW,
    Conversation,
    ConversationReader,
    parse_conversations,
)
from dflow_lightning.errors import InputError

CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 2, "b": 3}}}
RESULT = {"role": "tool", "content": "5"}
GOOD = {"prompt": "p", "answer": "a"}


def convert(*messages: Any, **more: Any) -> dict[str, Any]:
    return {"messages": [*messages], **more}


def said(*pairs: tuple[str, str]) -> dict[str, Any]:
    return {"conversations": [{"from": speaker, "value": text} for speaker, text in pairs]}


def save(path: Path, *rows: Any) -> Path:
    """Rows as objects, or as the bytes of a line."""
    lines = [row if isinstance(row, bytes) else json.dumps(row).encode() for row in rows]
    path.write_bytes(b"".join(line + b"\n" for line in lines))
    return path


def save_parquet(path: Path, *rows: dict[str, Any], **options: Any) -> Path:
    parquet.write_table(pa.Table.from_pylist([*rows]), path, **options)
    return path


def read(path: Path, share: float = 1.0) -> tuple[list[Conversation], dict[str, int], list[dict]]:
    """Conversations, rejects by reason, and the lines of the rejects' file."""
    reader = ConversationReader(path, out=path.with_name("out"), max_reject_share=share)
    found = list(reader)
    assert reader.num_rows == len(found) + sum(reader.rejects.values())
    listed = path.with_name("out.rejects.jsonl")
    assert listed.exists() == bool(reader.rejects)
    lines = listed.read_text().splitlines() if listed.exists() else []
    return found, dict(reader.rejects), [json.loads(line) for line in lines]


# ---------------------------------------------------------------- shapes

TALK = [user("p"), assistant("a")]
SHAPES = {
    "messages": (convert(*TALK), TALK),
    "system": (convert(system("s"), *TALK), [system("s"), *TALK]),
    "developer": (convert({"role": "developer", "content": "s"}, *TALK), [system("s"), *TALK]),
    "system beside the messages": (convert(*TALK, system="s"), [system("s"), *TALK]),
    "the same system twice": (convert(system("s"), *TALK, system="s"), [system("s"), *TALK]),
    "no answer yet": (convert(*TALK, user("q")), [*TALK, user("q")]),
    "text parts": (
        convert(user([{"type": "text", "text": "a"}, {"type": "text", "text": " b"}])),
        [user("a b")],
    ),
    "reasoning": (
        convert(user("p"), assistant("a") | {"reasoning_content": "r", "weight": 1}),
        [user("p"), assistant("a") | {"reasoning_content": "r"}],
    ),
    "tool calls": (
        convert(
            user("2+3?"),
            assistant(None)
            | {"tool_calls": [{"id": "c", "function": {"name": "add", "arguments": '{"a": 2}'}}]},
            RESULT | {"tool_call_id": "c"},
            assistant("5"),
        ),
        [
            user("2+3?"),
            assistant("")
            | {
                "tool_calls": [
                    {
                        "id": "c",
                        "type": "function",
                        "function": {"name": "add", "arguments": {"a": 2}},
                    }
                ]
            },
            RESULT | {"tool_call_id": "c"},
            assistant("5"),
        ],
    ),
    "first question repeated as prompt": (convert(*TALK, prompt="p"), TALK),
    "sharegpt": (said(("system", "s"), ("human", "p"), ("gpt", "a")), [system("s"), *TALK]),
    "sharegpt with a call": (
        said(
            ("human", "2+3?"),
            ("function_call", '{"name": "add", "arguments": {"a": 2, "b": 3}}'),
            ("observation", "5"),
            ("gpt", "5"),
        ),
        [user("2+3?"), assistant("") | {"tool_calls": [CALL]}, RESULT, assistant("5")],
    ),
    "tools as text": (convert(*TALK, tools=json.dumps([CALL])), TALK),
    "a list of calls as text": (
        said(("human", "2+3?"), ("function_call", json.dumps([CALL, CALL])), ("observation", "5")),
        [user("2+3?"), assistant("") | {"tool_calls": [CALL, CALL]}, RESULT],
    ),
    "weight": (convert(user("p"), assistant("a") | {"weight": 0}), TALK),
    "no calls": (convert(user("p"), assistant("a") | {"tool_calls": []}), TALK),
    "alpaca": ({"instruction": "Add.", "input": "2, 3", "output": "5"},
               [user("Add.\n\n2, 3"), assistant("5")]),
    "alpaca without input": ({"instruction": "p", "input": " ", "output": "a"}, TALK),
    "prompt": ({"prompt": "p"}, [user("p")]),
    "prompt and answer": (GOOD, TALK),
    "prompt and null answer": (GOOD | {"answer": None}, [user("p")]),
    "prompt and completion": ({"prompt": "p", "completion": "a", "note": 1.5}, TALK),
}  # fmt: skip


@pytest.mark.parametrize("name", SHAPES)
def test_shapes(tmp_path, name):
    row, messages = SHAPES[name]
    (found,), rejects, _ = read(save(tmp_path / "rows.jsonl", row), share=0.0)
    assert found.messages == messages
    assert (found.id, found.family, rejects) == ("rows.jsonl:1", "default", {})


def test_given_id_family_and_tools_are_kept(tmp_path):
    row = convert(*TALK, id=7, family="math", tools=[{"type": "function"}])
    (found,), _, _ = read(save(tmp_path / "rows.jsonl", row))
    assert (found.id, found.family, found.tools) == ("7", "math", ({"type": "function"},))


# ---------------------------------------------------------------- rows that are rejected

REJECTS: dict[str, tuple[Any, str, str]] = {
    "truncated": (b'{"prompt": "p", "ans', "not JSON", "Unterminated string"),
    "NaN": (b'{"prompt": "p", "score": NaN}', "not JSON", "NaN is no JSON number"),
    "deep nesting": (b"[" * 200_000, "not JSON", "recursion"),
    "huge number": (b'{"n": ' + b"9" * 5000 + b"}", "not JSON", "digit"),
    "raw control character": (b'{"prompt": "a\x01"}', "not JSON", "Invalid control character"),
    "escaped control character": ({"prompt": "a\x00"}, "control characters", r"'\x00'"),
    "half a surrogate pair": ({"prompt": "a\ud800"}, "control characters", r"'\ud800'"),
    "invalid UTF-8": (b'{"prompt": "\xff"}', "not UTF-8", "invalid start byte"),
    "number": (b"5", "not an object", "int"),
    "array": ([GOOD], "not an object", "list"),
    "repeated key": (b'{"prompt": "p", "prompt": "q"}', "repeated key", "'prompt'"),
    "no shape": ({"text": "p"}, "unknown shape", "no messages"),
    "null prompt": ({"prompt": None, "answer": "a"}, "unknown shape", "no messages"),
    "two shapes": (GOOD | convert(*TALK, prompt="x"), "several shapes", "messages and prompt"),
    "two answers": (GOOD | {"output": "b"}, "several shapes", "answer and output"),
    "prompt with an input": (GOOD | {"input": "i"}, "several shapes", "prompt and input"),
    "two systems": (convert(system("s"), *TALK, system="t"), "several shapes", "another system"),
    "history": ({"instruction": "i", "history": [["a", "b"]]}, "unread field", "history"),
    "numeric prompt": ({"prompt": 5}, "not text", "prompt is a int"),
    "blank prompt": ({"prompt": " "}, "empty text", "prompt is blank"),
    "empty answer": (GOOD | {"answer": ""}, "empty answer", "answer is blank"),
    "empty last turn": (convert(user("p"), assistant("")), "empty answer", "message 2 is blank"),
    "empty messages": (convert(), "no messages", "empty list"),
    "messages as text": ({"messages": "[]"}, "no messages", "messages is a str"),
    "message as text": (convert("p"), "message not an object", "message 1 is a str"),
    "null message": (convert(None), "message not an object", "NoneType"),
    "null content": (convert(user(None)), "no content", "message 1 has no text"),
    "missing content": (convert({"role": "user"}), "no content", "message 1 has no text"),
    "numeric content": (convert(user(5)), "not text", "message 1 is a int"),
    "image part": (convert(user([{"type": "image_url"}])), "not text", "'image_url'"),
    "text part without text": (convert(user([{"type": "text"}])), "not text", "without text"),
    "image beside the text": (GOOD | {"images": ["a.png"]}, "not text", "images"),
    "missing role": (convert({"content": "p"}), "no role", "message 1 has no role"),
    "unknown role": (convert(user("p"), {"role": "bot", "content": "a"}), "unknown role", "'bot'"),
    "role of a wrong type": (convert({"role": ["user"], "content": "p"}), "unknown role", "user"),
    "assistant first": (convert(assistant("a"), user("p")), "order of roles", "message 1"),
    "two user turns": (convert(user("p"), user("q")), "order of roles", "instead of the assistant"),
    "late system": (convert(user("p"), system("s")), "order of roles", "message 2 is of the syst"),
    "only a system message": (convert(system("s")), "order of roles", "only a system message"),
    "tool result without a call": (convert(*TALK, RESULT), "order of roles", "message 3"),
    "unanswered call": (
        convert(user("p"), assistant(None) | {"tool_calls": [CALL]}, user("q")),
        "order of roles", "instead of the tool",
    ),
    "broken call": (
        convert(user("p"), assistant(None) | {"tool_calls": [{"function": {"name": "f",
                "arguments": "{"}}]}), "tool call", "arguments object",
    ),
    "half a weight": (
        convert(user("p"), assistant("a") | {"weight": 0.5}), "weight", "give 0 or 1",
    ),
    "Dolly's context": (GOOD | {"context": "c"}, "unread field", "the row has context"),
    "legacy functions": (convert(*TALK, functions=[{"name": "f"}]), "unread field", "functions"),
    "reasoning beside the answer": (GOOD | {"reasoning": "r"}, "unread field", "reasoning"),
    "input beside messages": (convert(*TALK, input="i"), "several shapes", "messages and input"),
    "content and value": (
        convert(user("p") | {"value": "q"}), "several shapes", "content and value",
    ),
    "a user's call": (convert(user("p") | {"tool_calls": [CALL]}), "unread field", "tool_calls"),
    "tools that are no JSON": (convert(*TALK, tools="[{"), "tools", "tools is not valid JSON"),
    "tools that are names": (convert(*TALK, tools=['"add"']), "tools", "tools has 'add'"),
    "deep tools": (convert(*TALK, tools='[{"a":' + "[" * 120 + "]" * 120 + "}]"),
                   "nested too deep", "100 levels"),
    "tools with half a surrogate pair": (convert(*TALK, tools=[{"name": "\ud800"}]),
                                         "control characters", r"'\ud800'"),
    "no call in the list": (convert(user("p"), {"from": "function_call", "value": "[]"}),
                            "tool call", "no tool call"),
    "wrapper object": ({"data": [GOOD, GOOD]}, "unknown shape", "if 'data' is the list of rows"),
    "legacy call": (convert(user("p") | {"function_call": {}} | {"refusal": "no"}),
                    "unread field", "refusal"),
    "id of a wrong type": (GOOD | {"id": 1.5}, "not text", "the id is a float"),
    "finished": (GOOD | {"finished": "no"}, "finished", "finished is 'no'; give true or false"),
    "family": (GOOD | {"family": "a b"}, "family", "'a b'"),
    "duplicate id": (GOOD | {"id": "first"}, "duplicate id", "that of line 1"),
}  # fmt: skip


@pytest.mark.parametrize("name", REJECTS)
def test_rejects_are_counted_and_listed(tmp_path, name):
    row, reason, detail = REJECTS[name]
    path = save(tmp_path / "rows.jsonl", GOOD | {"id": "first"}, row, GOOD)
    found, rejects, listed = read(path)
    assert [one.id for one in found] == ["first", "rows.jsonl:3"]
    assert rejects == {reason: 1}
    assert [(one["line"], one["reason"]) for one in listed] == [(2, reason)]
    assert detail in listed[0]["detail"]


def test_a_line_of_50_megabytes_is_a_reject_and_never_held(tmp_path):
    path = save(tmp_path / "rows.jsonl", GOOD, b'{"prompt": "' + b"x" * 50_000_000 + b'"}', GOOD)
    tracemalloc.start()
    found, rejects, listed = read(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert [one.id for one in found] == ["rows.jsonl:1", "rows.jsonl:3"]
    assert (rejects, listed[0]["line"]) == ({"too long": 1}, 2)
    assert peak < 2.5 * MAX_ROW


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json"])
def test_memory_does_not_grow_with_the_file(tmp_path, name):
    row = json.dumps({"prompt": "x" * 24_000}).encode()
    if name == "rows.json":
        path = tmp_path / name
        path.write_bytes(b"[" + b", ".join([row] * 1000) + b"]")
    else:
        path = save(tmp_path / name, *[row] * 1000)
    tracemalloc.start()
    count = sum(1 for _ in ConversationReader(path, out=tmp_path / "out"))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert count == 1000
    assert peak < path.stat().st_size / 3


def test_byte_order_mark_windows_line_ends_and_blank_lines(tmp_path):
    line = json.dumps(GOOD).encode()
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + line + b"\r\n\r\n  \n" + line)
    found, rejects, _ = read(path)
    assert [one.id for one in found] == ["rows.jsonl:1", "rows.jsonl:4"]
    assert not rejects


def test_mixed_shapes_in_one_file(tmp_path):
    rows = [row for row, _ in SHAPES.values()]
    found, _, _ = read(save(tmp_path / "rows.jsonl", *rows))
    assert [one.messages for one in found] == [messages for _, messages in SHAPES.values()]


# ---------------------------------------------------------------- share of rejects


@pytest.mark.parametrize("bad", [1, 2])
def test_more_rejects_than_allowed_stop_with_the_commonest_reason(tmp_path, bad):
    rows = [GOOD] * (100 - bad) + [{"prompt": 5}] * bad
    path = save(tmp_path / "rows.jsonl", *rows)
    reader = ConversationReader(path, out=tmp_path / "out")
    if bad == 1:
        assert len(list(reader)) == 99
        return
    with pytest.raises(InputError, match=r"data: 2 of 100 rows .* the 0\.01 allowed") as raised:
        list(reader)
    assert "most often (2) for 'not text', first line 99: the prompt is a int" in str(raised.value)
    assert str(tmp_path / "out.rejects.jsonl") in str(raised.value)
    assert len((tmp_path / "out.rejects.jsonl").read_text().splitlines()) == 2


def test_whole_array_in_one_line_of_jsonl(tmp_path):
    path = save(tmp_path / "rows.jsonl", [GOOD, GOOD])
    with pytest.raises(InputError, match=r"1 of 1 rows .* the row is a list instead of an object"):
        read(path, share=0.01)


def test_share_out_of_range(tmp_path):
    with pytest.raises(InputError, match=r"max_reject_share is 1\.5; give a share between"):
        ConversationReader(tmp_path, out=tmp_path / "out", max_reject_share=1.5)


def test_a_second_pass_counts_anew_and_an_old_list_goes(tmp_path):
    path = save(tmp_path / "rows.jsonl", GOOD, {"prompt": 5})
    reader = ConversationReader(path, out=tmp_path / "out", max_reject_share=1.0)
    assert len(list(reader)) == len(list(reader)) == 1
    assert (reader.num_rows, reader.rejects.total()) == (2, 1)
    save(path, GOOD)
    assert len(list(reader)) == 1
    assert not reader.rejects_path.exists()


def test_rejects_never_overwrite_the_input(tmp_path):
    path = save(tmp_path / "out.rejects.jsonl", GOOD)
    with pytest.raises(InputError, match="the rejects would overwrite"):
        list(ConversationReader(path, out=tmp_path / "out"))
    assert json.loads(path.read_text()) == GOOD


def test_output_that_cannot_be_written(tmp_path):
    path = save(tmp_path / "rows.jsonl", GOOD)
    with pytest.raises(InputError, match=r"out: .* cannot be written"):
        list(ConversationReader(path, out=path / "out"))


# ---------------------------------------------------------------- JSON arrays and Parquet


def test_json_array(tmp_path):
    path = tmp_path / "rows.json"
    path.write_text(json.dumps([GOOD, "text", GOOD | {"id": "x"}], indent=2), encoding="utf-8-sig")
    found, rejects, listed = read(path)
    assert [one.id for one in found] == ["rows.json:1", "x"]
    assert (rejects, listed[0]["line"]) == ({"not an object": 1}, 2)


def test_json_array_of_strings(tmp_path):
    path = tmp_path / "rows.json"
    path.write_text('["a", "b"]')
    with pytest.raises(InputError, match=r"2 of 2 rows .* 'not an object'.* the row is a str"):
        read(path, share=0.01)


def test_json_array_goes_on_after_a_row_that_is_not_json(tmp_path):
    path = tmp_path / "rows.json"
    path.write_text('[{"prompt": NaN}, {"prompt": "a\n"}, {"prompt": "p"}]')
    found, rejects, _ = read(path)
    assert ([one.id for one in found], rejects) == (["rows.json:3"], {"not JSON": 2})


def test_json_file_with_an_object_per_line(tmp_path):
    assert len(read(save(tmp_path / "rows.json", GOOD, GOOD))[0]) == 2


@pytest.mark.parametrize("group", [1, 100])
def test_parquet_with_nested_columns(tmp_path, group):
    rows = [
        convert(system("s"), *TALK, id="a"),
        convert(
            user("p"), assistant(None) | {"tool_calls": [CALL]}, RESULT, assistant("5"), id="b"
        ),
        convert(user(None), id="c"),
    ]
    path = save_parquet(tmp_path / "rows.parquet", *rows, row_group_size=group)
    found, rejects, listed = read(path)
    assert [one.id for one in found] == ["a", "b"]
    assert found[0].messages == [system("s"), *TALK]
    assert found[1].messages[1] == assistant("") | {"tool_calls": [CALL]}
    assert (rejects, listed[0]["line"]) == ({"no content": 1}, 3)


def test_parquet_with_lists_inside_an_object(tmp_path):
    row = {"conversations": {"from": ["human", "gpt"], "value": ["p", "a"]}}
    assert read(save_parquet(tmp_path / "rows.parquet", row))[0][0].messages == TALK


def test_parquet_with_invalid_utf8(tmp_path):
    raw = pa.array([b"p", b"\xff", b"q"], pa.binary())
    text = pa.StringArray.from_buffers(len(raw), raw.buffers()[1], raw.buffers()[2])
    path = tmp_path / "rows.parquet"
    parquet.write_table(pa.table({"prompt": text}), path)
    found, rejects, _ = read(path)
    assert [one.messages for one in found] == [[user("p")], [user("q")]]
    assert rejects == {"not UTF-8": 1}


# ---------------------------------------------------------------- files that cannot be read

FILES = {
    "empty": ("a.jsonl", b"", "is empty; it needs at least one row"),
    "blank": ("a.jsonl", b"\n \n", "is empty; it needs at least one row"),
    "empty array": ("a.json", b" [ ] ", "is empty; it needs at least one row"),
    "empty parquet": ("a.parquet", b"", "is empty; it needs at least one row"),
    "no parquet": ("a.parquet", b"{}", "is no Parquet file; name it by its format"),
    "damaged parquet": ("a.parquet", b"PAR1xxxxPAR1", "is a damaged Parquet file"),
    "parquet by another name": ("a.jsonl", b"PAR1", "is a Parquet file; name it by its format"),
    "other suffix": ("a.csv", b"{}", "has the suffix '.csv'; give a file named .jsonl"),
    "compressed": ("a.jsonl", b"\x1f\x8b\x08", "cannot be read (Truncated"),
    "UTF-16": ("a.jsonl", "{}".encode("utf-16"), "is UTF-16 text; save it as UTF-8"),
    "truncated array": ("a.json", b'[{"prompt": "p"}, {"pro', "element 2 of the array is broken"),
    "array cut after a comma": ("a.json", b'[{"prompt": "p"},', "element 2 of the array is broken"),
    "text after the array": ("a.json", b'[{"prompt": "p"}]\n["b"]', "goes on after its array"),
    "array in latin-1": ("a.json", b'[{"prompt": "\xe9"}]', "is not UTF-8 text after element 0"),
    "wrapper object": (
        "a.json",
        b'{\n "data": [\n',
        "begins with a JSON object over several lines",
    ),
    "wrapper and list": (
        "a.jsonl",
        b'{"data": [\n',
        "begins with a JSON object over several lines",
    ),
    "compressed parquet": ("a.parquet.gz", gzip.compress(b"PAR1"), "read from its end; unpack it"),
    "compressed by name": ("a.jsonl.gz", b"{}", "is not compressed; name it by its format"),
    "compression alone": ("a.gz", b"{}", "which may be compressed (.gz, .zst)"),
    "deep array": ("a.json", b"[" * 200_000, "element 1 is nested too deep"),
}


@pytest.mark.parametrize("name", FILES)
def test_unusable_files_are_one_sentence(tmp_path, name):
    file, content, sentence = FILES[name]
    path = tmp_path / file
    path.write_bytes(content)
    with pytest.raises(InputError) as raised:
        read(path)
    assert str(raised.value).startswith(f"data: {path}")
    assert sentence in str(raised.value)
    assert "\n" not in str(raised.value)
    assert not (tmp_path / "out.rejects.jsonl").exists()


def test_rows_before_a_break_in_an_array_are_delivered(tmp_path):
    path = tmp_path / "rows.json"
    path.write_text('[{"prompt": "p"}, {"pro')
    rows = parse_conversations(path)
    assert next(rows)[0] == 1
    with pytest.raises(InputError, match="element 2"):
        next(rows)


def test_directory_missing_file_and_pipe(tmp_path):
    os.mkfifo(tmp_path / "pipe.jsonl")
    for path, sentence in {
        tmp_path: "is a directory; give one file in it",
        tmp_path / "nowhere.jsonl": "does not exist",
        tmp_path / "pipe.jsonl": "is not a regular file",
    }.items():
        with pytest.raises(InputError, match=f"data.train: {path} {sentence}"):
            next(parse_conversations(path, field="data.train"))


def test_unreadable_file(tmp_path, monkeypatch):
    """The error is made here, since root may read everything."""
    path, really_open = save(tmp_path / "rows.jsonl", GOOD), Path.open

    def refuse(self: Path, mode: str = "r", *args: Any, **options: Any) -> Any:
        if mode == "rb":
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        return really_open(self, mode, *args, **options)

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(InputError, match=r"rows\.jsonl cannot be read \(Permission denied\)"):
        list(ConversationReader(path, out=tmp_path / "out"))
