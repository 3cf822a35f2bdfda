"""Copy the measured figures into data/README.md, between its `<!-- name -->` marks.

    python data/build/fill_readme.py --target data/tiny-qwen3 --readme data/README.md

Reads the target's evaluation.json and prompts/manifest.json, and refuses figures of other weights.
"""

import argparse
import hashlib
import json
from pathlib import Path


def evaluation_table(evaluation: dict) -> str:
    lines = [
        "| split | family | prompts | answer tokens | top-1 | NLL (nats) | distinct 4-grams, mean |"
        " answers with >= half distinct | finished |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for split, scores in evaluation["splits"].items():
        for family, s in scores.items():
            lines.append(
                f"| {split} | {family} | {s['rows']} | {s['answer_tokens']:,} | {s['top1']:.3f} |"
                f" {s['nll']:.3f} | {s['distinct_mean']:.3f} | {s['distinct_share']:.1%} |"
                f" {s['finished_share']:.1%} |"
            )
    lines += ["", "Bars, on the test split:", ""]
    lines += [f"- {name}: {'met' if met else 'missed'}" for name, met in evaluation["bars"].items()]
    return "\n".join(lines)


def prompts_table(manifest: dict) -> str:
    lines = [
        "| split | family | rows | answer tokens | at temperature 1 | unfinished |"
        " dropped: unfinished | dropped: not reversible |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for split, families in manifest["counts"].items():
        for family, c in families.items():
            lines.append(
                f"| {split} | {family} | {c['rows']:,} | {c['answer_tokens']:,} |"
                f" {c['temperature_1']:,} | {c['unfinished']} | {c['dropped_unfinished']} |"
                f" {c['dropped_not_reversible']} |"
            )
    return "\n".join(lines)


def fill(text: str, name: str, content: str) -> str:
    """`text` with what stands between the marks of `name` replaced."""
    start, end = f"<!-- {name} -->", f"<!-- /{name} -->"
    before, found_start, rest = text.partition(start)
    _, found_end, after = rest.partition(end)
    if not (found_start and found_end):
        raise SystemExit(f"the readme has no marks {start} ... {end}")
    return f"{before}{start}\n{content}\n{end}{after}"


def main(target: Path, readme: Path) -> None:
    weights = hashlib.sha256((target / "model.safetensors").read_bytes()).hexdigest()
    text = readme.read_text()
    for name, path, table in (
        ("evaluation", target / "evaluation.json", evaluation_table),
        ("prompts", target / "prompts" / "manifest.json", prompts_table),
    ):
        report = json.loads(path.read_text())
        if report["target_sha256"] != weights:
            raise SystemExit(f"{path} was made with other weights than {target}'s: make it again")
        text = fill(text, name, table(report))
    readme.write_text(text)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--readme", type=Path, required=True)
    main(**vars(parser.parse_args()))
