"""Is the data ever the bottleneck? The loader alone, beside the training step that it feeds.

Makes batches of the tiny recipe's data (as files, and prepared and packed), with the recipe's batch
size, and of a prepared set of `--rows` rows, and takes the recipe's own training steps. Prints a
table; the exit status is 1 where a loader with workers gives fewer batches a second than
`--margin` times the steps, or where reading the large set takes more than 64 MB of memory and 150
bytes a row: memory may grow with the number of rows, never with their tokens.

    python scripts/bench_loader.py
"""

import argparse
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from lightning.pytorch.plugins.precision import Precision
from rich.console import Console
from rich.table import Table

from dflow_lightning.data.batches import TrainLoader
from dflow_lightning.data.datamodule import ChatDataModule
from dflow_lightning.data.prepared import PreparedRow, PreparedWriter, finish
from dflow_lightning.data.token_rows import PreparedRows, TokenRows
from dflow_lightning.models.dims import DrafterConfig
from dflow_lightning.training.module import DrafterModule, TargetConfig
from dflow_lightning.training.step_inputs import RolloutConfig

ROOT = Path(__file__).resolve().parents[1]
TARGET = ROOT / "data/tiny-qwen3"
BATCH, MAX_LENGTH, ANCHORS, ROLLED, ROUNDS = 4, 384, 8, 4, 2  # of recipes/tiny-dflow.yaml


class Measured(NamedTuple):
    """One loader: batches and tokens a second, the first batch apart, and its memory."""

    name: str
    start: float
    batches: float
    tokens: float
    padding: float
    megabytes: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=100_000, help="of the large prepared set")
    parser.add_argument("--longest", type=int, default=900, help="tokens of its longest row")
    parser.add_argument("--steps", type=int, default=20, help="training steps to time")
    parser.add_argument("--margin", type=float, default=2.0)
    parser.add_argument("--num_workers", type=int, default=2)
    arguments = parser.parse_args()
    data = ChatDataModule(
        train=TARGET / "prompts/train.jsonl",
        tokenizer=str(TARGET),
        max_length=MAX_LENGTH,
        batch_size=BATCH,
    )
    data.setup("fit")
    step = step_seconds(data, arguments.steps)
    with tempfile.TemporaryDirectory() as folder:
        tiny = write_tiny(data, Path(folder) / "tiny")
        large = write_large(Path(folder) / "large", arguments.rows, arguments.longest)
        size = sum(path.stat().st_size for path in large.iterdir()) / 1e6
        print(f"training step {1000 * step:.0f} ms; large set {size:.0f} MB on disk", flush=True)
        rows: dict[str, tuple[Any, int | None]] = {
            "tiny, files": (data._sources("train")[0], None),
            "tiny, prepared": (PreparedRows(tiny), None),
            "tiny, prepared, packed": (PreparedRows(tiny), MAX_LENGTH),
        }
        measured = []
        for name, (source, width) in rows.items():
            for workers in (0, arguments.num_workers):
                measured.append(measure(name, source, workers, width))
        for width in (None, 2048):
            name = f"{arguments.rows:,} rows" + ", packed" * (width is not None)
            measured.append(measure(name, PreparedRows(large), arguments.num_workers, width))
    show(measured, step)
    slow = [one for one in measured if one.batches < arguments.margin / step]
    heavy = [one for one in measured if one.name.startswith(f"{arguments.rows:,}")]
    allowed = 64 + 150 * arguments.rows / 1e6
    heavy = [one for one in heavy if one.megabytes > allowed]
    for one in slow:
        print(f"FAIL {one.name}: {one.batches:.0f} batches/s, steps take {1 / step:.1f} a second")
    for one in heavy:
        print(f"FAIL {one.name}: {one.megabytes:.0f} MB of memory, {allowed:.0f} are allowed")
    print("FAIL" if slow or heavy else "ok: no loader is a bottleneck")
    sys.exit(bool(slow or heavy))


def step_seconds(data: ChatDataModule, steps: int) -> float:
    """Median time of the recipe's step: clean forward, rollouts, forward and backward, AdamW."""
    module = DrafterModule(
        target=TargetConfig(path=str(TARGET)),
        drafter=DrafterConfig(num_layers=1, block_size=8, target_layer_ids=[1, 4, 6]),
        num_anchors=ANCHORS,
    )
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
    rollout = RolloutConfig(num_rounds=ROUNDS, num_anchors=ROLLED)
    times = []
    with Precision().forward_context():
        for batch in islice(data.train_dataloader(), steps):
            start = time.perf_counter()
            loss, _ = module.objective(module.step_inputs(batch, rollout))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            times.append(time.perf_counter() - start)
    return float(np.median(times))


def measure(name: str, source: Any, workers: int, width: int | None) -> Measured:
    """Up to 400 batches, or 10 seconds of them."""
    before = own_memory()
    start = time.perf_counter()
    loader = TrainLoader(source, batch_size=BATCH, seed=0, num_workers=workers, width=width)
    batches = iter(loader)
    next(batches)
    began = time.perf_counter()
    count, real, slots = 0, 0, 0
    largest = own_memory()
    for batch in limited(batches, began + 10):
        count += 1
        slots += batch.input_ids_BS.numel()
        if batch.documents is not None:
            real += int((batch.documents.sample_ids_BS >= 0).sum())
        if count % 50 == 0:
            largest = max(largest, own_memory())
    seconds = time.perf_counter() - began
    padding = 1 - real / slots if width is not None else float("nan")
    return Measured(
        f"{name}, {workers} workers", began - start, count / seconds, slots / seconds, padding,
        (largest - before) / 1e6,
    )  # fmt: skip


def limited(batches: Iterator[Any], until: float) -> Iterator[Any]:
    for batch in islice(batches, 400):
        yield batch
        if time.perf_counter() > until:
            return


def own_memory() -> int:
    """Bytes of this process and its workers that no file stands behind: mapped data is left out.

    Pages that workers share with this process count once. 0 where the system does not say (Linux
    does).
    """
    total = 0
    for one in [os.getpid(), *(child.pid for child in multiprocessing.active_children())]:
        try:
            lines = Path(f"/proc/{one}/smaps_rollup").read_text().splitlines()
        except OSError:
            continue
        total += sum(1024 * int(line.split()[1]) for line in lines if line.startswith("Pss_Anon:"))
    return total


def write_tiny(data: ChatDataModule, folder: Path) -> Path:
    """The tiny training rows as a prepared set."""
    rows = data._sources("train")[0]
    assert isinstance(rows, TokenRows)
    return write(
        folder,
        (
            PreparedRow(f"{n}", "all", rows.read(n)[0].tolist(), rows.read(n)[1].tolist(), True, n)
            for n in range(len(rows))
        ),
    )


def write_large(folder: Path, count: int, longest: int) -> Path:
    """Rows of a ninth to all of `longest` tokens, the end of them supervised."""
    lengths = np.random.default_rng(0).integers(longest // 9, longest, count).tolist()
    ids, mask = list(range(longest)), [n > longest // 10 for n in range(longest)]
    return write(
        folder,
        (
            PreparedRow(f"{n}", "all", ids[:length], mask[:length], True, n)
            for n, length in enumerate(lengths)
        ),
    )


def write(folder: Path, rows: Iterator[PreparedRow]) -> Path:
    folder.mkdir()
    writer = PreparedWriter(folder)
    for row in rows:
        writer.write(row)
    finish(folder, {}, writer.close())
    return folder


def show(measured: list[Measured], step: float) -> None:
    table = Table(box=None)
    for name in ("loader", "start s", "batches/s", "tokens/s", "padding", "MB", "of a step"):
        table.add_column(name, justify="left" if name == "loader" else "right")
    for one in measured:
        padding = "" if np.isnan(one.padding) else f"{one.padding:.1%}"
        table.add_row(
            one.name, f"{one.start:.2f}", f"{one.batches:,.0f}", f"{one.tokens:,.0f}", padding,
            f"{one.megabytes:.0f}", f"{1 / one.batches / step:.1%}",
        )  # fmt: skip
    Console(width=100, no_color=not os.isatty(1)).print(table)


if __name__ == "__main__":
    main()
