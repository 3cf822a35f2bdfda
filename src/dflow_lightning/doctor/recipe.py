"""What `dflow-train doctor --config` checks before the target's weights are loaded.

    data files     are there
    target         its tokenizer, and an architecture that can be tapped and rewound
    template       tells roles apart, begins an answer, and ends it with a token that stops
    prepared data  were prepared with this tokenizer, template and thinking flag
    batches        rows read, fit data.max_length, and are not also in validation
    masks          the prompt is not learned and the answer is
    thinking       the answers think if data.enable_thinking says so
    mask id        no pad, no end, no token of any text

Shapes: B batch, S sequence.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dflow_lightning.checks import DoubtError, FailedError, SkippedError, Step
from dflow_lightning.data.datamodule import Batch, ChatDataModule
from dflow_lightning.data.prepared import is_prepared, read_manifest
from dflow_lightning.data.sets import check_manifest
from dflow_lightning.data.template import ChatEncoder
from dflow_lightning.data.token_rows import PreparedRows
from dflow_lightning.data.tokenizer import end_token_id, load_tokenizer, stop_token_ids
from dflow_lightning.doctor.environment import Environment
from dflow_lightning.models.dims import DrafterConfig, DrafterDims
from dflow_lightning.models.target import FrozenTarget
from dflow_lightning.plan.command import empty_target
from dflow_lightning.terminal import shown

NUM_BATCHES = 8  # of the first epoch, looked at for masks and mask id
END_OF_THINKING = "</think>"


class Preflight:
    """The parts of a recipe, each made when the first check asks for it."""

    def __init__(self, environment: Environment) -> None:
        self.environment, self.recipe = environment, environment.recipe
        self.eagle3 = self.recipe.method == "eagle3"

    @cached_property
    def target_path(self) -> str:
        return str(self.recipe.model.target.path)

    @cached_property
    def tokenizer(self) -> Any:
        return load_tokenizer(self.target_path)

    @cached_property
    def empty_target(self) -> FrozenTarget:
        """The target without weights, with its tokenizer."""
        tokenizer = self.tokenizer  # first: what it says of a missing target names the fix
        model = empty_target(self.target_path, None).model
        return FrozenTarget(model, tokenizer, self.target_path)

    @cached_property
    def encoder(self) -> ChatEncoder:
        return ChatEncoder(self.tokenizer, enable_thinking=self.recipe.data.enable_thinking)

    @cached_property
    def data(self) -> ChatDataModule:
        return ChatDataModule(**self.recipe.data.as_dict())

    @cached_property
    def batches(self) -> list[Batch]:
        """The first ones of the training."""
        return list(islice(iter(self.data.train_dataloader()), NUM_BATCHES))

    @property
    def sets(self) -> dict[Path, str]:
        """Every path of the data section, and the setting that names it."""
        found = {}
        for field in ("train", "validation", "test"):
            given = self.recipe.data[field]
            for path in given if isinstance(given, list) else [given] if given else []:
                found[Path(path).expanduser()] = f"data.{field}"
        return found


def documents(batch: Batch) -> Iterator[tuple[Tensor, Tensor]]:
    """Ids and loss mask, `[S]` each, of every document; padding behind unpacked rows included."""
    if batch.documents is None:
        yield from zip(batch.input_ids_BS, batch.loss_mask_BS, strict=True)
        return
    rows = zip(batch.input_ids_BS, batch.loss_mask_BS, *batch.documents, strict=True)
    for ids_S, mask_S, starts_S, samples_S in rows:
        for start in starts_S.unique().tolist():
            inside_S = starts_S == start
            if samples_S[start] >= 0:  # else it is padding
                yield ids_S[inside_S], mask_S[inside_S]


def check_data_files(preflight: Preflight) -> str:
    """Every path that the recipe names."""
    missing = [f"{field}: {path}" for path, field in preflight.sets.items() if not path.exists()]
    if missing:
        raise FailedError(f"{', '.join(missing)} does not exist; fix the path or prepare the data")
    first = shown(next(iter(preflight.sets)))
    return first + (f" and {len(preflight.sets) - 1} more" if len(preflight.sets) > 1 else "")


def check_target(preflight: Preflight) -> str:
    """What can be known without the weights."""
    found = preflight.empty_target
    return f"{type(found.model).__name__}, {found.num_layers} layers, vocabulary {found.vocab_size}"


def check_template(preflight: Preflight) -> str:
    """Rendered with a conversation whose texts are easy to find."""
    encoder = preflight.encoder
    texts = ["One", "Two", "Three"]
    messages = [
        {"role": role, "content": text}
        for role, text in zip(("user", "assistant", "user"), texts, strict=True)
    ]
    rendered = "".join(segment.text for segment in encoder.segments(messages))
    before = []
    for text in texts:
        head, found, rendered = rendered.partition(text)
        if not found:
            raise FailedError(
                f"target: the chat template leaves out {text!r} of {texts}; use the target's own"
            )
        before.append(head)
    fix = "put the target's own chat_template.jinja into its folder"
    if before[1] == before[2]:
        raise FailedError(
            f"target: the chat template writes {before[1]!r} before a user's text and before an "
            f"assistant's, so the target cannot tell who speaks; {fix}"
        )
    prompt = "".join(
        segment.text for segment in encoder.segments(messages[:1], answer_next=True)
    ).rpartition(texts[0])[2]
    if not prompt.strip():
        raise FailedError(
            f"target: the chat template does not begin an answer (add_generation_prompt); {fix}"
        )
    stops = stop_token_ids(preflight.target_path, preflight.tokenizer)
    end = preflight.tokenizer.decode([end_token_id(encoder, stops)])
    return f"tells roles apart, begins an answer and ends it with {end}"


def check_prepared_data(preflight: Preflight) -> str:
    """The manifests of prepared folders."""
    folders = {path: field for path, field in preflight.sets.items() if is_prepared(path)}
    if not folders:
        return "none: all data are files, and tokenized at the start"
    for path, field in folders.items():
        check_manifest(PreparedRows(path), preflight.encoder, field)
    rows = sum(record["rows"] for path in folders for record in read_manifest(path)["files"])
    return f"{rows} rows with this tokenizer, template and thinking flag"


def check_batches(preflight: Preflight) -> str:
    """The data as `fit` sets them up, and the first batches."""
    preflight.data.setup("fit")
    shape = tuple(preflight.batches[0].input_ids_BS.shape)
    longest, limit = preflight.data.longest_row, preflight.recipe.data.max_length
    context = preflight.empty_target.config.max_position_embeddings
    if longest > context:
        raise FailedError(
            f"the longest row has {longest} tokens, but the target's context ends at {context}; "
            "shorten the rows"
        )
    return f"the first is {shape[0]} x {shape[1]} tokens, the longest row {longest} of {limit}"


def check_masks(preflight: Preflight) -> str:
    """Every conversation begins with a header that nobody learns, and has an answer."""
    rows = [mask_S for batch in preflight.batches for _, mask_S in documents(batch)]
    begun = sum(bool(mask_S[0]) for mask_S in rows)
    if begun:
        raise FailedError(
            f"{begun} of {len(rows)} rows learn from their first token, so the prompt is in the "
            "loss mask (all ones?); prepare the data again with dflow-train prepare"
        )
    empty = sum(not bool(mask_S.any()) for mask_S in rows)
    fix = "look at one with dflow-train inspect, and prepare the data again"
    if empty == len(rows):
        raise FailedError(f"no row has a supervised token (loss mask all zeros); {fix}")
    if empty:
        raise DoubtError(f"{empty} of {len(rows)} rows have no supervised token; {fix}")
    short = sum(int(mask_S.sum()) < 2 for mask_S in rows)
    if short == len(rows):
        raise FailedError(f"no row has two supervised tokens, which a block needs; {fix}")
    share = float(torch.cat([mask_S.float() for mask_S in rows]).mean())
    return f"{share:.0%} of the tokens of {len(rows)} rows are learned, no prompt among them"


def check_thinking(preflight: Preflight) -> str:
    """What is learned of the first batches against data.enable_thinking."""
    enabled = preflight.recipe.data.enable_thinking
    if END_OF_THINKING not in str(preflight.tokenizer.chat_template):
        raise SkippedError("the chat template knows no thinking")
    learned = [ids_S[mask_S] for batch in preflight.batches for ids_S, mask_S in documents(batch)]
    think = sum(END_OF_THINKING in preflight.tokenizer.decode(ids.tolist()) for ids in learned)
    summary = f"data.enable_thinking is {enabled}, and {think} of {len(learned)} answers think"
    if enabled != bool(think):
        raise DoubtError(
            f"{summary}; set data.enable_thinking to {not enabled}, or let the target answer again "
            "with dflow-train prepare"
        )
    return summary


def check_mask_id(preflight: Preflight) -> str:
    """The drafter's dimensions with it, and no row that holds it."""
    if preflight.eagle3:
        return "none: EAGLE-3 drafts without a mask token"
    config = DrafterConfig(**preflight.recipe.model.drafter.as_dict())
    found = DrafterDims.resolve(config, preflight.empty_target).mask_token_id
    special = stop_token_ids(preflight.target_path, preflight.tokenizer)
    if found in special:
        raise FailedError(
            f"drafter.mask_token_id is {found}, at which the target stops; "
            "give the id of a row that no text produces"
        )
    used = any(bool((ids_S == found).any()) for b in preflight.batches for ids_S, _ in documents(b))
    if used:
        raise FailedError(
            f"drafter.mask_token_id is {found}, which the training data contain; "
            "give the id of a row that no text produces"
        )
    return f"{found}, of {len(preflight.tokenizer)} tokens; no row has it"


RECIPE = {
    "data files": Step(check_data_files),
    "target": Step(check_target),
    "template": Step(check_template, ("target",)),
    "prepared data": Step(check_prepared_data, ("data files", "target", "template")),
    "batches": Step(check_batches, ("data files", "target", "template", "prepared data")),
    "masks": Step(check_masks, ("batches",)),
    "thinking": Step(check_thinking, ("batches",)),
    "mask id": Step(check_mask_id, ("target", "batches")),
}
