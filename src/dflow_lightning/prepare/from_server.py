"""Answers by an OpenAI-compatible server, vLLM or SGLang: how a real data set is written.

Only `/v1/completions` is used, with token ids as the prompt, so that the template and the tokenizer
are ours whatever the server has. Token ids come back where the server can return them (vLLM:
`return_token_ids`); the text of others is tokenized again, and such answers are counted.
"""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import cycle
from typing import Any

import aiohttp
from tenacity import (
    AsyncRetrying,
    RetryCallState,
    retry_if_exception,
    stop_after_attempt,
    wait_exponential,
)

from dflow_lightning.data.turns import TargetAnswer
from dflow_lightning.errors import InputError
from dflow_lightning.prepare.dialogue import Ask, Dialogue, Done, Failed, check_room

CONCURRENCY = 64  # dialogues in flight at the same time, over all servers
FIRST_WAIT = 1.0  # seconds before the second try; it doubles with each
LONGEST_WAIT = 60.0  # seconds between two tries
# What a server takes from the model's generation_config.json where a request does not say it.
# Qwen2.5 has a repetition penalty of 1.05 there, which is not what the target chooses by itself.
NEUTRAL_SAMPLING = {
    "top_k": -1,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
}
RETRIED = {408, 409, 425, 429, 500, 502, 503, 504, 529}
_TO_FIX = {401: "the key", 403: "the key", 404: "the address or the model"}
# Dialogues that fail one after the other before a server counts as gone, per one in flight.
FAILURES_IN_A_ROW = 2
FIRST = aiohttp.ClientTimeout(total=30)  # for the question which models there are
API_KEY = "OPENAI_API_KEY"


@dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """Where the servers are, and how long and how often to try.

    Args:
        server: address of an OpenAI-compatible API that serves the target, as
            http://host:8000/v1; may be given several times. Without one the target runs here.
        model: name under which the servers know the target; by default the only one they have.
        concurrency: conversations answered at the same time; by default 16 here, 64 on servers.
        timeout: seconds that a server's answer may take.
        retries: further tries after a server's answer that failed.
    """

    server: list[str] = field(default_factory=list)
    model: str | None = None
    concurrency: int | None = None
    timeout: float = 600.0
    retries: int = 5

    def __post_init__(self) -> None:
        """Raise `InputError` for a setting out of its range."""
        for url in self.server:
            if not url.startswith(("http://", "https://")):
                raise InputError(f"server is {url}; give an address such as http://host:8000/v1")
        if self.concurrency is not None and self.concurrency < 1:
            raise InputError(f"concurrency is {self.concurrency}; give 1 or more")
        if self.timeout <= 0:
            raise InputError(f"timeout is {self.timeout}; give a number of seconds above 0")
        if self.retries < 0:
            raise InputError(f"retries is {self.retries}; give 0 or more")


class _BadAnswerError(Exception):
    """An answer that cannot be used; `again` tells whether another try may bring a better one."""

    def __init__(self, reason: str, *, again: bool = True, wait: float = 0.0) -> None:
        super().__init__(reason)
        self.again, self.wait = again, wait


def _may_be_cured(error: BaseException) -> bool:
    return isinstance(error, _BadAnswerError) and error.again


class _FatalError(InputError):
    """What every other request would meet as well."""


class ServerGenerator:
    """Sends prompts to servers, many at a time.

    Args:
        tokenizer: the target's.
        stop_token_ids: tokens that end an answer.
        end_token_id: the one of them that the chat template writes.

    Attributes:
        retries: tries so far that had to be repeated.

    Raises:
        InputError: no server answers, or none of this name is served.
    """

    def __init__(
        self,
        options: ServerOptions,
        tokenizer: Any,
        *,
        stop_token_ids: tuple[int, ...],
        end_token_id: int,
    ) -> None:
        self.options, self.tokenizer, self._vocabulary = options, tokenizer, len(tokenizer)
        self._stop_ids, self._end_id = stop_token_ids, end_token_id
        self._concurrency = options.concurrency or CONCURRENCY
        self._failed_in_a_row = 0
        self.retries = 0
        self._limit: int | None = None  # tokens of prompt and answer, where the servers tell it
        key = os.environ.get(API_KEY)
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._model = asyncio.run(self._find_model())

    def describe(self) -> dict[str, Any]:
        """Its kind and the name of the served model; addresses do not belong in a data set."""
        return {"kind": "server", "model": self._model}

    def run(self, dialogues: Iterable[Dialogue], done: Done, failed: Failed) -> None:
        """See `Generator`; dialogues are taken as they are started."""
        asyncio.run(self._run(dialogues, done, failed))

    async def _run(self, dialogues: Iterable[Dialogue], done: Done, failed: Failed) -> None:
        tasks: set[asyncio.Task[None]] = set()
        self._urls = cycle(self.options.server)
        async with self._session() as session:
            try:
                for dialogue in dialogues:
                    tasks.add(asyncio.create_task(self._answer(session, dialogue, done, failed)))
                    if len(tasks) >= self._concurrency:
                        tasks = await _some_done(tasks)
                while tasks:
                    tasks = await _some_done(tasks)
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

    def _session(self) -> aiohttp.ClientSession:
        return aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(total=self.options.timeout),
            headers=self._headers,
        )

    async def _find_model(self) -> str:
        """The name that all servers know the target by."""
        name = self.options.model
        async with self._session() as session:
            for url in self.options.server:
                try:
                    async with session.get(f"{url.rstrip('/')}/models", timeout=FIRST) as response:
                        found = await response.json(content_type=None)
                    served = {one["id"]: one for one in found["data"]}
                except (aiohttp.ClientError, TimeoutError, asyncio.TimeoutError) as error:
                    raise InputError(
                        f"server: {url} does not answer ({_said(error)}); start the server or "
                        "fix the address"
                    ) from error
                except (ValueError, KeyError, TypeError) as error:
                    raise InputError(
                        f"server: {url}/models lists no models; give the address of an "
                        "OpenAI-compatible API, which often ends with /v1"
                    ) from error
                if name is None and len(served) == 1:
                    name = next(iter(served))
                if name not in served:
                    raise InputError(
                        f"model is {name}, but {url} serves {', '.join(served) or 'nothing'}; "
                        "give one of these"
                    )
                if isinstance(limit := served[name].get("max_model_len"), int):
                    self._limit = min(limit, self._limit or limit)
        assert name is not None
        return name

    async def _answer(
        self, session: aiohttp.ClientSession, dialogue: Dialogue, done: Done, failed: Failed
    ) -> None:
        """One dialogue to its end."""
        try:
            while ask := dialogue.next():
                dialogue.add(await self._ask(session, ask))
                self._failed_in_a_row = 0
        except _FatalError:
            raise
        except InputError as error:
            failed(dialogue, str(error), again=False)
        except _BadAnswerError as error:
            self._count_failure(error)
            failed(dialogue, str(error), again=error.again)
        else:
            done(dialogue)

    async def _ask(self, session: aiohttp.ClientSession, ask: Ask) -> TargetAnswer:
        """One answer, after as many tries as are allowed.

        The `openai` client retries by itself too, but always on the same server, and not where an
        answer arrives and makes no sense. Here each try goes to the next server.
        """
        check_room(ask, self._limit, "the server")
        tries = AsyncRetrying(
            stop=stop_after_attempt(self.options.retries + 1),
            retry=retry_if_exception(
                lambda error: isinstance(error, _BadAnswerError) and error.again
            ),
            wait=self._pause,
            before_sleep=self._count_retry,
            reraise=True,
        )
        return await tries(self._try, session, ask)

    def _pause(self, state: RetryCallState) -> float:
        """Seconds before the next try: what the server asked for, or longer with each try."""
        error = state.outcome.exception() if state.outcome else None
        asked = error.wait if isinstance(error, _BadAnswerError) else 0.0
        growing = wait_exponential(multiplier=FIRST_WAIT, max=LONGEST_WAIT)(state)
        # Spread, or all requests that failed together come back together.
        return min(max(asked, growing * (0.5 + random.random())), LONGEST_WAIT)

    def _count_retry(self, state: RetryCallState) -> None:
        self.retries += 1

    async def _try(self, session: aiohttp.ClientSession, ask: Ask) -> TargetAnswer:
        url = next(self._urls)
        body = {
            "model": self._model,
            "prompt": ask.prompt_ids,
            "max_tokens": ask.max_new_tokens,
            "temperature": ask.temperature,
            "top_p": ask.top_p,
            **NEUTRAL_SAMPLING,
            "seed": ask.seed,
            "stop_token_ids": list(self._stop_ids),
            "return_token_ids": True,
            "skip_special_tokens": False,
            "spaces_between_special_tokens": False,
        }
        try:
            async with session.post(f"{url.rstrip('/')}/completions", json=body) as response:
                if response.status != 200:
                    await self._refuse(url, response)
                found = await response.json(content_type=None)
        except (TimeoutError, asyncio.TimeoutError) as error:
            seconds = self.options.timeout
            raise _BadAnswerError(f"the server took longer than {seconds:g} s") from error
        except aiohttp.ClientError as error:
            raise _BadAnswerError(f"the connection failed ({_said(error)})") from error
        except ValueError as error:
            raise _BadAnswerError("the server's answer is not JSON") from error
        return self._read(url, ask, found)

    async def _refuse(self, url: str, response: aiohttp.ClientResponse) -> None:
        status = response.status
        text = " ".join((await response.text(errors="replace")).split())[:200]
        if status in _TO_FIX:
            raise _FatalError(
                f"server: {url} refuses with status {status} ({text}); fix {_TO_FIX[status]}"
                + (f" (the key is read from {API_KEY})" if status != 404 else "")
            )
        waits = response.headers.get("Retry-After", "")
        raise _BadAnswerError(
            f"the server refused with status {status} ({text})",
            again=status in RETRIED,
            wait=float(waits) if waits.isdigit() else 0.0,
        )

    def _read(self, url: str, ask: Ask, found: Any) -> TargetAnswer:
        """The answer in a response, or what is wrong with it."""
        try:
            choice = found["choices"][0]
            text, reason, ids = choice["text"], choice["finish_reason"], choice.get("token_ids")
            read = (found.get("usage") or {}).get("prompt_tokens")
        except (KeyError, IndexError, TypeError, AttributeError) as error:
            raise _BadAnswerError("the server's answer has no choice with a text") from error
        if isinstance(read, int) and read != len(ask.prompt_ids):
            raise _FatalError(
                f"server: {url} read {read} tokens where {len(ask.prompt_ids)} were sent; serve "
                "the target itself, with a server that adds no tokens to a prompt"
            )
        if reason not in ("stop", "length") or not isinstance(text, str):
            raise _BadAnswerError(f"the server's answer ended with {reason!r} and no text")
        if from_text := not ids:
            ids = self.tokenizer.encode(text, add_special_tokens=False)
        if not isinstance(ids, list) or not all(type(one) is int and one >= 0 for one in ids):
            raise _BadAnswerError("the server's answer has token ids that are no numbers")
        if not ids:
            raise _BadAnswerError("the server's answer is empty")
        if max(ids) >= self._vocabulary:
            raise _BadAnswerError(
                f"the server's answer has token {max(ids)}, and the tokenizer {self._vocabulary} "
                "tokens"
            )
        if not from_text and len(ids) > ask.max_new_tokens:
            raise _BadAnswerError(
                f"the server's answer has {len(ids)} tokens where {ask.max_new_tokens} were allowed"
            )
        if reason == "stop" and ids[-1] not in self._stop_ids:
            ids = [*ids, self._end_id]
        return TargetAnswer(list(ids), reason == "stop", from_text)

    def _count_failure(self, error: Exception) -> None:
        self._failed_in_a_row += 1
        if self._failed_in_a_row > FAILURES_IN_A_ROW * self._concurrency + 8:
            raise InputError(
                f"server: {self._failed_in_a_row} conversations failed one after the other, the "
                f"last because {error}; check the servers and run the same command again"
            )


async def _some_done(tasks: set[asyncio.Task[None]]) -> set[asyncio.Task[None]]:
    """Wait for one task at least; those still running. What a task raised is raised here."""
    done, running = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in done:
        task.result()
    return running


def _said(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__
