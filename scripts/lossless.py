"""Every way to decode gives what the target alone gives, token for token: one table.

    python scripts/lossless.py --drafter data/tiny-drafters/dflow

Drafters, relay and carryover on and off, requests in flight, backends, and trees of several sizes
beside chains, on the same held-out prompts, greedy, float32. The reference is plain decoding, one
request at a time. A difference counts unless the target itself cannot tell the two tokens apart
(`equality`); those are counted apart. The package is compiled into a copy of the export first. Exit
status 1 when any answer differs.
"""

import argparse
import itertools
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from dflow_lightning.bench.table import short_names
from dflow_lightning.data.prompts import read_prompts
from dflow_lightning.decode import SpeculativeDecoder
from dflow_lightning.decode.equality import EqualityCheck
from dflow_lightning.decode.package import PACKAGE_FOLDER, compile_package
from dflow_lightning.decode.rounds import Backend
from dflow_lightning.decode.tree import slots_are_independent
from dflow_lightning.models.eagle3 import Eagle3Drafter
from dflow_lightning.models.target import FrozenTarget

SUITE = "prompts/test.jsonl"


def packaged_copy(drafter: Path, target: FrozenTarget, folder: Path) -> SpeculativeDecoder:
    """The drafter from a copy of its folder that holds the compiled draft step, if it can."""
    shutil.copytree(drafter, folder)
    decoder = SpeculativeDecoder.from_export(folder, target)
    if isinstance(decoder.drafter, Eagle3Drafter):
        return decoder
    compile_package(decoder.models(), folder / PACKAGE_FOLDER)
    return decoder


def ways(
    decoder: SpeculativeDecoder, backends: list[Backend], tree_nodes: list[int]
) -> Iterator[tuple[Backend, int | None]]:
    """Backends with chains, then eager trees, as far as the drafter can."""
    drafter = decoder.drafter
    for one in backends:
        if not (one == "package" and isinstance(drafter, Eagle3Drafter)):
            yield one, None
    if slots_are_independent(drafter):
        for nodes in tree_nodes:
            yield "eager", nodes


def main(
    target: str, drafter: list[Path], per_family: int, max_new_tokens: int, batch: list[int],
    backend: list[Backend], tree_nodes: list[int],
) -> int:  # fmt: skip
    """Print the table; returns the exit status."""
    torch.set_num_threads(1)
    frozen = FrozenTarget.load(target)
    limit = frozen.config.max_position_embeddings - 1
    prompts = read_prompts(
        frozen.tokenizer, Path(target) / SUITE, per_family=per_family, max_length=limit,
        field="suite",
    )  # fmt: skip
    asked = [prompt.token_ids for prompt in prompts]
    check = EqualityCheck(frozen)
    failed = 0
    with tempfile.TemporaryDirectory() as place:
        names = short_names([str(one) for one in drafter])
        decoders = {
            name: packaged_copy(Path(path), frozen, Path(place) / name)
            for path, name in names.items()
        }
        first = next(iter(decoders.values()))
        plain = first.generate_plain(asked, max_new_tokens=max_new_tokens)
        print(f"{len(prompts)} prompts, up to {max_new_tokens} tokens, greedy, {frozen.dtype}")
        width = max(map(len, ["drafter", *decoders]))
        head = f"{'drafter':<{width}} {'relay':<5} {'backend':<9}"
        print(f"{head} tree  batch  tau   differ ties seconds")
        for name, decoder in decoders.items():
            relays = (True, False) if decoder.keeps_rejected else (False,)
            cells = itertools.product(ways(decoder, backend, tree_nodes), batch, relays)
            for (one, nodes), size, relay in cells:
                start = time.perf_counter()
                ours = decoder.generate(
                    asked, max_new_tokens=max_new_tokens, use_rejected=relay, batch_size=size,
                    backend=one, tree_nodes=nodes,
                )  # fmt: skip
                seconds = time.perf_counter() - start
                found = check.differences(
                    prompts, [c.token_ids for c in ours], [c.token_ids for c in plain],
                    temperature=0.0, seeds=range(len(prompts)),
                )  # fmt: skip
                ties = sum(one.excused for one in found)
                wrong = len(found) - ties
                rounds = [a for completion in ours for a in completion.accepted]
                print(
                    f"{name:<{width}} {'on' if relay else 'off':<5} {one:<9} "
                    f"{nodes or '-':>4}  {size:>5}  "
                    f"{1 + sum(rounds) / len(rounds):.3f} {wrong:>6} {ties:>4} {seconds:7.1f}",
                    flush=True,
                )
                failed += wrong
    print("all equal to plain decoding" if not failed else f"{failed} ANSWERS DIFFER")
    return int(failed > 0)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--target", default="data/tiny-qwen3")
    parser.add_argument("--drafter", type=Path, action="append", required=True)
    parser.add_argument("--per-family", type=int, default=32)
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 3, 8])
    parser.add_argument("--backend", nargs="+", default=["eager", "compiled", "package"])
    parser.add_argument("--tree-nodes", type=int, nargs="*", default=[8, 16])
    sys.exit(main(**vars(parser.parse_args())))
