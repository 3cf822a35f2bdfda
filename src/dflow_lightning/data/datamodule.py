"""The data of a run: files to loaders and prompts."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import torch.distributed
from lightning.pytorch import LightningDataModule
from transformers import AutoTokenizer

from dflow_lightning.data.batches import Batch, HeldOutLoader, TokenRows, TrainLoader
from dflow_lightning.data.prompts import Prompt, first_per_family, make_prompts
from dflow_lightning.data.rows import Row, check_disjoint, read_rows
from dflow_lightning.data.template import ChatEncoder, EncodedRow
from dflow_lightning.errors import InputError

__all__ = ["Batch", "ChatDataModule", "Prompt", "Split"]

ROWS_AT_ONCE = 1024  # rendered and tokenized together
Split = Literal["train", "validation", "test"]


class ChatDataModule(LightningDataModule):
    """Conversations from JSONL files.

    A row is `{"id", "family", "prompt", "answer"}` or `{"id", "family", "messages"}`.

    Args:
        train: JSONL file to train on; its answers should be the target's own.
        validation: JSONL file for the loss and for real decoding during training.
        test: JSONL file for `dflow-train test`.
        tokenizer: folder or hub id with the target's tokenizer and chat template.
        max_length: longest row allowed, in tokens.
        batch_size: rows of one step on one device.
        num_workers: processes that assemble training batches; 0 does it in the main process.
        enable_thinking: let answers begin with reasoning; false gives the empty think block.
        supervise: learn from every answer of a conversation, or from the last one.
        seed: seed of the order of training batches.
        limit_validation: at most this many validation rows of each family.
        limit_test: at most this many test rows of each family.
    """

    def __init__(
        self,
        *,
        train: Path,
        validation: Path | None = None,
        test: Path | None = None,
        tokenizer: str,
        max_length: int = 3072,
        batch_size: int = 4,
        num_workers: int = 0,
        enable_thinking: bool = False,
        supervise: Literal["all_turns", "last_turn"] = "all_turns",
        seed: int = 0,
        limit_validation: int | None = None,
        limit_test: int | None = None,
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
        self.paths: dict[Split, Path | None] = {
            "train": train,
            "validation": validation,
            "test": test,
        }
        self.limits: dict[Split, int | None] = {
            "train": None,
            "validation": limit_validation,
            "test": limit_test,
        }
        self.tokenizer_path = tokenizer
        self.max_length = max_length
        self.batch_size = batch_size
        self.num_workers = num_workers
        self.enable_thinking = enable_thinking
        self.supervise: Literal["all_turns", "last_turn"] = supervise
        self.seed = seed
        self._encoder: ChatEncoder | None = None
        self._rows: dict[Split, list[Row]] = {}
        self._tokens: dict[Split, TokenRows] = {}

    def setup(self, stage: str | None = None) -> None:
        """Read, check and tokenize what the stage needs, so that mistakes show before training."""
        if stage in (None, "fit"):
            for split in get_args(Split)[1:]:
                if self.paths[split] is not None:
                    check_disjoint(self._read("train"), self._read(split), f"data.{split}")
            self._tokenize("train")
            if self.trainer is not None and self.paths["validation"] is None:
                # Nothing was asked for; Lightning would warn about it twice.
                self.trainer.limit_val_batches = 0
        if stage in (None, "fit", "validate") and (self.paths["validation"] or stage == "validate"):
            self._tokenize("validation")
        if stage == "test" or (stage is None and self.paths["test"]):
            self._tokenize("test")

    def train_dataloader(self) -> TrainLoader:
        return TrainLoader(
            self._tokenize("train"),
            batch_size=self.batch_size,
            seed=self.seed,
            num_workers=self.num_workers,
            **_ranks(),
        )

    def val_dataloader(self) -> HeldOutLoader:
        rows = self._tokenize("validation")
        return HeldOutLoader(rows, batch_size=self.batch_size, **_ranks())

    def test_dataloader(self) -> HeldOutLoader:
        return HeldOutLoader(self._tokenize("test"), batch_size=self.batch_size, **_ranks())

    def prompts(self, split: Split, per_family: int | None = None) -> list[Prompt]:
        """A split's conversations for real decoding, cut before their last answer.

        Args:
            per_family: at most this many of each family, and always the same ones.
        """
        rows = first_per_family(self._read(split), per_family)
        return make_prompts(self._chat_encoder(), rows)

    @property
    def longest_row(self) -> int:
        """Tokens of the longest row among those that were set up; 0 before."""
        return max((int(rows.lengths.max()) for rows in self._tokens.values()), default=0)

    def _read(self, split: Split) -> list[Row]:
        path = self.paths[split]
        if path is None:
            raise InputError(f"data.{split} is not set; give a JSONL file")
        if split not in self._rows:
            rows = read_rows(Path(path).expanduser(), field=f"data.{split}")
            limit = self.limits[split]
            self._rows[split] = rows if limit is None else first_per_family(rows, limit)
        return self._rows[split]

    def _tokenize(self, split: Split) -> TokenRows:
        if split not in self._tokens:
            rows = self._read(split)
            encoder = self._chat_encoder()
            encoded = encode_rows(encoder, rows)
            self._check_lengths(encoded, rows)
            pad_id = encoder.tokenizer.pad_token_id
            self._tokens[split] = TokenRows.pack(encoded, [row.id for row in rows], pad_id or 0)
        return self._tokens[split]

    def _chat_encoder(self) -> ChatEncoder:
        if self._encoder is None:
            self._encoder = ChatEncoder(
                load_tokenizer(self.tokenizer_path),
                enable_thinking=self.enable_thinking,
                supervise=self.supervise,
            )
        return self._encoder

    def _check_lengths(self, encoded: Sequence[EncodedRow], rows: Sequence[Row]) -> None:
        lengths = [len(row.input_ids) for row in encoded]
        long = [row for row, length in zip(rows, lengths, strict=True) if length > self.max_length]
        if long:
            raise InputError(
                f"{len(long)} of {len(rows)} rows are longer than data.max_length "
                f"{self.max_length}, first {long[0].where}; raise data.max_length to "
                f"{max(lengths)} or shorten the rows"
            )


def encode_rows(encoder: ChatEncoder, rows: Sequence[Row]) -> list[EncodedRow]:
    """Token ids and loss masks of many rows.

    Raises:
        InputError: the template refuses a row, or leaves it without a supervised token.
    """
    encoded: list[EncodedRow] = []
    for start in range(0, len(rows), ROWS_AT_ONCE):
        segments = []
        for row in rows[start : start + ROWS_AT_ONCE]:
            try:
                segments.append(encoder.segments(row.messages))
            except InputError as error:
                raise InputError(f"{row.where}: {error}; mend the row or drop it") from error
        encoded += encoder.encode(segments)
    for row, tokens in zip(rows, encoded, strict=True):
        if not any(tokens.loss_mask):
            raise InputError(f"{row.where} has no supervised token; give it an answer or drop it")
    return encoded


def load_tokenizer(path: str) -> Any:
    """The tokenizer of a folder or of a hub id.

    Raises:
        InputError: there is none.
    """
    folder = Path(path).expanduser()
    # A missing folder that reads like a hub id would be looked up over the network, slowly.
    if not folder.exists() and (path.count("/") != 1 or folder.parent.exists()):
        raise InputError(
            f"model.target.path: {path} does not exist; give a model folder or a hub id"
        )
    try:
        return AutoTokenizer.from_pretrained(folder if folder.exists() else path)
    except (OSError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise InputError(
            f"model.target.path: {path} has no tokenizer that can be loaded ({reason}); "
            "give the folder of a model with its tokenizer, or a hub id"
        ) from error


def _ranks() -> dict[str, int]:
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return {"rank": 0, "world_size": 1}
    return {
        "rank": torch.distributed.get_rank(),
        "world_size": torch.distributed.get_world_size(),
    }
