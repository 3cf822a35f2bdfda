"""Whatever stands in config.json of a target or a drafter: it decodes as ever, or one sentence.

An exported folder is loaded beside its target and decodes a prompt; drafts never change the answer,
so a drafter whose config was misread is still seen: by an error that is no sentence.
"""

import copy
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from effort import check_sentence, examples
from hypothesis import example, given
from hypothesis import strategies as st

from dflow_lightning.decode.decoder import SpeculativeDecoder
from dflow_lightning.errors import InputError
from dflow_lightning.models.target import FrozenTarget

ROOT = Path(__file__).resolve().parents[2]
DRAFTERS = ROOT / "data/tiny-drafters"
TARGET = ROOT / "data/tiny-qwen3"
NAMES = ("dflash", "dflow", "domino-dflow", "eagle3")
ODD = (
    None, True, False, 0, 1, -1, 2, 3, 7, 8, 1e30, 0.5, 2**40, "", "text", "8", "float8", [], [1],
    [-1, 1], [1, 1], [99], ["a"], [1.5], [None], {}, {"a": 1}, {"rope_type": "yarn", "factor": 2.0},
    {"rope_type": "no such"}, "sliding_attention", ["sliding_attention"], "qwen3", "llama", "gpt2",
    float("nan"), float("inf"), "../../etc/passwd", "\ud800", [[1]], {"rope_theta": None},
)  # fmt: skip
KEYS = (
    "sliding_window", "rope_scaling", "quantization_config", "tie_word_embeddings", "auto_map",
    "draft_vocab_size", "text_config", "final_logit_softcapping", "layer_types", "torch_dtype",
    "head_dim", "rope_theta", "architectures", "is_causal", "pruned_heads", "new key",
)  # fmt: skip
PROMPT = [5, 17, 300, 41]


def places(value: Any, above: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The way to every value below another."""
    found = list[tuple[Any, ...]]()
    items = value.items() if isinstance(value, dict) else ()
    for key, one in items:
        found += [(*above, key), *places(one, (*above, key))]
    return found


@st.composite
def changes(draw: st.DrawFn, folders: list[Path]) -> tuple[Path, bytes]:
    """A folder, and what its config.json is to hold: one to three things done to its own."""
    folder = draw(st.sampled_from(folders))
    content = json.loads((folder / "config.json").read_text())
    for _ in range(draw(st.integers(1, 3))):
        kind = draw(st.sampled_from(["set", "set", "set", "add", "delete"]))
        *above, key = draw(st.sampled_from(places(content) or [("a",)]))
        place = content
        for step in above:
            place = place[step]
        if kind == "delete":
            place.pop(key, None)
        else:
            new = draw(st.sampled_from(KEYS)) if kind == "add" else key
            place[new] = copy.deepcopy(draw(st.sampled_from(ODD)))
    text = json.dumps(content, indent=1)
    return folder, draw(st.sampled_from([text] * 9 + [text[:-4], "[]", "null", ""])).encode()


@pytest.fixture(scope="session")
def target() -> FrozenTarget:
    return FrozenTarget.load(str(TARGET), dtype="float32")


@pytest.fixture(scope="session")
def plain(target: FrozenTarget) -> list[int]:
    """What the target answers."""
    decoder = SpeculativeDecoder.from_export(DRAFTERS / "dflash", target)
    return decoder.generate_plain([PROMPT], max_new_tokens=6)[0].token_ids


def changed(folder: Path, base: Path, content: bytes) -> Path:
    """A copy with another config.json; its other files are links."""
    copied = base / f"{folder.name}-changed"
    shutil.rmtree(copied, ignore_errors=True)
    shutil.copytree(folder, copied, copy_function=lambda a, b: Path(b).symlink_to(a))
    (copied / "config.json").unlink()
    (copied / "config.json").write_bytes(content)
    return copied


def with_value(name: str, value: Any, *way: str) -> tuple[Path, bytes]:
    """An example: a drafter's config with one value changed."""
    content = json.loads((DRAFTERS / name / "config.json").read_text())
    place = content
    for step in way[:-1]:
        place = place[step]
    place[way[-1]] = value
    return DRAFTERS / name, json.dumps(content).encode()


@given(changes([DRAFTERS / name for name in NAMES]))
@example(with_value("dflash", -1, "layer_types"))
@example(with_value("dflow", ["a"], "dflow_config", "target"))
@example(with_value("dflow", 0, "rope_parameters"))
@example(with_value("dflow", "1", "dflow_config", "format_version"))
@examples(20)
def test_a_drafter_decodes_or_is_one_sentence(
    tmp_path_factory: pytest.TempPathFactory,
    target: FrozenTarget,
    plain: list[int],
    given: tuple[Path, bytes],
) -> None:
    folder = changed(given[0], tmp_path_factory.getbasetemp(), given[1])
    check_drafter(folder, target, plain)


def check_drafter(folder: Path, target: FrozenTarget, plain: list[int]) -> None:
    try:
        decoder = SpeculativeDecoder.from_export(folder, target)
        (answer,) = decoder.generate([PROMPT], max_new_tokens=6)
    except InputError as error:
        check_sentence(error)
        return
    assert answer.token_ids == plain


@given(changes([TARGET]))
@examples(12)
@pytest.mark.filterwarnings("ignore")  # transformers', of settings that it sees changed
def test_a_target_decodes_or_is_one_sentence(
    tmp_path_factory: pytest.TempPathFactory, given: tuple[Path, bytes]
) -> None:
    check_target(changed(given[0], tmp_path_factory.getbasetemp(), given[1]))


def check_target(folder: Path) -> None:
    try:
        target = FrozenTarget.load(str(folder), dtype="float32")
        decoder = SpeculativeDecoder(target, None)  # type: ignore[arg-type]
        decoder.generate_plain([PROMPT], max_new_tokens=3)
    except InputError as error:
        check_sentence(error)
