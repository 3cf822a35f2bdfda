"""Paired rounds: the two drafts are those of relay-on and relay-off decoding, and nothing else."""

import json
import shutil
import sys
from pathlib import Path
from urllib.parse import unquote

import pytest
import torch
from test_report import Page

from dflow_lightning.bench.measure import BenchSettings, prompt_seed
from dflow_lightning.data.prompts import Prompt, read_prompts
from dflow_lightning.decode import SpeculativeDecoder
from dflow_lightning.errors import InputError
from dflow_lightning.export.write import export_drafter
from dflow_lightning.models.target import FrozenTarget

SCRIPTS = str(Path(__file__).resolve().parents[1] / "scripts")
sys.path.insert(0, SCRIPTS)  # they import each other by their bare names
from overlap import PairedDecoding, answer_entropies, main, measure_overlap  # noqa: E402
from overlap_page import entropy_cells, paired_tables, slot_gains, write_page  # noqa: E402
from overlap_record import Overlap, PairedRound, TwoDrafts  # noqa: E402

PROMPTS = [Prompt(f"{f}-{i}", f, [40 + i, 60, 7 * i + 3], []) for f in ("a", "b") for i in range(2)]


@pytest.fixture
def decoder(tiny_target, tiny_drafter, tiny_relay) -> SpeculativeDecoder:
    """A relay that was trained by chance: it changes drafts, and its rounds end early and late."""
    generator = torch.Generator().manual_seed(0)
    for parameter in tiny_relay.parameters():
        parameter.data.add_(0.5 * torch.randn(parameter.shape, generator=generator))
    return SpeculativeDecoder(tiny_target, tiny_drafter, tiny_relay)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rounds_are_those_of_decoding_with_the_relay(decoder, temperature):
    settings = BenchSettings(max_new_tokens=24)
    paired = PairedDecoding(decoder, PROMPTS, settings)
    for prompt in PROMPTS:
        rounds, _ = paired.rounds(prompt, temperature)
        (plain,) = decoder.generate(
            [prompt.token_ids],
            max_new_tokens=24,
            temperature=temperature,
            seeds=[prompt_seed(0, prompt.id)],
        )
        assert [one.accepted(one.drafted.on) for one in rounds] == plain.accepted
        assert [one.before for one in rounds] == [None, *plain.accepted[:-1]]


def test_the_other_draft_is_the_one_without_relay(decoder, tiny_target, tiny_drafter):
    """A slow twin: the state is built again, from the prompt and the answer so far, without relay.

    Decoded alone from there, the first round of a drafter without relay has the same state.
    """
    paired = PairedDecoding(decoder, PROMPTS, BenchSettings(max_new_tokens=20))
    bare = SpeculativeDecoder(tiny_target, tiny_drafter)
    compared = differing = 0
    for prompt in PROMPTS:
        rounds, _ = paired.rounds(prompt, 0.0)
        (answer,) = decoder.generate([prompt.token_ids], max_new_tokens=20)
        for one in rounds:
            known = one.drafted.anchor - len(prompt.token_ids)  # tokens of the answer before it
            start = [*prompt.token_ids, *answer.token_ids[:known]]
            left = len(answer.token_ids) - known
            if left < 2:
                continue
            (twin,) = bare.generate([start], max_new_tokens=left)
            assert twin.token_ids == answer.token_ids[known:]
            assert twin.accepted[0] == one.accepted(one.drafted.off)
            compared += 1
            differing += one.drafted.on != one.drafted.off
    assert compared > 10
    assert differing > 0


def test_records(decoder):
    records = measure_overlap(
        {"ours": decoder}, PROMPTS, BenchSettings(temperature=[0.0, 1.0], max_new_tokens=24)
    )
    assert [(one.temperature, one.family) for one in records] == [
        (t, family) for t in (0.0, 1.0) for family in ("a", "b", "pooled")
    ]
    for one in records:
        full = one.num_draft_tokens
        assert one.slots_with_row[full] == [0] * full  # all accepted: nothing is relayed
        assert one.hits_on[full] == one.hits_off[full]
        assert one.accepted_on[full] == one.accepted_off[full]
        for a, reached in enumerate(one.reached_on):
            assert sum(reached) == one.accepted_on[a]
            last = full - a  # the last slot that a row belongs to
            assert one.slots_with_row[a][:last] == one.slots[a][:last]
            assert not any(one.slots_with_row[a][last:])
        assert sum(map(sum, one.slots_with_row)) == sum(one.entropy_slots)
    first, second, pooled = records[:3]
    assert pooled.rounds == [x + y for x, y in zip(first.rounds, second.rounds, strict=True)]
    assert pooled.prompts == 4


def test_what_one_round_adds():
    record = Overlap.empty(3, drafter="d", temperature=0.0, acceptance="greedy", family="f")
    drafted = TwoDrafts(9, on=[5, 6, 1], off=[5, 2, 7], with_row=[True, True, False])
    record.add(PairedRound(1, drafted, [5, 6, 7], [0.0, 0.7, 3.0], 9))
    record.add(PairedRound(1, drafted, [5, 6], [0.0, 0.7], 2))  # ends: one accepted, one bonus
    record.add(PairedRound(None, drafted, [5, 6, 7], [0.0, 0.7, 3.0], 9))  # first: no relay
    assert record.rounds == [0, 2, 0, 0]
    assert (record.accepted_on[1], record.accepted_off[1]) == (2 + 1, 1 + 1)
    assert record.gain() == [None, (0.5, 0.5), None, None]
    assert record.slots[1] == [2, 2, 1]
    assert record.hits_on[1] == [2, 2, 0]
    assert record.hits_off[1] == [
        2,
        0,
        1,
    ]  # right after a wrong one counts as a hit, not as reached
    assert record.reached_on[1] == [2, 1, 0]
    assert record.reached_off[1] == [2, 0, 0]
    assert record.entropy_slots == [2, 0, 0, 2, 0, 0]
    assert record.entropy_hits_off == [2, 0, 0, 0, 0, 0]


def test_all_drafts_of_a_block_can_be_accepted():
    drafted = TwoDrafts(9, on=[5, 6, 7], off=[5, 6, 1], with_row=[True] * 3)
    one = PairedRound(0, drafted, [5, 6, 7], [0.0] * 3, tokens_left=4)
    assert (one.accepted(drafted.on), one.accepted(drafted.off)) == (3, 2)
    assert PairedRound(0, drafted, [5, 6, 7], [0.0] * 3, tokens_left=3).accepted(drafted.on) == 2


@pytest.mark.slow
def test_shipped_drafter_with_rounds_of_every_kind():
    target = FrozenTarget.load("data/tiny-qwen3")
    shipped = SpeculativeDecoder.from_export("data/tiny-drafters/dflow", target)
    prompts = read_prompts(
        target.tokenizer, Path("data/tiny-qwen3/prompts/test.jsonl"), per_family=2
    )
    settings = BenchSettings(max_new_tokens=48)
    paired = PairedDecoding(shipped, prompts, settings)
    seen: set[int] = set()
    for prompt in prompts:
        rounds, _ = paired.rounds(prompt, 0.0)
        (plain,) = shipped.generate([prompt.token_ids], max_new_tokens=48)
        assert [one.accepted(one.drafted.on) for one in rounds] == plain.accepted
        seen |= set(plain.accepted)
    assert {0, 7} <= seen


def test_entropies(tiny_target):
    logits = tiny_target.model(torch.tensor([[5, 6, 7, 8]])).logits[0].float()
    expected = -(logits.softmax(-1) * logits.log_softmax(-1)).sum(-1)
    found = answer_entropies(tiny_target, [5, 6], [7, 8])
    assert found == pytest.approx(expected[1:3].tolist(), abs=1e-5)


def test_refused(tiny_target, tiny_drafter):
    bare = SpeculativeDecoder(tiny_target, tiny_drafter)
    with pytest.raises(InputError, match="drafter: none has a relay"):
        measure_overlap({"bare": bare}, PROMPTS, BenchSettings())


def paired(before: int, on: list[int], off: list[int], times: int = 1, **names) -> Overlap:
    """Rounds whose answer is 1, 2, 3; the last slot has a row only after a round of none."""
    about = {"drafter": "d", "temperature": 0.0, "acceptance": "greedy", "family": "pooled"}
    record = Overlap.empty(3, **about | names)
    record.prompts, record.entropy = 2, 0.5
    drafted = TwoDrafts(0, on, off, [True, True, before == 0])
    for _ in range(times):
        record.add(PairedRound(before, drafted, [1, 2, 3], [0.0, 0.2, 5.0], 4))
    return record


def test_gain_by_slot_is_split_by_relay_rows():
    record = paired(0, [1, 2, 3], [1, 2, 9])
    for _ in range(3):
        record.add(
            PairedRound(
                1,
                TwoDrafts(0, [1, 9, 9], [1, 2, 3], [True, True, False]),
                [1, 2, 3],
                [0.0, 0.2, 5.0],
                4,
            )
        )
    assert slot_gains(record, with_row=True) == [(0.0, 4), (-0.75, 4), (1.0, 1)]
    assert slot_gains(record, with_row=False) == [None, None, (-1.0, 3)]
    assert entropy_cells(record)[-1] == "100.0 / 0.0 (1)"  # of slots with a row alone
    assert entropy_cells(record)[0] == "100.0 / 100.0 (4)"
    html = "".join(paired_tables([record], "x"))
    assert "-75.0 (4)" in html


def test_page(tmp_path):
    records = [
        paired(1, [1, 2, 3], [1, 9, 3], times=60, drafter="a/re<lay>", temperature=t)
        for t in (0.0, 1.0)
    ]
    write_page(tmp_path / "o.html", records, {"a/re<lay>": "re<lay>"})
    page = Page(tmp_path / "o.html")
    assert page.open == []
    assert page.loads == ["o_files/overlap-re%3Clay%3E.png"]
    assert (tmp_path / unquote(page.loads[0])).read_bytes().startswith(b"\x89PNG")
    assert "+2.00 ± 0.00 (60)" in page.text
    assert "re<lay>: what the relay gains" in page.text


def test_command(tmp_path, tiny_target_dir, tiny_target, tiny_drafter, tiny_relay, capsys):
    target = shutil.copytree(tiny_target_dir, tmp_path / "target")
    (target / "prompts").mkdir()
    rows = [{"id": f"p{n}", "family": "f", "prompt": f"{n}?", "answer": "yes"} for n in range(2)]
    (target / "prompts/test.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    export_drafter(tiny_drafter, tiny_relay, tiny_target, tmp_path / "dflow", dtype="float32")
    main(str(target), [tmp_path / "dflow"], [0.0], 2, 12, tmp_path / "o.html")
    assert "dflow T=0 pooled" in capsys.readouterr().out
    records = json.loads((tmp_path / "o.json").read_text())["overlap"]
    assert [one["family"] for one in records] == ["f", "pooled"]
    assert Page(tmp_path / "o.html").loads == ["o_files/overlap-dflow.png"]
