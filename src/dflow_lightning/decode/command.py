"""`dflow-train decode`: answer prompts with a target and its drafter."""

import json as jsonlib
import sys
from functools import partial
from pathlib import Path
from typing import Any, Literal

from dflow_lightning.data.prompts import Prompt, make_prompts
from dflow_lightning.data.rows import read_rows
from dflow_lightning.data.template import ChatEncoder
from dflow_lightning.decode import Completion, SpeculativeDecoder
from dflow_lightning.errors import InputError
from dflow_lightning.metrics import acceptance_summary
from dflow_lightning.target import FrozenTarget


def decode_command(
    *,
    target: str,
    drafter: Path,
    prompt: str | None = None,
    prompts: Path | None = None,
    relay: Literal["on", "off"] = "on",
    temperature: float = 0.0,
    max_new_tokens: int = 128,
    seed: int = 0,
    json: bool = False,
    thinking: bool = False,
    plain: bool = False,
) -> None:
    """Answer one prompt, or a file of them, by speculative decoding.

    Args:
        target: hub id or folder of the target.
        drafter: folder of an exported drafter.
        prompt: what the user says.
        prompts: JSONL file, each line {"prompt": "..."} or {"messages": [...]}, optionally an "id".
        relay: whether a DFlow drafter uses its relay.
        temperature: 0 is greedy; above it the target samples (the output distribution is its own).
        max_new_tokens: upper limit of an answer.
        seed: of the sampling noise.
        json: print one JSON object per prompt instead of text.
        thinking: let the target think first, where its chat template knows how.
        plain: decode with the target alone, to compare.
    """
    if temperature < 0:
        raise InputError(f"temperature is {temperature}; give 0 for greedy or a positive number")
    if max_new_tokens < 1:
        raise InputError(f"max_new_tokens is {max_new_tokens}; give 1 or more")
    if (prompt is None) == (prompts is None):
        raise InputError("prompt: give one of --prompt and --prompts")
    if prompt is not None and not prompt.strip():
        raise InputError("prompt is empty; say something to the target")
    frozen = FrozenTarget.load(target)
    requests = read_requests(prompt, prompts, frozen, thinking)
    decoder = SpeculativeDecoder.from_export(drafter, frozen)
    relay_used = relay == "on" and decoder.relay is not None and not plain
    generate = partial(decoder.generate, relay=relay_used)
    if plain:
        generate = partial(decoder.generate_plain)
    for request in requests:
        (completion,) = generate(
            [request.token_ids],
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            seeds=[seed],
        )
        row = describe(request, completion, decoder, plain, temperature, relay_used)
        if json:
            print(jsonlib.dumps(row, ensure_ascii=False), flush=True)
        else:
            show(row, named=len(requests) > 1)


def read_requests(
    prompt: str | None, prompts: Path | None, target: FrozenTarget, thinking: bool
) -> list[Prompt]:
    """The one prompt, or those of the file in its order; all of them are known to fit."""
    encoder = ChatEncoder(target.tokenizer, enable_thinking=thinking)
    if prompts is not None:
        rows = read_rows(prompts, field="prompts", need_answer=False)
        requests = make_prompts(encoder, rows)
    else:
        messages = [{"role": "user", "content": prompt or ""}]
        requests = [Prompt("prompt", "default", encoder.prompt(messages), [])]
    limit = target.config.max_position_embeddings
    for request in requests:
        if len(request.token_ids) >= limit:
            raise InputError(
                f"prompt: {request.id!r} has {len(request.token_ids)} tokens, but the context of "
                f"{target.name} ends at {limit}; shorten it"
            )
    return requests


def describe(
    request: Prompt,
    completion: Completion,
    decoder: SpeculativeDecoder,
    plain: bool,
    temperature: float,
    relay_used: bool,
) -> dict[str, Any]:
    """One prompt's answer and what it took; plain decoding has no drafts to count."""
    num_drafts = decoder.drafter.dims.block_size - 1
    summary = None if plain else acceptance_summary([completion.accepted], num_drafts)
    ids = completion.token_ids
    return {
        "id": request.id,
        "text": decoder.target.tokenizer.decode(ids, skip_special_tokens=True),
        "token_ids": ids,
        "finish_reason": completion.finish_reason,
        "accepted": None if plain else completion.accepted,
        "tau": summary and summary.tau,
        "rounds": summary and summary.rounds,
        "acceptance": "sample_match" if temperature > 0 else "greedy",
        "relay": "on" if relay_used else "off",
        "seconds": completion.seconds,
        "tokens_per_second": len(ids) / max(completion.seconds, 1e-9),
    }


def show(row: dict[str, Any], *, named: bool) -> None:
    """The answer on stdout; what it took on stderr, so that a pipe carries the answer alone."""
    if named:
        print(f"--- {row['id']}")
    print(row["text"], flush=True)
    how = "plain decoding"
    if row["tau"] is not None:
        how = f"tau {row['tau']:.2f}, {row['rounds']} rounds, relay {row['relay']}"
    speed = f"{len(row['token_ids'])} tokens, {row['tokens_per_second']:.1f} tokens/s"
    print(f"[{how}, {speed}]", file=sys.stderr, flush=True)
