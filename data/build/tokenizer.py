"""Train the embedded byte-level BPE tokenizer.

    python data/build/tokenizer.py --corpus build/corpus --out data/tiny-qwen3

The layout follows Qwen3's: ordinary tokens first, the special names after them, and a vocabulary
padded past `len(tokenizer)`, so that the mask token is `len(tokenizer)`: a row of the embedding
that no text can produce.
"""

import argparse
import json
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

SPECIAL = [
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<tool_call>",
    "</tool_call>",
    "<think>",
    "</think>",
]
LENGTH = 2032  # len(tokenizer); the model's vocabulary is padded to 2048
# Words keep their leading space, digits stand alone, runs of punctuation and of white space hold
# together.
WORDS = Regex(r"'[a-z]+| ?[^\W\d_]+|_|\d| ?[^\w\s]+|\s*\n|\s+(?!\S)|\s+")


def main(corpus: Path, out: Path) -> None:
    rows = [json.loads(line) for line in (corpus / "train.jsonl").open()]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(WORDS, behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=LENGTH - len(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((row["prompt"] + "\n" + row["answer"] for row in rows), trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        additional_special_tokens=SPECIAL,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        model_max_length=1024,
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = Path(__file__).with_name("chat_template.jinja").read_text()
    fast.save_pretrained(out)
    if len(fast) != LENGTH:
        raise SystemExit(f"the tokenizer has {len(fast)} tokens, not {LENGTH}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    main(**vars(parser.parse_args()))
