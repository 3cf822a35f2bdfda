"""Training steps that run in processes of their own and take turns: ours, and the peers'."""

import json
import os
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM
from transformers.utils.logging import disable_progress_bar

from dflow_lightning.models.dims import default_target_layer_ids

ROOT = Path(__file__).resolve().parents[1]
INTEROP = ROOT / "tests/interop"
PEERS = ROOT / ".venv-interop/bin/python"
TINY = ROOT / "data/tiny-qwen3"


@dataclass(frozen=True)
class Shape:
    """What both sides train on: a target, and the blocks of a step."""

    name: str
    target: Path
    target_layers: int
    seq_len: int
    batch: int
    anchors: int
    block_size: int
    layers: int

    def options(self) -> list[str]:
        """As the arguments of a worker."""
        values = asdict(self) | {"target": str(self.target)}
        names = ("target", "seq_len", "batch", "anchors", "block_size", "layers")
        return [part for n in names for part in ("--" + n.replace("_", "-"), str(values[n]))]


@dataclass(frozen=True)
class Step:
    """One step: seconds, and MiB of the process before and at its largest."""

    wall: float
    cpu: float
    before_mib: float
    peak_mib: float
    loss: float


class Worker:
    """A process that runs a step when it is asked to."""

    def __init__(self, python: str | Path, script: Path, *options: str, **env: str) -> None:
        self._name = script.stem
        self._process = subprocess.Popen(
            [str(python), str(script), *options],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"} | env,
        )  # fmt: skip
        self.about = self._answer()

    def step(self, kind: str) -> Step:
        """Run one step of a kind."""
        assert self._process.stdin is not None
        self._process.stdin.write(kind + "\n")
        self._process.stdin.flush()
        return Step(**self._answer())

    def close(self) -> None:
        """End the process."""
        self._process.communicate()

    def _answer(self) -> dict:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"error: {self._name} ended\n{self._process.communicate()[1][-2000:]}")
        return json.loads(line)


def ours(shape: Shape, *options: str, **env: str) -> Worker:
    """Our own steps on a shape."""
    script = ROOT / "scripts/train_steps.py"
    return Worker(sys.executable, script, *shape.options(), *options, **env)


def peers(shape: Shape, **env: str) -> Worker:
    """Those of speculators."""
    if not PEERS.exists():
        raise SystemExit("error: .venv-interop is missing; run `make env-interop`")
    taps = default_target_layer_ids(shape.target_layers, shape.layers)
    options = [*shape.options(), "--taps", *map(str, taps)]
    return Worker(PEERS, INTEROP / "speculators_step.py", *options, **env)


def save_random_target(folder: Path, vocab_size: int, hidden_size: int, head_dim: int) -> Path:
    """A random target of 8 layers; its ids up to the tokenizer's are text, the rest is padding."""
    config = Qwen3Config(
        vocab_size=vocab_size, hidden_size=hidden_size, intermediate_size=3 * hidden_size,
        num_hidden_layers=8, num_attention_heads=hidden_size // head_dim, num_key_value_heads=2,
        head_dim=head_dim, tie_word_embeddings=True, eos_token_id=1, pad_token_id=0,
    )  # fmt: skip
    disable_progress_bar()
    Qwen3ForCausalLM(config).save_pretrained(folder)
    AutoTokenizer.from_pretrained(TINY).save_pretrained(folder)
    return folder
