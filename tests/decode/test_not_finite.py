"""A target that computes NaN or infinity is refused, whatever decodes with it (F41)."""

import shutil
from pathlib import Path

import pytest
import torch

from dflow_lightning.__main__ import main
from dflow_lightning.decode import SpeculativeDecoder
from dflow_lightning.errors import InputError
from dflow_lightning.formats.tap_fingerprint import far_layers, tap_fingerprint
from dflow_lightning.models.target import FrozenTarget

PROMPT = [40, 60, 7, 3]
SAID = "in float32 computes logits that are not finite; its weights are damaged"


@pytest.fixture
def damaged(tiny_target_dir: Path) -> FrozenTarget:
    return FrozenTarget.load(str(tiny_target_dir))


def damage(target: FrozenTarget, token: int) -> None:
    """No prompt with this token can be read any more."""
    with torch.no_grad():
        target.embedding_weight[token] = torch.nan


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"speculative": False},
        {"temperature": 1.0},
        {"temperature": 1.0, "top_k": 20},
        {"temperature": 1.0, "acceptance": "rejection"},
        {"tree_nodes": 6},
    ],
)
def test_f41_a_round_that_meets_it_ends_the_run(damaged, tiny_drafter, tiny_relay, options) -> None:
    """F41: also in the middle of an answer; the engine's next answer is right again."""
    decoder = SpeculativeDecoder(damaged, tiny_drafter, tiny_relay)
    options = {"max_new_tokens": 24, "stop_token_ids": (), **options}
    other = [[11, 12, 13]]
    (first,), wanted = decoder.generate([PROMPT], **options), decoder.generate(other, **options)
    read_in_a_round = next(
        token for token in first.token_ids[4:] if token not in {*wanted[0].token_ids, *PROMPT}
    )
    damage(damaged, read_in_a_round)
    with pytest.raises(InputError, match=SAID):
        decoder.generate([PROMPT], **options)
    assert decoder.generate(other, **options)[0].token_ids == wanted[0].token_ids


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_f41_a_prompt_that_meets_it_and_its_neighbours(
    damaged, tiny_drafter, tiny_relay, temperature
) -> None:
    """F41: nothing is in flight afterwards, and one infinite logit is enough."""
    decoder = SpeculativeDecoder(damaged, tiny_drafter, tiny_relay)
    with torch.no_grad():
        damaged.head_weight[5] = torch.inf
    options = {"max_new_tokens": 8, "temperature": temperature}
    with pytest.raises(InputError, match=SAID):
        decoder.generate([PROMPT, [1, 2]], batch_size=2, **options)
    assert not decoder.engine(num_slots=2, max_length=8).busy


def test_f41_tokens_that_are_never_chosen_are_no_fault(damaged, tiny_drafter) -> None:
    """F41: a logit of minus infinity is how some models say never."""
    decoder = SpeculativeDecoder(damaged, tiny_drafter)
    head = damaged.head
    never = torch.zeros(damaged.vocab_size)
    never[300:] = -torch.inf
    damaged.head = lambda hidden: head(hidden) + never  # type: ignore[method-assign]
    found = decoder.generate([PROMPT], max_new_tokens=8, temperature=1.0)
    assert len(found[0].token_ids) == 8


def test_f41_float16_is_named_as_the_reason(damaged) -> None:
    """F41."""
    damaged.model.half()
    assert "give it dtype float32 or bfloat16" in str(damaged.not_finite())


def test_f41_a_fingerprint_of_it_is_refused_and_never_near(damaged) -> None:
    """F41: NaN is not larger than a limit, and passed as a close one."""
    good = tap_fingerprint(damaged, [0, 1], [1, 2])
    bad = {**good, "layers": {id: {"norm": torch.nan, "values": [0.0] * 8} for id in ("0", "1")}}
    assert set(far_layers(good, bad)) == {"0", "1"}
    damage(damaged, 2)
    with pytest.raises(InputError, match=SAID):
        tap_fingerprint(damaged, [0, 1], [1, 2])


def test_f41_prepare_says_it(damaged, tiny_target_dir, tmp_path, capsys) -> None:
    """F41: exit status 2, one sentence, and no row of it in a prepared folder."""
    with torch.no_grad():
        damaged.embedding_weight.fill_(torch.nan)
    folder = shutil.copytree(tiny_target_dir, tmp_path / "bad")
    damaged.model.save_pretrained(folder)
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "hello"}\n')
    common = ["--target", folder, "--max_length", 256]
    kept = ["--keep_answers", "true", "--verify", "true"]
    answered = tmp_path / "answered.jsonl"
    answered.write_text('{"prompt": "hello", "response": "hi there"}\n')
    for command in (
        ["prepare", "--data", rows, "--out", tmp_path / "out", *common],
        ["prepare", "--data", answered, "--out", tmp_path / "kept", *common, *kept],
    ):
        assert main([str(one) for one in command]) == 2, command
        assert SAID in " ".join(capsys.readouterr().err.split()), command
    assert not (tmp_path / "out").exists()
