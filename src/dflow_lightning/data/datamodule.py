"""The data of a run: turns files and prepared folders into loaders and prompts."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal, get_args

import numpy as np
import torch.distributed
from lightning.pytorch import LightningDataModule

from dflow_lightning.data.batches import HeldOutLoader, TrainLoader
from dflow_lightning.data.conversations import Conversation, warn
from dflow_lightning.data.prompts import Prompt, first_per_family, make_prompts, prepared_prompts
from dflow_lightning.data.sets import check_disjoint, check_manifest, encode_rows, read_set
from dflow_lightning.data.tasks import TaskName, task_prompts
from dflow_lightning.data.template import ChatEncoder
from dflow_lightning.data.token_rows import (
    Batch,
    ChainedRows,
    PreparedRows,
    RowSource,
    TokenRows,
)
from dflow_lightning.data.tokenizer import embedding_rows, load_tokenizer
from dflow_lightning.data.turns import Supervise
from dflow_lightning.errors import InputError

__all__ = ["Batch", "ChatDataModule", "Prompt", "Split"]

Split = Literal["train", "validation", "test"]


class ChatDataModule(LightningDataModule):
    """Conversations from prepared folders and from files.

    A folder is what `dflow-train prepare` writes; its rows stay on disk. A row of a file is
    `{"id", "family", "prompt", "answer"}` or `{"id", "family", "messages"}`, or one of the shapes
    that prepare reads; files are tokenized at the start and held in memory. A conversation of a
    file gives the rows that prepare would make of it with `--keep_answers`.

    Args:
        train: folder or file to train on, or several; the answers should be the target's own.
        train_weights: share of each training set in an epoch, one positive number a set; by default
            every row once.
        validation: folder or file for the loss and for real decoding during training.
        test: folder or file for `dflow-train test`.
        tokenizer: folder or hub id with the target's tokenizer and chat template.
        max_length: longest row allowed, in tokens.
        batch_size: rows of one step on one device.
        pack: put several conversations into each training row of max_length tokens; none sees
            another. A row's blocks, model.num_anchors of them, are shared by its conversations.
        num_workers: processes that assemble training batches; 0 does it in the main process.
        enable_thinking: let answers begin with reasoning; false gives the empty think block.
        supervise: learn from every answer of a conversation, or from the last one.
        seed: seed of the order of training batches.
        limit_validation: at most this many validation rows of each family.
        limit_test: at most this many test rows of each family.
        validation_tasks: benchmark tasks whose prompts (first turns) are also decoded in
            validation, as `val/<task>/tau`.
        validation_suite_dir: folder with a JSONL file for each of these tasks; by default they come
            from the hub.
    """

    def __init__(
        self,
        *,
        train: Path | list[Path],
        train_weights: list[float] | None = None,
        validation: Path | None = None,
        test: Path | None = None,
        tokenizer: str,
        max_length: int = 3072,
        batch_size: int = 4,
        pack: bool = False,
        num_workers: int = 0,
        enable_thinking: bool = False,
        supervise: Supervise = "all_turns",
        seed: int = 0,
        limit_validation: int | None = None,
        limit_test: int | None = None,
        validation_tasks: list[TaskName] = [],  # noqa: B006  (read, never changed)
        validation_suite_dir: Path | None = None,
    ) -> None:
        super().__init__()
        at_least = {
            "max_length": (max_length, 2),
            "batch_size": (batch_size, 1),
            "num_workers": (num_workers, 0),
            "seed": (seed, 0),
            "limit_validation": (limit_validation, 1),
            "limit_test": (limit_test, 1),
        }
        for name, (value, least) in at_least.items():
            if value is not None and value < least:
                raise InputError(f"data.{name} is {value}; give {least} or more")
        self.paths: dict[Split, list[Path]] = {  # from Python texts come too
            "train": [Path(one) for one in (train if isinstance(train, list) else [train])],
            "validation": [] if validation is None else [Path(validation)],
            "test": [] if test is None else [Path(test)],
        }
        self.limits: dict[Split, int | None] = {
            "train": None,
            "validation": limit_validation,
            "test": limit_test,
        }
        check_sets(self.paths["train"], train_weights)
        if validation_tasks and validation is None:
            raise InputError(
                "data.validation_tasks are given but data.validation is not; validation needs rows "
                "for its loss, give a few"
            )
        self.train_weights = train_weights
        self.tokenizer_path = tokenizer
        self.max_length = max_length
        self.batch_size = batch_size
        self.pack = pack
        self.num_workers = num_workers
        self.enable_thinking = enable_thinking
        self.supervise: Supervise = supervise
        self.seed = seed
        self.validation_tasks, self.validation_suite_dir = validation_tasks, validation_suite_dir
        self._encoder: ChatEncoder | None = None
        self._sets: dict[Path, list[Conversation] | PreparedRows] = {}
        self._tokens: dict[Split, list[RowSource]] = {}

    def setup(self, stage: str | None = None) -> None:
        """Read, check and tokenize what the stage needs, so that mistakes show before training."""
        if stage in (None, "fit"):
            self._check_disjoint()
            self._sources("train")
            if self.trainer is not None and not self.paths["validation"]:
                # Nothing was asked for; Lightning would warn about it twice.
                self.trainer.limit_val_batches = 0
        if stage in (None, "fit", "validate") and (self.paths["validation"] or stage == "validate"):
            self._sources("validation")
        if stage == "test" or (stage is None and self.paths["test"]):
            self._sources("test")

    def train_dataloader(self) -> TrainLoader:
        sources = self._sources("train")
        return TrainLoader(
            ChainedRows(sources) if len(sources) > 1 else sources[0],
            sizes=tuple(map(len, sources)),
            weights=None if self.train_weights is None else tuple(self.train_weights),
            batch_size=self.batch_size,
            width=self.max_length if self.pack else None,
            seed=self.seed,
            pad_id=self._pad_id,
            num_workers=self.num_workers,
            **_ranks(),
        )

    def val_dataloader(self) -> HeldOutLoader:
        return self._held_out("validation")

    def test_dataloader(self) -> HeldOutLoader:
        return self._held_out("test")

    def _held_out(self, split: Split) -> HeldOutLoader:
        (rows,) = self._sources(split)
        return HeldOutLoader(rows, batch_size=self.batch_size, pad_id=self._pad_id, **_ranks())

    def prompts(self, split: Split, per_family: int | None = None) -> list[Prompt]:
        """A split's conversations for real decoding, cut before their last answer.

        Args:
            per_family: at most this many of each family or task, and always the same ones.
        """
        prompts: list[Prompt] = []
        for rows in self._read(split):
            if isinstance(rows, PreparedRows):
                prompts += prepared_prompts(rows, self._first(rows, split, per_family))
            else:
                limited = first_per_family(rows, self.limits[split])
                prompts += make_prompts(self._chat_encoder(), first_per_family(limited, per_family))
        if split == "validation" and self.validation_tasks:
            prompts += task_prompts(
                self.validation_tasks,
                self._chat_encoder(),
                limit=per_family,
                suite_dir=self.validation_suite_dir,
                max_length=self.max_length,
                field="data.validation_tasks",
            ).prompts
        return prompts

    def row_names(self, sample_ids: Sequence[int]) -> list[str]:
        """The ids of training rows; the sample id as text where no row has it."""
        names: dict[int, str] = {}
        for rows in self._sources("train"):
            (found,) = np.nonzero(np.isin(rows.sample_ids, list(sample_ids)))
            names |= {int(rows.sample_ids[row]): rows.id(int(row)) for row in found}
        return [names.get(number, str(number)) for number in sample_ids]

    @property
    def longest_row(self) -> int:
        """Tokens of the longest conversation among those that were set up; 0 before."""
        found = [int(rows.lengths.max()) for each in self._tokens.values() for rows in each]
        return max(found, default=0)

    @property
    def train_size(self) -> tuple[int, int]:
        """Rows and tokens of the training sets, each row once."""
        sources = self._sources("train")
        return sum(map(len, sources)), sum(int(rows.lengths.sum()) for rows in sources)

    @property
    def _pad_id(self) -> int:
        return self._chat_encoder().tokenizer.pad_token_id or 0

    def _read(self, split: Split) -> list[list[Conversation] | PreparedRows]:
        """The sets of a split, as they are stored."""
        if not self.paths[split]:
            raise InputError(f"data.{split} is not set; give a prepared folder or a JSONL file")
        for path in self.paths[split]:
            if path not in self._sets:
                rows = read_set(path, f"data.{split}")
                if isinstance(rows, PreparedRows):
                    check_manifest(rows, self._chat_encoder(), f"data.{split}")
                self._sets[path] = rows
        return [self._sets[path] for path in self.paths[split]]

    def _first(self, rows: PreparedRows, split: Split, count: int | None) -> list[int]:
        """Numbers of at most `count` rows a family among those that the split is limited to."""
        limited = first_per_family(rows.names(), self.limits[split])
        return [row.number for row in first_per_family(limited, count)]

    def _sources(self, split: Split) -> list[RowSource]:
        """The token rows of every set of a split."""
        if split not in self._tokens:
            self._tokens[split] = [self._tokenize(rows, split) for rows in self._read(split)]
        return self._tokens[split]

    def _tokenize(self, rows: list[Conversation] | PreparedRows, split: Split) -> RowSource:
        limit = self.limits[split]
        if isinstance(rows, PreparedRows):
            folder = rows.folder
            self._check_lengths(rows, lambda row: f"data.{split}: row {row + 1} of {folder}")
            self._check_tokens(rows, lambda row: f"data.{split}: row {row + 1} of {folder}")
            return rows if limit is None else rows.in_memory(self._first(rows, split, limit))
        rows = rows if limit is None else first_per_family(rows, limit)
        encoded = encode_rows(self._chat_encoder(), rows, self.supervise)
        tokens = TokenRows.pack([row.tokens for row in encoded], (row.id for row in encoded))
        self._check_lengths(tokens, lambda row: encoded[row].where)
        if len(bare := tokens.without_anchor()):
            said = (
                f"{encoded[int(bare[0])].where} has no two supervised tokens side by side, so no "
                f"block can begin in it; {len(bare)} of {len(tokens)} rows are like it"
            )
            if len(bare) == len(tokens):
                raise InputError(f"{said}; give longer answers")
            warn(f"{said}; nothing is learned from them")
        return tokens

    def _chat_encoder(self) -> ChatEncoder:
        if self._encoder is None:
            self._encoder = ChatEncoder(
                load_tokenizer(self.tokenizer_path),
                enable_thinking=self.enable_thinking,
                vocab_size=embedding_rows(self.tokenizer_path),
            )
        return self._encoder

    def _check_disjoint(self) -> None:
        for split in get_args(Split)[1:]:
            if self.paths[split]:
                for held_out in self._read(split):
                    for train in self._read("train"):
                        check_disjoint(train, held_out, self._chat_encoder, f"data.{split}")

    def _check_tokens(self, rows: RowSource, where: Callable[[int], str]) -> None:
        encoder = self._chat_encoder()
        if not encoder.may_exceed:
            return  # nothing on the disk is read
        for row in range(len(rows)):
            try:
                encoder.check_tokens(rows.read(row)[0].tolist())
            except InputError as error:
                raise InputError(f"{where(row)}: {error}") from error

    def _check_lengths(self, rows: RowSource, where: Callable[[int], str]) -> None:
        """`where` names a row."""
        (long,) = np.nonzero(rows.lengths > self.max_length)
        if len(long):
            raise InputError(
                f"{len(long)} of {len(rows)} rows are longer than data.max_length "
                f"{self.max_length}, first {where(int(long[0]))}; raise data.max_length to "
                f"{rows.lengths.max()} or shorten the rows"
            )


def check_sets(paths: list[Path], weights: list[float] | None) -> None:
    """Raise `InputError` unless there are sets, each named once, and weights fit them."""
    if not paths:
        raise InputError("data.train is empty; give a prepared folder or a JSONL file")
    if len(set(paths)) < len(paths):
        raise InputError("data.train names a set twice; name it once and give train_weights")
    if weights is None:
        return
    if len(weights) != len(paths):
        raise InputError(
            f"data.train_weights has {len(weights)} numbers for {len(paths)} sets; give one a set"
        )
    if not all(0 < weight < float("inf") for weight in weights):
        raise InputError(f"data.train_weights are {weights}; give positive numbers")


def _ranks() -> dict[str, int]:
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return {"rank": 0, "world_size": 1}
    return {
        "rank": torch.distributed.get_rank(),
        "world_size": torch.distributed.get_world_size(),
    }
