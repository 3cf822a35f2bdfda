"""`dflow-train decode`: answer prompts with a target and its drafter."""

import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from dflow_lightning.commandline.grouped import grouped
from dflow_lightning.commandline.json_output import JsonOutput
from dflow_lightning.data.conversations import Conversation, read_conversations
from dflow_lightning.data.prompts import Prompt, make_prompts
from dflow_lightning.data.template import ChatEncoder
from dflow_lightning.decode import Completion, Request, SpeculativeDecoder
from dflow_lightning.decode.engine import Acceptance
from dflow_lightning.decode.rounds import Backend
from dflow_lightning.decode.tree import check_tree_settings
from dflow_lightning.errors import InputError, check_counts
from dflow_lightning.formats.drafter_folder import read_export_config
from dflow_lightning.models.device import Dtype, choose_device
from dflow_lightning.models.target import FrozenTarget
from dflow_lightning.tensors.metrics import acceptance_summary


@dataclass(frozen=True, kw_only=True)
class PromptOptions:
    """What is asked.

    Args:
        prompt: what the user says.
        prompts: JSONL file, each line {"prompt": "..."} or {"messages": [...]}, optionally an "id".
    """

    prompt: str | None = None
    prompts: Path | None = None


@dataclass(frozen=True, kw_only=True)
class SamplingOptions:
    """How tokens are chosen.

    Args:
        temperature: 0 is greedy; above it the target samples (the output distribution is its own).
        top_k: sample among the k most likely tokens; 0 takes all.
        top_p: sample among the most likely tokens that together reach this probability.
        max_new_tokens: upper limit of an answer.
        seed: of the sampling noise.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    max_new_tokens: int = 128
    seed: int = 0


@dataclass(frozen=True, kw_only=True)
class RoundOptions:
    """How rounds run.

    Args:
        concurrency: prompts of a file that are answered at the same time.
        acceptance: `match` accepts drafts that equal the target's own choice, `rejection` is
            rejection sampling; both are lossless.
        backend: `eager`, `compiled`, or `package`, the compiled draft step of the export.
        tree_nodes: verify the most probable drafts as a tree of so many tokens, the anchor among
            them, in place of a chain; for DFlash and DFlow, eager, by match.
    """

    concurrency: int = 1
    acceptance: Acceptance = "match"
    backend: Backend = "eager"
    tree_nodes: int | None = None


@grouped
def decode_command(
    *,
    target: str,
    drafter: Path,
    asked: PromptOptions,
    relay: Literal["on", "off"] = "on",
    sampling: SamplingOptions,
    rounds: RoundOptions,
    json: Path | None = None,
    thinking: bool = False,
    plain: bool = False,
    device: str = "auto",
    dtype: Dtype = "auto",
) -> None:
    """Answer one prompt, or a file of them, by speculative decoding.

    Args:
        target: hub id or folder of the target.
        drafter: folder of an exported drafter.
        relay: whether a DFlow drafter uses its relay.
        json: also write one JSON object per prompt to this file, a line each; without a file name
            print them on standard output instead of text.
        thinking: let the target think first, where its chat template knows how.
        plain: decode with the target alone, to compare.
        device: `cpu`, `cuda`, or one GPU such as `cuda:1`; auto is the GPU where there is one.
        dtype: of the target's weights; auto is bfloat16 on a GPU and float32 on a CPU.
    """
    if (asked.prompt is None) == (asked.prompts is None):
        raise InputError("prompt: give one of --prompt and --prompts")
    if asked.prompt is not None and not asked.prompt.strip():
        raise InputError("prompt is empty; say something to the target")
    check_counts(concurrency=rounds.concurrency)
    if plain and rounds.backend == "package":
        raise InputError(
            "backend is package, which drafts; choose eager or compiled for plain decoding"
        )
    check_tree_settings(rounds.tree_nodes, rounds.acceptance, rounds.backend, speculative=not plain)
    result_json = JsonOutput(json)
    settings = asdict(sampling)
    Request(prompt_ids=[0], **settings)  # refuses bad settings before anything is loaded
    read_export_config(drafter)
    rows = None
    if asked.prompts is not None:
        rows = read_conversations(
            asked.prompts, field="prompts", need_answer=False, keep_repeats=True
        )
    frozen = FrozenTarget.load(target, device=choose_device(device), dtype=dtype)
    requests = read_requests(asked.prompt, rows, frozen, thinking)
    decoder = SpeculativeDecoder.from_export(drafter, frozen)
    relay_used = relay == "on" and decoder.relay is not None and not plain
    options: dict[str, Any] = {
        "speculative": not plain, "use_rejected": relay_used, "backend": rounds.backend,
        "tree_nodes": rounds.tree_nodes,
    }  # fmt: skip
    waiting = [Request(prompt_ids=one.token_ids, **settings) for one in requests]
    rule = "rejection" if rounds.acceptance == "rejection" else "sample_match"
    rule = rule if sampling.temperature > 0 else "greedy"
    for first in range(0, len(waiting), rounds.concurrency):
        part = slice(first, first + rounds.concurrency)
        completions = decoder.run(
            waiting[part], batch_size=rounds.concurrency, acceptance=rounds.acceptance, **options
        )
        for request, completion in zip(requests[part], completions, strict=True):
            row = describe(request, completion, decoder, plain, rule, relay_used)
            row["tree_nodes"] = rounds.tree_nodes
            result_json.write_line(row)
            if not result_json.on_stdout:
                show_answer(row, named=len(requests) > 1)


def read_requests(
    prompt: str | None, rows: list[Conversation] | None, target: FrozenTarget, thinking: bool
) -> list[Prompt]:
    """The one prompt, or those of a file's rows in their order; all of them are known to fit."""
    encoder = ChatEncoder(target.tokenizer, enable_thinking=thinking, vocab_size=target.vocab_size)
    if rows is not None:
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
    rule: str,
    relay_used: bool,
) -> dict[str, Any]:
    """One prompt's answer and what it took; plain decoding has no drafts to count."""
    num_drafts = decoder.drafter.dims.block_size - 1
    summary = None if plain else acceptance_summary([completion.accepted], num_drafts)
    ids = completion.token_ids
    return {
        "id": request.id,
        "text": decoder.text(completion),
        "token_ids": ids,
        "finish_reason": completion.finish_reason,
        "accepted": None if plain else completion.accepted,
        "tau": summary and summary.tau,
        "rounds": summary and summary.rounds,
        "acceptance": rule,
        "relay": "on" if relay_used else "off",
        "seconds": completion.seconds,
        # An answer of one token comes with the prompt: no round ran, and there is no rate.
        "tokens_per_second": len(ids) / completion.seconds if completion.seconds else None,
    }


def show_answer(row: dict[str, Any], *, named: bool) -> None:
    """The answer on stdout; what it took on stderr, so that a pipe carries the answer alone."""
    if named:
        print(f"--- {row['id']}")
    print(row["text"], flush=True)
    how = "plain decoding"
    if row["tau"] is not None:
        how = f"tau {row['tau']:.2f}, {row['rounds']} rounds, relay {row['relay']}"
    speed = f"{len(row['token_ids'])} tokens"
    if row["tokens_per_second"] is not None:
        speed += f", {row['tokens_per_second']:.1f} tokens/s"
    print(f"[{how}, {speed}]", file=sys.stderr, flush=True)
