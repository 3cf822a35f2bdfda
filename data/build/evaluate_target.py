"""Judge the embedded target on held-out prompts: does it predict well, does it write coherently?

    python data/build/evaluate_target.py --corpus build/corpus --target data/tiny-qwen3 \\
        --out data/tiny-qwen3/evaluation.json

Teacher-forced on the corpus's reference answers: top-1 and negative log-likelihood in nats a token.
On the target's greedy answers: the distinct share of an answer's 4-grams, and whether it ended
within the limit. Exit code 1 when the test split misses a bar: top-1 of all its answer tokens >=
0.75, and in every family >= 80 % of the answers with at least half of their 4-grams distinct.
`test_unseen` (templates absent from training) is reported without a bar.
"""

# Shapes: B batch, S sequence, V vocabulary

import argparse
import hashlib
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path

import torch
from regenerate import (
    FAMILIES,
    MAX_NEW_TOKENS,
    Question,
    Reply,
    digest,
    generate,
    load_target,
    select,
)
from torch.nn.functional import cross_entropy
from train_target import encode
from transformers import PreTrainedTokenizerBase, Qwen3ForCausalLM

SPLITS = ("test", "test_unseen")
MIN_TOP1, MIN_DISTINCT, MIN_DISTINCT_SHARE = 0.75, 0.5, 0.8
SAMPLES = 2


@dataclass(frozen=True)
class Judgement:
    """What one held-out prompt gave: sums over its reference answer, marks of its greedy answer."""

    answer_tokens: int
    correct: int
    nll: float
    distinct: float
    finished: bool


@dataclass(frozen=True)
class Score:
    """Means over a group of prompts; top-1 and NLL weigh each answer token alike."""

    rows: int
    answer_tokens: int
    top1: float
    nll: float
    distinct_mean: float
    distinct_share: float
    finished_share: float


def distinct_ratio(token_ids: Sequence[int], n: int = 4) -> float:
    """Distinct n-grams over all n-grams; 1 for an answer too short to have one."""
    grams = list(zip(*(token_ids[i:] for i in range(n)), strict=False))
    return len(set(grams)) / len(grams) if grams else 1.0


@torch.inference_mode()
def teacher_forced(
    model: Qwen3ForCausalLM, rows: Sequence[tuple[list[int], int]], batch_size: int
) -> list[tuple[int, int, float]]:
    """Answer tokens, how many of them were the likeliest, and their summed NLL, for each row."""
    order = sorted(range(len(rows)), key=lambda i: len(rows[i][0]))
    starts = [*range(0, len(order), batch_size), len(order)]
    sums: dict[int, tuple[int, int, float]] = {}
    for start, end in pairwise(starts):
        group = order[start:end]
        width = max(len(rows[i][0]) for i in group)
        ids_BS = torch.tensor([rows[i][0] + [0] * (width - len(rows[i][0])) for i in group])
        logits_BSV = model(ids_BS[:, :-1]).logits
        labels_BS = ids_BS[:, 1:]
        nll_BS = cross_entropy(logits_BSV.transpose(1, 2), labels_BS, reduction="none")
        correct_BS = logits_BSV.argmax(-1) == labels_BS
        for b, i in enumerate(group):
            answer = slice(rows[i][1] - 1, len(rows[i][0]) - 1)
            sums[i] = (
                answer.stop - answer.start,
                int(correct_BS[b, answer].sum()),
                float(nll_BS[b, answer].sum()),
            )
    return [sums[i] for i in range(len(rows))]


def score(judgements: Sequence[Judgement]) -> Score:
    rows, tokens = len(judgements), sum(j.answer_tokens for j in judgements)
    return Score(
        rows=rows,
        answer_tokens=tokens,
        top1=sum(j.correct for j in judgements) / tokens,
        nll=sum(j.nll for j in judgements) / tokens,
        distinct_mean=sum(j.distinct for j in judgements) / rows,
        distinct_share=sum(j.distinct >= MIN_DISTINCT for j in judgements) / rows,
        finished_share=sum(j.finished for j in judgements) / rows,
    )


def judge(
    model: Qwen3ForCausalLM,
    tokenizer: PreTrainedTokenizerBase,
    questions: Sequence[Question],
    replies: Sequence[Reply],
    references: dict[str, dict],
    batch_size: int,
) -> dict[str, Score]:
    """The scores of each family and of all prompts together."""
    rows = [encode(tokenizer, references[question.id], False) for question in questions]
    judgements = [
        Judgement(*sums, distinct_ratio(reply.token_ids), reply.finished)
        for sums, reply in zip(teacher_forced(model, rows, batch_size), replies, strict=True)
    ]
    groups = {
        family: [j for q, j in zip(questions, judgements, strict=True) if q.family == family]
        for family in FAMILIES
    }
    return {family: score(group) for family, group in groups.items()} | {
        "pooled": score(judgements)
    }


def bars(scores: dict[str, Score]) -> dict[str, bool]:
    """The conditions the shipped target has to meet on the test split, and whether it does."""
    met = {f"pooled top-1 >= {MIN_TOP1}": scores["pooled"].top1 >= MIN_TOP1}
    for family in FAMILIES:
        name = f"{family}: distinct 4-grams >= {MIN_DISTINCT} in >= {MIN_DISTINCT_SHARE:.0%}"
        met[name] = scores[family].distinct_share >= MIN_DISTINCT_SHARE
    return met


def print_table(split: str, scores: dict[str, Score]) -> None:
    print(f"\n{split:<12} rows  tokens  top-1    NLL  distinct-4  >= {MIN_DISTINCT}  finished")
    for family, s in scores.items():
        print(
            f"{family:<12} {s.rows:4} {s.answer_tokens:7} {s.top1:6.3f} {s.nll:6.3f}"
            f" {s.distinct_mean:11.3f} {s.distinct_share:7.3f} {s.finished_share:9.3f}"
        )


def print_samples(
    tokenizer: PreTrainedTokenizerBase, questions: Sequence[Question], replies: Sequence[Reply]
) -> None:
    for family in FAMILIES:
        pairs = [p for p in zip(questions, replies, strict=True) if p[0].family == family]
        for question, reply in pairs[:SAMPLES]:
            end = "" if reply.finished else " [...]"
            print(f"\n--- {family} ({question.template})\n> {question.prompt}")
            print(f"{tokenizer.decode(reply.token_ids)}{end}")


def main(
    *,
    corpus: Path,
    target: Path,
    out: Path,
    per_family: int,
    max_new_tokens: int,
    batch_size: int,
    seed: int,
) -> int:
    model, tokenizer = load_target(target)
    splits: dict[str, dict[str, Score]] = {}
    for split in SPLITS:
        path = corpus / f"{split}.jsonl"
        with path.open() as file:
            references = {row["id"]: row for row in map(json.loads, file)}
        questions = select(path, per_family, tokenizer, seed, mixed=False)
        replies = generate(model, questions, max_new_tokens, batch_size)
        splits[split] = judge(model, tokenizer, questions, replies, references, batch_size)
        print_samples(tokenizer, questions, replies)
    met = bars(splits["test"])
    report = {
        "target_sha256": hashlib.sha256((target / "model.safetensors").read_bytes()).hexdigest(),
        "corpus_sha256": {s: digest((corpus / f"{s}.jsonl").read_text()) for s in SPLITS},
        "settings": {"per_family": per_family, "max_new_tokens": max_new_tokens, "seed": seed},
        "splits": {
            split: {family: asdict(s) for family, s in scores.items()}
            for split, scores in splits.items()
        },
        "bars": met,
    }
    out.write_text(json.dumps(report, indent=2) + "\n")
    for split, scores in splits.items():
        print_table(split, scores)
    print()
    for name, passed in met.items():
        print(f"{'met   ' if passed else 'MISSED'} {name}")
    return 0 if all(met.values()) else 1


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--per-family", type=int, default=200)
    parser.add_argument("--max-new-tokens", type=int, default=MAX_NEW_TOKENS)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    sys.exit(main(**vars(parser.parse_args())))
