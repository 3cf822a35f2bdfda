"""Conversations to token ids and loss mask, by the tokenizer's own chat template.

What is supervised is found by rendering the conversation several times and comparing the texts, so
that any template works and none has to mark its answers:

    prompt   `<|im_start|>user\\nHi<|im_end|>\\n<|im_start|>assistant\\n<think>\\n\\n</think>\\n\\n`
    answer   `Hello.<|im_end|>`          the assistant's text and the token that ends its turn
    rest     `\\n`

The three parts are tokenized apart. No token crosses from the prompt into the answer, which is how
the target meets them when it decodes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Any

from jinja2 import TemplateError

from dflow_lightning.data.shown import left_out
from dflow_lightning.errors import InputError

Message = Mapping[str, Any]

# Special tokens that an assistant writes itself; in anyone else's text they are plain text.
ASSISTANT_TOKENS = frozenset({"<think>", "</think>", "<tool_call>", "</tool_call>"})
# The fields of a message that hold free text, in whatever they nest.
WRITTEN_BY_PEOPLE = ("content", "reasoning_content", "tool_calls")
# Templates are other people's programs. They raise on purpose, and also fail in their own code, as
# on a tool definition of another shape; neither may end a run over many rows.
TEMPLATE_FAILURES = (
    TemplateError, TypeError, AttributeError, ValueError, LookupError, ArithmeticError,
    RecursionError,
)  # fmt: skip
PRIVATE_USE = range(0xE000, 0xF900)  # code points that stand in for text while a template runs


@dataclass(frozen=True)
class EncodedRow:
    """Token ids of one conversation; the mask is true on the tokens the drafter learns from."""

    input_ids: list[int]
    loss_mask: list[bool]


@dataclass(frozen=True)
class Segment:
    """A stretch of a rendered conversation that is tokenized on its own.

    `hidden` maps the stand-ins in `text` to spellings of special tokens that someone typed.
    """

    text: str
    supervised: bool
    hidden: Mapping[str, str]


def render_prompt(
    tokenizer: Any,
    messages: Sequence[Message],
    *,
    enable_thinking: bool = False,
    tools: Sequence[Any] = (),
    vocab_size: int | None = None,
) -> list[int]:
    """Token ids of a conversation up to where the assistant's next answer begins."""
    encoder = ChatEncoder(tokenizer, enable_thinking=enable_thinking, vocab_size=vocab_size)
    return encoder.prompt(messages, tools)


class ChatEncoder:
    """The chat template of one tokenizer with its settings; make one and encode many rows.

    Args:
        vocab_size: rows of the target's embedding, which may be fewer than the tokenizer's tokens;
            None where no target is known.

    Raises:
        InputError: the tokenizer has no chat template.
    """

    def __init__(
        self, tokenizer: Any, *, enable_thinking: bool = False, vocab_size: int | None = None
    ) -> None:
        name = getattr(tokenizer, "name_or_path", "")
        if not getattr(tokenizer, "chat_template", None):
            raise InputError(
                f"the tokenizer {name or 'given'} has no chat template; use an instruction-tuned "
                "target or add a chat_template.jinja to its folder"
            )
        named = tokenizer.chat_template
        if isinstance(named, Mapping) and "default" not in named:
            raise InputError(
                f"the tokenizer has chat templates named {', '.join(named)} and none named "
                "default; save the one to use as its chat_template"
            )
        self.tokenizer = tokenizer
        self._whose = f"the chat template of {name}" if name else "the chat template"
        self.enable_thinking = enable_thinking
        self.vocab_size = vocab_size
        added = tokenizer.added_tokens_decoder
        special = (token.content for token in added.values() if token.special)
        # The longest first: one spelling may contain another.
        self._specials = {
            text: tokenizer.convert_tokens_to_ids(text) for text in _by_length(special)
        }
        self._special = _any_of(self._specials)
        self._added = _any_of(_by_length(token.content for token in added.values()))
        self._guard = self._find_guard()

    def prompt(self, messages: Sequence[Message], tools: Sequence[Any] = ()) -> list[int]:
        """Ids of the conversation and the header of the answer to come."""
        row = self.encode([self.segments(messages, tools, answer_next=True)])[0]
        return row.input_ids

    def segments(
        self,
        messages: Sequence[Message],
        tools: Sequence[Any] = (),
        *,
        answer_next: bool = False,
        finished: bool = True,
    ) -> list[Segment]:
        """Render a conversation and cut it where an answer begins or ends.

        Args:
            tools: definitions of the functions that the assistant could call.
            answer_next: end with the header of an answer instead of a message.
            finished: whether the last answer ended by itself; if not, it has no end token.

        Raises:
            InputError: the template refuses the conversation, rewrites the assistant's text or
                leaves a text out; see `data/shown.py` for the one exception.
        """
        messages, tools, hidden = self._hide_specials(messages, tools)
        turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        text = self._render(messages, tools, answer_next)
        self._check_shown(text, messages, tools, None if answer_next else len(messages) - 1)
        found: list[Segment] = []
        position = 0
        for turn in turns:
            ended = finished or turn != turns[-1]
            start, end = self._answer_span(messages, tools, turn, text, answer_next, ended)
            found.append(Segment(text[position:start], False, hidden))
            found.append(Segment(text[start:end], True, hidden))
            position = end
        found.append(Segment(text[position:], False, hidden))
        return found

    def _check_shown(
        self, text: str, messages: Sequence[Message], tools: Sequence[Any], last: int | None
    ) -> None:
        if lost := left_out(text, messages, tools, last):
            raise InputError(
                f"{self._whose} leaves out {lost}; use a template that shows "
                "it, or take it out of the row"
            )

    def encode(self, rows: Sequence[Sequence[Segment]]) -> list[EncodedRow]:
        """Tokenize the segments of many rows in one call.

        Raises:
            InputError: a token is not in the target's embedding.
        """
        ids_of = iter(self._tokenize([segment for row in rows for segment in row]))
        encoded = []
        for row in rows:
            parts = [(next(ids_of), segment.supervised) for segment in row]
            encoded.append(
                EncodedRow(
                    list(chain.from_iterable(ids for ids, _ in parts)),
                    [supervised for ids, supervised in parts for _ in ids],
                )
            )
        for one in encoded:
            self.check_tokens(one.input_ids)
        return encoded

    @cached_property
    def _largest(self) -> int:
        return max(self.tokenizer.get_vocab().values(), default=-1)

    @property
    def may_exceed(self) -> bool:
        """Whether the tokenizer has tokens that the target's embedding lacks."""
        return self.vocab_size is not None and self._largest >= self.vocab_size

    def check_tokens(self, token_ids: Sequence[int]) -> None:
        """Raise `InputError` for a token that is not in the target's embedding."""
        token = int(max(token_ids, default=-1))
        if token < (self.vocab_size or token + 1):
            return
        raise InputError(
            f"the text has the token {token} ({self.tokenizer.convert_ids_to_tokens(token)!r}), "
            f"but the target's embedding has {self.vocab_size} rows; take it out of the text, or "
            "give the target its own tokenizer"
        )

    def _render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Any],
        answer_next: bool,
        thinking: bool | None = None,
    ) -> str:
        try:
            return self.tokenizer.apply_chat_template(
                list(messages),
                tools=list(tools) or None,
                tokenize=False,
                add_generation_prompt=answer_next,
                enable_thinking=self.enable_thinking if thinking is None else thinking,
            )
        except TEMPLATE_FAILURES as error:
            raise InputError(f"the chat template refuses the conversation ({error})") from error

    def _answer_span(
        self,
        messages: Sequence[Message],
        tools: Sequence[Any],
        turn: int,
        text: str,
        answer_next: bool,
        ended: bool,
    ) -> tuple[int, int]:
        """Where the answer of message `turn` stands in `text`, with its end token if it `ended`."""
        mark = _unused_characters(messages, 1)[0]
        marked = [*messages]
        marked[turn] = _marked(messages[turn], mark)
        before, found, after = self._render(marked, tools, answer_next).partition(mark)
        if not found:
            raise InputError(
                "the chat template leaves out an answer, so it has no supervised token"
            )
        start = self._answer_start(messages[:turn], tools, text, before)
        end = len(text) - len(after)
        if start > end or not text.endswith(after):
            raise InputError(
                "the chat template mixes the answer with its own text; use another one"
            )
        if not ended:
            return start, end
        # The turn on its own shows how it ends, and that the end is not the next turn's beginning.
        last = turn == len(messages) - 1 and not answer_next
        closing = after
        if not last:
            closing = self._render(marked[: turn + 1], tools, False).partition(mark)[2]
        ends = [match.end() for match in self._added.finditer(closing)]
        if ends and after.startswith(closing[: ends[-1]]):
            end += ends[-1]
        return start, end

    def _answer_start(
        self, past: Sequence[Message], tools: Sequence[Any], text: str, before: str
    ) -> int:
        """Where the answer to `past` begins in `text`; `before` is what precedes its content.

        What a generation prompt ends with is given to the target and not learned: the header and
        the empty think block. Turns that are history may lack that block.
        """
        header = self._render(past, tools, True)
        if header == before and text.startswith(header):
            return len(header)
        others = (self._render(past, tools, True, thinking) for thinking in (True, False))
        headers = header, *others
        starts = [len(header) for header in headers if text.startswith(header)]
        if not starts and not text.startswith(before):
            raise InputError(
                "the chat template mixes the answer with its own text; use another one"
            )
        return max(starts, default=len(before))

    def _hide_specials(
        self, messages: Sequence[Message], tools: Sequence[Any]
    ) -> tuple[Sequence[Message], Sequence[Any], Mapping[str, str]]:
        """Replace special tokens that someone spelled out by characters no template reacts to."""
        if not self._special.search(_all_text([messages, tools])):
            return messages, tools, {}
        free = _unused_characters([messages, tools], len(self._specials))
        stand_ins = dict(zip(self._specials, free, strict=True))

        def hidden(value: Any, allowed: frozenset[str]) -> Any:
            if isinstance(value, str):
                return self._special.sub(
                    lambda match: match[0] if match[0] in allowed else stand_ins[match[0]], value
                )
            if isinstance(value, Mapping):
                return {hidden(k, allowed): hidden(v, allowed) for k, v in value.items()}
            if isinstance(value, list | tuple):
                return [hidden(one, allowed) for one in value]
            return value

        shown = []
        for message in messages:
            allowed = ASSISTANT_TOKENS if message["role"] == "assistant" else frozenset[str]()
            texts = {f: hidden(message[f], allowed) for f in WRITTEN_BY_PEOPLE if message.get(f)}
            shown.append({**message, **texts})
        back = {character: text for text, character in stand_ins.items()}
        return shown, hidden(list(tools), frozenset()), back

    def _find_guard(self) -> str:
        """A special token to put before a segment, where the tokenizer treats a text's start apart.

        SentencePiece vocabularies write a space before the first word of a text, which must not
        happen in the middle of a conversation.
        """
        end = self.tokenizer.eos_token or ""
        if not end or self._plain_ids("a") == self._plain_ids(end + "a")[1:]:
            return ""
        return end

    def _plain_ids(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False)

    def _tokenize(self, segments: Sequence[Segment]) -> list[list[int]]:
        if not segments:
            return []
        first = 1 if self._guard else 0
        texts = [self._guard + segment.text for segment in segments]
        # A tokenizer returns a BatchEncoding; the ids alone are asked for by name.
        found = self.tokenizer(
            texts, add_special_tokens=False, return_attention_mask=False, verbose=False
        )["input_ids"]
        return [
            self._tokenize_hidden(segment) if segment.hidden else ids[first:]
            for segment, ids in zip(segments, found, strict=True)
        ]

    def _tokenize_hidden(self, segment: Segment) -> list[int]:
        """Ids of a text whose spelled special tokens are plain, and the template's are not."""
        ids: list[int] = []
        for piece in self._special.split(segment.text):
            if piece in self._specials:
                ids.append(self._specials[piece])
                continue
            for stand_in, spelled in segment.hidden.items():
                piece = piece.replace(stand_in, spelled)
            ids += self.tokenizer.encode(piece, add_special_tokens=False, split_special_tokens=True)
        return ids


def _marked(message: Message, mark: str) -> Message:
    """A message with `mark` for its text; for the first call's name where there is no text.

    Some templates put white space between a text and a call.
    """
    calls = message.get("tool_calls")
    if message.get("content") or not calls:
        return {**message, "content": mark}
    first = {**calls[0], "function": {**calls[0]["function"], "name": mark}}
    return {**message, "tool_calls": [first, *calls[1:]]}


def _by_length(texts: Iterable[str]) -> list[str]:
    return sorted(texts, key=len, reverse=True)


def _any_of(texts: Iterable[str]) -> re.Pattern[str]:
    """Matches, and on splitting keeps, any of the texts; nothing when there are none."""
    return re.compile(f"({'|'.join(map(re.escape, texts)) or '(?!)'})")


def _all_text(value: Any) -> str:
    """All text in a nested value, unchanged."""
    return json.dumps(value, ensure_ascii=False, default=str)


def _unused_characters(conversation: Any, count: int) -> list[str]:
    """Private-use characters that occur nowhere in the conversation."""
    used = set(_all_text(conversation))
    free = (chr(point) for point in PRIVATE_USE if chr(point) not in used)
    return [character for character, _ in zip(free, range(count), strict=False)]
