"""Sections of `make serving`: requests come and go, damaged folders, another release, speed."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from pathlib import Path

from bench import ARMS, DRAFTERS, HERE, ROOT, TARGET, VLLM, Arm, Bench, counts
from recompute import Recompute, Verdict
from safetensors.torch import load_file, save_file
from transformers import Qwen3Config

from dflow_lightning.errors import InputError
from dflow_lightning.serving.check import own_counts
from dflow_lightning.serving.server import ServerSettings, VllmServer

DFLOW = ARMS[2]
PREVIOUS = ROOT / ".venv-vllm/previous"  # the release before, over the same environment


def soak(bench: Bench) -> None:
    """Requests with random lives: each block recomputed, each greedy answer as if alone."""
    count = bench.num_requests
    for fault in (None, "mixed", "stale"):
        options = {"count": count if fault is None else count // 5}
        run = bench.offline(
            bench.ids, DFLOW, script="soak.py", **options, **({"broken": fault} if fault else {})
        )
        verdict, alone = judge(bench, run)
        cut = sum(len(one) > 0 for one in run["cancelled"])
        print(
            f"{fault or 'as it is':<9} {len(run['answers'])} requests, {cut} cancelled, "
            f"{run['preemptions']} preemptions, {run['prefix_hits']} prompt tokens from the cache"
            f"\n{'':<9} {verdict}, {len(verdict.errors)} wrong; {alone[0]} greedy answers, "
            f"{alone[1]} differ, {alone[2]} of them ties; marker: {run['errors'] or 'not seen'}"
        )
        found = bool(verdict.errors or run["errors"])
        right = found == (fault is not None) and alone[1] == alone[2]
        if fault is None:
            right &= run["preemptions"] > 0 and run["prefix_hits"] > 0 and cut > 0
        if found:
            print(f"{'':<9} first found: {(run['errors'] + verdict.errors)[0]}")
        print(f"{'':<9} {bench.expect(f'soak {fault}', right)}", flush=True)


def judge(bench: Bench, run: dict) -> tuple[Verdict, tuple[int, int, int]]:
    """Blocks of all requests, and greedy answers: compared, differing, ties.

    A cancelled answer has to be the beginning of the whole one.
    """
    recompute = Recompute(DFLOW.folder, bench.target, relay=True)
    verdict, rows = Verdict(), {}
    for block in run["blocks"]:
        rows.setdefault(block["request"].rpartition("-")[0], []).append(block)
    compared = differ = ties = 0
    for number, request in enumerate(run["plan"]):
        answer = run["answers"][str(number)]
        prompt = bench.prompts[request["prompt"]]
        recompute.compare(
            f"request {number}", prompt.token_ids + answer, len(prompt.token_ids),
            rows.get(str(number), []), verdict,
        )  # fmt: skip
        if request["sampling"]["temperature"] > 0 or not answer:
            continue
        whole = bench.plain[request["prompt"]][: request["sampling"]["max_tokens"]]
        if str(number) in run["cancelled"]:
            whole = whole[: len(answer)]
        compared += 1
        found = bench.equality.compare(
            prompt.id, prompt.token_ids, answer, whole, temperature=0.0, seed=0
        )
        differ += found is not None
        ties += found is not None and found.excused
    return verdict, (compared, differ, ties)


def damaged_folders(scratch: Path) -> dict[str, tuple[dict, str]]:
    """Settings of vLLM that are to be refused, and a part of the sentence."""

    def copied(name: str) -> Path:
        return Path(shutil.copytree(DRAFTERS / "dflow", scratch / name))

    def with_tensors(name: str, change) -> Path:
        folder = copied(name)
        tensors = load_file(folder / "relay/relay.safetensors")
        change(tensors)
        save_file(tensors, folder / "relay/relay.safetensors")
        return folder

    def narrow(tensors: dict) -> None:
        tensors["relay_mlp.0.weight"] = tensors["relay_mlp.0.weight"][:, :300].contiguous()

    def poison(tensors: dict) -> None:
        tensors["relay_mlp.2.bias"][7] = float("nan")

    missing = copied("missing")
    shutil.rmtree(missing / "relay")
    flag = copied("flag")
    settings = json.loads((flag / "relay/config.json").read_text())
    (flag / "relay/config.json").write_text(json.dumps(settings | {"first_rejected": False}))
    beside = copied("beside")
    shutil.copyfile(beside / "relay/relay.safetensors", beside / "relay.safetensors")
    other = scratch / "other-target"
    shutil.copytree(TARGET, other, ignore=shutil.ignore_patterns("*.safetensors", "prompts"))
    config = Qwen3Config.from_pretrained(TARGET)
    config.hidden_size = 192
    config.save_pretrained(other)

    def drafter(folder: Path) -> dict:
        speculative = {"method": "dflash", "model": str(folder), "num_speculative_tokens": 7}
        return {"speculative_config": speculative}

    padded = drafter(DRAFTERS / "dflow")
    padded["speculative_config"]["disable_padded_drafter_batch"] = True
    return {
        "relay folder missing": (drafter(missing), "lacks its relay folder"),
        "wrong hidden size": (drafter(with_tensors("narrow", narrow)), "has shape [320, 300]"),
        "NaN": (drafter(with_tensors("nan", poison)), "not finite"),
        "flag is not the weights'": (drafter(flag), "differs from dflow_config"),
        "relay beside the body": (drafter(beside), "engines would read"),
        "drafter of another target": (
            drafter(DRAFTERS / "dflow") | {"model": str(other)}, "is for a target with hidden_size",
        ),
        "rejected rows dropped": (padded, "drops the rows"),
        "switch is no bool": (
            drafter(DRAFTERS / "dflow") | {"additional_config": {"dflow_relay": "no"}},
            "give true or false",
        ),
    }  # fmt: skip


def damage(bench: Bench) -> None:
    """Damaged folders and settings: one sentence and no server, or a warning and a server."""
    cases = damaged_folders(bench.scratch / "damage")
    file = bench.scratch / "cases.json"
    file.write_text(json.dumps({name: settings for name, (settings, _) in cases.items()}))
    run = bench.offline(bench.ids[:4], None, script="damage.py", folders=file)
    for name, (_, wanted) in cases.items():
        text = run["refused"][name] or "served"
        right = text.startswith("InputError") and wanted in text and "\n" not in text
        print(f"refused  {name:<26} {bench.expect(name, right)}  {short(text)}", flush=True)
    file.write_text("{}")
    other = bench.scratch / "other-weights"
    shutil.copytree(TARGET, other)
    tensors = load_file(other / "model.safetensors")
    tensors["model.norm.weight"] = tensors["model.norm.weight"] * 1.01
    save_file(tensors, other / "model.safetensors", metadata={"format": "pt"})
    eight = {"method": "dflash", "model": str(DFLOW.folder), "num_speculative_tokens": 5}
    for name, options, wanted in (
        ("release not in the table", {"change": "release"}, "vLLM 0.99.0 is none of"),
        ("another signature", {"change": "signature"}, "has no parameter num_rejected"),
        ("target with other weights", {"engine": json.dumps({"model": str(other)})}, "not those"),
        ("another number of drafts",
         {"engine": json.dumps({"speculative_config": eight})}, "num_speculative_tokens is 5"),
    ):  # fmt: skip
        run = bench.offline(bench.ids[:4], DFLOW, script="damage.py", folders=file, **options)
        said = " ".join(re.findall(r"(DFlow (?:relay: off|drafter:).*)", run["log"]))
        right = wanted in said and run["rounds"] > 0
        if "weights" not in name:
            right &= run["answers"] == [one[:32] for one in bench.plain[:4]]
        print(f"served   {name:<26} {bench.expect(name, right)}  {short(said)}", flush=True)
    settings = ServerSettings(
        python=VLLM, target=str(TARGET), num_draft_tokens=7,
        drafter=bench.scratch / "damage/missing",
    )  # fmt: skip
    try:
        with VllmServer(settings, patience=600):
            text = "served"
    except InputError as error:
        text = str(error)
    right = "lacks its relay folder" in text
    print(
        f"refused  {'the same, by the server':<26} {bench.expect('server', right)}  {short(text)}"
    )


def short(text: str) -> str:
    """A sentence without the folders in it."""
    words = text.replace("InputError: ", "").split()
    return " ".join(Path(w).name if w.startswith("/") else w for w in words)[:150]


def overhead(bench: Bench) -> None:
    """What the relay costs: its share of vLLM's draft call, and tokens per second; one run."""
    print("arm               in flight  tokens/s  draft call  relay  share")
    prompts = bench.ids[::2]
    for concurrency in (1, 8):
        for arm in (None, Arm("DFlow, relay off", DFLOW.folder, False), DFLOW):
            run = bench.offline(
                prompts, arm, concurrency=concurrency, passes=3, time=True, max_new_tokens=128
            )
            tokens = sum(map(len, run["answers"]))
            seconds = sorted(run["seconds"][1:])[0]  # of two, after one that warms up
            draft, relay = (run["parts"].get(part, 0.0) for part in ("draft", "relay"))
            print(
                f"{arm.name if arm else 'no speculation':<17} {concurrency:>9} "
                f"{tokens / seconds:>9.0f} {draft:>9.2f} s {relay:>5.2f} "
                f"{relay / draft if draft else 0:>6.1%}",
                flush=True,
            )


def contract(bench: Bench, release: str, environment: dict[str, str]) -> None:
    """What the plug-in relies on, and the V2 runner's hook on vLLM's own classes."""
    inherited = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    done = subprocess.run(
        [VLLM, HERE / "contract.py", DFLOW.folder], capture_output=True, text=True, check=False,
        env=inherited | environment,
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(done.stderr[-2000:])
    found = json.loads(done.stdout.splitlines()[-1])
    differences = [one for group in ("model", "V1", "V2") for one in found[group]]
    right = not differences and found["equal"] and found["corrected"] == [3, 0, 7]
    print(
        f"vLLM {found['version']:<8} interface: {differences or 'as expected'}; V2 hook on vLLM's "
        f"own classes gives {'what V1 gives' if found['equal'] else 'SOMETHING ELSE'}  "
        f"{bench.expect(f'contract {release}', right)}",
        flush=True,
    )


def releases(bench: Bench) -> None:
    """The release before, on fewer prompts: counters and blocks, exactly."""
    prompts = bench.ids[::4]
    for name, environment in (("0.32", {}), ("0.31", {"PYTHONPATH": str(PREVIOUS)})):
        if environment and not PREVIOUS.is_dir():
            raise InputError(f"{PREVIOUS} is missing; run `make env-vllm`")
        contract(bench, name, environment)
        for arm in ARMS[1:]:
            run = bench.offline(
                prompts, arm, max_new_tokens=64, record=True, environment=environment
            )
            verdict = bench.blocks(arm, prompts, run)
            ours = own_counts(bench.decoder(arm.folder), prompts, run["answers"], relay=arm.relay)
            right = counts(run) == ours and not verdict.errors and name in run["version"]
            print(
                f"vLLM {run['version']:<8} {arm.name:<17} tau {counts(run).tau:.3f}  "
                f"rounds {run['rounds']} (ours {ours.rounds})  {verdict}  "
                f"{bench.expect(f'{name} {arm.name}', right)}",
                flush=True,
            )
