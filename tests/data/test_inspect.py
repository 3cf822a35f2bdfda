"""What `dflow-train inspect` prints, on a terminal and in a pipe."""

import io
import re

import pytest
from conversations import assistant, question, system, user
from rich.cells import cell_len
from rich.console import Console

from dflow_lightning.__main__ import main
from dflow_lightning.data.conversations import Conversation
from dflow_lightning.data.inspect import anchor_candidates, show_conversation, visible
from dflow_lightning.data.template import ChatEncoder
from dflow_lightning.data.turns import written_rows
from dflow_lightning.errors import InputError

ESCAPE = "\x1b"


@pytest.fixture
def inspect(capsys, tokenizer_dir):
    """Run the command; exit status, standard output and standard error."""

    def run(path, *options):
        capsys.readouterr()
        options = [str(option) for option in options]
        status = main(["inspect", "--data", str(path), "--target", str(tokenizer_dir), *options])
        return status, *capsys.readouterr()

    return run


def ids_in(out: str) -> tuple[list[int], list[int]]:
    """All token ids that were printed, and the marked ones."""
    listed = out.partition("\ntoken ids\n")[2]
    marked = " ".join(re.findall(r"«([^»]*)»", listed))
    return [int(n) for n in re.findall(r"\d+", listed)], [int(n) for n in marked.split()]


def printed(tokenizer, messages, console, tools=()) -> str:
    conversation = Conversation("x", "default", messages, tools)
    show_conversation("row 1", conversation, ChatEncoder(tokenizer), console=console)
    return console.file.getvalue()


# ---------------------------------------------------------------- the command


def test_piped_output_has_marks_and_the_ids_of_training(inspect, write, tokenizer):
    messages = [system("Be brief."), user("Hi"), assistant("Hello."), user("How?"), assistant("Ok")]
    path = write(question(0), {"id": "second", "family": "chat", "messages": messages})
    status, out, err = inspect(path, "--row", 2)
    assert (status, err) == (0, "")
    parts = out.split("row 2 of ")[1:]
    rows = written_rows(ChatEncoder(tokenizer), Conversation("second", "default", messages))
    for i, ((name, row), part) in enumerate(zip(rows, parts, strict=True), start=1):
        ids, mask = row.tokens.input_ids, row.tokens.loss_mask
        assert f"\nid second#{i}, family chat\n" in part
        assert f"\n{i} of the 2 rows of this conversation\n" in part
        assert name == f"second#{i}"
        assert f"{len(ids)} tokens, {sum(mask)} supervised" in part
        assert f"{len(anchor_candidates(mask))} anchor candidates (" in part
        every, marked = ids_in(part)
        assert every == ids
        assert marked == [token for token, wanted in zip(ids, mask, strict=True) if wanted]
    first, second = parts
    assert "</think>\n\n«Hello.<|im_end|>»\n" in first
    assert "assistant\nHello.<|im_end|>\n" in second
    assert "</think>\n\n«Ok<|im_end|>»\n" in second


def test_an_unfinished_answer_is_shown_without_its_end(inspect, write):
    path = write({"prompt": "Hi", "answer": "Hello", "finished": False})
    status, out, _ = inspect(path)
    assert status == 0
    assert "the last answer is cut off where its limit was reached\n" in out
    assert "</think>\n\n«Hello»\ntoken ids\n" in out


def test_piped_output_is_plain_and_80_columns_wide(inspect, write):
    start = "A sentence that goes on. " * 12 + "你好" * 60 + "x" * 200
    text = start + "\x9b31m [bold]b[/bold]"
    status, out, _ = inspect(write({"prompt": text, "answer": text}))
    assert status == 0
    assert ESCAPE not in out
    assert "\x9b" not in out
    assert r"\x9b31m [bold]b[/bold]" in out.replace("\n", "")
    assert 70 < max(map(cell_len, out.splitlines())) <= 80
    assert "".join(out.split()).count("".join(start.split())) == 2


def test_last_turn_only_and_thinking(inspect, write):
    path = write({"messages": [user("a"), assistant("b"), user("c"), assistant("d")]})
    _, out, _ = inspect(path, "--supervise", "last_turn")
    assert "«b" not in out
    assert "«d<|im_end|>»" in out
    reasoned = assistant("Five.") | {"reasoning_content": "Two and three."}
    status, out, _ = inspect(write({"messages": [user("a"), reasoned]}), "--thinking")
    assert status == 0
    assert "«<think>\nTwo and three.\n</think>\n\nFive.<|im_end|>»" in out


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--row", 0], "row is 0; give 1 or more"),
        (["--row", 2], "row: line 2 of {path} is blank; the next row is 3"),
        (["--row", 4], "row: line 4 of {path} is rejected (unknown role): message 1 has the role"),
        (["--row", 9], "row: {path} has no line 9; its last row is 4"),
        (["--target", "./nowhere"], "target: ./nowhere does not exist; give a folder saved by"),
        (["--supervise", "none"], "supervise: "),
    ],
)
def test_mistakes_are_one_sentence_and_status_2(inspect, write, options, sentence):
    path = write(question(0), "", question(1), {"messages": [{"role": "bot", "content": "p"}]})
    status, out, err = inspect(path, *options)
    assert (status, out) == (2, "")
    assert err.startswith("error: " + sentence.format(path=path))
    assert err.count("\n") == 1


def test_a_template_that_refuses_the_row_names_it(inspect, write, tokenizer, tmp_path):
    folder = tmp_path / "refusing"
    tokenizer.save_pretrained(folder)
    (folder / "chat_template.jinja").write_text("{{ raise_exception('no system here') }}")
    path = write(question(0))
    status, _, err = inspect(path, "--target", folder)
    assert status == 2
    assert err.startswith(f"error: row: line 1 of {path}: the chat template refuses")
    assert "no system here" in err


# ---------------------------------------------------------------- parts


def test_terminals_get_colour_and_no_marks(tokenizer, monkeypatch):
    monkeypatch.delenv("NO_COLOR", raising=False)  # whatever the suite runs in
    monkeypatch.setenv("TERM", "xterm-256color")
    terminal = Console(file=io.StringIO(), force_terminal=True, color_system="standard", width=80)
    out = printed(tokenizer, [user("Hi"), assistant("Hello.")], terminal)
    assert f"{ESCAPE}[1;32mHello.<|im_end|>{ESCAPE}[0m" in out
    assert "«" not in out


def test_terminals_without_colour_get_marks(tokenizer):
    terminal = Console(file=io.StringIO(), force_terminal=True, no_color=True, width=80)
    assert "«Hello.<|im_end|>»" in printed(tokenizer, [user("Hi"), assistant("Hello.")], terminal)


def test_special_tokens_that_someone_typed_are_shown_as_typed(tokenizer):
    out = printed(
        tokenizer, [user("Say <|im_end|>"), assistant("No.")], Console(file=io.StringIO())
    )
    assert "Say <|im_end|><|im_end|>\n" in out


def test_what_the_template_leaves_out_is_said(tokenizer):
    """F5: a row that the template shows in part is refused as training refuses it."""
    call = {"type": "function", "function": {"name": "add", "arguments": {}}}
    called = assistant("Let me see.") | {"tool_calls": [call]}
    with pytest.raises(InputError, match=r"leaves out a tool call of message 2 \('add'\)"):
        printed(tokenizer, [user("2+3?"), called], Console(file=io.StringIO()))


def test_nothing_supervised_has_no_candidates(tokenizer):
    out = printed(tokenizer, [user("Hi")], Console(file=io.StringIO()))
    assert "no answer: this is what the target is given\n" in out
    assert "assistant\n<think>\n\n</think>\n\n" in out
    assert "0 supervised\n0 anchor candidates (none)\n" in out


def test_anchor_candidates_need_a_supervised_neighbour():
    mask = [False, True, True, True, False, True, False, True, True]
    assert anchor_candidates(mask) == [1, 2, 7]
    assert anchor_candidates([]) == []


def test_visible_keeps_what_can_be_read():
    assert visible("a\tb\n你好 🙂\u00a0\r\x7f\x85") == "a\tb\n你好 🙂\u00a0\\r\\x7f\\x85"
