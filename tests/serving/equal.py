"""Sections of `make serving`: the numbers of vLLM beside those of our own engine."""

from __future__ import annotations

import copy
import json
import math
import shutil
from pathlib import Path

import torch
from bench import ARMS, DRAFTERS, TARGET, VLLM, Arm, Bench, counts
from safetensors.torch import load_file, save_file

from dflow_lightning.serving.check import own_counts
from dflow_lightning.serving.server import ServerSettings, VllmServer
from dflow_lightning.tensors.metrics import acceptance_summary

TIES = "a tie: the first difference lies where the two logits are within 1e-4 in float64"


def offline(bench: Bench) -> None:
    """vLLM's class, greedy: counters and every block, exactly; output against plain vLLM."""
    bare = bench.offline(bench.ids, None, max_new_tokens=bench.max_new_tokens)
    differ, ties = bench.differing(bare["answers"], bench.plain)
    print(f"plain vLLM beside our plain decoding: {differ} answers differ, {ties} of them ties")
    bench.expect("plain vLLM", differ == ties)
    taus = {}
    for arm in ARMS:
        run = bench.offline(bench.ids, arm, max_new_tokens=bench.max_new_tokens, record=True)
        theirs = counts(run)
        ours = own_counts(bench.decoder(arm.folder), bench.ids, run["answers"], relay=arm.relay)
        differ, ties = bench.differing(run["answers"], bare["answers"])
        verdict = bench.blocks(arm, bench.ids, run)
        taus[arm.name] = theirs.tau
        # A block at the end of an answer is drafted and never verified.
        right = theirs == ours and differ == ties and not verdict.errors
        right &= verdict.blocks >= theirs.rounds
        print(
            f"{arm.name:<17} tau {theirs.tau:.3f}  rounds {theirs.rounds} (ours {ours.rounds})  "
            f"accepted {theirs.accepted} (ours {ours.accepted})  answers differ {differ}, "
            f"ties {ties}\n{'':<17} {verdict}  {bench.expect(f'offline {arm.name}', right)}",
            flush=True,
        )
        for error in verdict.errors[:3]:
            print(f"{'':<17} {error}")
    better = taus["DFlow, relay on"] > taus["DFlow, relay off"]
    print(f"relay on above relay off: {bench.expect('relay on above off', better)}")
    print(f"({TIES})")


def sampled(bench: Bench) -> None:
    """Temperature 1: tau beside ours, and how probable the answers are to the target."""
    bare = bench.offline(bench.ids, None, max_new_tokens=bench.max_new_tokens, temperature=1.0)
    wanted = bench.surprise(bare["answers"])
    print(f"plain vLLM: {wanted:.3f} nats a token")
    for arm in ARMS:
        run = bench.offline(bench.ids, arm, max_new_tokens=bench.max_new_tokens, temperature=1.0)
        completions = bench.decoder(arm.folder).generate(
            bench.ids, max_new_tokens=bench.max_new_tokens, temperature=1.0, batch_size=8,
            relay=arm.relay,
        )  # fmt: skip
        ours = acceptance_summary([one.accepted for one in completions], 7)
        spread = math.sqrt(
            sum(n * (a - ours.accepted_drafts) ** 2 for a, n in enumerate(ours.histogram))
            / ours.rounds
        )
        # Two samples of about as many rounds; ours is cut at the ends of answers, theirs is not.
        limit = 4 * spread * math.sqrt(1 / ours.rounds + 1 / run["rounds"]) + 0.05
        nats = bench.surprise(run["answers"])
        tau = counts(run).tau
        right = abs(tau - ours.tau) < limit and abs(nats - wanted) < 0.1
        print(
            f"{arm.name:<17} tau {tau:.3f}, ours {ours.tau:.3f} (may differ by {limit:.3f})  "
            f"{nats:.3f} nats a token  {bench.expect(f'sampled {arm.name}', right)}",
            flush=True,
        )


def http(bench: Bench) -> None:
    """vLLM's server: tau by temperature and requests in flight; greedy counters exactly."""
    print("arm               T  in flight    tau  rounds  accepted  differ  ties")
    for arm in ARMS:
        settings = ServerSettings(
            python=VLLM, target=str(TARGET), drafter=arm.folder, num_draft_tokens=7,
            relay=arm.relay, environment=(("VLLM_CPU_OMP_THREADS_BIND", "0"),),
        )  # fmt: skip
        wanted = None
        with VllmServer(settings, patience=600) as server:
            for temperature in (0.0, 1.0):
                for concurrency in (1, 4, 8):
                    before = server.counters()
                    answers = server.complete_all(
                        bench.ids, concurrency=concurrency, temperature=temperature,
                        max_tokens=bench.max_new_tokens,
                    )  # fmt: skip
                    found = {k: v - before[k] for k, v in server.counters().items()}
                    line = (
                        f"{arm.name:<17} {temperature:.0f} {concurrency:>10} "
                        f"{counts(found).tau:>6.3f} {found['rounds']:>7} {found['accepted']:>9}"
                    )
                    if temperature:
                        print(line, flush=True)
                        continue
                    if wanted is None:
                        wanted = own_counts(
                            bench.decoder(arm.folder), bench.ids, answers, relay=arm.relay
                        )
                    differ, ties = bench.differing(answers, bench.plain)
                    right = differ == ties and counts(found) == wanted
                    verdict = bench.expect(f"http {arm.name} {concurrency}", right)
                    print(f"{line} {differ:>7} {ties:>5}  {verdict}", flush=True)


def deep_drafter(source: Path, folder: Path, layers: int = 3) -> Path:
    """The drafter with further layers of noise, whose key norms are far from the first one's.

    It drafts less well than `source`, and needs its own layers' norms to draft what it should.
    """
    shutil.copytree(source, folder)
    config = json.loads((folder / "config.json").read_text())
    config |= {"num_hidden_layers": layers, "max_window_layers": layers}
    config["layer_types"] = ["full_attention"] * layers
    section = config["dflow_config"]
    del section["checksums"], section["exported_config"]  # another drafter than was exported
    (folder / "config.json").write_text(json.dumps(config))
    tensors = load_file(folder / "model.safetensors")
    generator = torch.Generator().manual_seed(0)
    for name, tensor in list(tensors.items()):
        if not name.startswith("layers.0."):
            continue
        for layer in range(1, layers):
            if name.endswith("k_norm.weight"):
                made = torch.rand(tensor.shape, generator=generator) * 4
            elif tensor.dim() == 1:
                made = copy.copy(tensor).float()
            else:
                noise = torch.randn(tensor.shape, generator=generator)
                made = noise * tensor.float().std() * 0.7
            tensors[name.replace("layers.0.", f"layers.{layer}.")] = made.to(tensor.dtype)
    save_file(tensors, folder / "model.safetensors")
    return folder


def fixes(bench: Bench) -> None:
    """The two defects of the CPU backend: the checks see them when they are left in."""
    arm = Arm("3 layers", deep_drafter(DRAFTERS / "dflow", bench.scratch / "deep"), True)
    prompts = bench.ids[::4]
    for name, value, wanted in (("mended", "1", True), ("left in", "0", False)):
        environment = {"DFLOW_VLLM_CPU_FIXES": value}
        run = bench.offline(prompts, arm, max_new_tokens=64, record=True, environment=environment)
        verdict = bench.blocks(arm, prompts, run)
        right = (not verdict.errors) == wanted
        print(
            f"key norms {name:<8} {verdict}: {len(verdict.errors)} wrong  "
            f"{bench.expect(f'key norms {name}', right)}",
            flush=True,
        )
    arm, plain = (
        ARMS[2],
        bench.surprise(
            bench.offline(bench.ids, None, max_new_tokens=48, temperature=1.0)["answers"]
        ),
    )
    for name, value, wanted in (("mended", "1", True), ("left in", "0", False)):
        run = bench.offline(
            bench.ids, arm, max_new_tokens=48, temperature=1.0,
            environment={"DFLOW_VLLM_CPU_FIXES": value},
        )  # fmt: skip
        nats = bench.surprise(run["answers"])
        right = (abs(nats - plain) < 0.1) == wanted
        print(
            f"sampling  {name:<8} {nats:.3f} nats a token, plain {plain:.3f}, "
            f"tau {counts(run).tau:.3f}  {bench.expect(f'sampling {name}', right)}",
            flush=True,
        )
