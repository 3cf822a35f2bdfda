"""A target that is no Qwen3, from prompts to a proven export: Llama, no spare vocabulary row.

`DFLOW_TARGET` names the folder of a real one (docs/how-to-other-target.md) for the test that takes
minutes.
"""

import json
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from targets import random_target
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from dflow_lightning.data.prepared import read_manifest
from dflow_lightning.errors import InputError

if TYPE_CHECKING:
    from launch import Launcher

pytest_plugins = ["launch"]
REAL = os.environ.get("DFLOW_TARGET")
# Of the kind that SmolLM2 has: a system message of its own where the user gives none.
TEMPLATE = (
    "{% for message in messages %}{% if loop.first and message.role != 'system' %}"
    "<|im_start|>system\nYou are helpful.<|im_end|>\n{% endif %}"
    "<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="module")
def llama(tmp_path_factory) -> Path:
    """A random Llama whose embedding has as many rows as its tokenizer has tokens."""
    folder = random_target(tmp_path_factory.mktemp("llama"))
    for file in ("model.safetensors", "config.json", "chat_template.jinja"):
        (folder / file).unlink()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    torch.manual_seed(5)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=48, intermediate_size=80, num_hidden_layers=5,
        num_attention_heads=6, num_key_value_heads=2, head_dim=8, max_position_embeddings=512,
        tie_word_embeddings=True, bos_token_id=tokenizer.convert_tokens_to_ids("<|im_start|>"),
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.eos_token_id,
        rope_parameters={"rope_type": "default", "rope_theta": 1e5},
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        model.model.norm.weight.mul_(8.0)  # sharper logits: fewer greedy ties
    model.save_pretrained(folder)
    return folder


def write_prompts(path: Path, texts: list[str]) -> Path:
    rows = [{"id": f"{path.stem}-{i}", "prompt": text} for i, text in enumerate(texts)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def write_tasks(folder: Path) -> Path:
    """Two tasks in the shape of their sources, one of two turns."""
    folder.mkdir()
    sums = [{"question": f"What is {n} + {n}?", "answer": "#### 1"} for n in range(4)]
    talks = [{"prompt": [f"Name {n} colours.", "Now backwards."]} for n in range(2, 4)]
    for name, rows in {"gsm8k": sums, "mt-bench": talks}.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def whole_way(
    launch: "Launcher", target: Path, folder: Path, mask_id: int, settings: list[str],
    tasks: Path, limit: int, tokens: int,
) -> list[dict]:  # fmt: skip
    """Prepare, train on packed rows, export, prove and bench; the bench's rows."""
    prompts = write_prompts(folder / "prompts.jsonl", [f"Tell me about {n}." for n in range(6)])
    held = write_prompts(folder / "held.jsonl", ["What is a drafter?", "What is a target?"])
    for path, out in ((prompts, "train"), (held, "held-out")):
        done = launch("prepare", "--data", path, "--target", target, "--out", folder / out,
                      "--max_new_tokens", tokens, "--max_reject_share", 0.9)  # fmt: skip
        assert done.status == 0, done.err
    fit = launch(
        "fit", f"--model.target.path={target}", f"--model.drafter.mask_token_id={mask_id}",
        f"--data.train={folder / 'train'}", f"--data.validation={folder / 'held-out'}",
        "--data.pack=true", "--model.relay.enabled=true", "--data.batch_size=1",
        "--trainer.accelerator=cpu",
        "--trainer.devices=1", "--trainer.check_val_every_n_epoch=null",
        "--trainer.num_sanity_val_steps=0", f"--validation.max_new_tokens={tokens}",
        f"--run_dir={folder / 'run'}", "--tracking.enabled=false", *settings,
    )  # fmt: skip
    assert fit.status == 0, fit.err
    export = folder / "export"
    done = launch("export", "--checkpoint", folder / "run/checkpoints/last.ckpt", "--out", export)
    assert done.status == 0, done.err
    proof = launch("validate-export", "--drafter", export, "--target", target, "--suite", held,
                   "--max_new_tokens", tokens)  # fmt: skip
    assert proof.status == 0, proof.out + proof.err
    assert "FAIL" not in proof.out
    bench = launch(
        "bench", "--target", target, "--drafter", export, "--suite",
        ",".join(path.stem for path in sorted(tasks.glob("*.jsonl"))), "--suite_dir", tasks,
        "--limit", limit, "--max_new_tokens", tokens, "--json", folder / "bench.json",
    )  # fmt: skip
    assert bench.status == 0, bench.out + bench.err
    print(bench.out)
    rows = json.loads((folder / "bench.json").read_text())["rows"]
    assert all(row["lossless"] for row in rows)
    return rows


@pytest.mark.slow
@pytest.mark.usefixtures("traced")
def test_a_random_llama_from_prompts_to_a_proven_export(launch, llama, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(llama)
    settings = [
        "--model.drafter.num_layers=1", "--model.drafter.block_size=4",
        "--model.drafter.target_layer_ids=[0,2,3]", "--model.num_anchors=48",
        "--rollout.num_anchors=16", "--data.max_length=160", "--trainer.max_steps=80",
        "--trainer.val_check_interval=80", "--model.optimizer.lr=3e-3",
    ]  # fmt: skip
    mask_id = tokenizer.convert_tokens_to_ids("<think>")
    tasks = write_tasks(tmp_path / "tasks")
    rows = whole_way(launch, llama, tmp_path, mask_id, settings, tasks, 2, 24)
    assert {(row["family"], row["prompts"]) for row in rows} == {
        ("gsm8k", 2), ("mt-bench", 4), ("pooled", 6)
    }  # fmt: skip
    pooled = {row["relay"]: row for row in rows if row["family"] == "pooled"}
    assert pooled.keys() == {"on", "off"}
    assert min(row["tau"] for row in pooled.values()) > 1.1  # drafts were accepted, not only made
    manifest = read_manifest(tmp_path / "train")
    assert manifest["target"]["name"] == str(llama)
    config = json.loads((tmp_path / "export/config.json").read_text())
    assert config["dflash_config"]["mask_token_id"] == mask_id


def test_a_vocabulary_without_a_spare_row_needs_a_mask_id(llama):
    from dflow_lightning.models.dims import DrafterConfig, DrafterDims
    from dflow_lightning.models.target import FrozenTarget

    target = FrozenTarget.load(str(llama))
    with pytest.raises(InputError, match=r"no row after the tokenizer's .* <think> \(259\)"):
        DrafterDims.resolve(DrafterConfig(target_layer_ids=[0]), target)
    dims = DrafterDims.resolve(DrafterConfig(target_layer_ids=[0], mask_token_id=259), target)
    assert dims.mask_token_id == 259


@pytest.mark.slow
@pytest.mark.skipif(REAL is None, reason="DFLOW_TARGET names no target")
def test_a_real_target_from_prompts_to_a_proven_export(launch, tmp_path):
    assert REAL is not None
    target = Path(REAL).expanduser()
    suite = os.environ.get("DFLOW_SUITE_DIR")
    tasks = Path(suite) if suite else write_tasks(tmp_path / "tasks")
    chosen = tmp_path / "chosen"
    chosen.mkdir()
    for path in sorted(tasks.glob("*.jsonl"))[:3]:
        shutil.copy(path, chosen)
    settings = [
        "--model.drafter.num_layers=1", "--model.drafter.block_size=8", "--model.num_anchors=16",
        "--rollout.num_anchors=8", "--data.max_length=256", "--trainer.max_steps=3",
        "--trainer.val_check_interval=3", "--validation.prompts_per_family=1",
    ]  # fmt: skip
    mask_id = int(os.environ.get("DFLOW_MASK_ID", "16"))
    rows = whole_way(launch, target, tmp_path, mask_id, settings, chosen, 4, 16)
    assert rows[-1]["tau"] >= 1
