"""An OpenAI-compatible server without a model, which fails on purpose.

    python tests/data/stub_server.py --port 0 --fail 0.03

Prints the port it listens on. An answer follows from the prompt alone, so runs can be compared; a
failure from the prompt and how often it was asked. One prompt in `--broken` never gets an answer.
"""

import argparse
import asyncio
import hashlib
import json
from collections import Counter
from random import Random

from aiohttp import web

MODEL = "stub"
KINDS = (
    "status", "busy", "slow", "closed", "no json", "no choice", "aborted", "no ids", "empty",
    "impossible ids", "too many",
)  # fmt: skip
# What a request must say, or a model's generation_config.json would decide it.
SETTINGS = (
    "temperature", "top_p", "top_k", "min_p", "seed", "max_tokens", "repetition_penalty",
    "presence_penalty", "frequency_penalty",
)  # fmt: skip


class Stub:
    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.asked: Counter[bytes] = Counter()
        self.failures: Counter[str] = Counter()
        self.in_flight = self.most = 0

    async def models(self, request: web.Request) -> web.Response:
        limit = {"max_model_len": self.options.limit} if self.options.limit else {}
        return web.json_response({"data": [{"id": MODEL, **limit}]})

    async def counts(self, request: web.Request) -> web.Response:
        asked = sum(self.asked.values())
        return web.json_response({"asked": asked, "most": self.most, **self.failures})

    async def completions(self, request: web.Request) -> web.StreamResponse:
        self.in_flight += 1
        self.most = max(self.most, self.in_flight)
        try:
            return await self._completions(request, await request.json())
        finally:
            self.in_flight -= 1

    async def _completions(self, request: web.Request, body: dict) -> web.StreamResponse:
        if body["model"] != MODEL:
            return web.json_response({"error": "no such model"}, status=404)
        if missing := [name for name in SETTINGS if name not in body]:
            return web.json_response({"error": f"no {missing}"}, status=422)
        if self.options.limit and len(body["prompt"]) + body["max_tokens"] > self.options.limit:
            return web.json_response({"error": "longer than the context"}, status=400)
        key = hashlib.sha256(json.dumps([body["prompt"], body["seed"]]).encode()).digest()
        self.asked[key] += 1
        random = Random(key)
        if random.random() * self.options.broken < 1:
            return web.json_response({"choices": []})
        luck = Random(key + bytes([self.asked[key] % 256]))
        if luck.random() < self.options.fail:
            return await self._fail(request, luck.choice(KINDS))
        return web.json_response(self._answer(body, random))

    def _answer(self, body: dict, random: Random) -> dict:
        least = min(4, body["max_tokens"])
        count = random.randint(least, min(self.options.longest, body["max_tokens"]))
        ids = [random.randrange(*self.options.ids) for _ in range(count)]
        finished = count < body["max_tokens"]
        if finished:
            ids[-1] = body["stop_token_ids"][0]
        choice = {"text": "x " * 3, "finish_reason": "stop" if finished else "length"}
        if self.options.token_ids:
            choice["token_ids"] = ids
        return {"choices": [choice], "usage": {"prompt_tokens": len(body["prompt"])}}

    async def _fail(self, request: web.Request, kind: str) -> web.StreamResponse:
        self.failures[kind] += 1
        if kind == "status":
            return web.Response(status=500, text="out of memory")
        if kind == "busy":
            return web.Response(status=429, headers={"Retry-After": "0"})
        if kind == "slow":
            await asyncio.sleep(self.options.slow)
        if kind in ("slow", "closed"):
            if request.transport is not None:  # the client may have gone first
                request.transport.close()
            return web.Response()
        if kind == "no json":
            return web.Response(text='{"choices": [{"te')
        if kind == "no choice":
            return web.json_response({"error": {"message": "sorry"}})
        if kind == "aborted":
            return web.json_response({"choices": [{"text": "x", "finish_reason": "abort"}]})
        bad: dict[str, list] = {
            "empty": [],
            "no ids": ["x", None],
            "impossible ids": [400, 10**6],
            "too many": [400] * 999,
        }
        text = "" if kind == "empty" else "x"
        choice = {"text": text, "finish_reason": "stop", "token_ids": bad[kind]}
        return web.json_response({"choices": [choice]})


async def main(options: argparse.Namespace) -> None:
    stub = Stub(options)
    app = web.Application(client_max_size=2**24)
    app.add_routes(
        [
            web.get("/v1/models", stub.models),
            web.get("/counts", stub.counts),
            web.post("/v1/completions", stub.completions),
        ]
    )
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", options.port)
    await site.start()
    print(runner.addresses[0][1], flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--fail", type=float, default=0.0, help="share of requests that fail")
    parser.add_argument("--broken", type=float, default=1e9, help="one prompt in so many")
    parser.add_argument("--slow", type=float, default=5.0, help="seconds of a slow failure")
    parser.add_argument("--longest", type=int, default=48, help="tokens of an answer")
    parser.add_argument("--ids", type=int, nargs=2, default=(300, 1900), help="range of tokens")
    parser.add_argument("--limit", type=int, default=0, help="tokens of prompt and answer; 0: none")
    parser.add_argument("--token_ids", type=int, default=1, help="0 answers with text alone")
    asyncio.run(main(parser.parse_args()))
