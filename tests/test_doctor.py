"""`dflow-train doctor` passes a good setup and finds every fault that is planted into it."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from copy import copy
from dataclasses import dataclass, replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from targets import ROOT
from torch import nn

from dflow_lightning.__main__ import main
from dflow_lightning.checks import Check
from dflow_lightning.data.prepared import PreparedRow, PreparedWriter, finish
from dflow_lightning.data.template import ChatEncoder
from dflow_lightning.data.tokenizer import load_tokenizer, template_sha256, tokenizer_sha256
from dflow_lightning.data.turns import training_rows
from dflow_lightning.decode import rounds
from dflow_lightning.doctor import environment
from dflow_lightning.doctor.command import examine
from dflow_lightning.models import drafter, layers, target
from dflow_lightning.run import strategy
from dflow_lightning.training import step_inputs

if TYPE_CHECKING:
    from launch import Launcher

pytest_plugins = ["launch"]
SHIPPED = ROOT / "data/tiny-qwen3"
DRAFTER = ROOT / "data/tiny-drafters/dflash"
NO_ROLES = "{% for message in messages %}{{ message['content'] }}<|im_end|>{% endfor %}"


@dataclass
class Setup:
    """A recipe's command line that a fault is planted into, in a folder of its own."""

    folder: Path
    options: dict[str, Any]
    patch: pytest.MonkeyPatch

    @property
    def args(self) -> list[str]:
        options = [f"--{key}={value}" for key, value in self.options.items()]
        return ["--config", str(self.folder / "small.yaml"), *options]

    def find(self, name: str) -> Check:
        """The check of this name; those after it are not run."""
        return next(check for check in examine(self.args) if check.name == name)

    def copy(self, key: str, source: Path) -> Path:
        """A copy of a folder, which the recipe now names in place of it."""
        path = self.folder / f"copy-of-{source.name}"
        shutil.copytree(source, path)
        self.options[key] = path
        return path

    def own_target(self) -> Path:
        return self.copy("model.target.path", Path(self.options["model.target.path"]))

    def prepared(self, mask: Callable[[list[bool]], list[bool]] = list, **manifest: Any) -> None:
        """Train on a prepared folder of the same rows."""
        tokenizer = load_tokenizer(str(self.options["model.target.path"]))
        lines = Path(self.options["data.train"]).read_text().splitlines()
        folder = self.folder / "prepared"
        folder.mkdir()
        writer = PreparedWriter(folder)
        for number, row in enumerate(map(json.loads, lines)):
            messages = [
                {"role": "user", "content": row["prompt"]},
                {"role": "assistant", "content": row["answer"]},
            ]
            (row_of_turn,) = training_rows(ChatEncoder(tokenizer), messages)
            ids, found = vars(row_of_turn.tokens).values()
            writer.write(PreparedRow(row["id"], row["family"], ids, mask(found), True, number))
        ours = {
            "tokenizer_sha256": tokenizer_sha256(tokenizer),
            "template_sha256": template_sha256(tokenizer),
            "enable_thinking": False,
        }
        finish(folder, ours | manifest, writer.close())
        self.options["data.train"] = folder


@pytest.fixture
def setup(
    recipe: Path, run_options: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Setup:
    """A good one: the small recipe with its random target."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    options = dict(option.removeprefix("--").split("=", 1) for option in run_options)
    return Setup(tmp_path, options, monkeypatch)


# ---------------------------------------------------------------- a good setup


@pytest.mark.slow
def test_the_tiny_recipe_passes(launch: "Launcher", monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    done = launch("doctor", "--config", "recipes/tiny-dflow.yaml", "--json")
    found = json.loads(done.out)
    assert (done.status, len(done.err.splitlines())) == (0, 27)
    statuses = {check["name"]: check["status"] for check in found["checks"]}
    assert found["ok"]
    assert len(statuses) == 25
    assert {name for name, status in statuses.items() if status != "ok"} <= {"packages"}
    (lossless,) = (one["detail"] for one in found["checks"] if one["name"] == "lossless")
    assert "up to 7 drafts accepted" in lossless  # of the block that was learned


@pytest.mark.parametrize("options", [{}, {"data.pack": "true", "data.max_length": 300}])
def test_good_prepared_data_pass_packed_or_not(setup: Setup, options: dict[str, Any]) -> None:
    setup.prepared()
    setup.options |= options
    checks = {check.name: check for check in examine(setup.args)}
    failed = {check.name: check for check in checks.values() if check.status == "FAIL"}
    assert not failed
    assert "24 rows" in checks["prepared data"].detail
    # A random target did not write the answers of the data.
    assert checks["on policy"].status == "warn"


def test_one_line_a_check_and_status_1(setup: Setup, capsys: pytest.CaptureFixture[str]) -> None:
    setup.options["data.train"] = "nowhere.jsonl"
    assert main(["doctor", *setup.args]) == 1
    lines = capsys.readouterr().out.splitlines()
    (failed,) = (line for line in lines if line.startswith("FAIL"))
    assert "data.train: nowhere.jsonl does not exist; " in failed
    assert any(line.startswith("skip  batches") for line in lines)
    assert any(line.startswith("ok    template") for line in lines)  # others go on
    assert not (setup.folder / "runs").exists()  # nothing is written
    assert lines[-1] == f"{len(lines) - 2} checks, 1 failed, 0 warnings"


def test_without_a_recipe_nothing_heavier_than_torch(launch: "Launcher") -> None:
    code = (
        "import sys; from dflow_lightning.__main__ import main; status = main(['doctor']); "
        "heavy = {'lightning', 'mlflow', 'transformers', 'datasets', 'deepspeed', 'jsonargparse'};"
        "assert not heavy & set(sys.modules); sys.exit(status)"
    )

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert [line.split()[1] for line in done.stdout.splitlines()[:5]] == [
        *("packages", "deepspeed", "GPUs", "disk", "tracking")
    ]


# ---------------------------------------------------------------- planted faults


def shifted_taps(setup: Setup) -> None:
    own = target.FrozenTarget._capture
    setup.patch.setattr(target.FrozenTarget, "_capture", lambda self, i: own(self, i - 1))


def taps_without_a_mask(setup: Setup) -> None:
    own = target.FrozenTarget._run

    def run(self: Any, decoder: Any, *arguments: Any) -> Any:
        *before, visible, layer_ids = arguments
        return own(self, decoder, *before, torch.ones_like(visible), layer_ids)

    setup.patch.setattr(target.FrozenTarget, "_run", run)


def rope_theta(setup: Setup) -> None:
    own = layers.rope_frequencies

    def frequencies(dims: Any) -> Any:
        return own(replace(dims, rope_parameters={"rope_type": "default", "rope_theta": 1e4}))

    setup.patch.setattr(layers, "rope_frequencies", frequencies)


def shipped(setup: Setup) -> None:
    """The shipped target and the shape of its drafters."""
    setup.options |= {
        "model.target.path": SHIPPED,
        "model.drafter.block_size": 8,
        "model.drafter.target_layer_ids": "[1,4,6]",
    }


def rope_theta_of_init_from(setup: Setup) -> None:
    shipped(setup)
    config = setup.copy("model.init_from", DRAFTER) / "config.json"
    content = json.loads(config.read_text())
    del content["dflow_config"]  # as others publish: nothing to compare the file with
    content.pop("rope_theta", None)
    content["rope_parameters"]["rope_theta"] = 10000.0
    config.write_text(json.dumps(content))


def rope_theta_of_the_target(setup: Setup) -> None:
    shipped(setup)
    rows = (SHIPPED / "prompts/train.jsonl").read_text().splitlines(keepends=True)
    setup.options["data.train"] = setup.folder / "few.jsonl"
    setup.options["data.train"].write_text("".join(rows[:24]))
    assert setup.find("on policy").status == "ok"
    config = setup.own_target() / "config.json"
    content = json.loads(config.read_text())
    content["rope_parameters"]["rope_theta"] = 10000.0
    config.write_text(json.dumps(content))


def another_targets_drafter(setup: Setup) -> None:
    setup.options["model.init_from"] = DRAFTER


def mask_is_pad(setup: Setup) -> None:
    tokenizer = load_tokenizer(setup.options["model.target.path"])
    setup.options["model.drafter.mask_token_id"] = tokenizer.pad_token_id


def mask_is_text(setup: Setup) -> None:
    setup.options["model.drafter.mask_token_id"] = 65


def mask_is_in_the_data(setup: Setup) -> None:
    tokenizer = load_tokenizer(setup.options["model.target.path"])
    setup.options["model.drafter.mask_token_id"] = tokenizer.convert_tokens_to_ids("</think>")


def template_without_roles(setup: Setup) -> None:
    (setup.own_target() / "chat_template.jinja").write_text(NO_ROLES)


def no_template(setup: Setup) -> None:
    (setup.own_target() / "chat_template.jinja").unlink()


def all_ones(setup: Setup) -> None:
    setup.prepared(lambda mask: [True] * len(mask))


def all_zeros(setup: Setup) -> None:
    setup.prepared(lambda mask: [False] * len(mask))


def thinking_mismatch(setup: Setup) -> None:
    setup.prepared(enable_thinking=True)


def thinking_in_no_answer(setup: Setup) -> None:
    setup.options["data.enable_thinking"] = "true"


def stale_cache(setup: Setup) -> None:
    setup.prepared()
    template = setup.own_target() / "chat_template.jinja"
    template.write_text(template.read_text() + "{# another #}")


def other_tokenizer(setup: Setup) -> None:
    setup.prepared(tokenizer_sha256="0" * 64)


def data_of_another_target(setup: Setup) -> None:
    setup.prepared(target={"name": "another", "weights": "0" * 64})


def no_final_norm_in_target(setup: Setup) -> None:
    path = setup.own_target() / "model.safetensors"
    tensors = load_file(path)
    del tensors["model.norm.weight"]
    save_file(tensors, path, metadata={"format": "pt"})


def no_final_norm_in_drafter(setup: Setup) -> None:
    own = drafter.Drafter.project

    def project(self: Any, taps: torch.Tensor) -> torch.Tensor:
        self.norm = nn.Identity()
        return own(self, taps)

    setup.patch.setattr(drafter.Drafter, "project", project)


def no_final_norm_before_the_head(setup: Setup) -> None:
    own = target.FrozenTarget._run

    def run(self: Any, decoder: Any, *arguments: Any) -> Any:
        bare = copy(decoder)
        bare._modules = decoder._modules | {"norm": nn.Identity()}
        return own(self, bare, *arguments)

    setup.patch.setattr(target.FrozenTarget, "_run", run)


def little_disk(setup: Setup) -> None:
    usage = SimpleNamespace(free=10_000)
    setup.patch.setattr(environment.shutil, "disk_usage", lambda path: usage)


def old_transformers(setup: Setup) -> None:
    own = environment.version
    setup.patch.setattr(
        environment,
        "version",
        lambda name: "4.51.0" if name == "transformers" else own(name),
    )


def no_deepspeed(setup: Setup) -> None:
    setup.options["trainer.strategy"] = "zero2"
    setup.patch.setattr(environment, "find_spec", lambda name: None)


def fake_deepspeed(setup: Setup, code: str) -> None:
    """What an import of it comes to, in the process that tries it."""
    setup.options["trainer.strategy"] = "zero2"
    package = setup.folder / "instead/deepspeed"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(code)
    setup.patch.setenv("PYTHONPATH", str(package.parent), prepend=os.pathsep)


def deepspeed_without_its_ops(setup: Setup) -> None:
    fake_deepspeed(setup, "import deepspeed.ops.op_builder")


def deepspeed_that_hangs(setup: Setup) -> None:
    setup.patch.setattr(environment, "IMPORT_WITHIN", 1.0)
    fake_deepspeed(setup, "import time; time.sleep(60)")


def no_gpu(setup: Setup) -> None:
    setup.options["trainer.accelerator"] = "gpu"
    setup.patch.setattr(torch.cuda, "is_available", lambda: False)


def dead_server(setup: Setup) -> None:
    with HTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as server:
        port = server.server_port  # free again once it is closed
    setup.options |= {"tracking.enabled": "true", "tracking.uri": f"http://127.0.0.1:{port}"}


def sick_server(setup: Setup) -> None:
    class Sick(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_error(500)

        def log_message(self, *args: Any) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Sick)

    def answer_once() -> None:
        with server:
            server.handle_request()

    Thread(target=answer_once, daemon=True).start()
    uri = f"http://127.0.0.1:{server.server_port}"
    setup.options |= {"tracking.enabled": "true", "tracking.uri": uri}


def unfit_target(setup: Setup) -> None:
    config = setup.own_target() / "config.json"
    content = json.loads(config.read_text())
    layers = content["num_hidden_layers"]
    content |= {
        "use_sliding_window": True, "sliding_window": 16, "max_window_layers": 0,
        "layer_types": ["sliding_attention"] * layers,
    }  # fmt: skip
    config.write_text(json.dumps(content))


def no_data_file(setup: Setup) -> None:
    setup.options["data.validation"] = setup.folder / "nowhere.jsonl"


def rows_too_long(setup: Setup) -> None:
    setup.options["data.max_length"] = 20


def unknown_key(setup: Setup) -> None:
    setup.options["model.drafter.blocksize"] = 8


def not_finite(setup: Setup) -> None:
    path = setup.own_target() / "model.safetensors"
    tensors = load_file(path)
    tensors["model.layers.2.mlp.up_proj.weight"][3, 5] = float("nan")
    save_file(tensors, path, metadata={"format": "pt"})


def shifted_positions(setup: Setup) -> None:
    own = step_inputs.BlockLayout.behind.__func__

    def behind(cls: Any, *arguments: Any) -> Any:
        layout = own(cls, *arguments)
        return replace(layout, positions_BQ=layout.positions_BQ + 1)

    setup.patch.setattr(step_inputs.BlockLayout, "behind", classmethod(behind))


def blocks_that_see_their_anchors_feature(setup: Setup) -> None:
    own = drafter.block_attention

    def attend(q: Any, keys: Any, context: Any, view: Any, formulation: str) -> Any:
        if formulation != "dense":
            view = replace(view, anchors_BN=view.anchors_BN + 1)
        return own(q, keys, context, view, formulation)

    setup.patch.setattr(drafter, "block_attention", attend)


def zero_in_bfloat16(setup: Setup) -> type:
    pytest.importorskip("deepspeed")
    setup.options |= {
        "trainer.strategy": "zero2",
        "trainer.precision": "bf16-mixed",
        "model.target.dtype": "bfloat16",
    }
    return strategy.ZeroStrategy


def rollouts_without_autocast(setup: Setup) -> None:
    """As ZeRO once did on GPUs, where its autocast was the CPU's."""
    zero_in_bfloat16(setup)
    setup.patch.setattr(strategy.ZeroPrecision, "forward_context", lambda self: nullcontext())


def strategy_that_never_steps(setup: Setup) -> None:
    setup.patch.setattr(
        zero_in_bfloat16(setup), "optimizer_step", lambda self, optimizer, closure, **_: closure()
    )


def learning_rate(setup: Setup) -> None:
    setup.options["model.optimizer.lr"] = 1e-9


def everything_accepted(setup: Setup) -> None:
    own = rounds.accept
    setup.patch.setattr(rounds, "accept", lambda drafts, chosen: own(drafts, drafts))


# The fault, the check that finds it, how bad it is, and what its line says.
FAULTS = [
    (shifted_taps, "taps", "FAIL", "it is the output of layer 1, shifted by 1"),
    (taps_without_a_mask, "taps", "FAIL", "a wrong mask or wrong positions"),
    (rope_theta, "RoPE", "FAIL", "though both configurations say 1e+06"),
    (rope_theta_of_init_from, "drafter", "FAIL", "rope_theta"),
    (rope_theta_of_the_target, "on policy", "warn", "rope_theta"),
    (another_targets_drafter, "drafter", "FAIL", "give the target it was trained for"),
    (mask_is_pad, "mask id", "FAIL", "the target's pad_token"),
    (mask_is_text, "mask id", "FAIL", "a token of ordinary text"),
    (mask_is_in_the_data, "mask id", "FAIL", "which the training data contain"),
    (template_without_roles, "template", "FAIL", "cannot tell who speaks"),
    (no_template, "template", "FAIL", "has no chat template"),
    (all_ones, "masks", "FAIL", "24 of 24 rows learn from their first token"),
    (all_zeros, "masks", "FAIL", "all zeros"),
    (thinking_mismatch, "prepared data", "FAIL", "data.enable_thinking is False"),
    (thinking_in_no_answer, "thinking", "warn", "0 of 24 answers think"),
    (stale_cache, "prepared data", "FAIL", "another chat template"),
    (other_tokenizer, "prepared data", "FAIL", "another tokenizer"),
    (data_of_another_target, "on policy", "warn", "are by another"),
    (no_final_norm_in_target, "drafter", "FAIL", "model.norm.weight"),
    (no_final_norm_in_drafter, "final norm", "FAIL", "its final norm is missing"),
    (no_final_norm_before_the_head, "final norm", "FAIL", "missing or applied twice"),
    (little_disk, "disk", "FAIL", "checkpoint.save_top_k"),
    (old_transformers, "packages", "FAIL", "transformers 4.51.0 is installed"),
    (no_deepspeed, "deepspeed", "FAIL", "trainer.strategy is zero2"),
    (deepspeed_without_its_ops, "deepspeed", "FAIL", "No module named 'deepspeed.ops'"),
    (deepspeed_that_hangs, "deepspeed", "FAIL", "takes more than 1 s"),
    (no_gpu, "GPUs", "FAIL", "torch sees 0 GPUs"),
    (dead_server, "tracking", "FAIL", "does not answer"),
    (sick_server, "tracking", "FAIL", "status 500"),
    (unfit_target, "target", "FAIL", "sliding_attention"),
    (no_data_file, "data files", "FAIL", "data.validation"),
    (rows_too_long, "batches", "FAIL", "raise data.max_length"),
    (unknown_key, "recipe", "FAIL", "did you mean"),
    (not_finite, "weights", "FAIL", "model.layers.2.mlp.up_proj.weight"),
    (shifted_positions, "positions", "FAIL", "rows of verified blocks"),
    (blocks_that_see_their_anchors_feature, "attention", "FAIL", "from a dense mask"),
    (rollouts_without_autocast, "step", "FAIL", "rollouts in float32, not in bfloat16"),
    (strategy_that_never_steps, "step", "FAIL", "0 of 20 tensors moved"),
    (learning_rate, "overfit", "FAIL", "model.optimizer.lr"),
    (everything_accepted, "lossless", "FAIL", "leaves plain decoding"),
]


@pytest.mark.parametrize(
    ("plant", "name", "status", "says"), FAULTS, ids=[one[0].__name__ for one in FAULTS]
)
def test_finds_what_is_planted(
    setup: Setup,
    plant: Callable[[Setup], None],
    name: str,
    status: str,
    says: str,
    record_property: Callable[[str, object], None],
) -> None:
    plant(setup)
    check = setup.find(name)
    record_property("line", f"{check.status:<4}  {check.name}: {check.detail}")
    assert check.status == status, check
    assert says in check.detail
    assert "; " in check.detail  # the fix
