"""The bench: its JSON contract, and that it notices an answer that is not the plain one."""

import io
import json
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console

from dflow_lightning.arguments import spell_out
from dflow_lightning.bench import BenchSettings, bench, bench_command
from dflow_lightning.bench_table import short_names, show
from dflow_lightning.data.prompts import Prompt
from dflow_lightning.decode import RoundTimer, SpeculativeDecoder
from dflow_lightning.equality import EqualityCheck, choice_margin, first_difference
from dflow_lightning.errors import InputError
from dflow_lightning.export import export_drafter
from dflow_lightning.measure import prompt_seed, relay_share

FAMILIES = ("math", "code")
CONTRACT = {
    "drafter",
    "relay",
    "temperature",
    "acceptance",
    "family",
    "tau",
    "accepted_drafts",
    "position_acceptance",
    "tokens_per_second",
    "speedup",
    "lossless",
}


@pytest.fixture
def decoder(tiny_target, tiny_drafter, tiny_relay) -> SpeculativeDecoder:
    return SpeculativeDecoder(tiny_target, tiny_drafter, tiny_relay)


@pytest.fixture
def prompts() -> list[Prompt]:
    return [
        Prompt(f"{family}-{i}", family, [40 + i, 60, 7 * i + 3], [])
        for family in FAMILIES
        for i in range(2)
    ]


@pytest.fixture
def folders(tmp_path, tiny_target_dir, tiny_target, tiny_drafter, tiny_relay) -> SimpleNamespace:
    """A target with its prompts, a DFlow and a DFlash drafter."""
    target = shutil.copytree(tiny_target_dir, tmp_path / "target")
    (target / "prompts").mkdir()
    lines = [
        json.dumps({"id": f"{f}-{i}", "family": f, "prompt": f"{f} {i}?", "answer": "yes"})
        for f in FAMILIES
        for i in range(3)
    ]
    (target / "prompts/test.jsonl").write_text("\n".join(lines))
    export_drafter(tiny_drafter, tiny_relay, tiny_target, tmp_path / "dflow", dtype="float32")
    export_drafter(tiny_drafter, None, tiny_target, tmp_path / "dflash", dtype="float32")
    return SimpleNamespace(
        target=str(target), dflow=tmp_path / "dflow", dflash=tmp_path / "dflash", out=tmp_path
    )


def test_rows(decoder, prompts):
    settings = BenchSettings(temperatures=[0.0, 1.0], max_new_tokens=6)
    rows = bench({"ours": decoder}, prompts, settings)
    assert [(r.temperature, r.relay, r.family) for r in rows] == [
        (temperature, relay, family)
        for temperature in (0.0, 1.0)
        for relay in ("on", "off")
        for family in (*FAMILIES, "pooled")
    ]
    for row in rows:
        assert row.lossless
        assert row.tau == pytest.approx(row.accepted_drafts + 1)
        assert row.accepted_drafts == pytest.approx(sum(row.position_acceptance))
        assert len(row.position_acceptance) == 3
        assert sum(row.histogram) == row.rounds
        assert row.acceptance == ("greedy" if row.temperature == 0 else "sample_match")
        assert (row.relay_share is not None) == (row.relay == "on")
        assert row.speedup == pytest.approx(row.tokens_per_second / row.plain_tokens_per_second)
    pooled = rows[2]
    assert pooled.prompts == 4
    assert pooled.tokens == rows[0].tokens + rows[1].tokens
    assert pooled.rounds == rows[0].rounds + rows[1].rounds


def test_a_drafter_without_a_relay_is_measured_once(tiny_target, tiny_drafter, prompts):
    decoder = SpeculativeDecoder(tiny_target, tiny_drafter)
    rows = bench({"dflash": decoder}, prompts, BenchSettings(max_new_tokens=4))
    assert {row.relay for row in rows} == {"off"}


def test_rows_do_not_depend_on_the_batch(decoder, prompts):
    settings = BenchSettings(temperatures=[1.0], max_new_tokens=6)
    alone = bench({"ours": decoder}, prompts, settings)
    together = bench({"ours": decoder}, prompts, replace(settings, batch_size=4))
    assert [row.histogram for row in alone] == [row.histogram for row in together]
    assert all(row.lossless for row in together)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_tampered_answers_are_reported(decoder, prompts, monkeypatch, temperature):
    generate = decoder.generate

    def tampered(ids, **options):
        completions = generate(ids, **options)
        wrong = completions[0].token_ids.copy()
        wrong[2] = (wrong[2] + 100) % 256
        return [replace(completions[0], token_ids=wrong), *completions[1:]]

    monkeypatch.setattr(decoder, "generate", tampered)
    settings = BenchSettings(temperatures=[temperature], relay="on", max_new_tokens=8, batch_size=2)
    rows = bench({"ours": decoder}, prompts, settings)
    assert not any(row.lossless for row in rows)
    (difference,) = rows[0].differences
    assert (difference.prompt, difference.position) == ("math-0", 2)
    assert not difference.excused
    assert len(rows[-1].differences) == 2


def test_an_answer_cut_short_is_no_tie(tiny_target):
    check = EqualityCheck(tiny_target)
    difference = check.compare("p", [5, 6], [1, 2], [1, 2, 3], temperature=0.0, seed=0)
    assert (difference.position, difference.token, difference.plain_token) == (2, None, 3)
    assert not difference.excused


def test_a_tie_of_the_target_is_excused_and_counted(tiny_target, monkeypatch):
    check = EqualityCheck(tiny_target)
    logits_V = torch.full((320,), -9.0, dtype=torch.float64)
    logits_V[[7, 8]] = torch.tensor([2.0, 2.0 - 2e-6], dtype=torch.float64)
    monkeypatch.setattr(check, "_logits", lambda prefix: logits_V)
    tie = check.compare("p", [5], [8], [7], temperature=0.0, seed=0)
    assert tie.excused
    assert tie.margin == pytest.approx(2e-6)
    assert not check.compare("p", [5], [9], [7], temperature=0.0, seed=0).excused


def test_no_difference():
    assert first_difference([1, 2], [1, 2]) is None
    assert first_difference([1, 3], [1, 2]) == 1
    assert first_difference([1], [1, 2]) == 1


def test_margin_of_a_sample():
    logits_V = torch.log(torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64))
    assert choice_margin(logits_V, 1, 1.0, 0.3) == 0.0
    assert choice_margin(logits_V, 0, 1.0, 0.3) == pytest.approx(0.1)
    assert choice_margin(logits_V, 2, 1.0, 0.3) == pytest.approx(0.4)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_what_plain_decoding_chooses_has_no_margin(decoder, prompts, temperature):
    """The check recomputes the noise by itself; this ties it to the decoder's."""
    check = EqualityCheck(decoder.target)
    seed = prompt_seed(3, prompts[0].id)
    ids = prompts[0].token_ids
    options = {"temperature": temperature, "seeds": [seed], "max_new_tokens": 6}
    (plain,) = decoder.generate_plain([ids], **options)
    for position, token in enumerate(plain.token_ids):
        wrong = [*plain.token_ids[:position], (token + 1) % 256]
        found = check.compare("p", ids, wrong, plain.token_ids, temperature=temperature, seed=seed)
        assert found.margin > 0
        logits_V = check._logits(ids + plain.token_ids[:position])
        uniform = torch.rand(
            64, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
        )[len(ids) + position]
        assert choice_margin(logits_V, token, temperature, float(uniform)) == pytest.approx(
            0, abs=1e-6
        )


def test_relay_share_is_per_round():
    timer = RoundTimer(draft=[1.0, 1.0], verify=[3.0, 3.0], relay=[0.1, 0.1, 0.3, 0.3])
    assert relay_share(timer) == pytest.approx(0.4 / 4)


def test_json_contract(folders, capsys):
    out = folders.out / "deep/out.json"
    bench_command(
        target=folders.target,
        drafter=[folders.dflow, folders.dflash],
        temperature=[0.0, 1.0],
        per_family=1,
        max_new_tokens=4,
        json=out,
    )
    result = json.loads(out.read_text())
    assert result.keys() == {"rows", "environment"}
    assert len(result["rows"]) == 2 * 3 * 3
    for row in result["rows"]:
        assert row.keys() >= CONTRACT
        assert row["lossless"] is True
    assert {row["drafter"] for row in result["rows"]} == {str(folders.dflow), str(folders.dflash)}
    environment = result["environment"]
    assert environment["prompts"] == {"code": 1, "math": 1}
    assert environment["enable_thinking"] is False
    assert environment["versions"]["torch"] == torch.__version__
    printed = capsys.readouterr().out
    assert "\x1b" not in printed
    assert max(map(len, printed.splitlines()[:-1])) <= 80
    assert not list(out.parent.glob(".*"))


def test_not_lossless_ends_with_status_1_and_the_rows(folders, monkeypatch, capsys):
    generate = SpeculativeDecoder.generate

    def tampered(self, ids, **options):
        return [replace(one, token_ids=[0, 0]) for one in generate(self, ids, **options)]

    monkeypatch.setattr(SpeculativeDecoder, "generate", tampered)
    out = folders.out / "out.json"
    with pytest.raises(SystemExit) as stop:
        bench_command(
            target=folders.target, drafter=[folders.dflash], max_new_tokens=3, json=out, quiet=True
        )
    assert stop.value.code == 1
    assert {row["lossless"] for row in json.loads(out.read_text())["rows"]} == {False}
    captured = capsys.readouterr()
    assert "DIFFERENT" in captured.out
    assert "NOT LOSSLESS" in captured.err


def test_the_table_fits_80_columns_with_16_slots_and_long_names(decoder, prompts):
    (row, *_) = bench({"ours": decoder}, prompts, BenchSettings(max_new_tokens=4))
    wide = replace(
        row,
        drafter="runs/2026-01-01/a-rather-long-name-of-a-drafter",
        family="instructions",
        position_acceptance=[0.9 - 0.05 * j for j in range(15)],
        histogram=[1] * 16,
        excused_ties=3,
        tokens_per_second=1234.5,
    )
    paper = io.StringIO()
    show([wide, replace(wide, relay="off", lossless=False)], Console(file=paper, width=200))
    lines = paper.getvalue().splitlines()
    assert max(map(len, lines)) <= 80
    assert "instructions" in paper.getvalue()
    assert "1234" in paper.getvalue()
    assert "90 85 80 75" in paper.getvalue()


def test_names_are_as_short_as_they_can_be():
    assert short_names(["a/b/x", "a/c/x"]) == {"a/b/x": "b/x", "a/c/x": "c/x"}
    assert short_names(["runs/dflow", "dflash"]) == {"runs/dflow": "dflow", "dflash": "dflash"}
    assert short_names(["x", "x"]) == {"x": "x"}


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"drafter": []}, "drafter: none given"),
        ({"drafter": [Path("a"), Path("a")]}, "given twice"),
        ({"temperature": []}, "temperature: none given"),
        ({"temperature": [-1.0]}, "temperature holds -1.0"),
        ({"per_family": 0}, "per_family is 0"),
        ({"batch_size": 0}, "batch_size is 0"),
        ({"max_new_tokens": 0}, "max_new_tokens is 0"),
        ({"suite": "missing.jsonl"}, "missing.jsonl does not exist"),
        ({"target": "."}, "which the suite tiny reads"),
    ],
)
def test_bad_input(folders, change, expected):
    given = {"target": folders.target, "drafter": [folders.dflash]} | change
    with pytest.raises(InputError, match=expected):
        bench_command(**given)


def test_the_place_of_the_json_is_checked_first(folders):
    with pytest.raises(InputError, match=r"json: .* is a folder"):
        bench_command(target=folders.target, drafter=[folders.dflash], json=folders.out)


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        (["--drafter", "A", "--drafter", "B"], ['--drafter=["A","B"]']),
        (["--drafter=A,1"], ['--drafter=["A,1"]']),
        (['--drafter=["A"]'], ['--drafter=["A"]']),
        (["--temperature", "0,1"], ["--temperature=[0,1]"]),
        (["--temperature=0", "--temperature", "1"], ["--temperature=[0,1]"]),
        (["--quiet", "--seed", "3"], ["--quiet=true", "--seed", "3"]),
        (["--quiet", "false"], ["--quiet", "false"]),
        (["--quiet=false", "--json", "x"], ["--quiet=false", "--json", "x"]),
    ],
)
def test_options_as_people_write_them(typed, expected):
    assert spell_out(bench_command, typed) == expected
