"""`dflow-train validate-export`: each check passes on an export and fails on what is none."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from dflow_lightning.checks import FailedError, SkippedError
from dflow_lightning.data.prompts import read_prompts
from dflow_lightning.errors import InputError
from dflow_lightning.export import validate_decoding, validate_folder
from dflow_lightning.export.command import export_command
from dflow_lightning.export.draft_logits import draft_logits
from dflow_lightning.export.validate import CHECKS, validate_export
from dflow_lightning.export.validate_folder import Subject, interleaved
from dflow_lightning.export.write import export_drafter
from dflow_lightning.formats.integrity import file_sha256
from dflow_lightning.models.dims import DrafterConfig, DrafterDims
from dflow_lightning.models.drafter import Drafter
from dflow_lightning.models.relay import RelayConfig
from dflow_lightning.models.target import FrozenTarget
from dflow_lightning.tensors.metrics import acceptance_summary
from dflow_lightning.training.module import DrafterModule, TargetConfig
from dflow_lightning.training.saved import training_record

if TYPE_CHECKING:
    from launch import Launcher

pytest_plugins = ["launch"]

SETTINGS = {"prompts_per_family": 2, "max_new_tokens": 12, "temperature": 0.0, "batch_size": 3}


@pytest.fixture(scope="module")
def run(tmp_path_factory, tiny_target_dir, data_dir) -> Path:
    """A folder with best.ckpt and its export; tau is what this drafter gives on these prompts."""
    folder = tmp_path_factory.mktemp("run")
    torch.manual_seed(4)
    module = DrafterModule(
        target=TargetConfig(path=str(tiny_target_dir)),
        drafter=DrafterConfig(num_layers=1, block_size=4, target_layer_ids=[0, 1, 2]),
        relay=RelayConfig(enabled=True, hidden_size=96, first_rejected=False),
    )
    with torch.no_grad():
        for parameter in module.relay.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    prompts = read_prompts(module.target.tokenizer, data_dir / "validation.jsonl", per_family=2)
    answers = module.decoder().generate([one.token_ids for one in prompts], max_new_tokens=12)
    score = acceptance_summary([one.accepted for one in answers], 3).tau
    content = {
        "state_dict": module.state_dict(),
        "global_step": 12,
        "pytorch-lightning_version": "2.6.6",
        "recipe": {"data": {"validation": str(data_dir / "validation.jsonl")}}
        | {"validation": SETTINGS},
        "callbacks": {
            "Checkpointing": {
                "monitor": "val/tau",
                "best_k_models": {"/run/best.ckpt": torch.tensor(score)},
            }
        },
    }
    module.on_save_checkpoint(content)
    torch.save(content, folder / "best.ckpt")
    export_command(checkpoint=folder / "best.ckpt", out=folder / "export")
    return folder


@pytest.fixture
def subject(run, tiny_target, data_dir) -> Subject:
    """The export beside its checkpoint; reads of the folder are this test's own."""
    suite = data_dir / "validation.jsonl"
    content = torch.load(run / "best.ckpt", weights_only=True)
    prompts = read_prompts(tiny_target.tokenizer, suite)[:3]
    return Subject(run / "export", tiny_target, prompts, 10, suite, content)


def section(subject: Subject) -> dict[str, Any]:
    """The records of the folder, to be changed in memory."""
    return subject.loaded.config["dflow_config"]


# ------------------------------------------------------------ everything at once


@pytest.mark.slow
def test_the_command(run, tiny_target_dir, data_dir, launch: "Launcher") -> None:
    given = {
        "drafter": run / "export",
        "target": tiny_target_dir,
        "suite": data_dir / "validation.jsonl",
        "checkpoint": run / "best.ckpt",
        "num_prompts": 2,
        "max_new_tokens": 6,
        "json": "out/checks.json",
    }
    done = launch("validate-export", *(f"--{key}={value}" for key, value in given.items()))
    assert done.status == 0, done.out
    lines = {line[6:23].strip(): line[:5].strip() for line in done.out.splitlines()}
    assert list(lines) == list(CHECKS)
    assert lines == dict.fromkeys(CHECKS, "ok") | {"package": "skip"}
    written = json.loads((launch.folder / "out/checks.json").read_text())
    assert written["ok"] is True
    assert [one["status"] for one in written["checks"]] == list(lines.values())
    assert written["checks"][-1]["values"]["prompts"] == 6


def test_a_damaged_folder_is_status_1(run, tiny_target_dir, data_dir, launch: "Launcher") -> None:
    folder = shutil.copytree(run / "export", launch.folder / "export")
    (folder / "model.safetensors").write_bytes(b"")
    given = [f"--drafter={folder}", f"--target={tiny_target_dir}", "--json=checks.json"]
    done = launch("validate-export", *given, f"--suite={data_dir}/test.jsonl")
    assert done.status == 1
    first, *rest = done.out.splitlines()
    assert first.startswith("FAIL  files ")
    assert "is damaged" in first
    assert rest[1:] == [f"skip  {name:<16} the drafter does not load" for name in list(CHECKS)[2:]]
    assert json.loads((launch.folder / "checks.json").read_text())["ok"] is False


@pytest.mark.parametrize(
    ("option", "sentence"),
    [
        ("--drafter=nowhere", "drafter: nowhere does not exist"),
        ("--target=nowhere/at/all", "target: nowhere/at/all does not exist"),
        ("--checkpoint=nowhere.ckpt", "checkpoint: nowhere.ckpt does not exist"),
        ("--num_prompts=0", "num_prompts is 0; "),
        ("--max_new_tokens=0", "max_new_tokens is 0; "),
        ("--suite=nowhere.jsonl", "suite: nowhere.jsonl does not exist"),
        ("--suite=tiny", "holds no prompts/test.jsonl"),
        ("--json=.", "json: . is a folder"),
        ("--num_promts=3", "did you mean 'num_prompts'?"),
    ],
)
def test_mistakes(option, sentence, run, tiny_target_dir, data_dir, launch: "Launcher") -> None:
    given = {"--drafter": run / "export", "--target": tiny_target_dir}
    given |= {"--suite": data_dir / "test.jsonl"}
    key, _, value = option.partition("=")
    done = launch("validate-export", *(f"{k}={v}" for k, v in (given | {key: value}).items()))
    assert (done.status, done.out) == (2, "")
    assert done.err.count("\n") == 1
    assert sentence in done.err


# ------------------------------------------------------------ one check after the other


def test_files_and_contract(subject, monkeypatch):
    assert validate_folder.files_check(subject)[0] == "20 tensors in bfloat16, checksums hold"
    validate_folder.engine_contract_check(subject)
    monkeypatch.setattr(validate_folder, "check_contract", lambda folder: ["a is b", "c is d"])
    with pytest.raises(FailedError, match=r"a is b .and 1 more"):
        validate_folder.engine_contract_check(subject)


def test_config_agrees_with_the_target(subject, tiny_target, tmp_path):
    assert validate_folder.config_check(subject)[0].startswith("taps 0, 1, 2 of 4, mask 261")
    config = DrafterConfig(num_layers=1, block_size=4, target_layer_ids=[0, 1, 2])
    dims = DrafterDims.resolve(config, tiny_target)
    for name, changed, expected in (
        ("rope", {"rope_parameters": {"rope_theta": 1e4, "rope_type": "default"}}, "rope_param"),
        ("mask", {"mask_token_id": 65}, "a token of ordinary text"),
    ):
        export_drafter(Drafter(replace(dims, **changed)), None, tiny_target, tmp_path / name)
        with pytest.raises((FailedError, InputError), match=expected):
            validate_folder.config_check(replace(subject, folder=tmp_path / name))


def test_taps_of_another_layer_are_seen(subject, tiny_target):
    validate_folder.taps_check(subject)
    recorded = section(subject)["tap_fingerprint"]
    recorded["layers"]["1"]["values"][0] *= 1.1
    with pytest.raises(FailedError, match=r"layer 1 of the target is .* away") as caught:
        validate_folder.taps_check(subject)
    assert list(caught.value.values) == ["1"]
    recorded["layers"] = {str(int(index) + 1): row for index, row in recorded["layers"].items()}
    with pytest.raises(FailedError, match="fingerprint is of layers 1, 2, 3"):
        validate_folder.taps_check(subject)
    del section(subject)["tap_fingerprint"]
    with pytest.raises(SkippedError):
        validate_folder.taps_check(subject)


def test_the_fingerprint_is_that_of_hugging_face(subject, tiny_target_dir):
    from transformers import AutoModelForCausalLM

    recorded = section(subject)["tap_fingerprint"]
    model = AutoModelForCausalLM.from_pretrained(tiny_target_dir, dtype=torch.float32)
    ids = torch.tensor([recorded["token_ids"]])
    with torch.inference_mode():
        states = model.model(ids, output_hidden_states=True).hidden_states
    for index, row in recorded["layers"].items():
        state = states[int(index) + 1][0, -1]
        assert row["values"] == pytest.approx(state[: len(row["values"])].tolist(), rel=1e-5)
        assert row["norm"] == pytest.approx(state.norm().item(), rel=1e-5)


def test_a_target_in_bfloat16_has_the_same_fingerprint(subject, tiny_target_dir):
    rounded = FrozenTarget.load(str(tiny_target_dir), dtype="bfloat16")
    found, _ = validate_folder.taps_check(replace(subject, target=rounded))
    assert found.startswith("3 layers")
    assert rounded.dtype == torch.bfloat16


def test_checkpoint_is_compared_bit_for_bit(subject):
    assert validate_folder.checkpoint_check(subject)[0].startswith(
        "draft logits of 3 blocks are bit for bit"
    )
    state = subject.checkpoint["state_dict"]
    state["drafter.norm.weight"][0] += 1e-5  # lost in bfloat16, like the export's own rounding
    validate_folder.checkpoint_check(subject)
    state["drafter.norm.weight"][0] += 0.1
    with pytest.raises(FailedError, match=r"tensor norm\.weight is not that of the checkpoint"):
        validate_folder.checkpoint_check(subject)
    with pytest.raises(SkippedError):
        validate_folder.checkpoint_check(replace(subject, checkpoint=None))


@pytest.mark.parametrize(
    ("place", "key", "value", "expected"),
    [
        ("drafter", "block_size", 8, "block_size is 4, but 8"),
        ("drafter", "target_layer_ids", [0, 1], "target_layer_ids is"),
        ("relay", "first_rejected", True, "first_rejected is False"),
        ("relay", "enabled", False, "the other has none"),
        (None, "target_fingerprint", "0", "whose weights are not"),
    ],
)
def test_another_checkpoint_is_named(subject, place, key, value, expected):
    saved = subject.checkpoint["dflow"]
    (saved[place] if place else saved)[key] = value
    with pytest.raises(FailedError, match=expected):
        validate_folder.checkpoint_check(subject)


def test_logits_differ_where_weights_do(subject, tiny_target):
    """The comparison of logits would see what the comparison of tensors sees first."""
    drafter, relay = validate_folder.rebuild(subject.checkpoint, subject.loaded, tiny_target)
    parts = subject.loaded.drafter, subject.loaded.relay
    first = draft_logits(tiny_target, drafter, relay, [3, 5])
    assert torch.equal(first, draft_logits(tiny_target, *parts, [3, 5]))
    assert not torch.equal(first, draft_logits(tiny_target, drafter, None, [3, 5]))


def with_decoder(subject: Subject, change: Callable[..., list[int]]) -> Subject:
    """The subject with a decoder whose speculative answers are changed."""
    real = subject.decoder

    def generate(prompts, *, backend="eager", **options):
        answers = real.generate(prompts, **options)
        return [replace(one, token_ids=change(one.token_ids, backend, options)) for one in answers]

    decoder = SimpleNamespace(generate=generate, generate_plain=real.generate_plain)
    subject.__dict__["decoder"] = decoder
    return subject


def test_lossless(subject):
    detail, values = validate_decoding.lossless_check(subject)
    assert values == {"answers": 12, "excused_ties": 0, "differences": 0}
    assert detail == "12 answers equal plain decoding token for token, 0 excused ties"

    def wrong(token_ids, backend, options):
        late = options["temperature"] > 0 and not options["use_rejected"]
        return [*token_ids[:4], 7, *token_ids[5:]] if late and len(token_ids) > 5 else token_ids

    with pytest.raises(FailedError, match=r"relay off, T=1\) at token 4: 7 instead of") as caught:
        validate_decoding.lossless_check(with_decoder(subject, wrong))
    assert caught.value.values["first"]["excused"] is False


def test_ties_are_excused_and_counted(subject, monkeypatch):
    monkeypatch.setattr("dflow_lightning.decode.equality.TIE", 1e9)
    changed = with_decoder(subject, lambda ids, *_: [(ids[0] + 1) % 250, *ids[1:]])
    assert validate_decoding.lossless_check(changed)[1] == {
        "answers": 12,
        "excused_ties": 12,
        "differences": 0,
    }


def test_lossless_asserts_nothing_in_bfloat16(subject, tiny_target_dir):
    rounded = FrozenTarget.load(str(tiny_target_dir), dtype="bfloat16")
    changed = with_decoder(
        replace(subject, target=rounded), lambda ids, *_: [(ids[0] + 1) % 250, *ids[1:]]
    )
    with pytest.raises(SkippedError, match=r"12 of 12 answers .* bfloat16"):
        validate_decoding.lossless_check(changed)


class FakeDecoder:
    """A decoder with a compiled backend, whose answers are given."""

    def __init__(self, answers: Callable[[str], list[int]]) -> None:
        self.answers = answers

    def generate(self, prompts, *, backend="eager", **_):
        return [SimpleNamespace(token_ids=self.answers(backend)) for _ in prompts]


def test_another_backend_is_compared_with_the_eager_one(subject):
    subject.__dict__["decoder"] = FakeDecoder(lambda backend: [1, 2, 3])
    assert validate_decoding.compiled_check(subject)[1]["answers"] == 6
    subject.__dict__["decoder"] = FakeDecoder(lambda backend: [1, 2 + len(backend), 3])
    with pytest.raises(FailedError, match=r"compiled, T=0\) at token 1: 10 instead of 7"):
        validate_decoding.compiled_check(subject)


def test_a_package_that_is_not_there_is_skipped(subject):
    with pytest.raises(SkippedError, match=r"no decode/draft\.pt2"):
        validate_decoding.package_check(subject)


def test_tau_is_that_of_the_training_on_its_prompts(subject):
    detail, values = validate_decoding.tau_check(subject)
    assert values["prompts"] == 6
    assert values["relay"] == "on"
    assert values["tau"] == pytest.approx(values["training_tau"], rel=0.05)
    assert "validation prompts" in detail
    section(subject)["training"]["val_tau_relay_on"] = 1.2 * values["tau"]
    with pytest.raises(FailedError, match="more than 15% apart"):
        validate_decoding.tau_check(subject)


def test_tau_is_not_compared_with_that_of_other_prompts(subject, data_dir, tmp_path):
    with pytest.raises(SkippedError, match=r"validation\.jsonl\) are not here"):
        validate_decoding.tau_check(replace(subject, suite=data_dir / "test.jsonl"))
    same_name = tmp_path / "validation.jsonl"
    shutil.copy(data_dir / "test.jsonl", same_name)
    with pytest.raises(SkippedError, match="are not here"):
        validate_decoding.tau_check(replace(subject, suite=same_name))
    section(subject)["training"] = None
    with pytest.raises(SkippedError, match="no tau"):
        validate_decoding.tau_check(subject)


def test_prompts_lie_beside_the_target(subject, tiny_target_dir, data_dir, tmp_path):
    folder = shutil.copytree(tiny_target_dir, tmp_path / "target")
    shutil.copytree(data_dir, folder / "prompts")
    settings = section(subject)["training"]["validation"]
    assert settings["sha256"] == file_sha256(data_dir / "validation.jsonl")
    moved = replace(subject, target=FrozenTarget.load(str(folder)), suite=Path("other.jsonl"))
    assert len(validate_decoding.training_prompts(moved, settings)) == 6


def test_training_record_knows_whose_score_it_is(run):
    content = torch.load(run / "best.ckpt", weights_only=True)
    state = content["callbacks"]["Checkpointing"]
    record = training_record("best.ckpt", content)
    assert set(record) == {"step", "val_tau_relay_on", "validation"}
    assert record["validation"]["per_family"] == 2
    assert training_record("last.ckpt", content) is None
    state["monitor"] = "val/tau_relay_off"
    assert "val_tau_relay_off" in training_record("best.ckpt", content)
    state["monitor"] = "val/loss"
    assert training_record("best.ckpt", content) is None
    del content["callbacks"]
    assert training_record("best.ckpt", content) is None


def test_who_may_read_the_folder_may_read_its_files(run):
    expected = (run / "export/config.json").stat().st_mode
    assert {p.stat().st_mode for p in (run / "export").rglob("*.*")} == {expected}


def test_the_card_tells_the_tau(run):
    assert "| tau in training | 1." in (run / "export/README.md").read_text()


def test_first_prompts_are_of_all_families(data_dir, tiny_target):
    prompts = read_prompts(tiny_target.tokenizer, data_dir / "test.jsonl")
    shuffled = interleaved(prompts)
    assert {one.family for one in shuffled[:3]} == {"math", "code", "chat"}
    assert sorted(one.id for one in shuffled) == sorted(one.id for one in prompts)


def test_one_failure_hides_no_other(subject, monkeypatch):
    for name in ("lossless", "compiled", "tau"):
        monkeypatch.setitem(CHECKS, name, lambda _: ("fine", {}))
    section(subject)["tap_fingerprint"]["layers"]["0"]["norm"] *= 2
    subject.checkpoint["dflow"]["drafter"]["block_size"] = 8
    found = {check.name: check.status for check in validate_export(subject)}
    expected = dict.fromkeys(CHECKS, "ok") | {"package": "skip"}
    assert found == expected | {"tap fingerprint": "FAIL", "checkpoint": "FAIL"}
