"""Answers of a validation as an HTML page: accepted drafts of each round, readable in grey."""

from collections.abc import Sequence
from html import escape
from typing import Any

from dflow_lightning.html import page
from dflow_lightning.training.validation import DecodedPrompt, Measured

SHOWN = 6  # prompts
PROMPT_TOKENS = 120  # of a longer prompt only the end is shown

_STYLE = """
body { font: 15px/1.7 system-ui, sans-serif; margin: 1.5em auto; max-width: 60em; padding: 0 1em;
  color: #111; background: #fff; }
h2 { font-size: 1.05em; margin: 2em 0 .3em; border-top: 1px solid #bbb; padding-top: 1em; }
h3 { font-size: .95em; margin: 1em 0 .2em; }
.text { white-space: pre-wrap; overflow-wrap: anywhere; font-family: ui-monospace, monospace;
  font-size: 14px; }
.prompt { background: #f2f2f2; padding: .5em .7em; }
.run { background: #cfe8cf; border-bottom: 2px solid #1b6e1b; }
.run::before { content: "["; color: #1b6e1b; } .run::after { content: "]"; color: #1b6e1b; }
sub { color: #1b6e1b; font-size: 70%; } .bonus { font-weight: bold;
  border-right: 1px solid #999; padding-right: 1px; margin-right: 1px; }
"""


def sample_page(tokenizer: Any, measured: Measured) -> str:
    """An HTML page of a few prompts of every family, with the relay on and off."""
    parts = [legend(measured)]
    for number in chosen(measured):
        prompt = measured.prompts[number]
        shown = prompt.token_ids[-PROMPT_TOKENS:]
        text = ("... " if len(shown) < len(prompt.token_ids) else "") + tokenizer.decode(shown)
        parts.append(f"<h2>{escape(prompt.family)} &middot; {escape(prompt.id)}</h2>")
        parts.append(f'<div class="text prompt">{escape(text)}</div>')
        for suffix, rows in measured.passes.items():
            row = next((row for row in rows if row.number == number), None)
            if row is not None:
                parts.append(answer(tokenizer, row, title(measured, suffix)))
    return page(f"Answers at step {measured.step}", parts, _STYLE)


def chosen(measured: Measured) -> list[int]:
    """Numbers of the prompts to show: the families in turn, each from its first prompt."""
    families: dict[str, list[int]] = {}
    for number, prompt in enumerate(measured.prompts):
        families.setdefault(prompt.family, []).append(number)
    deepest = max((len(numbers) for numbers in families.values()), default=0)
    turns = [n[i] for i in range(deepest) for n in families.values() if i < len(n)]
    return sorted(turns[:SHOWN], key=lambda number: measured.prompts[number].family)


def title(measured: Measured, suffix: str) -> str:
    """Heading of a pass."""
    if len(measured.passes) == 1:
        return "Answer"
    return "Relay off" if suffix else "Relay on"


def legend(measured: Measured) -> str:
    """Head of the page: tau of each pass, and how to read the answers."""
    taus = [
        f"{title(measured, suffix).lower()} {measured.metrics[name]:.2f}"
        for suffix in measured.passes
        for name in measured.metrics
        if name.endswith(f"/tau{suffix}") and name.count("/") == 1
    ]
    return (
        f"<h1>Answers at step {measured.step}</h1><p>tau over all prompts: {', '.join(taus)}.</p>"
        '<p class="text"><span class="run">drafts that were accepted</span><sub>how many</sub>'
        '<span class="bonus">token of the target</span></p>'
        "<p>Each round ends with one token of the target and a line behind it: "
        "a round of <i>a</i> accepted drafts "
        "gives <i>a</i> + 1 tokens; a target's token without brackets before it is a round whose "
        "first draft was rejected. The first token comes from the prompt alone.</p>"
    )


def answer(tokenizer: Any, row: DecodedPrompt, name: str) -> str:
    """One answer, cut into its rounds."""
    rounds = len(row.accepted)
    tau = sum(row.accepted) / rounds + 1 if rounds else 1.0
    pieces = []
    for text, accepted in cut(tokenizer, row.token_ids, row.accepted):
        if accepted:
            pieces.append(f'<span class="run">{escape(text)}</span><sub>{accepted}</sub>')
        else:
            pieces.append(f'<span class="bonus">{escape(text)}</span>')
    head = f"<h3>{escape(name)}: tau {tau:.2f}, {len(row.token_ids)} tokens in {rounds} rounds</h3>"
    return f'{head}<div class="text">{"".join(pieces)}</div>'


def cut(tokenizer: Any, ids: Sequence[int], accepted: Sequence[int]) -> list[tuple[str, int]]:
    """The text of each run of accepted drafts, with their number, and of each target's token.

    A character that several tokens spell belongs to the part that completes it.
    """
    places, at = [(1, 0)], 1
    for count in accepted:
        if count:
            places.append((at + count, count))
        places.append((at + count + 1, 0))
        at += count + 1
    parts, done = list[tuple[str, int]](), ""
    for end, count in places:
        text = tokenizer.decode(ids[:end])
        if end < len(ids):
            text = text.rstrip("\ufffd")
        parts.append((text[len(done) :], count))
        done = text
        if end >= len(ids):
            break
    return parts
