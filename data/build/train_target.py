"""Train the embedded target from scratch: a `Qwen3ForCausalLM` of about three million parameters.

    python data/build/train_target.py --corpus build/corpus --out data/tiny-qwen3

About 50 minutes on 2 cores; `--out` holds the tokenizer already. Rows are rendered with the chat
template, thinking off (a tenth of the math rows with the working as thinking), and batched by
length. Answers carry the loss; prompts a tenth of it.
"""

# Shapes: B batch, S sequence, V vocabulary

import argparse
import json
import math
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random

import torch
from torch.nn.functional import cross_entropy
from transformers import (
    AutoTokenizer,
    PreTrainedTokenizerBase,
    Qwen3Config,
    Qwen3ForCausalLM,
)

PROMPT_WEIGHT = 0.1
BATCH_TOKENS = 6_144
PEAK_LR, WARMUP_STEPS, WEIGHT_DECAY = 4e-3, 100, 0.1

# Token ids of a rendered row and how many of them are its prompt
Encoded = tuple[list[int], int]


def config(tokenizer: PreTrainedTokenizerBase) -> Qwen3Config:
    return Qwen3Config(
        vocab_size=2048,
        hidden_size=160,
        intermediate_size=480,
        num_hidden_layers=8,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 1_000_000.0},
        attention_dropout=0.0,
        bos_token_id=None,
        eos_token_id=tokenizer.convert_tokens_to_ids("<|im_end|>"),
        pad_token_id=tokenizer.convert_tokens_to_ids("<|endoftext|>"),
        dtype="float32",
    )


def encode(tokenizer: PreTrainedTokenizerBase, row: dict, thinking: bool) -> Encoded:
    """A corpus row, rendered; with `thinking` a math row's working becomes the reasoning."""
    user = [{"role": "user", "content": row["prompt"]}]
    prompt = tokenizer.apply_chat_template(
        user, add_generation_prompt=True, enable_thinking=thinking, tokenize=False
    )
    answer = row["answer"]
    if thinking:
        working, _, result = answer.rpartition("\n####")
        answer = f"<think>\n{working.strip()}\n</think>\n\nThe answer is {result.strip()}."
    prompt_ids = tokenizer(prompt, add_special_tokens=False).input_ids
    answer_ids = tokenizer(answer + "<|im_end|>", add_special_tokens=False).input_ids
    return prompt_ids + answer_ids, len(prompt_ids)


def load(path: Path, tokenizer: PreTrainedTokenizerBase, rng: Random) -> list[Encoded]:
    with path.open() as file:
        rows = [json.loads(line) for line in file]
    return [encode(tokenizer, row, row["family"] == "math" and rng.random() < 0.1) for row in rows]


def batches(rows: list[Encoded], rng: Random) -> Iterator[list[Encoded]]:
    """Endless batches of about `BATCH_TOKENS` padded tokens, rows of like length together."""
    while True:
        order = sorted(
            range(len(rows)), key=lambda i: (len(rows[i][0]) + rng.randint(0, 12), rng.random())
        )
        groups: list[list[int]] = []
        group: list[int] = []
        for index in order:
            width = max(len(rows[index][0]), max((len(rows[i][0]) for i in group), default=0))
            if group and width * (len(group) + 1) > BATCH_TOKENS:
                groups.append(group)
                group = []
            group.append(index)
        groups.append(group)
        rng.shuffle(groups)
        for group in groups:
            yield [rows[i] for i in group]


def tensors(batch: list[Encoded], pad: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids, padded on the right, and the loss weight of each token."""
    width = max(len(ids) for ids, _ in batch)
    ids_BS = torch.full((len(batch), width), pad)
    weight_BS = torch.zeros(len(batch), width)
    for i, (ids, prompt) in enumerate(batch):
        ids_BS[i, : len(ids)] = torch.tensor(ids)
        weight_BS[i, 1:prompt] = PROMPT_WEIGHT
        weight_BS[i, prompt : len(ids)] = 1.0
    return ids_BS, weight_BS


def schedule(step: int, steps: int) -> float:
    """Linear warm-up, then cosine to one per cent of the peak."""
    if step < WARMUP_STEPS:
        return (step + 1) / WARMUP_STEPS
    progress = math.pi * (step - WARMUP_STEPS) / (steps - WARMUP_STEPS)
    return 0.01 + 0.99 * 0.5 * (1 + math.cos(progress))


def main(corpus: Path, out: Path, steps: int, seed: int) -> None:
    torch.manual_seed(seed)
    rng = Random(seed)
    tokenizer = AutoTokenizer.from_pretrained(out)
    model = Qwen3ForCausalLM(config(tokenizer))
    decayed = [p for p in model.parameters() if p.ndim > 1]
    other = [p for p in model.parameters() if p.ndim < 2]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": WEIGHT_DECAY}, {"params": other, "weight_decay": 0.0}],
        lr=PEAK_LR,
        betas=(0.9, 0.95),
        fused=True,
    )
    rows = load(corpus / "train.jsonl", tokenizer, rng)
    parameters, tokens = sum(p.numel() for p in model.parameters()), sum(len(r) for r, _ in rows)
    print(f"{parameters:,} parameters, {tokens:,} tokens", flush=True)
    source, seen, start = batches(rows, rng), 0, time.time()
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = PEAK_LR * schedule(step, steps)
        ids_BS, weight_BS = tensors(next(source), tokenizer.pad_token_id)
        logits_BSV = model(input_ids=ids_BS[:, :-1]).logits
        losses = cross_entropy(logits_BSV.flatten(0, 1), ids_BS[:, 1:].flatten(), reduction="none")
        loss = (losses * weight_BS[:, 1:].flatten()).sum() / weight_BS[:, 1:].sum()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        seen += ids_BS.numel()
        if step % 20 == 0 or step == steps - 1:
            speed = seen / (time.time() - start)
            print(f"step {step} loss {loss.item():.4f} tokens {seen:,} ({speed:.0f}/s)", flush=True)
        if step % 200 == 199 and step < steps - 1:
            torch.save(model.state_dict(), out / "last.pt")
    model.to(torch.bfloat16).save_pretrained(out)
    (out / "last.pt").unlink(missing_ok=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=1_800)
    parser.add_argument("--seed", type=int, default=1)
    main(**vars(parser.parse_args()))
