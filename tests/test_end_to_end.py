"""What ships: the embedded target, its prompts and its drafters, as a user finds them."""

import hashlib
from pathlib import Path

import pytest

from dflow_lightning.data.prompts import read_prompts
from dflow_lightning.decode import SpeculativeDecoder
from dflow_lightning.decode.equality import EqualityCheck
from dflow_lightning.models.target import FrozenTarget
from dflow_lightning.tensors.metrics import acceptance_summary

DATA = Path(__file__).resolve().parents[1] / "data"
TARGET = DATA / "tiny-qwen3"
MEGABYTE = 1_000_000


@pytest.fixture(scope="module")
def target():
    return FrozenTarget.load(str(TARGET))


def test_files_are_the_recorded_ones():
    lines = (TARGET / "SHA256SUMS").read_text().splitlines()
    recorded = {name: digest for digest, name in (line.split(maxsplit=1) for line in lines)}
    present = {f"./{p.relative_to(TARGET)}" for p in TARGET.rglob("*") if p.is_file()}
    assert present - {"./SHA256SUMS"} == set(recorded)
    for name, digest in recorded.items():
        assert hashlib.sha256((TARGET / name).read_bytes()).hexdigest() == digest, name


def test_sizes():
    assert (TARGET / "model.safetensors").stat().st_size <= 8 * MEGABYTE
    for drafter in (DATA / "tiny-drafters").iterdir():
        assert sum(p.stat().st_size for p in drafter.rglob("*") if p.is_file()) <= 4 * MEGABYTE


def test_the_mask_token_is_the_first_row_after_the_tokenizer(target):
    assert len(target.tokenizer) < target.vocab_size
    decoder = SpeculativeDecoder.from_export(DATA / "tiny-drafters/dflow", target)
    assert decoder.drafter.dims.mask_token_id == len(target.tokenizer)
    assert decoder.relay is not None


@pytest.mark.slow
def test_shipped_drafters_are_lossless_and_worth_their_relay(target):
    """All test prompts, 64 tokens, greedy, float32; those with a relay with it on and off."""
    prompts = read_prompts(
        target.tokenizer,
        TARGET / "prompts/test.jsonl",
        per_family=None,
        max_length=target.config.max_position_embeddings - 1,
        field="suite",
    )
    asked = [prompt.token_ids for prompt in prompts]
    check = EqualityCheck(target)
    taus = {}
    plain = None
    without = [(name, False) for name in ("dflash", "dflow", "domino-dflow", "eagle3")]
    for name, relay in (*without, ("dflow", True), ("domino-dflow", True)):
        decoder = SpeculativeDecoder.from_export(DATA / "tiny-drafters" / name, target)
        plain = plain or decoder.generate_plain(asked, max_new_tokens=64, batch_size=16)
        fast = decoder.generate(asked, max_new_tokens=64, batch_size=16, use_rejected=relay)
        for prompt, one, other in zip(prompts, fast, plain, strict=True):
            difference = check.compare(
                prompt.id, prompt.token_ids, one.token_ids, other.token_ids, temperature=0, seed=0
            )
            assert difference is None or difference.excused, difference
        drafts = decoder.drafter.dims.block_size - 1
        taus[name, relay] = acceptance_summary([one.accepted for one in fast], drafts).tau
    assert taus["dflow", True] > taus["dflow", False] > 1
    assert taus["dflow", True] > taus["dflash", False] > 1
    assert taus["domino-dflow", True] > taus["domino-dflow", False] > taus["dflow", False]
    assert taus["eagle3", False] > 1
