"""Build the prompts and reference answers the embedded target is trained on.

    python data/build/corpus.py --out build/corpus

Needs `reasoning-gym==0.1.25` and `chatterbot-corpus==1.3.3` (see data/README.md); nothing else in
the project does. Writes {train,validation,test,test_unseen}.jsonl, one row a line: {"id", "family",
"template", "prompt", "answer"}. A prompt belongs to exactly one split, by the hash of its text;
`test_unseen` holds the templates that appear nowhere else.
"""

import argparse
import gzip
import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from importlib.resources import files
from pathlib import Path
from random import Random

import procedural
import yaml

ROWS = {"math": 26_000, "code": 20_000, "chat": 24_000}
HELD_OUT_MATH = 10  # of the 100 gsm_symbolic templates
HELD_OUT = {"fold-product", "string-longest_word", "string-count_digits", "filter-below", "hobby"}
REAL_REPEATS = 8  # how often a real (not procedural) training row is repeated: there are few
MAX_CHARACTERS = 900

# (template, prompt, answer, whether the template is held out, whether the row is real)
Row = tuple[str, str, str, bool, bool]


def math_rows(seed: int) -> Iterator[Row]:
    import reasoning_gym

    dataset = reasoning_gym.create_dataset("gsm_symbolic", size=ROWS["math"], seed=seed)
    templates = sorted(set(dataset.task_indices))
    unseen = set(Random(seed).sample(templates, HELD_OUT_MATH))
    suffix = " Give the result as your final answer. Do not include units."
    for index, template in enumerate(dataset.task_indices):
        row = dataset[index]
        answer = row["metadata"]["answer_cot"].replace("•", "-").replace("\u00d7", "*").strip()
        question = row["question"].removesuffix(suffix)
        yield f"gsm-{template}", question, answer, template in unseen, False


def code_rows(seed: int) -> Iterator[Row]:
    archive = files("reasoning_gym") / "data" / "codeio-hq.jsonl.gz"
    for row in json.loads(gzip.decompress(archive.read_bytes())):
        code = row["code_sample"].strip()
        if len(code) < MAX_CHARACTERS - 200 and (code + row["task_description"]).isascii():
            yield "codeio", row["task_description"].strip(), f"```python\n{code}\n```", False, True
    yield from chatterbot_rows(["coding"], "coding")
    yield from procedural_rows(Random(seed + 1), procedural.CODE, ROWS["code"])


def chat_rows(seed: int) -> Iterator[Row]:
    folder = files("chatterbot_corpus") / "data" / "english"
    topics = sorted(path.name[:-4] for path in folder.iterdir() if path.name.endswith(".yml"))
    yield from chatterbot_rows([topic for topic in topics if topic != "coding"], "chatterbot")
    yield from procedural_rows(Random(seed + 2), procedural.CHAT, ROWS["chat"])


def chatterbot_rows(topics: list[str], template: str) -> Iterator[Row]:
    folder = files("chatterbot_corpus") / "data" / "english"
    for topic in topics:
        for turns in yaml.safe_load((folder / f"{topic}.yml").read_text())["conversations"]:
            turns = [str(turn).strip() for turn in turns]
            if len(turns) > 1 and turns[0] and turns[1] and "".join(turns[:2]).isascii():
                yield template, turns[0], turns[1], False, True


def procedural_rows(
    rng: Random, generators: Sequence[Callable[[Random], tuple[str, str, str]]], count: int
) -> Iterator[Row]:
    for _ in range(count):
        template, question, answer = rng.choice(generators)(rng)
        yield template, question, answer, template in HELD_OUT, False


def split_of(prompt: str) -> str:
    """The split of a prompt: 4 % validation, 4 % test, by the hash of its text."""
    bucket = int(hashlib.sha256(prompt.lower().encode()).hexdigest(), 16) % 100
    return "validation" if bucket < 4 else "test" if bucket < 8 else "train"


def main(out: Path, seed: int) -> None:
    rows: dict[str, list[dict]] = {"train": [], "validation": [], "test": [], "test_unseen": []}
    seen: set[str] = set()
    for family, source in (("math", math_rows), ("code", code_rows), ("chat", chat_rows)):
        for template, prompt, answer, unseen, real in source(seed):
            key = " ".join(prompt.lower().split())
            if len(prompt) + len(answer) > MAX_CHARACTERS or (key in seen and not real):
                continue
            split = "test_unseen" if unseen else split_of(key)
            if split != "train" and key in seen:
                continue
            seen.add(key)
            row = {
                "id": hashlib.sha256(f"{family}\n{key}".encode()).hexdigest()[:12],
                "family": family,
                "template": template,
                "prompt": prompt,
                "answer": answer,
            }
            rows[split] += [row] * (REAL_REPEATS if real and split == "train" else 1)
    out.mkdir(parents=True, exist_ok=True)
    for split, members in rows.items():
        Random(seed).shuffle(members)
        (out / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in members))
        counts = {family: sum(row["family"] == family for row in members) for family in ROWS}
        print(split, len(members), counts)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=20261129)
    main(**vars(parser.parse_args()))
