"""Every command reads rows of conversations the same way, or refuses them in one sentence.

`WAYS` are those that may not skip a row: training, held-out sets, and prompts of `bench --suite`,
`validate-export`, `serve-check` and `decode --prompts`. What `prepare` makes of a row, and the
reasons why a row is rejected, are in test_conversations.py.
"""

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from conversations import assistant, question, system, user
from pyarrow import parquet

from dflow_lightning.__main__ import main
from dflow_lightning.data.conversations import check_messages, read_conversations
from dflow_lightning.data.prepared import open_prepared
from dflow_lightning.data.prompts import make_prompts, read_prompts
from dflow_lightning.data.sets import check_disjoint, count_rows, encode_rows, read_set
from dflow_lightning.data.template import ChatEncoder
from dflow_lightning.errors import InputError

GOOD = {"id": "a", "prompt": "Hi", "answer": "Hello."}
WAYS: dict[str, Callable[[Path], Any]] = {
    "data.train": lambda path: read_set(path, "data.train"),
    "data.validation": lambda path: read_set(path, "data.validation"),
    "prompts": lambda path: read_conversations(path, field="prompts", need_answer=False),
}


def conversation(*messages: Any, **more: Any) -> dict:
    return {"id": "a", "messages": [*messages], **more}


def zstd(content: bytes) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, "zstd") as stream:
        stream.write(content)
    return sink.getvalue().to_pybytes()


@pytest.fixture
def prepare(tmp_path, tokenizer_dir):
    """Keep the answers of a file; exit status, and the rows by id."""

    def run(
        path: Path, *options: str, target: Path = tokenizer_dir
    ) -> dict[str, tuple[list[int], list[bool]]]:
        out = tmp_path / f"prepared {path.name}"
        command = ["prepare", "--data", str(path), "--target", str(target)]
        assert main([*command, "--out", str(out), "--keep_answers", *options]) == 0
        rows = open_prepared(out)
        return {row["id"]: (row["input_ids"], row["loss_mask"]) for row in rows}

    return run


@pytest.fixture(scope="module")
def tool_tokenizer(with_template) -> Any:
    """Its chat template shows tools, which the embedded target's does not."""
    return with_template(Path(__file__).with_name("qwen3_like.jinja").read_text())


@pytest.fixture(scope="module")
def tool_target(tool_tokenizer, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("tool target")
    tool_tokenizer.save_pretrained(folder)
    return folder


def trained(path: Path, tokenizer: Any) -> dict[str, tuple[list[int], list[bool]]]:
    """The rows that training makes of a file, without what the template puts after the answer."""
    found = {}
    for row in encode_rows(ChatEncoder(tokenizer), read_set(path, "data.train"), "all_turns"):
        ids, mask = row.tokens.input_ids, row.tokens.loss_mask
        end = len(mask) - mask[::-1].index(True)
        found[row.id] = (ids[:end], mask[:end])
    return found


# ---------------------------------------------------------------- one reader

TOOL = {"type": "function", "function": {"name": "add", "description": "Adds."}}
SAME = {
    "system beside the messages": conversation(
        user("Hi"), assistant("Bonjour, mon ami."), system="Answer in French."
    ),
    "text parts": conversation(
        user([{"type": "text", "text": "Hi"}]), assistant([{"type": "text", "text": "Hello."}])
    ),
    "developer": conversation({"role": "developer", "content": "s"}, user("p"), assistant("a b")),
    "empty list of calls": conversation(user("p"), assistant("a b") | {"tool_calls": []}),
    "prompt beside equal messages": conversation(user("p"), assistant("a b"), prompt="p"),
    "tools": conversation(user("p"), assistant("a b"), tools=[TOOL]),
    "sharegpt": {"id": "a", "conversations": [
        {"from": "human", "value": "p"}, {"from": "gpt", "value": "q r"}]},
    "prompt and completion of messages": {
        "id": "a", "prompt": [system("s"), user("p")], "completion": [assistant("a b")]},
    "prompt of messages": {"id": "a", "prompt": [user("p")], "completion": "a b"},
    "no id": {"prompt": "p", "answer": "a b"},
    "several turns": conversation(user("p"), assistant("a b"), user("q"), assistant("c d")),
    "unfinished": GOOD | {"finished": False},
}  # fmt: skip


@pytest.mark.parametrize("suffix", ["jsonl", "json", "parquet", "jsonl.gz", "json.gz", "jsonl.zst"])
@pytest.mark.parametrize("name", SAME)
def test_a_row_is_the_same_however_it_comes(
    name, suffix, tmp_path, tool_tokenizer, tool_target, prepare
):
    """F2, F14, F31: a row in any file, in training and through prepare, beside an Alpaca row.

    The second row has another shape than the first one, by which a file was once judged.
    """
    rows = [SAME[name], {"id": "z", "instruction": "Add.", "input": "2, 3", "output": "The 5."}]
    path = tmp_path / f"rows.{suffix}"
    content = "\n".join(map(json.dumps, rows)) if "jsonl" in suffix else json.dumps(rows)
    packed = {"gz": gzip.compress, "zst": zstd}.get(suffix.rpartition(".")[2], bytes)
    if suffix == "parquet":
        columns = {key: [row.get(key) for row in rows] for key in {**rows[0], **rows[1]}}
        parquet.write_table(pa.table(columns), path)
    else:
        path.write_bytes(packed(content.encode()))
    found = trained(path, tool_tokenizer)
    assert found == prepare(path, target=tool_target)
    assert count_rows(path, "data.train") == 2
    written = tmp_path / "plain.jsonl"
    written.write_text("\n".join(json.dumps({"id": f"{path.name}:1"} | row) for row in rows))
    assert found == trained(written, tool_tokenizer)
    prompts = read_prompts(tool_tokenizer, path)
    answered = make_prompts(ChatEncoder(tool_tokenizer), WAYS["prompts"](path))
    assert {one.id: one for one in prompts} == {one.id: one for one in answered}
    said = {one.id: tool_tokenizer.decode(one.token_ids) for one in prompts}
    assert "Answer in French." in "".join(said.values()) or name != "system beside the messages"


def test_messages_of_the_python_api_are_read_the_same_way():
    """F31: text parts were refused by one entry and printed as a list by another."""
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert check_messages([{"role": "developer", "content": "s"}, user(parts)], "prompt") == [
        system("s"), user("ab")
    ]  # fmt: skip
    for messages, sentence in {
        "no role": ([{"content": "x"}], "prompt: message 1 has no role"),
        "empty": ([], "prompt: messages is an empty list"),
        "blank": ([user("")], "prompt: message 1 is blank"),
    }.values():
        with pytest.raises(InputError, match=sentence):
            check_messages(messages, "prompt")


# ---------------------------------------------------------------- rows that are refused

BAD_ROWS: dict[str, tuple[Any, str]] = {
    "malformed JSON": ('{"id": "a", "prompt": }', "the row is not valid JSON"),
    "cut short": ('{"id": "b", "prompt": "x', "the row is not valid JSON"),
    "not an object": ('["a"]', "the row is a list instead of an object"),
    "no prompt": ({"id": "b", "answer": "a"}, "the row has no messages, .* or prompt"),
    "blank answer": ({"id": "b", "prompt": "p", "answer": " \n"}, "the answer is blank"),
    "blank id": (GOOD | {"id": ""}, "the id is blank"),
    "number as prompt": ({"id": "b", "prompt": 3, "answer": "a"}, "the prompt is a int"),
    "same id": (GOOD | {"prompt": "other"}, "has the id 'a' of line 1; give every row its own id"),
    "finished": (GOOD | {"id": "b", "finished": "no"}, "finished is 'no'; give true or false"),
    "family": (GOOD | {"id": "b", "family": "a/b c"}, "the family is 'a/b c'"),
    "both shapes": (conversation(user("p"), assistant("a")) | GOOD, "has both messages and prompt"),
    "no messages": (conversation(), "messages is an empty list"),
    "message is text": (conversation("p"), "message 1 is a str"),
    "message without role": (conversation({"content": "p"}), "message 1 has no role"),
    "message without content": (conversation({"role": "user"}), "message 1 has no text"),
    "blank content": (conversation(user(" ")), "message 1 is blank"),
    "image": (conversation(user([{"type": "image_url"}])), "a part of the type 'image_url'"),
    "images": (GOOD | {"id": "b", "images": ["a.png"]}, "the row has images; only text is read"),
    "a user's call": (conversation(user("p") | {"tool_calls": [1]}), "message 1 has tool_calls"),
    "only system": (conversation(system("s")), "the row has only a system message"),
    "assistant first": (conversation(assistant("a")), "message 1 is of the assistant"),
    "two users": (
        conversation(user("p"), user("p"), assistant("a")),
        "message 2 is of the user instead of the assistant",
    ),
    "late system": (
        conversation(user("p"), assistant("a"), system("s")),
        "message 3 is of the system instead of the user",
    ),
    "unknown role": (conversation({"role": "bot", "content": "p"}), "message 1 has the role 'bot'"),
    "repeated key": ('{"prompt": "p", "prompt": "q"}', "the key 'prompt' is there twice"),
    "NaN": ('{"prompt": "p", "score": NaN}', "NaN is no JSON number"),
    "control character": (GOOD | {"prompt": "a\x00"}, r"the prompt has the character '\\x00'"),
    "half a surrogate pair": (GOOD | {"prompt": "a\ud800"}, r"has the character '\\ud800'"),
    "deep nesting": ("[" * 200_000, "the row is not valid JSON"),
    "an id of 5,000 digits": ('{"id": ' + "9" * 5000 + ', "prompt": "p"}', "is not valid JSON"),
    "not UTF-8": (b'{"prompt": "\xff"}', "the row is not UTF-8 text"),
    # F5, found by tests/fuzz and by reading: what was left out without a word
    "input beside messages": (
        conversation(user("p"), assistant("a"), input=["more"]),
        "both messages and input",
    ),
    "role and from": (conversation(user("p") | {"from": "gpt"}), "message 1 has both role and"),
    "from is no text": (conversation(user("p") | {"from": ["gpt"]}), "both role and from"),
    "arguments by another name": (
        conversation(user("p"), assistant("") | {"tool_calls": [{"name": "f", "args": {"a": 1}}]}),
        "message 2 has a tool call with 'args', which is not read",
    ),
    "arguments beside the function": (
        conversation(
            user("p"),
            assistant("") | {"tool_calls": [{"function": {"name": "f"}, "arguments": {"a": 1}}]},
        ),
        "message 2 has a tool call with 'arguments', which is not read",
    ),
    "not to be learned": (
        conversation(user("p"), assistant("a") | {"train": False}),
        "message 2 has train False, which is not read; give it weight 0",
    ),
    "masked": (conversation(user("p"), assistant("a") | {"masked": True}), "has masked True"),
    "thoughts": (conversation(user("p"), assistant("a") | {"thought": "t"}), "has thought, which"),
    "tools of a message": (
        conversation(system("s") | {"tools": [TOOL]}, user("p")),
        "message 1 has tools, which",
    ),
    "settings of the template": (
        GOOD | {"chat_template_kwargs": {"enable_thinking": True}},
        "has chat_template_kwargs",
    ),
    "two answers": (
        {"prompt": [user("p")], "completion": "a", "answer": "b"},
        "both answer and completion",
    ),
    "messages by another name": (
        {"dialog": [user("p"), assistant("a")]},
        "if 'dialog' holds the messages, name it messages",
    ),
    "context": (GOOD | {"context": "c"}, "the row has context, which is not read"),
}
UNANSWERED: dict[str, tuple[Any, str]] = {
    "no answer": ({"id": "b", "prompt": "p"}, r"\(id 'b'\) does not end with an answer"),
    "null answer": ({"id": "b", "prompt": "p", "answer": None}, "does not end with an answer"),
    "no assistant": (conversation(user("p")) | {"id": "b"}, "does not end with an answer"),
    "ends with user": (
        conversation(user("p"), assistant("a"), user("q")) | {"id": "b"},
        "does not end with an answer; add it, or let dflow-train prepare have the target write it",
    ),
    "nothing to learn": (
        {"id": "b", "messages": [user("p"), assistant("a") | {"weight": 0}]},
        "has the weight 0 on every answer",
    ),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", BAD_ROWS)
def test_a_bad_row_is_one_sentence_everywhere(name, way, tmp_path):
    """F39 and the like: decode, bench and fit once had a traceback where prepare had a reject."""
    row, message = BAD_ROWS[name]
    text = json.dumps(row) if isinstance(row, dict) else row
    path = tmp_path / "rows.jsonl"
    content = text if isinstance(text, bytes) else text.encode()
    path.write_bytes(json.dumps(GOOD).encode() + b"\n" + content + b"\n")
    with pytest.raises(InputError, match=message) as caught:
        WAYS[way](path)
    assert str(caught.value).startswith(f"{way}: line 2 of {path} ")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", UNANSWERED)
def test_rows_to_learn_from_need_an_answer_and_prompts_do_not(name, write):
    row, message = UNANSWERED[name]
    path = write(GOOD, row)
    for way in ("data.train", "data.validation"):
        with pytest.raises(InputError, match=rf"{way}: line 2 of .*{message}") as caught:
            WAYS[way](path)
        assert "\n" not in str(caught.value)
    assert len(WAYS["prompts"](path)) == 2


@pytest.mark.parametrize("way", WAYS)
def test_bad_files(way, tmp_path):
    empty = tmp_path / "empty.jsonl"
    empty.touch()
    wrapper, lines = tmp_path / "wrapper.json", tmp_path / "pretty.json"
    wrapper.write_text(json.dumps({"data": [GOOD]}))
    lines.write_text(json.dumps({"data": [GOOD]}, indent=1))
    cut = tmp_path / "cut.jsonl.gz"
    cut.write_bytes(gzip.compress(json.dumps(GOOD).encode() * 9)[:-12])
    for path, message in {
        tmp_path / "nowhere.jsonl": "does not exist; give a JSONL, JSON or Parquet file",
        tmp_path: "is a directory",
        empty: "is empty; it needs at least one row",
        wrapper: "if 'data' is the list of rows, give that list as the file",
        lines: "begins with a JSON object over several lines; write one row per line",
        cut: r"cannot be read \(Truncated compressed stream\)",
    }.items():
        with pytest.raises(InputError, match=rf"{way}: .*{message}") as caught:
            WAYS[way](path)
        assert "\n" not in str(caught.value)


# ---------------------------------------------------------------- what a row has


def test_ids_families_and_places(write):
    notes = {"template": "t", "temperature": 1}
    path = write(
        {"id": 7, "family": "math", **notes, "prompt": "p", "answer": "a"},
        "",
        {"messages": [system("s"), user("p"), assistant("a")]},
    )
    first, second = WAYS["data.train"](path)
    assert (first.id, first.family, second.family) == ("7", "math", "default")
    assert first.messages == [user("p"), assistant("a")]
    assert second.id == "rows.jsonl:3"
    assert second.prompt == [system("s"), user("p")]
    assert second.where == f"data.train: line 3 of {path} (id 'rows.jsonl:3')"


def test_reasoning_is_kept(write):
    answer = assistant("Five.") | {"reasoning_content": "Two plus three.", "tool_calls": None}
    (row,) = WAYS["data.train"](write(conversation(user("p"), answer)))
    assert row.messages[1] == assistant("Five.") | {"reasoning_content": "Two plus three."}


def test_prompts_need_no_answer(write):
    path = write({"prompt": "p"}, conversation(user("p"), assistant("a"), user("q")))
    first, second = WAYS["prompts"](path)
    assert not first.is_answered
    assert second.prompt == second.messages


def test_byte_order_mark_and_windows_line_ends(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(
        b'\xef\xbb\xbf{"prompt": "p", "answer": "a"}\r\n{"prompt": "q", "answer": "b"}\r\n'
    )
    assert len(WAYS["data.train"](path)) == 2


@pytest.mark.parametrize("tools", [[TOOL], [json.dumps(TOOL)], json.dumps([TOOL])])
def test_tools_are_objects_or_json_text(tools, write, tool_tokenizer, tool_target, prepare):
    """F4: a list of JSON texts ended the whole of prepare, one JSON text rejected every row."""
    path = write(conversation(user("Hi"), assistant("Hello my friend."), tools=tools))
    ((row,),) = [WAYS["data.train"](path)]
    assert row.tools == (TOOL,)
    assert trained(path, tool_tokenizer) == prepare(path, target=tool_target)


@pytest.mark.parametrize("failure", ["{{ {}['x'] | int + 1 / 0 }}", "{{ 'x'.index('y') }}"])
def test_a_template_that_fails_rejects_its_row_alone(
    failure, write, with_template, tmp_path, capsys
):
    """F4: any exception of a template, not only those that it raises on purpose."""
    template = with_template(None)
    body = "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ eos_token }}{% endfor %}"
    template.chat_template = f"{{% if messages[0].content == 'bad' %}}{failure}{{% endif %}}{body}"
    template.save_pretrained(tmp_path / "target")
    path = write(GOOD | {"id": "b", "prompt": "bad"}, *(question(n) for n in range(4)))
    command = ["prepare", "--data", str(path), "--target", str(tmp_path / "target")]
    command += ["--out", str(tmp_path / "out"), "--keep_answers", "--max_reject_share", "0.5"]
    assert main(command) == 0, capsys.readouterr().err
    (reject,) = (tmp_path / "out/rejects.jsonl").read_text().splitlines()
    assert json.loads(reject)["reason"] == "template"
    assert len(open_prepared(tmp_path / "out")) == 4


def test_named_templates_need_a_default(with_template):
    """F4: transformers has a long traceback for it."""
    with pytest.raises(InputError, match="templates named a, b and none named default"):
        ChatEncoder(with_template({"a": "x", "b": "y"}))  # type: ignore[arg-type]


def test_weight_0_is_context(write, tokenizer, prepare):
    """F18: the answer stays where it is and is not learned from."""
    messages = [user("p"), assistant("a b c") | {"weight": 0}, user("q"), assistant("d e f")]
    path = write(conversation(*messages))
    plain = [{k: v for k, v in one.items() if k != "weight"} for one in messages]
    whole = trained(write(conversation(*plain), name="plain.jsonl"), tokenizer)
    found = trained(path, tokenizer)
    assert list(whole) == ["a#1", "a#2"]
    assert found == {"a": whole["a#2"]} == prepare(path)
    assert "a b c" in tokenizer.decode(found["a"][0])
    last = write(conversation(*messages[2:], *messages[:2]), name="last.jsonl")
    ((ids, mask),) = trained(last, tokenizer).values()
    assert trained(last, tokenizer) == prepare(last)
    answer = tokenizer.decode([i for i, learned in zip(ids, mask, strict=True) if learned])
    assert answer == "d e f<|im_end|>"
    alone = write(conversation(*messages[:2]), GOOD | {"id": "b"}, name="alone.jsonl")
    assert list(prepare(alone, "--max_reject_share", "0.5")) == ["b"]


# ---------------------------------------------------------------- repeated rows


def test_repeated_rows_count_once_everywhere(write, tokenizer, prepare, capsys):
    """F36: prepare took one of equal rows, training all of them, bench asked each of them."""
    rows = [GOOD | {"id": str(n)} for n in range(50)] + [GOOD | {"id": "x", "answer": "Other."}]
    path = write(*rows)
    capsys.readouterr()
    for way, count in {"data.train": 2, "data.validation": 2, "prompts": 1}.items():
        assert len(WAYS[way](path)) == count
        assert capsys.readouterr().err == (
            f"warning: {way}: {51 - count} of 51 rows of {path} repeat an earlier row and are left "
            "out, the first on line 2 (as line 1)\n"
        )
    assert [one.id for one in read_prompts(tokenizer, path)] == ["0"]
    assert list(prepare(path)) == list(trained(path, tokenizer)) == ["0", "x"]
    rows = read_conversations(path, field="prompts", need_answer=False, keep_repeats=True)
    assert len(rows) == 51  # decode answers every line it is given


def test_held_out_prompts_may_not_be_trained_on(write):
    train = read_set(write(GOOD, {"prompt": "q", "answer": "a"}), "data.train")
    same_prompt = {"id": "z", "prompt": "Hi", "answer": "Another answer."}
    held_out = read_set(write(same_prompt, {"prompt": "r", "answer": "a"}), "data.test")
    with pytest.raises(InputError, match=r"data\.test: 1 of 2 prompts .*data\.train, first 'z'"):
        check_disjoint(train, held_out, lambda: None, "data.test")
    check_disjoint(train, held_out[1:], lambda: None, "data.test")
