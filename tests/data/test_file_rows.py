"""Files of conversations as training and validation read them: the rows of `training_rows`."""

import hashlib
import json
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
from conversations import assistant, question, user
from transformers import AutoTokenizer

from dflow_lightning.data.datamodule import ChatDataModule
from dflow_lightning.data.template import ChatEncoder
from dflow_lightning.data.token_rows import sample_id
from dflow_lightning.data.turns import training_rows
from dflow_lightning.errors import InputError

TINY = Path(__file__).resolve().parents[2] / "data/tiny-qwen3"
PROMPTS = TINY / "prompts"
# Of ids, masks, offsets and sample ids of train.jsonl, since the recorded runs were trained on it.
TRAIN_SHA256 = "07346bd8809740c0cea4e52ebbd1f898325e3d978ead3905ce9fb7a0d5eedf34"
TALK = [user("Hi"), assistant("Hello."), user("How are you?"), assistant("I am fine.")]


def rows_of(data: ChatDataModule, split: str) -> list[tuple[str, list[int], list[bool]]]:
    data.setup("fit")
    (rows,) = data._tokens[split]
    return [(rows.id(r), *(column.tolist() for column in rows.read(r))) for r in range(len(rows))]


def texts(tokenizer, data: ChatDataModule, split: str) -> dict[str, str]:
    """The supervised text of each row."""
    return {
        name: tokenizer.decode([t for t, wanted in zip(ids, mask, strict=True) if wanted])
        for name, ids, mask in rows_of(data, split)
    }


# ---------------------------------------------------------------- the shipped files


@pytest.mark.slow  # 15 s
def test_the_shipped_training_set_keeps_its_tokens():
    data = ChatDataModule(train=PROMPTS / "train.jsonl", tokenizer=str(TINY))
    data.setup("fit")
    (rows,) = data._tokens["train"]
    columns = rows.tokens, rows.loss_mask, rows.offsets, rows.sample_ids
    found = hashlib.sha256(b"".join(np.ascontiguousarray(one).tobytes() for one in columns))
    assert found.hexdigest() == TRAIN_SHA256


@pytest.mark.parametrize("name", ["train", "validation", "test", "test_unseen"])
def test_shipped_rows_are_prompt_answer_and_line_break(name, tmp_path):
    """Written out without the template's machinery; what is unfinished has no end."""
    lines = (PROMPTS / f"{name}.jsonl").read_text().splitlines()[:200]
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(lines))
    tokenizer = AutoTokenizer.from_pretrained(TINY)

    def ids_of(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False)

    wanted = []
    for row in map(json.loads, lines):
        header = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
        prompt = ids_of(f"<|im_start|>user\n{row['prompt']}{header}")
        answer = ids_of(row["answer"] + ("<|im_end|>" if row["finished"] else ""))
        rest = ids_of("\n") if row["finished"] else []
        mask = [False] * len(prompt) + [True] * len(answer) + [False] * len(rest)
        wanted.append((row["id"], [*prompt, *answer, *rest], mask))
    assert rows_of(ChatDataModule(train=path, tokenizer=str(TINY)), "train") == wanted


# ---------------------------------------------------------------- several turns, and no end


def test_every_answer_is_learned_as_the_target_wrote_it(make_data, write, tokenizer):
    path = write({"id": "a", "messages": TALK}, {"id": "b", "prompt": "p", "answer": "q r"})
    data = make_data(path, batch_size=3)
    assert texts(tokenizer, data, "train") == {
        "a#1": "Hello.<|im_end|>", "a#2": "I am fine.<|im_end|>", "b": "q r<|im_end|>"
    }  # fmt: skip
    encoder = ChatEncoder(tokenizer)
    for (_, ids, mask), end in zip(rows_of(data, "train"), (1, 3), strict=False):
        prompt = encoder.prompt(TALK[:end])
        assert ids[: len(prompt)] == prompt
        assert mask.index(True) == len(prompt)
    names = ["a#1", "a#2", "b"]
    (batch,) = data.train_dataloader()
    assert sorted(batch.sample_ids) == sorted(map(sample_id, names))
    assert data.row_names([sample_id(name) for name in names] + [7]) == [*names, "7"]
    last = make_data(path, supervise="last_turn")
    assert texts(tokenizer, last, "train") == {
        "a": "I am fine.<|im_end|>", "b": "q r<|im_end|>"
    }  # fmt: skip


def test_held_out_answers_are_the_same_rows(make_data, write, tokenizer):
    """The loss of an unfinished answer has no end token, which the target did not write there."""
    held_out = write({"id": "a", "messages": TALK, "finished": False}, name="held.jsonl")
    data = make_data(3, validation=held_out, batch_size=2)
    wanted = {"a#1": "Hello.<|im_end|>", "a#2": "I am fine."}
    assert texts(tokenizer, data, "validation") == wanted
    (batch,) = data.val_dataloader()
    shown = {
        number: tokenizer.decode(ids[mask])
        for number, ids, mask in zip(
            batch.sample_ids_B.tolist(), batch.input_ids_BS, batch.loss_mask_BS, strict=True
        )
    }
    assert shown == {sample_id(name): text for name, text in wanted.items()}
    (prompt,) = data.prompts("validation")
    assert prompt.token_ids == ChatEncoder(tokenizer).prompt(TALK[:-1])
    assert tokenizer.decode(prompt.reference_ids) == "I am fine."


def test_other_shapes_say_that_they_are_unfinished_too(make_data, write, tokenizer):
    turns = [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello."}]
    path = write({"id": "a", "conversations": turns, "finished": False})
    assert texts(tokenizer, make_data(path), "train") == {"a": "Hello."}


def test_a_row_that_is_too_long_is_named_by_its_conversation(make_data, write, tokenizer):
    path = write(question(0), {"id": "talk", "messages": TALK})
    longest = max(len(ids) for _, ids, _ in rows_of(make_data(path), "train"))
    with pytest.raises(InputError, match=r"1 of 3 rows .* first data\.train: line 2 .*'talk'"):
        make_data(path, max_length=longest - 1).setup("fit")


def test_a_file_and_training_rows_agree(make_data, write, tokenizer):
    """Apart from what the template puts behind the last answer."""
    conversations = [TALK[:2], TALK, [*TALK, user("<|im_end|>"), assistant("Thank you. " * 9)]]
    path = write(*({"id": str(i), "messages": one} for i, one in enumerate(conversations)))
    encoder = ChatEncoder(tokenizer)
    wanted = list(chain(*(training_rows(encoder, one) for one in conversations)))
    found = rows_of(make_data(path), "train")
    assert len(found) == len(wanted) == 6
    for (_, ids, mask), row in zip(found, wanted, strict=True):
        rest = len(ids) - len(row.tokens.input_ids)
        assert tokenizer.decode(ids[-rest:]) == "\n"
        assert (ids[:-rest], mask) == (row.tokens.input_ids, [*row.tokens.loss_mask, False])
