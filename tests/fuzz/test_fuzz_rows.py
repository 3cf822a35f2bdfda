"""Whatever a row is: it is read whole, or one reject; what the template makes of it is whole, too.

Each text is made of words of five letters or more, so that a word that is lost is seen.
"""

import gzip
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from effort import check_sentence, examples
from hostile_rows import rows
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from dflow_lightning.data.conversations import (
    Conversation,
    Reject,
    RejectedError,
    load_record,
    parse_conversations,
    to_conversation,
)
from dflow_lightning.data.template import ChatEncoder
from dflow_lightning.data.turns import training_rows
from dflow_lightning.errors import InputError

WORD = re.compile(r"[a-z]{5,}")
SPELLED = re.compile(r"<\|\w+\|>|</?\w+>|raw")  # words of the trimmings are not those of the texts
OURS = {"function", "arguments", "description", "content", "value"}  # keys of messages and calls
TEXTS = ("messages", "conversations", "prompt", "instruction", "input", "system", "tools")
ANSWERS = ("answer", "output", "completion", "response")
IN_MESSAGE = ("content", "value", "reasoning_content", "tool_calls", "function_call", "refusal")
ROOT = Path(__file__).resolve().parents[2]
BODY = "{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}"
TEMPLATES = {
    "embedded": (ROOT / "data/build/chat_template.jinja").read_text(),
    "qwen3": (ROOT / "tests/data/qwen3_like.jinja").read_text(),
    "trims": (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content|trim }}"
        "{% for c in m.tool_calls or [] %}\n{{ c.function|tojson }}{% endfor %}<|im_end|>"
        "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    ),
    "keeps what follows the reasoning": (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content.split('</think>')[-1] }}"
        "<|im_end|>{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    ),
}


def words(value: Any) -> set[str]:
    """The words of all texts in a value, and of keys that hold anything."""
    if isinstance(value, str):
        return set(WORD.findall(SPELLED.sub(" ", value)))
    if isinstance(value, dict):
        inner = set().union(*map(words, value.values()))
        return inner | set().union(*(words(key) for key in value if value[key]))
    return set().union(*map(words, value)) if isinstance(value, list) else set()


def lost(value: Any, text: str) -> set[str]:
    """The words of a value that do not stand in a text, which may join them."""
    return {word for word in words(value) - OURS if word not in text}


def spoken(row: dict[str, Any]) -> Iterator[Any]:
    """What of a row is part of the conversation, as its documentation has it."""
    listed = row.get("messages") is not None or row.get("conversations") is not None
    for key in TEXTS if listed else TEXTS + ANSWERS:
        found = row.get(key)
        if key in ("system", "tools", "input") or not isinstance(found, list):
            yield found
            continue
        for message in found:
            yield from (message.get(name) for name in IN_MESSAGE if isinstance(message, dict))


def read(row: Any) -> Conversation | Reject:
    try:
        return to_conversation(load_record(json.dumps(row).encode()), "row:1")
    except RejectedError as error:
        return error.reject


@given(rows())
@examples(60)
def test_a_row_is_read_whole_or_is_one_reject(row: Any) -> None:
    found = read(row)
    if isinstance(found, Reject):
        assert found.reason
        assert len(found.detail.splitlines()) == 1
        return
    kept = json.dumps([found.messages, list(found.tools)], ensure_ascii=False)
    for value in spoken(row):
        assert not lost(value, kept)


@pytest.fixture(scope="session")
def encoders(tiny_target_dir: Path) -> dict[str, ChatEncoder]:
    """A tokenizer whose tokens are bytes, with each template."""
    found = {}
    for name, template in TEMPLATES.items():
        tokenizer = AutoTokenizer.from_pretrained(tiny_target_dir)
        tokenizer.chat_template = template
        found[name] = ChatEncoder(tokenizer)
    return found


@given(rows(), st.sampled_from(list(TEMPLATES)))
@examples(40)
def test_a_row_is_rendered_whole_or_is_one_sentence(
    encoders: dict[str, ChatEncoder], row: Any, template: str
) -> None:
    conversation = read(row)
    if isinstance(conversation, Reject):
        return
    encoder = encoders[template]
    messages = conversation.messages
    answers = [i for i, one in enumerate(messages) if one["role"] == "assistant"]
    try:
        found = training_rows(encoder, messages, conversation.tools, finished=conversation.finished)
        prompt = encoder.prompt(conversation.prompt, conversation.tools)
    except InputError as error:
        return check_sentence(error)
    decode = encoder.tokenizer.decode
    shown = " ".join(decode(one.tokens.input_ids) for one in found)
    for message in messages[: answers[-1] + 1] if answers else []:
        given = [message["content"], message.get("reasoning_content"), message.get("tool_calls")]
        assert not lost(given, shown)
    assert not lost(
        [one["content"].rpartition("</think>")[2] for one in conversation.prompt], decode(prompt)
    )
    theirs = words([one["content"] for one in messages if one["role"] != "assistant"])
    own = json.dumps([messages[i] for i in answers])
    for one in found:
        ids, mask = one.tokens.input_ids, one.tokens.loss_mask
        learned = decode([i for i, wanted in zip(ids, mask, strict=True) if wanted])
        assert not {word for word in theirs if word in learned and word not in own}


@given(st.lists(rows(), max_size=3), st.data())
@examples(30)
def test_a_file_is_read_or_is_one_sentence(
    tmp_path_factory: pytest.TempPathFactory, given_rows: list[Any], data: st.DataObject
) -> None:
    """Bytes of a file cut, changed, packed, named otherwise."""
    suffix = data.draw(st.sampled_from([".jsonl", ".json", ".jsonl.gz", ".parquet", ".json.zst"]))
    lines = [
        json.dumps(row, indent=data.draw(st.sampled_from([None, None, 1]))) for row in given_rows
    ]
    text = "\n".join(lines) if data.draw(st.booleans()) else f"[{','.join(lines)}]"
    content = bytearray(text.encode("utf-8", "surrogatepass"))
    for _ in range(data.draw(st.integers(0, 2))):
        at = data.draw(st.integers(0, len(content)))
        content[at : at + data.draw(st.integers(0, 3))] = data.draw(st.binary(max_size=3))
    packed = gzip.compress(bytes(content)) if data.draw(st.booleans()) else bytes(content)
    packed = (
        packed[: data.draw(st.integers(0, len(packed)))] if data.draw(st.booleans()) else packed
    )
    path = tmp_path_factory.getbasetemp() / f"rows{suffix}"
    path.write_bytes(packed)
    try:
        for line, found in parse_conversations(path):
            assert line >= 1
            assert isinstance(found, Conversation) or found.reason
    except InputError as error:
        check_sentence(error)
