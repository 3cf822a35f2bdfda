"""An exported folder that was damaged: every way is named in one sentence, when it is loaded and by
`dflow-train validate-export`, and what others publish is not refused for what they do not record.
"""

import json
import os
import pickle
import shutil
from collections.abc import Callable
from itertools import islice
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from targets import random_target

from dflow_lightning.data.prompts import Prompt
from dflow_lightning.errors import InputError
from dflow_lightning.export.validate import validate_export
from dflow_lightning.export.validate_folder import Subject
from dflow_lightning.export.write import export_drafter
from dflow_lightning.formats.drafter_folder import load_export
from dflow_lightning.models.dims import DrafterConfig, DrafterDims
from dflow_lightning.models.drafter import Drafter
from dflow_lightning.models.relay import Relay
from dflow_lightning.models.target import FrozenTarget

BODY, CONFIG = "model.safetensors", "config.json"
BEFORE_DECODING = 4  # checks: files, engine contract, config, tap fingerprint
RELAY, RELAY_CONFIG = "relay/relay.safetensors", "relay/config.json"


@pytest.fixture(scope="module")
def pristine(tmp_path_factory, tiny_target) -> Path:
    """An export that is only ever copied; its taps can be shifted by one and stay in range."""
    torch.manual_seed(3)
    config = DrafterConfig(num_layers=2, block_size=4, target_layer_ids=[0, 1])
    drafter = Drafter(DrafterDims.resolve(config, tiny_target))
    folder = tmp_path_factory.mktemp("pristine") / "dflow"
    export_drafter(drafter, Relay(64, 96), tiny_target, folder)
    return folder


@pytest.fixture
def folder(pristine, tmp_path) -> Path:
    return Path(shutil.copytree(pristine, tmp_path / "dflow"))


@pytest.fixture(scope="module")
def other_target(tmp_path_factory) -> FrozenTarget:
    return FrozenTarget.load(str(random_target(tmp_path_factory.mktemp("other"), seed=9)))


def edit(file: str = CONFIG, **changes) -> Callable[[Path], None]:
    """Set keys of a JSON file; `None` takes one out, `a__b` reaches into an object."""

    def damage(folder: Path) -> None:
        content = json.loads((folder / file).read_text())
        for name, value in changes.items():
            *outer, key = name.split("__")
            place = content
            for part in outer:
                place = place[part]
            if value is None:
                del place[key]
            else:
                place[key] = value
        (folder / file).write_text(json.dumps(content))

    return damage


def tensors(change: Callable[[dict], object], file: str = BODY) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        content = load_file(folder / file)
        change(content)
        save_file(content, folder / file, metadata={"format": "pt"})

    return damage


def each(*damages: Callable[[Path], None]) -> Callable[[Path], None]:
    return lambda folder: [damage(folder) for damage in damages] and None


def flip(file: str) -> Callable[[Path], None]:
    """Change the lowest bit of a file's last number."""

    def damage(folder: Path) -> None:
        content = bytearray((folder / file).read_bytes())
        content[-2] ^= 1
        (folder / file).write_bytes(content)

    return damage


def swap(content: dict) -> None:
    first, second = "layers.0.mlp.gate_proj.weight", "layers.0.mlp.up_proj.weight"
    content[first], content[second] = content[second], content[first]


def poison(content: dict) -> None:
    content["norm.weight"][0] = float("nan")


def link_out(folder: Path) -> None:
    """Move a file out of the folder and leave a link."""
    shutil.move(folder / BODY, folder.parent / "elsewhere")
    (folder / BODY).symlink_to(folder.parent / "elsewhere")


def unpickled(folder: Path) -> Path:
    return folder.parent / "was unpickled"


class Trap:
    """Leaves a file when it is unpickled."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self):
        return Path.touch, (unpickled(self.folder),)


def trap(name: str) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        (folder / name).write_bytes(pickle.dumps(Trap(folder)))

    return damage


def write(name: str, text: str) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)

    return damage


def both_relays(**changes) -> Callable[[Path], None]:
    """Edit the relay's settings in both places, so that they agree."""
    inner = {f"dflow_config__relay__{key}": value for key, value in changes.items()}
    return each(edit(RELAY_CONFIG, **changes), edit(**inner))


DAMAGES: dict[str, tuple[Callable[[Path], None], str]] = {
    # the weights
    "tensor missing": (tensors(lambda t: t.pop("fc.weight")), "lacks tensor fc.weight"),
    "tensor renamed": (
        tensors(lambda t: t.update({"model.norm.weight": t.pop("norm.weight")})),
        "lacks tensor norm.weight",
    ),
    "tensor unknown": (tensors(lambda t: t.update(extra=torch.ones(1))), "unknown tensor extra"),
    "shape wrong": (
        tensors(lambda t: t.update({"fc.weight": t["fc.weight"][:, 1:].contiguous()})),
        "tensor fc.weight of",
    ),
    "not finite": (tensors(poison), "norm.weight of"),
    "dtype wrong": (
        tensors(lambda t: t.update({"norm.weight": t["norm.weight"].half()})),
        "is float16, not bfloat16",
    ),
    "dtype changed everywhere": (
        each(
            tensors(lambda t: t.update({name: one.half() for name, one in t.items()})),
            edit(dtype="float16", torch_dtype="float16"),
        ),
        "has dtype float16, which was exported as bfloat16",
    ),
    "truncated": (
        lambda folder: os.truncate(folder / BODY, (folder / BODY).stat().st_size - 2),
        "is damaged",
    ),
    "empty": (write(BODY, ""), "is damaged"),
    "tensors of one shape swapped": (tensors(swap), "the checksum of"),
    "one bit flipped": (flip(BODY), "the checksum of"),
    "one bit of the relay flipped": (flip(RELAY), "relay.safetensors is not that of the export"),
    # config.json
    "config not JSON": (write(CONFIG, "{'a': 1}"), "is not JSON"),
    "config empty": (write(CONFIG, ""), "is not JSON"),
    "section of the wrong type": (edit(dflash_config=[4]), "is not a JSON object"),
    "mask of another token": (
        edit(dflash_config__mask_token_id=300),
        "has dflash_config.mask_token_id 300, which was exported as 261",
    ),
    "mask ends text": (edit(dflash_config__mask_token_id=256), "the target's eos_token"),
    "mask outside": (edit(dflash_config__mask_token_id=9999), "outside the target's embedding"),
    "rope_theta removed": (edit(rope_theta=None), "lacks rope_theta, which was exported as"),
    "RoPE removed": (edit(rope_theta=None, rope_parameters=None), "lacks rope_theta"),
    "rope_theta changed": (edit(rope_theta=1e4), "has rope_theta 10000.0, but 1000000.0"),
    "rope_theta changed in both": (
        edit(rope_theta=1e4, rope_parameters__rope_theta=1e4),
        "has rope_theta 10000.0, which was exported as 1000000.0",
    ),
    "taps shifted": (
        edit(dflash_config__target_layer_ids=[1, 2]),
        "has dflash_config.target_layer_ids [1, 2], which was exported as [0, 1]",
    ),
    "taps in another order": (
        edit(dflash_config__target_layer_ids=[1, 0]),
        "has dflash_config.target_layer_ids [1, 0]",
    ),
    "taps no list": (edit(dflash_config__target_layer_ids=1), "target_layer_ids 1, which is of"),
    "last layer tapped": (edit(dflash_config__target_layer_ids=[0, 3]), "holds 3"),
    "two block sizes": (edit(block_size=15), "has block_size 15 at the top"),
    "another block size": (
        edit(block_size=15, dflash_config__block_size=15),
        "has block_size 15, which was exported as 4",
    ),
    "block size a text": (edit(block_size="4", dflash_config__block_size="4"), "of the wrong type"),
    "too few layers": (
        edit(num_hidden_layers=1, layer_types=["full_attention"]),
        "unknown tensor layers.1.",
    ),
    "too many layers": (edit(num_hidden_layers=3), "lacks tensor layers.2."),
    "head_dim wrong": (edit(head_dim=32), "but config.json asks for"),
    "heads regrouped": (
        edit(num_attention_heads=4, num_key_value_heads=4),
        "but config.json asks for",
    ),
    "norm_eps changed": (edit(rms_norm_eps=1e-5), "has rms_norm_eps 1e-05, which was exported"),
    "sliding layers": (
        edit(layer_types=["sliding_attention", "full_attention"]),
        "only full_attention",
    ),
    "causal": (edit(is_causal=True), "sets is_causal to True"),
    "head tied": (edit(tie_word_embeddings=True), "has tie_word_embeddings True"),
    "other architecture": (edit(architectures=["DFlash"]), "has architectures ['DFlash']"),
    # what the export says of itself
    "other fingerprint": (
        edit(dflow_config__target__fingerprint="0" * 64),
        "whose weights are not those of",
    ),
    "tau of the training changed": (
        edit(dflow_config__training={"val_tau_relay_on": 9.0}),
        "dflow_config in",
    ),
    "checksum changed": (
        edit(dflow_config__checksums={"model.safetensors": "0" * 64}),
        "was changed after the export (checksum)",
    ),
    "newer format": (edit(dflow_config__format_version=2), "newer than 1"),
    "other layout": (edit(dflow_config__layout="shifted"), "block layout shifted"),
    # the relay
    "relay missing": (lambda folder: shutil.rmtree(folder / "relay"), "lacks its relay folder"),
    "relay weights missing": (lambda folder: (folder / RELAY).unlink(), "no relay.safetensors"),
    "relay uninvited": (edit(dflow_config__relay=None), "does not know"),
    "relay width in one place": (edit(RELAY_CONFIG, hidden_size=48), "differs from dflow_config"),
    "relay width in both": (both_relays(hidden_size=48), "but config.json asks for"),
    "relay terms unknown": (both_relays(terms="product"), "which is none of both, scale, shift"),
    "relay terms in both": (both_relays(terms="scale"), "but config.json asks for"),
    "relay flag in one place": (edit(RELAY_CONFIG, first_rejected=False), "differs from"),
    "relay flag in both": (both_relays(first_rejected=False), "dflow_config in"),
    "relay beside the body": (
        lambda folder: shutil.copy(folder / RELAY, folder / "relay.safetensors"),
        "holds relay.safetensors, which no export wrote",
    ),
    # files that somebody's loader would run, unpickle or follow
    "pickled weights": (trap("pytorch_model.bin"), "holds pytorch_model.bin; only safetensors"),
    "pickle": (trap("relay/extra.pkl"), "holds relay/extra.pkl; only safetensors"),
    "torch file": (trap("optimizer.pt"), "holds optimizer.pt; only safetensors"),
    "pickle instead of weights": (
        each(lambda folder: (folder / BODY).unlink(), trap("pytorch_model.bin")),
        "only safetensors files are read",
    ),
    "pickle under the weights' name": (trap(BODY), "is damaged"),
    "code of auto_map": (write("dflash.py", "raise SystemExit"), "no other code"),
    "compiled code": (write("decode/other.pt2", "code"), "no other code"),
    "package changed": (write("decode/draft.pt2", "code"), "draft.pt2 is not that of the export"),
    "link out of the folder": (link_out, "outside the folder"),
    "link to nothing": (
        lambda folder: (folder / "extra").symlink_to("/nowhere"),
        "holds extra, a link to /nowhere outside the folder",
    ),
}  # fmt: skip


def subject(folder: Path, target: FrozenTarget) -> Subject:
    prompts = [Prompt("p", "default", [3, 5, 7], [])]
    return Subject(folder, target, prompts, 4, Path("unused.jsonl"), None)


def one_sentence(message: str) -> bool:
    return "\n" not in message and not message.endswith(".") and len(message) < 400


def test_the_undamaged_folder_loads(folder, tiny_target):
    assert load_export(folder, tiny_target).relay is not None
    checks = validate_export(subject(folder, tiny_target))
    assert [check.status for check in islice(checks, BEFORE_DECODING)] == ["ok"] * BEFORE_DECODING


@pytest.mark.parametrize("damage", DAMAGES, ids=str)
def test_damage_is_named_in_one_sentence(folder, tiny_target, damage):
    change, expected = DAMAGES[damage]
    change(folder)
    with pytest.raises(InputError) as caught:
        load_export(folder, tiny_target)
    message = str(caught.value)
    assert expected in message
    assert one_sentence(message)
    first, contract, *rest = validate_export(subject(folder, tiny_target))
    assert (first.name, first.status, first.detail) == ("files", "FAIL", message)
    assert contract.name == "engine contract"
    assert all(check.status == "skip" for check in rest)
    assert not unpickled(folder).exists()


def test_the_trap_is_a_trap(folder):
    trap("x.pkl")(folder)
    pickle.loads((folder / "x.pkl").read_bytes())
    assert unpickled(folder).exists()


def test_another_target_of_the_same_sizes(folder, other_target):
    with pytest.raises(InputError, match="whose weights are not those of"):
        load_export(folder, other_target)
    first = next(iter(validate_export(subject(folder, other_target))))
    assert first.status == "FAIL"
    assert "give that target" in first.detail


# ------------------------------------------------------------ what is no damage


def test_a_published_folder_may_hold_its_code(folder, tiny_target):
    """The layout of z-lab: no section of ours, no checksums, `dflash.py` for `auto_map`."""
    edit(dflow_config=None, rope_parameters=None)(folder)
    shutil.rmtree(folder / "relay")
    write("dflash.py", "raise SystemExit")(folder)
    flip(BODY)(folder)
    assert load_export(folder, tiny_target).relay is None
    checks = islice(validate_export(subject(folder, tiny_target)), BEFORE_DECODING)
    found = {check.name: check for check in checks}
    assert [name for name, check in found.items() if check.status == "FAIL"] == []
    assert found["files"].detail.endswith("no checksums recorded")
    assert found["tap fingerprint"].status == "skip"


def test_an_export_from_before_the_checksums_loads(folder, tiny_target):
    records = ("checksums", "exported_config", "tap_fingerprint", "training")
    edit(**{f"dflow_config__{key}": None for key in records})(folder)
    assert load_export(folder, tiny_target).relay is not None


def test_keys_and_files_that_others_add_are_no_damage(folder, tiny_target):
    edit(transformers_version="5.0")(folder)
    write(".gitattributes", "*.safetensors filter=lfs")(folder)
    assert load_export(folder, tiny_target).relay is not None


def test_the_links_of_a_hub_cache_are_followed(pristine, tmp_path, tiny_target):
    snapshot, blobs = tmp_path / "snapshots/abc", tmp_path / "blobs"
    blobs.mkdir(parents=True)
    for number, path in enumerate(sorted(pristine.rglob("*.*"))):
        link = snapshot / path.relative_to(pristine)
        link.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, blobs / str(number))
        link.symlink_to(os.path.relpath(blobs / str(number), link.parent))
    assert load_export(snapshot, tiny_target).relay is not None
    (tmp_path / "main").symlink_to(snapshot)
    assert load_export(tmp_path / "main", tiny_target).relay is not None
