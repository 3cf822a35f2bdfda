"""A user's mistakes, through the command line: status 2 and one sentence, never a traceback."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from targets import random_target
from transformers import AutoTokenizer, GPT2Config, GPT2LMHeadModel, Qwen3Config, Qwen3ForCausalLM

from dflow_lightning.export.write import export_drafter
from dflow_lightning.models.dims import DrafterConfig, DrafterDims
from dflow_lightning.models.drafter import Drafter
from dflow_lightning.models.relay import Relay
from dflow_lightning.models.target import FrozenTarget

if TYPE_CHECKING:
    from launch import Launcher, Result

pytest_plugins = ["launch"]


def export_to(
    folder: Path, target: FrozenTarget, *, relay_width: int = 96, rope_theta: float = 1e6, **shape
) -> Path:
    """An untrained drafter of the shape that `run_options` ask for, except for what is given."""
    given = {"num_layers": 1, "block_size": 4, "target_layer_ids": [0, 1, 2]} | shape
    dims = DrafterDims.resolve(DrafterConfig(**given), target)
    rope = dims.rope_parameters | {"rope_theta": rope_theta}
    drafter = Drafter(replace(dims, rope_parameters=rope))
    export_drafter(drafter, Relay(target.hidden_size, relay_width), target, folder, dtype="float32")
    return folder


def copy_of(target_dir: Path, folder: Path, **changes) -> Path:
    """A target folder with some keys of its config.json changed."""
    shutil.copytree(target_dir, folder)
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def places(tmp_path_factory, tiny_target_dir: Path, tiny_target: FrozenTarget) -> dict[str, object]:
    """What the cases below name in braces: folders, files and token ids."""
    root = tmp_path_factory.mktemp("mistakes")
    tokenizer = AutoTokenizer.from_pretrained(tiny_target_dir)
    (root / "empty.jsonl").write_text("\n")
    unanswered = {"id": "q7", "messages": [{"role": "user", "content": "2 + 2"}]}
    (root / "unanswered.jsonl").write_text(json.dumps(unanswered) + "\n")
    (root / "long.jsonl").write_text(json.dumps({"prompt": "1" * 600, "answer": "2"}) + "\n")
    (root / "broken.jsonl").write_text('{"prompt": "1", "answer": "2"}\n{"prompt": "1"\n')
    shape = {"vocab_size": 320, "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4}
    no_ids = {"bos_token_id": None, "eos_token_id": None}
    window = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2}
    sliding = Qwen3Config(**shape, **window, num_key_value_heads=2, head_dim=16)
    gpt2 = GPT2Config(vocab_size=320, n_embd=64, n_layer=4, n_head=4, **no_ids)
    models = {"sliding": Qwen3ForCausalLM(sliding), "gpt2": GPT2LMHeadModel(gpt2)}
    for name, model in models.items():
        model.save_pretrained(root / name)
        tokenizer.save_pretrained(root / name)
    six_layers = {"num_hidden_layers": 6, "layer_types": ["full_attention"] * 6}
    truncated = copy_of(tiny_target_dir, root / "truncated")
    weights = truncated / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:5000])
    words = copy_of(tiny_target_dir, root / "words")  # with a token more than rows for it
    tokenizer.add_tokens([f"word{i}" for i in range(80)])
    tokenizer.save_pretrained(words)
    word = {"id": "w", "prompt": "tell me", "answer": "word79 is a word that I know."}
    (root / "word.jsonl").write_text(json.dumps(word) + "\n")
    return {
        "root": root,
        "rows": tiny_target.vocab_size,
        "eos": tokenizer.eos_token_id,
        "pad": tokenizer.pad_token_id,
        "target": tiny_target_dir,
        "other": random_target(root / "other", seed=9),
        "larger": copy_of(tiny_target_dir, root / "larger", **six_layers),
        "drafter": export_to(root / "drafter", tiny_target),
        "words": words,
        "two_taps": export_to(root / "two_taps", tiny_target, target_layer_ids=[0, 1]),
        "one_head": export_to(root / "one_head", tiny_target, num_key_value_heads=1),
        "other_rope": export_to(root / "other_rope", tiny_target, rope_theta=1e4),
        "wide_relay": export_to(root / "wide_relay", tiny_target, relay_width=64),
    }


def refused(done: "Result", sentence: str) -> None:
    assert done.status == 2, done.err
    assert len(done.err.splitlines()) == 1, done.err
    assert done.err.startswith("error: ")
    assert sentence in done.err


TARGET = {
    "--model.target.path=nowhere/at/all": "target: nowhere/at/all does not exist",
    "--model.target.path=recipes/tiny-qwen": "target: recipes/tiny-qwen does not exist",
    "--model.target.path={root}": "holds no config.json",
    "--model.target.path={root}/sliding": "layers of type full_attention, sliding_attention",
    "--model.target.path={root}/gpt2": "is a GPT2LMHeadModel, whose layers cannot be tapped",
    "--model.target.path={root}/truncated": "could not be loaded",
    "--model.target.path={larger}": "lacks 22 tensors, first model.layers.4",
    "--model.target.dtype=float8": "model.target.dtype",
    "--model.target.attn_implementation=flesh": "could not be loaded",
}
DRAFTER = {
    "--model.drafter.mask_token_id={eos}": "drafter.mask_token_id is {eos}, the target's eos_token",
    "--model.drafter.mask_token_id={pad}": "drafter.mask_token_id is {pad}, the target's pad_token",
    "--model.drafter.mask_token_id={rows}": "outside the target's embedding of {rows} rows",
    "--model.drafter.mask_token_id=-1": "outside the target's embedding of {rows} rows",
    "--model.drafter.mask_token_id=65": "drafter.mask_token_id is 65, ",
    "--model.drafter.target_layer_ids=[-1,1]": "holds -1; give ids between 0 and 2",
    "--model.drafter.target_layer_ids=[0,3]": "holds 3; give ids between 0 and 2",
    "--model.drafter.target_layer_ids=[0,9]": "holds 9; give ids between 0 and 2",
    "--model.drafter.target_layer_ids=[1,1]": "at least one id and none twice",
    "--model.drafter.target_layer_ids=[]": "at least one id and none twice",
    "--model.drafter.block_size=1": "drafter.block_size is 1; ",
    "--model.drafter.block_size=0": "drafter.block_size is 0; ",
    "--model.drafter.num_layers=0": "drafter.num_layers is 0; ",
    "--model.drafter.intermediate_size=0": "drafter.intermediate_size is 0; ",
    "--model.drafter.num_attention_heads=3": "drafter.num_attention_heads is 3",
    "--model.drafter.head_dim=15": "drafter.head_dim is 15; ",
    "--model.drafter.blok_size=4": "did you mean 'model.drafter.block_size'?",
}
WARM_START = {
    "--model.init_from=nowhere": "nowhere does not exist",
    "--model.init_from={two_taps}": "drafter.target_layer_ids is [0, 1, 2] but model.init_from",
    "--model.init_from={one_head}": "drafter.num_key_value_heads is 2 but model.init_from",
    "--model.init_from={other_rope}": "drafter.rope_parameters is ",
    "--model.init_from={wide_relay}": "relay.hidden_size is 128 but model.init_from",
}
METHOD = {
    "--model.num_anchors=0": "model.num_anchors is 0; ",
    "--rollout.num_anchors=7": "rollout.num_anchors is 7 but model.num_anchors is 6",
    "--rollout.num_anchors=0": "rollout.num_anchors is 0; ",
    "--rollout.num_rounds=-1": "rollout.num_rounds is -1; ",
    "--rollout.num_rounds=0": "rollout.num_rounds is 0 but relay.enabled is true",
    "--rollout.mode=off": "rollout.mode is off but relay.enabled is true",
    "--rollout.mode=onlin": "rollout.mode",
    "--rollout.start=1": "rollout.start is 1.0; ",
    "--rollout.reference=argmax": "rollout.reference",
    "--model.relay.hidden_size=0": "relay.hidden_size is 0; ",
    "--model.loss.round_weights=[1,1]": "loss.round_weights has 2 numbers for 3 rounds",
    "--model.loss.round_weights=[0,0,0]": "loss.round_weights is [0.0, 0.0, 0.0]; ",
    "--model.loss.round_weights=[1,-1,1]": "loss.round_weights is [1.0, -1.0, 1.0]; ",
    "--model.loss.gamma=0": "loss.gamma is 0.0; ",
    "--model.loss.chunk_blocks=0": "loss.chunk_blocks is 0; ",
    "--model.optimizer.lr=fast": "model.optimizer.lr",
    "--model.optimizer.lr=-0.1": "optimizer.lr is -0.1; ",
    "--model.optimizer.betas=[0.9,1.0]": "optimizer.betas is (0.9, 1.0); ",
    "--model.optimizer.weight_decay=-1": "optimizer.weight_decay is -1.0; ",
    "--model.optimizer.warmup_ratio=2": "optimizer.warmup_ratio is 2.0; ",
}
DATA = {
    "--data.train=nowhere.jsonl": "data.train: nowhere.jsonl does not exist",
    "--data.train={root}/empty.jsonl": "is empty; it needs at least one row",
    "--data.train={root}/unanswered.jsonl": "(id 'q7') does not end with an answer",
    "--data.train={root}/broken.jsonl": "line 2 of",
    "--data.max_length=10": "are longer than data.max_length 10",
    "--data.batch_size=0": "data.batch_size is 0; ",
    "--data.supervise=some": "data.supervise",
}


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["val_check_interval=1000", "check_val_every_n_epoch=1"], "`val_check_interval` (1000) "),
        (["val_check_interval=0.5", "check_val_every_n_epoch=null"], "`val_check_interval` should"),
        (["val_check_interval=1.5"], "val_check_interval"),
        (["limit_train_batches=1.5"], "limit_train_batches"),
        (["accelerator=cpu", "devices=0"], "devices"),
        (["accelerator=cpu", "devices=[0,1"], "`devices` selected with"),  # a TypeError
    ],
)
def test_f13_settings_that_lightning_judges(
    launch: "Launcher", recipe: Path, run_options: list[str], options: list[str], sentence: str
) -> None:
    """Some of them only when the data are known (F13)."""
    done = launch(
        "fit", "--config", recipe, *run_options, *(f"--trainer.{option}" for option in options)
    )
    refused(done, sentence)


@pytest.mark.parametrize("option", [*TARGET, *DRAFTER, *WARM_START, *METHOD, *DATA])
def test_fit(
    option: str, launch: "Launcher", recipe: Path, run_options: list[str], places: dict[str, object]
) -> None:
    sentence = (TARGET | DRAFTER | WARM_START | METHOD | DATA)[option]
    done = launch("fit", "--config", recipe, *run_options, option.format_map(places))
    refused(done, sentence.format_map(places))
    assert not (launch.folder / "runs/small/checkpoints").exists()


def test_fit_rows_longer_than_the_targets_context(
    launch: "Launcher", recipe: Path, run_options: list[str], places: dict[str, object]
) -> None:
    done = launch(
        "fit", "--config", recipe, *run_options, f"--data.train={places['root']}/long.jsonl"
    )
    refused(done, "context")


def test_f12_a_path_that_a_library_would_split_is_refused(
    launch: "Launcher", recipe: Path, run_options: list[str], places: dict[str, object]
) -> None:
    """F12: with :: in it the checkpoint was written to another file, and the training ended."""
    folder = launch.folder / "a::b"
    done = launch("fit", "--config", recipe, *run_options, f"--run_dir={folder}")
    refused(done, f"run_dir: {folder} has :: in its path")
    rows = f"{places['root']}/word.jsonl"
    prepare = ["prepare", "--data", rows, "--target", places["target"], "--keep_answers"]
    refused(launch(*prepare, "--out", folder), f"out: {folder} has :: in its path")
    assert not folder.exists()


OUTSIDE = "the text has the token 340 ('word79'), but the target's embedding has 320 rows"


def test_f11_a_token_that_the_target_has_no_embedding_for(
    launch: "Launcher", recipe: Path, run_options: list[str], places: dict[str, object]
) -> None:
    """F11: it was an IndexError in the first step, and a failed assertion on a GPU."""
    rows, words = f"{places['root']}/word.jsonl", str(places["words"])
    given = [*run_options, f"--model.target.path={words}", "--model.drafter.mask_token_id=259"]
    done = launch("fit", "--config", recipe, *given, f"--data.train={rows}")
    refused(done, f"data.train: line 1 of {rows} (id 'w'): {OUTSIDE}")
    validation = launch("fit", "--config", recipe, *given, f"--data.validation={rows}")
    refused(validation, f"data.validation: line 1 of {rows} (id 'w'): {OUTSIDE}")
    refused(launch("inspect", "--data", rows, "--target", words), OUTSIDE)
    prepare = ["prepare", "--data", rows, "--target", words, "--out", "out"]
    assert OUTSIDE in launch(*prepare, "--keep_answers").err
    drafter = ["--target", words, "--drafter", places["drafter"]]
    refused(launch("decode", *drafter, "--prompt", "word79?"), OUTSIDE)
    asked = launch.folder / "asked.jsonl"
    asked.write_text('{"prompt": "word79?"}\n')
    assert OUTSIDE in launch(*prepare, "--data", asked).err
    refused(launch("bench", *drafter, "--suite", asked), OUTSIDE)
    refused(launch("decode", *drafter, "--prompts", asked), OUTSIDE)
    refused(launch("validate-export", *drafter, "--suite", asked), OUTSIDE)


def test_f11_prepared_rows_are_checked_when_the_target_is_known(
    launch: "Launcher", recipe: Path, run_options: list[str], places: dict[str, object]
) -> None:
    """F11: a folder that holds a tokenizer alone does not say how many tokens a target has."""
    alone = launch.folder / "tokenizer"
    AutoTokenizer.from_pretrained(places["words"]).save_pretrained(alone)
    prepare = ["prepare", "--data", f"{places['root']}/word.jsonl", "--target", alone]
    assert launch(*prepare, "--out", "out", "--keep_answers").status == 0
    given = [*run_options, f"--model.target.path={places['words']}", "--data.train=out"]
    done = launch("fit", "--config", recipe, *given, "--model.drafter.mask_token_id=259")
    refused(done, f"data.train: row 1 of out: {OUTSIDE}")


def test_f27_an_answer_that_the_context_cuts_is_said_once(
    launch: "Launcher", places: dict[str, object]
) -> None:
    """F27: a limit was lowered without a word."""
    asked = launch.folder / "asked.jsonl"
    asked.write_text('{"prompt": "One?"}\n{"prompt": "Two?"}\n')
    given = ["--target", places["target"], "--drafter", places["drafter"]]
    said = (
        r"warning: prompt and answer may take 5,0\d\d tokens, but the context of .* ends at 512, "
        "and so do the answers; give fewer max_new_tokens\n"
    )
    for command in (["decode", "--prompts"], ["bench", "--suite"]):
        done = launch(*command, asked, *given, "--max_new_tokens", "5000")
        assert done.status == 0
        assert len(re.findall(said, done.err)) == 1
        done = launch(*command, asked, *given, "--max_new_tokens", "8")
        assert "warning" not in done.err


def test_fit_without_its_recipe_file(launch: "Launcher") -> None:
    refused(launch("fit", "--config", "nowhere.yaml"), "nowhere.yaml")


def test_fit_with_a_recipe_that_is_no_yaml(launch: "Launcher", recipe: Path) -> None:
    recipe.write_text("model: {drafter: [\n")
    refused(launch("fit", "--config", recipe), "line 2, column 1")


DECODE = {
    "--target=nowhere/at/all": "target: nowhere/at/all does not exist",
    "--target={other}": "give that target",
    "--target={root}/sliding": "layers of type full_attention, sliding_attention",
    "--drafter=nowhere": "drafter: nowhere does not exist",
    "--drafter={target}": "drafter: ",
    "--prompt={long}": "the context of {target} ends at 512",
    "--prompt= ": "prompt is empty",
    "--prompts=nowhere.jsonl": "give one of --prompt and --prompts",
    "--temperature=-1": "temperature is -1.0; ",
    "--temperature=nan": "temperature: Expected",
    "--temperature=hot": "temperature",
    "--max_new_tokens=0": "max_new_tokens is 0; ",
    "--relay=maybe": "relay",
    "--temprature=1": "unknown key 'temprature'; did you mean 'temperature'?",
}


@pytest.mark.parametrize("option", DECODE)
def test_decode(option: str, launch: "Launcher", places: dict[str, object]) -> None:
    values = places | {"long": "1" * 600}
    given = {"--target": places["target"], "--drafter": places["drafter"], "--prompt": "hello"}
    key, _, value = option.format_map(values).partition("=")
    done = launch("decode", *(f"{name}={text}" for name, text in (given | {key: value}).items()))
    refused(done, DECODE[option].format_map(values))
    assert done.out == ""


def test_decode_of_a_bad_file(launch: "Launcher", places: dict[str, object]) -> None:
    given = [f"--target={places['target']}", f"--drafter={places['drafter']}"]
    for name, sentence in {"empty": "is empty", "broken": "line 2 of", "long": "context"}.items():
        refused(launch("decode", *given, f"--prompts={places['root']}/{name}.jsonl"), sentence)


def test_validation_is_checked_before_the_first_step(
    launch: "Launcher", recipe: Path, run_options: list[str]
) -> None:
    done = launch("fit", "--config", recipe, *run_options, "--validation.temperature=-1")
    refused(done, "temperature is -1.0; ")
    assert "step 1" not in done.out
