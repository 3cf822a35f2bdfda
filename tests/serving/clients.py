"""Section of `make serving`: clients that no one here wrote, against a server of each setting."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess

from bench import ARMS, HERE, TARGET, VLLM, Arm, Bench

from dflow_lightning.data.template import render_prompt
from dflow_lightning.serving.server import ServerSettings, VllmServer

FIRST = "What can I cook with rice and beans?"
SECOND = "Write a Python function that adds two numbers."
LIMIT = 64


def clients(bench: Bench) -> None:
    """`openai`, `curl` and vLLM's `bench serve`, relay on and off; answers are those of here."""
    for arm in ARMS[2:0:-1]:
        settings = ServerSettings(
            python=VLLM, target=str(TARGET), drafter=arm.folder, num_draft_tokens=7,
            relay=arm.relay, max_model_len=1024,
        )  # fmt: skip
        with VllmServer(settings, patience=600) as server:
            before = server.counters()
            openai(bench, arm, server)
            curl(bench, arm, server)
            bench_serve(bench, arm, server)
            found = {k: v - before[k] for k, v in server.counters().items()}
            print(
                f"{arm.name}: tau over all of these {1 + found['accepted'] / found['rounds']:.3f}"
            )


def answered_here(bench: Bench, *turns: str) -> str:
    """What plain decoding says to the last of some turns, the answers between them included."""
    messages: list[dict[str, str]] = []
    answer = ""
    for turn in turns:
        messages += [{"role": "assistant", "content": answer}] if messages else []
        messages.append({"role": "user", "content": turn})
        ids = render_prompt(bench.target.tokenizer, messages, enable_thinking=False)
        found = bench.decoder(ARMS[0].folder).generate_plain([ids], max_new_tokens=LIMIT)[0]
        answer = bench.target.tokenizer.decode(found.token_ids, skip_special_tokens=True)
    return answer


def openai(bench: Bench, arm: Arm, server: VllmServer) -> None:
    """The `openai` package: streamed or not, and a second turn."""
    done = subprocess.run(
        [VLLM, HERE / "openai_client.py", server.url, str(TARGET), FIRST, SECOND],
        capture_output=True, text=True, check=False, env=without_source(),
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(done.stderr[-1000:])
    said = json.loads(done.stdout.splitlines()[-1])
    checks = {
        "answer": said["answer"] == answered_here(bench, FIRST),
        "streamed": said["streamed"] == said["answer"] and 1 < said["pieces"] < said["tokens"],
        "second turn": said["second"] == answered_here(bench, FIRST, SECOND),
    }
    for name, right in checks.items():
        print(f"{arm.name:<17} openai, {name:<12} {bench.expect(f'openai {name}', right)}")
    print(f"{'':<17} {said['tokens']} tokens in {said['pieces']} pieces", flush=True)


def curl(bench: Bench, arm: Arm, server: VllmServer) -> None:
    """`curl`, where there is one."""
    if shutil.which("curl") is None:
        print(f"{arm.name:<17} curl is not installed here")
        return
    body = {
        "model": str(TARGET), "messages": [{"role": "user", "content": FIRST}],
        "temperature": 0, "max_tokens": LIMIT, "chat_template_kwargs": {"enable_thinking": False},
    }  # fmt: skip
    done = subprocess.run(
        ["curl", "-s", f"{server.url}/v1/chat/completions", "-H",
         "Content-Type: application/json", "-d", json.dumps(body)],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    answer = json.loads(done.stdout)["choices"][0]["message"]["content"]
    right = answer == answered_here(bench, FIRST)
    print(f"{arm.name:<17} curl                 {bench.expect('curl', right)}", flush=True)


def bench_serve(bench: Bench, arm: Arm, server: VllmServer) -> None:
    """vLLM's own benchmark client, on prompts of ours."""
    file = bench.scratch / "bench.json"
    texts = [bench.target.tokenizer.decode(ids) for ids in bench.ids[::4]]
    turns = [[{"from": "human", "value": text}, {"from": "gpt", "value": text}] for text in texts]
    file.write_text(json.dumps([{"conversations": two} for two in turns]))
    done = subprocess.run(
        [VLLM, HERE / "bench_serve.py", "--backend", "openai", "--base-url", server.url,
         "--model", str(TARGET), "--dataset-name", "sharegpt", "--dataset-path", str(file),
         "--sharegpt-output-len", str(LIMIT), "--num-prompts",
         str(len(texts)), "--max-concurrency", "4", "--temperature", "0", "--seed", "0"],
        capture_output=True, text=True, check=False, env=without_source(),
    )  # fmt: skip
    kept = re.findall(
        r"^(?:Successful requests|Failed requests|Output token throughput|Mean TPOT|"
        r"Acceptance (?:rate|length)).*$", done.stdout, re.M,
    )  # fmt: skip
    right = re.search(rf"Successful requests:\s+{len(texts)}\b", done.stdout) is not None
    print(f"{arm.name:<17} vLLM's bench serve   {bench.expect('bench serve', right)}")
    print("\n".join(f"{'':<17} {' '.join(line.split())}" for line in kept), flush=True)
    if not right:
        print(done.stdout[-1000:], done.stderr[-2000:])


def without_source() -> dict[str, str]:
    """The environment for a process of the engine's own installation."""
    kept = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    return kept | {"NO_PROXY": "127.0.0.1", "VLLM_NO_USAGE_STATS": "1"}
