"""Eight conversations in Qwen3's format, and how their golden masks are made.

python tests/data/qwen3_cases.py --tokenizer FOLDER_OF_QWEN3 > tests/data/qwen3_masks.json
"""

import argparse
import json
from collections.abc import Sequence
from itertools import groupby
from typing import Any

from conversations import assistant, system, user

from dflow_lightning.data.template import ChatEncoder
from dflow_lightning.data.turns import training_rows

CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 2, "b": 3}}}
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds two numbers. It never says <|im_end|>.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
    },
}
REASONED = "<think>\nTwo and three.\n</think>\n\nFive."
CASES: dict[str, tuple[bool, list[dict[str, Any]], list[Any]]] = {
    "think": (True, [user("2+3?"), assistant(REASONED)], []),
    "no think": (False, [user("Hi"), assistant("Hello.")], []),
    "multi-turn": (
        True,
        [user("2+3?"), assistant(REASONED), user("Sure?"), assistant(REASONED), user("Ok?"),
         assistant("Yes.")], [],
    ),
    "tool call": (
        False,
        [user("2+3?"), assistant("") | {"tool_calls": [CALL]},
         {"role": "tool", "content": "5"}, assistant("It is 5."), user("Thanks"),
         assistant("Welcome.")], [ADD],
    ),
    "system": (False, [system("Be brief."), user("Hi"), assistant("Hello.")], []),
    "empty answer": (False, [user("Say nothing."), assistant("")], []),
    "unicode": (False, [user("你好 🙂"), assistant("héllo \ue000 🙂 नमस्ते")], []),
    "special tokens as text": (
        False,
        [user("<|im_end|>\n<|im_start|>assistant\n<think>"),
         assistant("I write <|im_end|> and <|endoftext|>."),
         user("</think>"), assistant("Fine.")], [],
    ),
}  # fmt: skip


def rows_of(tokenizer: Any, name: str) -> list[dict[str, Any]]:
    """What `training_rows` makes of a case."""
    thinking, messages, tools = CASES[name]
    encoder = ChatEncoder(tokenizer, enable_thinking=thinking)
    return [
        {
            "turn": row.turn,
            "text": tokenizer.decode(row.tokens.input_ids),
            "supervised": stretches(tokenizer, row.tokens.input_ids, row.tokens.loss_mask),
            "input_ids": row.tokens.input_ids,
            "loss_mask": [int(one) for one in row.tokens.loss_mask],
        }
        for row in training_rows(encoder, messages, tools)
    ]


def stretches(tokenizer: Any, ids: Sequence[int], mask: Sequence[bool]) -> list[str]:
    """The decoded text of each supervised stretch."""
    groups = groupby(zip(mask, ids, strict=True), key=lambda pair: pair[0])
    return [tokenizer.decode([token for _, token in pairs]) for wanted, pairs in groups if wanted]


if __name__ == "__main__":
    from transformers import AutoTokenizer

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokenizer", required=True)
    qwen3 = AutoTokenizer.from_pretrained(parser.parse_args().tokenizer)
    lines = [
        f"  {json.dumps(name)}: [\n    "
        + ",\n    ".join(json.dumps(row, ensure_ascii=False) for row in rows_of(qwen3, name))
        + "\n  ]"
        for name in CASES
    ]
    print("{\n" + ",\n".join(lines) + "\n}")
