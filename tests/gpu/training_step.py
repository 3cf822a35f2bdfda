"""One training step at Qwen3-1.7B's shape on a GPU: three ways to compute it, and what it takes.

The target has random weights in bfloat16; the drafter float32 master weights under autocast. Blocks
attend by flex_attention. Compared with a dense mask in float32 on few blocks: loss and gradient of
the eager step with `dense`, with `flex`, and of the drafter compiled. Timed: DFlash and DFlow steps
of the recipes' shape, with the peak of memory. One JSON object at the end; exit status 1 when a
comparison fails.
"""

import argparse
import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

from dflow_lightning.data.datamodule import Batch
from dflow_lightning.models.dims import DrafterConfig
from dflow_lightning.models.relay import RelayConfig
from dflow_lightning.models.target import FrozenTarget
from dflow_lightning.training.module import DrafterModule, TargetConfig
from dflow_lightning.training.step_inputs import RolloutConfig

ROOT = Path(__file__).resolve().parents[2]
ROUNDS = 2
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 3e-2}  # of the gradient's norm


@dataclass(frozen=True)
class Shape:
    """A target and the blocks of a step."""

    hidden: int
    layers: int
    heads: int
    key_heads: int
    head_dim: int
    intermediate: int
    vocabulary: int
    rows: int
    length: int
    anchors: int
    rolled: int
    few: int  # blocks of the comparison, whose dense mask must fit


QWEN = Shape(2048, 28, 16, 8, 128, 6144, 151936, 2, 3072, 512, 64, 64)
TINY = Shape(64, 6, 4, 2, 16, 128, 2048, 2, 96, 24, 6, 12)


def build(shape: Shape, device: torch.device) -> DrafterModule:
    """A module on a random target, without files."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=shape.vocabulary, hidden_size=shape.hidden, num_hidden_layers=shape.layers,
        intermediate_size=shape.intermediate, num_attention_heads=shape.heads,
        num_key_value_heads=shape.key_heads, head_dim=shape.head_dim, tie_word_embeddings=True,
        max_position_embeddings=40960, eos_token_id=1, pad_token_id=0,
    )  # fmt: skip
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    with torch.device(device):
        model = Qwen3ForCausalLM(config).to(dtype)
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "data/tiny-qwen3")
    target = FrozenTarget(model, tokenizer, "random")
    FrozenTarget.load = classmethod(lambda cls, *args, **kwargs: target)  # type: ignore[assignment]
    module = DrafterModule(
        target=TargetConfig(path="random"), relay=RelayConfig(enabled=True),
        drafter=DrafterConfig(num_layers=5 if shape is QWEN else 2, block_size=16),
        num_anchors=shape.anchors,
    )  # fmt: skip
    with torch.no_grad():
        for parameter in module.relay.parameters():  # it starts at zero, and would show nothing
            parameter.add_(0.02 * torch.randn_like(parameter))
    return module.to(device).train()


def random_batch(shape: Shape, device: torch.device) -> Batch:
    """Random rows of full length, all supervised but a prompt."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(2, shape.vocabulary, (shape.rows, shape.length), generator=generator)
    mask = torch.ones_like(ids, dtype=torch.bool)
    mask[:, : shape.length // 8] = False
    return Batch(ids.to(device), mask.to(device), torch.arange(shape.rows))


def step(module, batch: Batch, anchors: int, rolled: int, autocast: bool):
    """Forward and backward of one step; returns its loss."""
    module.num_anchors = anchors
    module.zero_grad(set_to_none=True)
    device = batch.input_ids_BS.device.type
    with torch.autocast(device, torch.bfloat16, enabled=autocast):
        config = RolloutConfig(num_rounds=ROUNDS, num_anchors=rolled) if rolled else None
        inputs = module.step_inputs(batch, config)
        loss, _ = module.objective(inputs)
    loss.backward()
    return loss.detach()


def gradient(module) -> torch.Tensor:
    """All gradients as one vector."""
    return torch.cat([p.grad.flatten().float() for p in module.parameters() if p.grad is not None])


def compare(module, batch: Batch, shape: Shape, autocast: bool, slow: str, fast: str) -> dict:
    """Loss and gradient by three ways: relative differences to the first."""
    found = {}
    forward = module.drafter.forward
    for name, backend in (("eager", slow), (fast, fast), ("compiled", slow)):
        module.drafter.attention = backend
        if name == "compiled":
            on_gpu = batch.input_ids_BS.device.type == "cuda"  # C++ would take minutes to compile
            kind = "inductor" if on_gpu else "aot_eager"
            module.drafter.forward = torch.compile(forward, dynamic=False, backend=kind)
        loss = step(module, batch, shape.few, 0, autocast)
        found[name] = (loss.item(), gradient(module))
    module.drafter.forward = forward
    loss, wanted = found["eager"]
    return {
        name: {
            "loss": abs(other - loss) / abs(loss),
            "gradient": ((got - wanted).norm() / wanted.norm()).item(),
        }
        for name, (other, got) in found.items()
        if name != "eager"
    }


def timed(module, batch: Batch, shape: Shape, autocast: bool, rolled: int, steps: int) -> dict:
    """Median seconds of a step after two, and the peak of memory."""
    device = batch.input_ids_BS.device
    seconds = []
    for number in range(2 + steps):
        if number == 2 and device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        if device.type == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        step(module, batch, shape.anchors, rolled, autocast)
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    middle = sorted(seconds[2:])[steps // 2]
    peak = torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else None
    return {
        "seconds": middle,
        "tokens_per_second": batch.input_ids_BS.numel() / middle,
        "peak_gib": peak,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--out", type=Path, help="by default docs/results/gpu-<name>.json")
    args = parser.parse_args()
    device = torch.device(args.device)
    on_gpu = args.device == "cuda"
    if on_gpu and not torch.cuda.is_available():
        print("error: no CUDA device; --device cpu tries the script itself", file=sys.stderr)
        return 2
    shape = QWEN if on_gpu else TINY
    name = torch.cuda.get_device_name() if on_gpu else "cpu, tiny shape"
    module, batch = build(shape, device), random_batch(shape, device)
    fast = "flex" if on_gpu else "split"
    result: dict = {"device": name, "torch": torch.__version__, "shape": vars(shape), "equal": {}}
    failed = []
    for dtype, autocast in ((torch.float32, False), (torch.bfloat16, True)):
        if on_gpu and not autocast:
            module.target.model.float()
        found = compare(module, batch, shape, autocast, "dense", fast)
        if on_gpu and not autocast:
            module.target.model.bfloat16()
        result["equal"][str(dtype)] = found
        for way, differences in found.items():
            if not max(differences.values()) < TOLERANCE[dtype]:  # NaN fails, too
                failed.append(f"{way} in {dtype}: {differences}")
    module.drafter.attention = "auto"
    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    for kind, rolled in (("dflash", 0), ("dflow", shape.rolled)):
        result[kind] = timed(module, batch, shape, on_gpu, rolled, args.steps)
    module.drafter.gradient_checkpointing = True
    result["dflow, recomputed"] = timed(module, batch, shape, on_gpu, shape.rolled, args.steps)
    result["compilations"] = torch._dynamo.utils.counters["stats"]["unique_graphs"] - before
    if result["compilations"] > 3:  # one kernel, and at most two more
        failed.append(f"{result['compilations']} compilations of flex_attention")
    result["failed"] = failed
    text = json.dumps(result, indent=2)
    out = args.out or ROOT / "docs/results" / f"gpu-{name.split()[-1].lower()}.json"
    if on_gpu or args.out:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(text + "\n")
    print("\n".join(page(result)) if args.out else text)
    return int(bool(failed))


def page(result: dict) -> list[str]:
    """The numbers in a few lines; all of them are in the file."""
    lines = [f"{result['device']}, torch {result['torch']}"]
    for dtype, ways in result["equal"].items():
        for way, off in ways.items():
            numbers = f"loss {off['loss']:.1e}, gradient {off['gradient']:.1e} off dense"
            lines.append(f"{way + ', ' + dtype:<28}{numbers}")
    for kind in ("dflash", "dflow", "dflow, recomputed"):
        seconds, peak = result[kind]["seconds"], result[kind]["peak_gib"]
        memory = "" if peak is None else f", peak {peak:.1f} GiB"
        lines.append(f"step of {kind:<20}{seconds:.3f} s{memory}")
    failed = result["failed"] or ["nothing failed"]
    return [*lines, f"{result['compilations']} compilations of flex_attention", *failed]


if __name__ == "__main__":
    sys.exit(main())
