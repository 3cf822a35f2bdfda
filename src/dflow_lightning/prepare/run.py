"""From a source to a prepared folder: scan the rows, have them answered, write them.

The source is read once for each of these and once for its checksum, always by the one reader of
data/conversations.py, so that memory stays flat however large it is.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from dflow_lightning.data.conversations import (
    Conversation,
    ConversationReader,
    Reject,
    SeenIds,
    Source,
    conversation_hash,
    conversations,
    prompt_hash,
)
from dflow_lightning.data.prepared import (
    REJECTS,
    PreparedRow,
    PreparedWriter,
    finish,
    is_prepared,
    prompt_hashes,
    read_manifest,
)
from dflow_lightning.data.template import ASSISTANT_TOKENS, ChatEncoder, Message
from dflow_lightning.data.turns import (
    Supervise,
    TargetAnswer,
    TurnRow,
    named,
    num_anchors,
    training_rows,
    with_anchors,
)
from dflow_lightning.errors import InputError
from dflow_lightning.files import staged_folder
from dflow_lightning.prepare.dialogue import AnswerSettings, Dialogue, Generator
from dflow_lightning.prepare.journal import AnswerJournal, OtherSettingsError, difference
from dflow_lightning.prepare.progress import PrepareProgress

# Part of a prepared folder's identity. Raise it when the same source, target and settings give
# other rows; tests/data/test_golden_rows.py holds this version's rows and fails when they change.
ROWS_VERSION = 2


TooLong = Literal["truncate", "reject"]


@dataclass(frozen=True, kw_only=True)
class RowOptions:
    """What becomes of an answered conversation.

    Args:
        supervise: learn from every answer of a conversation, or from the last one.
        supervise_thinking: learn from the reasoning as well.
        max_length: longest row, in tokens.
        too_long: end longer conversations at the last turn that fits, or reject them.
    """

    supervise: Supervise = "all_turns"
    supervise_thinking: bool = True
    max_length: int = 3072
    too_long: TooLong = "truncate"

    def describe(self) -> dict[str, Any]:
        """The settings by name."""
        return asdict(self)


@dataclass(frozen=True, kw_only=True)
class Preparation:
    """All that a prepared folder is made of.

    Args:
        out: the folder to come.
        generator: who answers; None keeps the answers of the source.
        answers: how to answer; None keeps the answers of the source.
        held_out: prepared folders whose prompts must not be trained on.
        max_reject_share: share of rejects among all rows above which nothing is written.
        described: what else the manifest says, about the target and its tokenizer.
    """

    source: Source
    out: Path
    encoder: ChatEncoder
    stop_ids: tuple[int, ...]
    rows: RowOptions
    generator: Generator | None
    answers: AnswerSettings | None
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
        return self.answers.samples_per_prompt if self.answers else 1

    def asked(self) -> dict[str, Any]:
        """What the answers depend on, as JSON gives it back."""
        asked = {
            "source": self.source.describe(),
            **self.described,
            "generator": self.generator.describe() if self.generator else {"kind": "kept"},
            "sampling": self.answers.describe() if self.answers else None,
            "held_out": sorted(read_manifest(one, "held_out")["key"] for one in self.held_out),
        }
        return json.loads(json.dumps(asked))

    def settings(self) -> dict[str, Any]:
        """What the folder depends on."""
        return {**self.asked(), "rows": self.rows.describe(), "rows_version": ROWS_VERSION}

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
            opened = AnswerJournal(self.partial / "answers.sqlite", asked)
        except OtherSettingsError:
            if not overwrite:
                raise
            shutil.rmtree(self.partial)
            opened = AnswerJournal(self.partial / "answers.sqlite", asked)
        with closing(opened) as journal:
            try:
                num_rows = self._scan(journal)
            except InputError:  # nothing is answered yet
                shutil.rmtree(self.partial)
                raise
            if self.generator and self.answers:
                self._answer(self.generator, self.answers, journal, num_rows)
            manifest = self._write(journal, num_rows)
        shutil.rmtree(self.partial)
        self._reader().rejects_path.unlink(missing_ok=True)  # they are in the folder
        return manifest

    def _scan(self, journal: AnswerJournal) -> int:
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
                    reject = Reject("held out", "its prompt is also in a set of held_out")
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
        self, generator: Generator, sampling: AnswerSettings, journal: AnswerJournal, num_rows: int
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

        def failed(dialogue: Dialogue, error: str, *, again: bool) -> None:
            journal.fail(dialogue.line, dialogue.sample, error)
            progress.count(0, failed=True)
            if progress.failed > allowed:
                advice = "; run the same command again to try them again" if again else ""
                raise InputError(
                    f"data: {progress.failed} of {total} conversations got no answer, more than "
                    f"max_reject_share {self.max_reject_share:.3g} allows, the last (line "
                    f"{dialogue.line}) because {error}{advice}"
                )

        with progress:
            generator.run(self._dialogues(journal, sampling), done, failed)

    def _dialogues(self, journal: AnswerJournal, sampling: AnswerSettings) -> Iterator[Dialogue]:
        for line, conversation in conversations(self.source):
            if journal.is_rejected(line):
                continue
            for sample in range(sampling.samples_per_prompt):
                if not journal.is_answered(line, sample):
                    yield Dialogue(line, sample, conversation, self.encoder, sampling)

    def _write(self, journal: AnswerJournal, num_rows: int) -> dict[str, Any]:
        """The folder, from the journal alone: an interruption costs only this step."""
        maker = RowMaker(self.encoder, self.rows, self.stop_ids)
        total = journal.num_asked(num_rows)
        with staged_folder(self.out) as folder:
            writer = PreparedWriter(folder)
            with PrepareProgress("rows", total * self.samples) as progress:
                write_rows(self.source, journal, maker, writer, self.answers, progress)
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

    def _check_rejects(self, journal: AnswerJournal, num_rows: int) -> None:
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


class RowMaker:
    """Makes the rows of conversations and counts what becomes of them.

    Args:
        stop_ids: tokens that may end an answer.

    Attributes:
        counts: what is written into the manifest; cut conversations are those that end early.
    """

    def __init__(
        self, encoder: ChatEncoder, options: RowOptions, stop_ids: tuple[int, ...]
    ) -> None:
        self.encoder, self.options = encoder, options
        self._stop_ids = frozenset(stop_ids)
        tokenizer = encoder.tokenizer
        written = {tokenizer.get_vocab().get(text) for text in ASSISTANT_TOKENS}
        self._special = frozenset(tokenizer.all_special_ids) - written
        self._size = min(len(tokenizer), encoder.vocab_size or len(tokenizer))
        names = ("rows", "tokens", "supervised_tokens", "anchors", "unfinished", "from_text")
        self.counts = Counter(dict.fromkeys((*names, "without_anchors", "cut"), 0))

    def rows(
        self,
        conversation: Conversation,
        messages: list[dict[str, Any]],
        answers: dict[int, TargetAnswer],
        sample: str = "",
        cut: str = "",
    ) -> Iterator[PreparedRow] | Reject:
        """The rows of one conversation, or why it has none; `counts` grows with the rows.

        Args:
            messages: the conversation as the target wrote it.
            answers: its tokens, by the index of the message.
            sample: added to the id.
            cut: why there are fewer answers than the conversation has room for.
        """
        try:
            turns = self._turns(conversation, messages, answers)
        except InputError as error:
            return Reject("template", str(error))
        context = _unsupervised(conversation, answers)
        written = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        last = max((n for n, i in enumerate(written, start=1) if i not in context), default=0)
        too_long = cut == "room" or not turns or turns[-1].turn < last
        if not turns or (too_long and self.options.too_long == "reject"):
            detail = f"it is longer than max_length {self.options.max_length}"
            return Reject("too long", detail)
        for one in turns:
            if problem := self._problem(one.tokens.input_ids, one.tokens.loss_mask):
                return Reject("token in an answer", problem)
        learned = with_anchors(turns)
        if not learned:
            return Reject("no anchor", "its answers have no two supervised tokens in a row")
        self.counts["without_anchors"] += len(turns) - len(learned)
        self.counts["cut"] += too_long or bool(cut)
        self.counts["from_text"] += any(one.from_text for one in answers.values())
        return self._prepared(conversation, learned, sample)

    def _turns(
        self,
        conversation: Conversation,
        messages: Sequence[Message],
        answers: dict[int, TargetAnswer],
    ) -> list[TurnRow]:
        return training_rows(
            self.encoder,
            messages,
            conversation.tools,
            answers=answers,
            finished=conversation.finished,
            supervise=self.options.supervise,
            supervise_thinking=self.options.supervise_thinking,
            max_length=self.options.max_length,
            unsupervised=_unsupervised(conversation, answers),
        )

    def _problem(self, ids: list[int], mask: list[bool]) -> str:
        """What a supervised token must not be: unknown, or special before the answer's end."""
        last = len(ids) - 1
        for i, (token, supervised) in enumerate(zip(ids, mask, strict=True)):
            if not supervised:
                continue
            if token >= self._size:
                size = self._size
                return f"token {token} is outside the target's {size} tokens, like a mask token"
            ends = i == last or not mask[i + 1]
            if token in self._special and not (ends and token in self._stop_ids):
                return f"{self.encoder.tokenizer.convert_ids_to_tokens(token)!r} stands inside it"
        return ""

    def _prepared(
        self, conversation: Conversation, turns: list[TurnRow], sample: str
    ) -> Iterator[PreparedRow]:
        asked = prompt_hash(conversation)
        for name, one in named(f"{conversation.id}{sample}", turns):
            ids, mask = one.tokens.input_ids, one.tokens.loss_mask
            self.counts["rows"] += 1
            self.counts["tokens"] += len(ids)
            self.counts["supervised_tokens"] += sum(mask)
            self.counts["anchors"] += num_anchors(mask)
            self.counts["unfinished"] += not one.finished
            yield PreparedRow(name, conversation.family, ids, mask, one.finished, asked)


def _unsupervised(
    conversation: Conversation, answers: Mapping[int, TargetAnswer]
) -> frozenset[int]:
    """Answers that are context only: the file's weights speak of the file's own answers."""
    return frozenset() if answers else conversation.unsupervised


def write_rows(
    source: Source,
    journal: AnswerJournal,
    maker: RowMaker,
    writer: PreparedWriter,
    sampling: AnswerSettings | None,
    progress: PrepareProgress,
) -> None:
    """Write the rows of all conversations, in the order of the source.

    Args:
        journal: has the answers and takes the rejects.
        sampling: how the answers were asked for; None takes those of the source.
    """
    journal.forget_late()
    for line, conversation in conversations(source):
        if journal.is_rejected(line):
            continue
        for sample in range(sampling.samples_per_prompt if sampling else 1):
            if sampling is None:
                found = _kept(maker, conversation)
            else:
                found = _answered(maker, conversation, journal, line, sample, sampling)
            tokens = 0
            if isinstance(found, Reject):
                counted = found.reason != "no anchor"
                journal.reject_late(line, sample, found, counted=counted)
            else:
                for row in found:
                    tokens += len(row.input_ids)
                    writer.write(row)
            progress.count(tokens)


def _kept(maker: RowMaker, conversation: Conversation) -> Iterator[PreparedRow] | Reject:
    messages = conversation.messages
    if all(message["role"] != "assistant" for message in messages):
        return Reject("no answer", "it has no answer to keep; let the target answer, or drop it")
    if not conversation.num_supervised:
        return Reject("no answer", "every answer has the weight 0; let the target answer")
    return maker.rows(conversation, messages, {}, cut="" if conversation.is_answered else "open")


def _answered(
    maker: RowMaker,
    conversation: Conversation,
    journal: AnswerJournal,
    line: int,
    sample: int,
    sampling: AnswerSettings,
) -> Iterator[PreparedRow] | Reject:
    answers = journal.answers(line, sample)
    if not isinstance(answers, list):
        return Reject("not answered", answers or "it was never asked")
    dialogue = Dialogue(line, sample, conversation, maker.encoder, sampling)
    dialogue.replay(answers)
    name = f"@{sample}" if sampling.samples_per_prompt > 1 else ""
    return maker.rows(conversation, dialogue.messages, dialogue.answers, name, dialogue.cut)
