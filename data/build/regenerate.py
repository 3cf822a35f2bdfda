"""Replace the corpus's answers by the target's own: a drafter learns what its target says.

    python data/build/regenerate.py --corpus build/corpus --target data/tiny-qwen3 \\
        --out data/tiny-qwen3/prompts --train-per-family 2000

Writes {train,validation,test,test_unseen}.jsonl and manifest.json. A row is {"id", "family",
"template", "prompt", "answer", "temperature", "finished"}. About half of the train rows are decoded
greedily, the others at temperature 1: which ones, and with which noise, follows from the seed and
the row's id alone. Held-out rows are decoded greedily. Train rows that did not end within the limit
are dropped, held-out ones kept as "finished": false. Rows whose text would not tokenise to the
generated tokens again are dropped everywhere: training reads text and must see what the target
produced.
"""

# Shapes: B batch, S sequence, V vocabulary, L answer limit

import argparse
import hashlib
import json
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

import torch
from transformers import AutoTokenizer, DynamicCache, PreTrainedTokenizerBase, Qwen3ForCausalLM

FAMILIES = ("math", "code", "chat")
SPLITS = ("train", "validation", "test", "test_unseen")
COUNTED = (
    "rows",
    "answer_tokens",
    "temperature_1",
    "unfinished",
    "dropped_unfinished",
    "dropped_not_reversible",
)
MAX_NEW_TOKENS = 160


@dataclass(frozen=True)
class Question:
    """A prompt of the corpus and how it is to be answered."""

    id: str
    family: str
    template: str
    prompt: str
    token_ids: tuple[int, ...]
    temperature: int = 0
    seed: str = ""


@dataclass(frozen=True)
class Reply:
    """Generated tokens, without the one that ends them; `finished` says whether it came."""

    token_ids: list[int]
    finished: bool


def load_target(folder: Path) -> tuple[Qwen3ForCausalLM, PreTrainedTokenizerBase]:
    """The target in fp32 and its tokenizer."""
    model = Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model.eval(), AutoTokenizer.from_pretrained(folder)


def render(
    tokenizer: PreTrainedTokenizerBase, prompt: str, answer: str | None = None
) -> tuple[int, ...]:
    """Token ids of the prompt up to the answer, thinking off, or of the whole exchange."""
    messages = [{"role": "user", "content": prompt}]
    if answer is not None:
        messages.append({"role": "assistant", "content": answer})
    text = tokenizer.apply_chat_template(
        messages, add_generation_prompt=answer is None, enable_thinking=False, tokenize=False
    )
    return tuple(tokenizer(text, add_special_tokens=False).input_ids)


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def chosen_templates(corpus: Path, count: int, seed: int) -> set[str]:
    """The math templates that drafters train on: a seeded choice of those the target knows."""
    with (corpus / "train.jsonl").open() as file:
        names = {row["template"] for row in map(json.loads, file) if row["family"] == "math"}
    return set(sorted(names, key=lambda name: digest(f"{seed} template {name}"))[:count])


def select(
    path: Path,
    per_family: int,
    tokenizer: PreTrainedTokenizerBase,
    seed: int,
    *,
    mixed: bool,
    math_templates: set[str] | None,
) -> list[Question]:
    """Distinct prompts of a split, `per_family` of each, in the order of their seeded hash."""
    with path.open() as file:
        rows = {
            row["id"]: row
            for row in map(json.loads, file)
            if row["family"] != "math"
            or math_templates is None
            or row["template"] in math_templates
        }
    order = sorted(rows, key=lambda row_id: digest(f"{seed} order {row_id}"))
    taken: Counter[str] = Counter()
    questions = []
    for row_id in order:
        row = rows[row_id]
        if taken[row["family"]] == per_family:
            continue
        taken[row["family"]] += 1
        sampled = mixed and int(digest(f"{seed} temperature {row_id}"), 16) % 2
        questions.append(
            Question(
                id=row_id,
                family=row["family"],
                template=row["template"],
                prompt=row["prompt"],
                token_ids=render(tokenizer, row["prompt"]),
                temperature=int(sampled),
                seed=f"{seed} noise {row_id}",
            )
        )
    return questions


def pick(logits_BV: torch.Tensor, sampled_B: torch.Tensor, uniform_B: torch.Tensor) -> torch.Tensor:
    """The next token of each row: the likeliest, or by inverting its cumulative distribution."""
    greedy_B = logits_BV.argmax(-1)
    if not sampled_B.any():
        return greedy_B
    cumulative_BV = logits_BV.double().softmax(-1).cumsum(-1)
    threshold_B = uniform_B * cumulative_BV[:, -1]
    drawn_B = torch.searchsorted(cumulative_BV, threshold_B[:, None], right=True)[:, 0]
    return torch.where(sampled_B, drawn_B.clamp(max=logits_BV.shape[-1] - 1), greedy_B)


@torch.inference_mode()
def decode_batch(
    model: Qwen3ForCausalLM, questions: Sequence[Question], max_new_tokens: int
) -> list[Reply]:
    """Answer a batch, prompts padded on the left; rows leave it as they finish."""
    width = max(len(question.token_ids) for question in questions)
    pad, stop = model.config.pad_token_id, model.config.eos_token_id
    ids_BS = torch.tensor([[pad] * (width - len(q.token_ids)) + [*q.token_ids] for q in questions])
    mask_BS = torch.tensor(
        [[0] * (width - len(q.token_ids)) + [1] * len(q.token_ids) for q in questions]
    )
    position_BS = (mask_BS.cumsum(-1) - 1).clamp(min=0)
    sampled_B = torch.tensor([question.temperature > 0 for question in questions])
    sources = [Random(question.seed) for question in questions]
    uniform_BL = torch.tensor(
        [[source.random() for _ in range(max_new_tokens)] for source in sources],
        dtype=torch.float64,
    )
    replies = [Reply([], False) for _ in questions]
    active_B = torch.arange(len(questions))
    cache = DynamicCache(config=model.config)
    for step in range(max_new_tokens):
        logits_BV = model(
            ids_BS, attention_mask=mask_BS, position_ids=position_BS, cache=cache, logits_to_keep=1
        ).logits[:, -1]
        token_B = pick(logits_BV, sampled_B[active_B], uniform_BL[active_B, step])
        for row, token in zip(active_B.tolist(), token_B.tolist(), strict=True):
            if token == stop:
                replies[row] = Reply(replies[row].token_ids, True)
            else:
                replies[row].token_ids.append(token)
        going_B = token_B.ne(stop).nonzero()[:, 0]
        if not len(going_B):
            break
        if len(going_B) < len(active_B):
            cache.batch_select_indices(going_B)
        active_B, ids_BS = active_B[going_B], token_B[going_B, None]
        mask_BS = torch.nn.functional.pad(mask_BS[going_B], (0, 1), value=1)
        position_BS = position_BS[going_B, -1:] + 1
    return replies


def generate(
    model: Qwen3ForCausalLM, questions: Sequence[Question], max_new_tokens: int, batch_size: int
) -> list[Reply]:
    """Answer all questions, those with prompts of like length together."""
    order = sorted(range(len(questions)), key=lambda i: (len(questions[i].token_ids), i))
    replies: dict[int, Reply] = {}
    for start in range(0, len(order), batch_size):
        group = order[start : start + batch_size]
        batch = [questions[i] for i in group]
        replies.update(zip(group, decode_batch(model, batch, max_new_tokens), strict=True))
    return [replies[i] for i in range(len(questions))]


def reads_back(
    tokenizer: PreTrainedTokenizerBase, question: Question, reply: Reply, answer: str
) -> bool:
    """Whether the rendered exchange holds exactly the generated tokens, none of them special."""
    special = set(tokenizer.all_special_ids)
    if any(token in special or token >= len(tokenizer) for token in reply.token_ids):
        return False
    generated = (*reply.token_ids, tokenizer.eos_token_id)
    ids = render(tokenizer, question.prompt, answer)
    length = len(question.token_ids) + len(generated)
    return ids[:length] == question.token_ids + generated


def rows_of(
    questions: Sequence[Question],
    replies: Sequence[Reply],
    tokenizer: PreTrainedTokenizerBase,
    keep_unfinished: bool,
) -> tuple[list[dict], dict[str, Counter[str]]]:
    """The rows to write, and per family how many were kept and dropped, and why."""
    rows, counts = [], {family: Counter(dict.fromkeys(COUNTED, 0)) for family in FAMILIES}
    for question, reply in zip(questions, replies, strict=True):
        answer = str(tokenizer.decode(reply.token_ids))
        count = counts[question.family]
        if not reads_back(tokenizer, question, reply, answer):
            count["dropped_not_reversible"] += 1
            continue
        if not reply.finished and not keep_unfinished:
            count["dropped_unfinished"] += 1
            continue
        count["rows"] += 1
        count["answer_tokens"] += len(reply.token_ids) + reply.finished
        count["temperature_1"] += question.temperature
        count["unfinished"] += not reply.finished
        rows.append(
            {
                "id": question.id,
                "family": question.family,
                "template": question.template,
                "prompt": question.prompt,
                "answer": answer,
                "temperature": question.temperature,
                "finished": reply.finished,
            }
        )
    return rows, counts


def check_disjoint(questions: dict[str, list[Question]]) -> None:
    """Stop when two splits share a prompt, letter case and white space aside."""
    owner: dict[str, str] = {}
    for split, members in questions.items():
        for question in members:
            key = digest(" ".join(question.prompt.lower().split()))
            if owner.setdefault(key, split) != split:
                raise SystemExit(f"prompt {question.id} is in both {owner[key]} and {split}")


def main(
    *,
    corpus: Path,
    target: Path,
    out: Path,
    train_per_family: int,
    validation_per_family: int,
    test_per_family: int,
    unseen_per_family: int,
    math_templates: int,
    max_new_tokens: int,
    batch_size: int,
    seed: int,
) -> None:
    model, tokenizer = load_target(target)
    templates = chosen_templates(corpus, math_templates, seed)
    sizes = (train_per_family, validation_per_family, test_per_family, unseen_per_family)
    questions = {
        split: select(
            corpus / f"{split}.jsonl",
            size,
            tokenizer,
            seed,
            mixed=split == "train",
            math_templates=None if split == "test_unseen" else templates,
        )
        for split, size in zip(SPLITS, sizes, strict=True)
    }
    check_disjoint(questions)
    out.mkdir(parents=True, exist_ok=True)
    manifest: dict[str, dict | str] = {
        "target_sha256": hashlib.sha256((target / "model.safetensors").read_bytes()).hexdigest(),
        "settings": {
            "per_family": dict(zip(SPLITS, sizes, strict=True)),
            "math_templates": sorted(templates),
            "max_new_tokens": max_new_tokens,
            "enable_thinking": False,
            "seed": seed,
        },
    }
    written, files = {}, {}
    for split, members in questions.items():
        start = time.perf_counter()
        replies = generate(model, members, max_new_tokens, batch_size)
        rows, counts = rows_of(members, replies, tokenizer, keep_unfinished=split != "train")
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (out / f"{split}.jsonl").write_text(text)
        written[split] = {family: dict(count) for family, count in counts.items()}
        files[f"{split}.jsonl"] = digest(text)
        tokens, seconds = sum(len(r.token_ids) for r in replies), time.perf_counter() - start
        print(f"{split}: {len(rows)} rows, {tokens:,} tokens in {seconds:.0f} s", flush=True)
        for family, count in counts.items():
            print(f"  {family}: {dict(count)}", flush=True)
    manifest |= {"counts": written, "files": files}
    (out / "manifest.json").write_text(json.dumps(manifest, indent=2) + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--train-per-family", type=int, default=2000)
    parser.add_argument("--validation-per-family", type=int, default=64)
    parser.add_argument("--test-per-family", type=int, default=64)
    parser.add_argument("--unseen-per-family", type=int, default=32)
    parser.add_argument("--math-templates", type=int, default=20)
    parser.add_argument("--max-new-tokens", type=int, default=MAX_NEW_TOKENS)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    main(**vars(parser.parse_args()))
