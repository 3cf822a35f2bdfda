"""A source to a prepared folder: looked through, answered, written."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflow_lightning.data.conversations import ConversationReader, SeenIds
from dflow_lightning.data.prepared import (
    REJECTS,
    PreparedWriter,
    finish,
    is_prepared,
    prompt_hashes,
    read_manifest,
)
from dflow_lightning.data.shapes import Reject
from dflow_lightning.data.template import ChatEncoder
from dflow_lightning.errors import InputError
from dflow_lightning.files import staged_folder
from dflow_lightning.prepare.dialogue import Dialogue, Generator, Sampling
from dflow_lightning.prepare.journal import Journal, OtherSettingsError, difference
from dflow_lightning.prepare.progress import PrepareProgress
from dflow_lightning.prepare.rows import RowMaker, RowOptions, write_rows
from dflow_lightning.prepare.source import (
    Source,
    conversation_hash,
    conversations,
    prompt_hash,
)

# Part of a prepared folder's identity. Raise it when the same source, target and settings give
# other rows; tests/data/test_golden_rows.py holds this version's rows and fails when they change.
ROWS_VERSION = 1


@dataclass(frozen=True, kw_only=True)
class Preparation:
    """All that a prepared folder is made of.

    Args:
        out: the folder to come.
        generator: who answers; None keeps the answers of the source.
        sampling: how to answer; None keeps the answers of the source.
        held_out: prepared folders whose prompts must not be trained on.
        max_reject_share: share of rejects among all rows above which nothing is written.
        described: what else the manifest says, about the target and its tokenizer.
    """

    source: Source
    out: Path
    encoder: ChatEncoder
    stop_ids: tuple[int, ...]
    options: RowOptions
    generator: Generator | None
    sampling: Sampling | None
    held_out: tuple[Path, ...]
    max_reject_share: float
    described: dict[str, Any]

    @property
    def partial(self) -> Path:
        """Where the answers are while they are not complete."""
        return self.out.with_name(self.out.name + ".partial")

    @property
    def samples(self) -> int:
        """Dialogues per conversation."""
        return self.sampling.samples_per_prompt if self.sampling else 1

    def asked(self) -> dict[str, Any]:
        """What the answers depend on, as JSON gives it back."""
        asked = {
            "source": self.source.describe(),
            **self.described,
            "generator": self.generator.describe() if self.generator else {"kind": "kept"},
            "sampling": self.sampling.describe() if self.sampling else None,
            "held_out": sorted(read_manifest(one, "held_out")["key"] for one in self.held_out),
        }
        return json.loads(json.dumps(asked))

    def settings(self) -> dict[str, Any]:
        """What the folder depends on."""
        return {**self.asked(), "rows": self.options.describe(), "rows_version": ROWS_VERSION}

    def is_done(self, overwrite: bool) -> bool:
        """Whether the folder is there, made with these settings.

        Raises:
            InputError: it was made with others, and may not be overwritten.
        """
        if not is_prepared(self.out):
            return False
        known, asked = read_manifest(self.out, "out"), self.settings()
        if changed := difference({key: known.get(key) for key in asked}, asked):
            if not overwrite:
                raise OtherSettingsError(
                    f"out: {self.out} was made with {changed}; name another --out, or give "
                    "--overwrite"
                )
            return False
        return True

    def run(self, overwrite: bool = False) -> dict[str, Any]:
        """Read, answer and write, from where an earlier run stopped; returns the manifest.

        Raises:
            InputError: the source, the server or too many rows do not fit.
        """
        asked = self.asked()
        try:
            opened = Journal(self.partial / "answers.sqlite", asked)
        except OtherSettingsError:
            if not overwrite:
                raise
            shutil.rmtree(self.partial)
            opened = Journal(self.partial / "answers.sqlite", asked)
        with closing(opened) as journal:
            try:
                num_rows = self._scan(journal)
            except InputError:  # nothing is answered yet
                shutil.rmtree(self.partial)
                raise
            if self.generator and self.sampling:
                self._answer(self.generator, self.sampling, journal, num_rows)
            manifest = self._write(journal, num_rows)
        shutil.rmtree(self.partial)
        self._reader().rejects_path.unlink(missing_ok=True)  # they stand in the folder
        return manifest

    def _scan(self, journal: Journal) -> int:
        """Look all rows through before any is answered; returns how many there are."""
        if (known := journal.meta("num_rows")) is not None:
            return known
        reader = self._reader(journal.reject)
        held_out = _HeldOut(self.held_out)
        # Other answers to the same prompt are new only where they are kept.
        hash_of = prompt_hash if self.generator else conversation_hash
        with closing(SeenIds()) as seen:
            for conversation in reader:
                if earlier := seen.add(str(hash_of(conversation)), reader.line):
                    reject = Reject("duplicate", f"it says the same as line {earlier}")
                elif prompt_hash(conversation) in held_out:
                    reject = Reject("held out", "its prompt also stands in a set of held_out")
                else:
                    continue
                journal.reject(reader.line, reject, counted=False)
        journal.set_meta("num_rows", reader.num_rows)
        journal.commit()
        return reader.num_rows

    def _reader(self, on_reject: Callable[[int, Reject], None] | None = None) -> ConversationReader:
        return ConversationReader(
            self.source.path,
            out=self.out,
            max_reject_share=self.max_reject_share,
            rows=self.source.rows,
            on_reject=on_reject,
        )

    def _answer(
        self, generator: Generator, sampling: Sampling, journal: Journal, num_rows: int
    ) -> None:
        """Let the target answer whatever has no answers yet."""
        total = journal.num_asked(num_rows) * self.samples
        before = journal.count_answers()[0]
        if before == total:
            return
        allowed = self.max_reject_share * num_rows * self.samples
        progress = PrepareProgress("answers", total, before)

        def done(dialogue: Dialogue) -> None:
            answers = list(dialogue.answers.values())
            journal.add(dialogue.line, dialogue.sample, answers)
            progress.retries = getattr(generator, "retries", 0)
            progress.count(sum(len(one.token_ids) for one in answers))

        def failed(dialogue: Dialogue, error: str) -> None:
            journal.fail(dialogue.line, dialogue.sample, error)
            progress.count(0, failed=True)
            if progress.failed > allowed:
                raise InputError(
                    f"data: {progress.failed} of {total} conversations got no answer, more than "
                    f"max_reject_share {self.max_reject_share:.3g} allows, the last (line "
                    f"{dialogue.line}) because {error}; run the same command again to try them "
                    "again"
                )

        with progress:
            generator.run(self._dialogues(journal, sampling), done, failed)

    def _dialogues(self, journal: Journal, sampling: Sampling) -> Iterator[Dialogue]:
        for line, conversation in conversations(self.source):
            if journal.is_rejected(line):
                continue
            for sample in range(sampling.samples_per_prompt):
                if not journal.is_answered(line, sample):
                    yield Dialogue(line, sample, conversation, self.encoder, sampling)

    def _write(self, journal: Journal, num_rows: int) -> dict[str, Any]:
        """The folder, from the journal alone: an interruption costs only this step."""
        maker = RowMaker(self.encoder, self.options, self.stop_ids)
        total = journal.num_asked(num_rows)
        with staged_folder(self.out) as folder:
            writer = PreparedWriter(folder)
            with PrepareProgress("rows", total * self.samples) as progress:
                write_rows(self.source, journal, maker, writer, self.sampling, progress)
            files = writer.close()
            self._check_rejects(journal, num_rows * self.samples)
            with (folder / REJECTS).open("w", encoding="utf-8") as file:
                for reject in journal.rejects():
                    file.write(json.dumps(reject) + "\n")
            settings = self.settings()
            rejects = journal.count_rejects()
            counts = {"source_rows": num_rows, **maker.counts, "rejects": rejects}
            finish(folder, {"key": key_of(settings), **settings, "counts": counts}, files)
        return read_manifest(self.out)

    def _check_rejects(self, journal: Journal, num_rows: int) -> None:
        count, reason, first = journal.worst()
        if count > self.max_reject_share * num_rows:
            raise InputError(
                f"data: {count} of {num_rows} rows of {self.source.path} are rejected, more than "
                f"the {self.max_reject_share:.3g} allowed by max_reject_share, most often for "
                f"{reason!r}, first {first}; what is answered is kept in {self.partial}"
            )
        if sum(journal.count_rejects().values()) >= num_rows:
            reason = next(iter(journal.count_rejects()), "")
            raise InputError(
                f"data: no row of {self.source.path} is left, most often for {reason!r}; give "
                "other rows or settings"
            )


class _HeldOut:
    """Prompts of prepared folders, by their hashes."""

    def __init__(self, folders: tuple[Path, ...]) -> None:
        import numpy as np

        found = [np.fromiter(prompt_hashes(folder), np.int64) for folder in folders]
        self._known = np.unique(np.concatenate(found)) if found else np.zeros(0, np.int64)

    def __contains__(self, value: int) -> bool:
        at = int(self._known.searchsorted(value))
        return at < len(self._known) and int(self._known[at]) == value


def key_of(settings: dict[str, Any]) -> str:
    """One hash for all that a folder depends on."""
    text = json.dumps(settings, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()
