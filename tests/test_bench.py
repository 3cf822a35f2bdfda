"""The bench: its JSON contract, and that it notices an answer that is not the plain one."""

import copy
import io
import json
import re
import shutil
import time
import weakref
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console

from dflow_lightning.bench.command import BENCH_FORMAT, BenchSettings, bench, bench_command
from dflow_lightning.bench.measure import WARM_UP_TOKENS, BenchPass, chunks, prompt_seed
from dflow_lightning.bench.row import (
    DecodedPrompts,
    relay_share,
    round_milliseconds,
    time_per_output_token,
)
from dflow_lightning.bench.table import short_names, show_rows
from dflow_lightning.commandline.arguments import option_types, spell_out
from dflow_lightning.data.prompts import Prompt
from dflow_lightning.decode import Completion, Engine, SpeculativeDecoder
from dflow_lightning.decode.equality import EqualityCheck, choice_margin, first_difference
from dflow_lightning.errors import InputError
from dflow_lightning.export.write import export_drafter
from dflow_lightning.models.target import FrozenTarget
from dflow_lightning.stopwatch import RoundTimer, Stopwatch

FAMILIES = ("math", "code")
CONTRACT = {
    "drafter",
    "relay",
    "temperature",
    "acceptance",
    "backend",
    "tree_nodes",
    "concurrency",
    "requests_in_flight",
    "family",
    "tau",
    "accepted_drafts",
    "position_acceptance",
    "joint_histogram",
    "tokens_per_second",
    "plain_tokens_per_second",
    "speedup",
    "time_per_output_token_p50",
    "time_per_output_token_p95",
    "round_milliseconds",
    "relay_share",
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
    settings = BenchSettings(temperature=[0.0, 1.0], max_new_tokens=6)
    rows = bench({"ours": decoder}, prompts, settings).rows
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
        assert sum(map(sum, row.joint_histogram)) == row.rounds - row.prompts  # but first rounds
        assert row.acceptance == ("greedy" if row.temperature == 0 else "sample_match")
        assert (row.relay_share is not None) == (row.relay == "on")
        assert row.speedup == pytest.approx(row.tokens_per_second / row.plain_tokens_per_second)
        assert row.tokens_per_second == pytest.approx(row.tokens / row.seconds)
        assert (row.concurrency, row.requests_in_flight, row.backend) == (1, 1.0, "eager")
        assert 0 < row.time_per_output_token_p50 <= row.time_per_output_token_p95
        assert row.round_milliseconds.keys() == {"whole", "draft", "verify", "relay", "commit"}
        assert min(row.round_milliseconds["draft"], row.round_milliseconds["verify"]) > 0
    pooled = rows[2]
    assert pooled.prompts == 4
    assert pooled.tokens == rows[0].tokens + rows[1].tokens
    assert pooled.rounds == rows[0].rounds + rows[1].rounds


def test_a_drafter_without_a_relay_is_measured_once(tiny_target, tiny_drafter, prompts):
    decoder = SpeculativeDecoder(tiny_target, tiny_drafter)
    rows = bench({"dflash": decoder}, prompts, BenchSettings(max_new_tokens=4)).rows
    assert {row.relay for row in rows} == {"off"}


def test_rows_of_a_tree(decoder, prompts):
    settings = BenchSettings(temperature=[0.0, 1.0], max_new_tokens=8, tree_nodes=6)
    rows = bench({"ours": decoder}, prompts, settings).rows
    assert all(row.lossless for row in rows)
    assert {(row.relay, row.tree_nodes) for row in rows} == {("on", 6), ("off", 6)}
    with pytest.raises(InputError, match="acceptance is rejection"):
        bench({"ours": decoder}, prompts, replace(settings, acceptance="rejection"))


def test_rows_of_several_concurrencies(decoder, prompts):
    settings = BenchSettings(
        temperature=[1.0, 0.0], concurrency=[2, 1], relay="on", max_new_tokens=6
    )
    rows = bench({"ours": decoder}, prompts, settings).rows
    assert [(row.temperature, row.concurrency, row.family) for row in rows] == [
        (temperature, concurrency, family)
        for temperature in (1.0, 0.0)
        for concurrency in (2, 1)
        for family in (*FAMILIES, "pooled")
    ]
    assert all(row.lossless for row in rows)
    assert [row.histogram for row in rows[:3]] == [row.histogram for row in rows[3:6]]
    assert all((row.speedup_median is None) == (row.concurrency == 2) for row in rows)
    assert all(1 < row.requests_in_flight <= 2 for row in rows if row.concurrency == 2)


def test_f19_all_arms_take_turns_on_every_chunk(decoder, prompts, monkeypatch):
    """F19: minutes apart, a busy machine gave one family a speedup of 13 and another 0.4."""
    order, decode = [], BenchPass.decode

    def record(self, arm, chunk, limit):
        if limit > WARM_UP_TOKENS:
            order.append((arm.name, arm.relay, chunk[0].id))
        return decode(self, arm, chunk, limit)

    monkeypatch.setattr(BenchPass, "decode", record)
    bench({"ours": decoder}, prompts, BenchSettings(max_new_tokens=WARM_UP_TOKENS + 1))
    arms = [("plain", "off"), ("ours", "on"), ("ours", "off")]
    assert order == [(*arm, chunk[0].id) for _, chunk in chunks(prompts, 1) for arm in arms]


@pytest.mark.parametrize(("backend", "plain"), [("compiled", "compiled"), ("package", "eager")])
def test_plain_decoding_is_measured_as_the_drafter_is(
    decoder, prompts, monkeypatch, backend, plain
):
    """The same backend, slots and room for all arms, and only engines that were warmed up."""
    asked, made, used = [], [], set()
    make, run, warm_up = decoder.engine, Engine.run, Engine.warm_up

    def engine(**options):
        asked.append(options)
        return make(**options | {"backend": "eager"})

    monkeypatch.setattr(decoder, "engine", engine)
    monkeypatch.setattr(
        Engine, "warm_up", lambda self, modes: (made.append(self), warm_up(self, modes))
    )
    monkeypatch.setattr(Engine, "run", lambda self, some: (used.add(self), run(self, some))[1])
    settings = BenchSettings(
        temperature=[0.0, 1.0], concurrency=[1, 2], max_new_tokens=20, backend=backend
    )
    result = bench({"ours": decoder}, prompts, settings)
    assert result.warm_up_seconds > 0
    assert {row.backend for row in result.rows} == {backend}
    assert all((row.relay_share is None) == (plain == "eager") for row in result.rows[:3])
    assert {(one.get("speculative", True), one["backend"]) for one in asked} == {
        (True, backend),
        (False, plain),
    }
    assert [one.num_slots for one in made] == [1] * 3 + [2] * 3  # plain, relay on, relay off
    assert len({(one.max_length, one.prefill_chunk) for one in made}) == 1
    assert used == set(made)


def test_rejection_sampling_is_compared_only_where_it_is_greedy(decoder, prompts):
    settings = BenchSettings(temperature=[0.0, 1.0], acceptance="rejection", max_new_tokens=8)
    rows = bench({"ours": decoder}, prompts, settings).rows
    verdicts = {(row.temperature, row.acceptance, row.lossless) for row in rows}
    assert verdicts == {(0.0, "greedy", True), (1.0, "rejection", None)}
    assert not any(row.differences for row in rows)
    assert all(row.speedup > 0 for row in rows)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_tampered_answers_are_reported(decoder, prompts, monkeypatch, temperature):
    run = decoder.run

    def tampered(requests, **options):
        completions = run(requests, **options)
        if options.get("speculative", True):
            wrong = completions[0].token_ids.copy()
            wrong[2] = (wrong[2] + 100) % 256
            completions[0] = replace(completions[0], token_ids=wrong)
        return completions

    monkeypatch.setattr(decoder, "run", tampered)
    settings = BenchSettings(
        temperature=[temperature], relay="on", max_new_tokens=8, concurrency=[2]
    )
    rows = bench({"ours": decoder}, prompts, settings).rows
    assert not any(row.lossless for row in rows)
    (difference,) = rows[0].differences
    assert (difference.prompt, difference.position) == ("math-0", 2)
    assert not difference.excused
    assert len(rows[-1].differences) == 2


def test_too_few_prompts_for_a_concurrency(decoder, prompts):
    with pytest.raises(InputError, match="concurrency holds 3, but family code has 1 prompts"):
        bench({"ours": decoder}, prompts[:3], BenchSettings(concurrency=[1, 3]))


@pytest.mark.parametrize(
    ("count", "concurrency", "expected"),
    [
        (5, 1, [5]),
        (32, 1, [8, 8, 8, 8]),
        (33, 8, [33]),  # and not 32, then one alone
        (63, 8, [31, 32]),
        (63, 32, [63]),
        (300, 32, [150, 150]),
    ],
)
def test_chunks_keep_a_queue(count, concurrency, expected):
    prompts = [Prompt(str(i), "math", [i], []) for i in range(count)]
    cut = chunks([*prompts, Prompt("x", "code", [0], [])], concurrency)
    assert [len(part) for family, part in cut if family == "math"] == expected
    assert [one for family, part in cut if family == "math" for one in part] == prompts


def completion(tokens: int, seconds: float, latency: float, rounds: int) -> Completion:
    return Completion([0] * tokens, [1] * rounds, "length", seconds, latency)


def test_rates_and_latencies():
    answers = [
        completion(11, 1.0, 2.0, 6),  # 0.2 s a token
        completion(5, 0.5, 1.6, 3),  # 0.4 s
        completion(1, 0.0, 0.0, 0),  # ended with the token of its prompt
    ]
    measured = DecodedPrompts([], answers, RoundTimer(whole=[0.1] * 6))
    assert measured.tokens_per_second == pytest.approx(17 / 1.5)
    assert measured.requests_in_flight == pytest.approx(9 / 6)
    assert time_per_output_token(answers, 0.5) == pytest.approx(0.3)
    assert time_per_output_token(answers, 0.95) == pytest.approx(0.39)


def test_nothing_is_divided_by_no_rounds():
    nothing = DecodedPrompts([], [completion(1, 0.0, 0.0, 0)], RoundTimer())
    assert nothing.tokens_per_second is None
    assert nothing.requests_in_flight is None
    assert time_per_output_token(nothing.completions, 0.5) is None
    assert round_milliseconds(nothing.timer) is None
    assert relay_share(None) is None


def test_rows_where_no_round_ran(decoder, prompts, monkeypatch):
    """Every answer ends with its first token: rates are unknown, not infinite."""
    monkeypatch.setattr(Engine, "_first_tokens", lambda self, rows_R, *_: [[3, 1]] * len(rows_R))
    (row, *_) = bench({"ours": decoder}, prompts, BenchSettings(max_new_tokens=4)).rows
    assert (row.tokens, row.rounds, row.lossless) == (2, 0, True)
    assert (row.tokens_per_second, row.speedup, row.round_milliseconds) == (None, None, None)
    paper = io.StringIO()
    two = [replace(row, concurrency=level, family="pooled") for level in (1, 2)]
    show_rows(two, Console(file=paper, width=200))
    assert "ours" in paper.getvalue()
    assert not re.search("nan|inf|None", paper.getvalue())


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


def test_float64_logits_are_those_of_a_wide_copy(tiny_target, monkeypatch):
    """The slow twin, which holds all weights a second time; half precision for once as well."""
    from dflow_lightning.decode import equality

    monkeypatch.setattr(equality, "HEAD_ROWS", 100)  # the last part of the head is a smaller one
    for dtype in (torch.float32, torch.bfloat16):
        model = copy.deepcopy(tiny_target.model).to(dtype)
        before = {name: weight.clone() for name, weight in model.state_dict().items()}
        wide = copy.deepcopy(model).double()
        ids = [3, 50, 7, 200, 11]
        with torch.inference_mode():
            expected_V = wide(torch.tensor([ids]), logits_to_keep=1).logits[0, -1]
            found_V = equality.float64_logits(model, ids)
        assert found_V.dtype is torch.float64
        torch.testing.assert_close(found_V, expected_V, rtol=1e-12, atol=1e-12)
        assert all(torch.equal(weight, before[name]) for name, weight in model.state_dict().items())


def test_float64_is_never_more_than_a_layer(tiny_target, monkeypatch):
    """Weights are widened when they are needed and dropped again: no second copy of a target."""
    from dflow_lightning.decode import equality

    monkeypatch.setattr(equality, "HEAD_ROWS", 64)
    wide, most, held = weakref.WeakSet(), 0, [0]
    double = torch.Tensor.double

    def counted(tensor):
        nonlocal most
        result = double(tensor)
        wide.add(result)
        held[0] = sum(one.numel() for one in wide)
        most = max(most, held[0])
        return result

    monkeypatch.setattr(torch.Tensor, "double", counted)
    logits_V = EqualityCheck(tiny_target)._logits([3, 50, 7, 200, 11])
    layer = sum(weight.numel() for weight in tiny_target.layer_weights(0).values())
    assert logits_V.shape == (tiny_target.vocab_size,)
    assert layer <= most < 1.5 * layer


def test_in_half_precision_a_difference_is_reported_and_not_recomputed(
    decoder, prompts, monkeypatch, capsys
):
    """Float64 weights would not fit beside a large target, and would decide nothing."""
    from dflow_lightning.decode import equality

    def refuse(*_: object) -> None:
        pytest.fail("float64 in half precision")

    monkeypatch.setattr(equality, "float64_logits", refuse)
    half = FrozenTarget(copy.deepcopy(decoder.target.model).bfloat16(), None, "half")
    found = EqualityCheck(half).compare("p", [5], [1, 2], [1, 3], temperature=0.0, seed=0)
    assert (found.position, found.margin, found.excused) == (1, None, False)
    row = bench({"ours": decoder}, prompts, BenchSettings(max_new_tokens=4)).rows[2]
    show_rows([replace(row, lossless=None, differences=[found])])
    line = next(one for one in capsys.readouterr().out.splitlines() if "prompt p" in one)
    assert line.startswith("different, not asserted: ours, relay on")
    assert "tie" not in line


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


class FakeEvent:
    """An event of a GPU that is behind the program that feeds it: it has no time until asked."""

    clock = 0.0
    log: list[str]

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing
        self.milliseconds: float | None = None
        self.recorded: float | None = None

    def record(self, stream: str) -> None:
        FakeEvent.log.append(f"record on {stream}")
        self.recorded = FakeEvent.clock

    def synchronize(self) -> None:
        FakeEvent.log.append("synchronize")

    def elapsed_time(self, end: "FakeEvent") -> float:
        assert "synchronize" in FakeEvent.log[-1]
        assert self.recorded is not None
        assert end.recorded is not None
        return end.recorded - self.recorded


@pytest.fixture
def events(monkeypatch) -> type[FakeEvent]:
    """Takes the place of CUDA's events; the program's own clock stands still."""
    FakeEvent.clock, FakeEvent.log = 0.0, []
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"stream of {device}")
    monkeypatch.setattr(time, "perf_counter", lambda: 0.0)
    return FakeEvent


def test_rounds_on_a_gpu_are_timed_by_its_events(events):
    timer = RoundTimer(torch.device("cuda:1"))
    for _ in range(2):
        with timer.measure("whole"):
            for part, milliseconds in (("draft", 3.0), ("verify", 5.0)):
                with timer.measure(part):
                    events.clock += milliseconds
    assert events.log == ["record on stream of cuda:1"] * 12  # a round waits for nothing
    assert timer.seconds("draft") == pytest.approx([0.003, 0.003])
    assert timer.seconds("verify") == pytest.approx([0.005, 0.005])
    assert timer.seconds("whole") == pytest.approx([0.008, 0.008])
    assert events.log.count("synchronize") == 1
    with timer.measure("draft"):
        events.clock += 1.0
    pooled = RoundTimer()
    pooled.extend(timer)
    pooled.extend(timer)
    assert pooled.seconds("draft") == pytest.approx([0.003, 0.003, 0.001] * 2)
    assert events.log.count("synchronize") == 2


def test_laps_on_a_gpu_are_timed_by_its_events(events):
    watch = Stopwatch()
    for milliseconds in (2.0, 4.0):
        with watch.lap(torch.device("cuda")):
            events.clock += milliseconds
    assert "synchronize" not in events.log
    assert watch.take() == pytest.approx(0.003)
    assert watch.take() is None


def test_bench_times_rounds_where_the_target_is(decoder, prompts, monkeypatch):
    from dflow_lightning.bench import measure

    devices = []
    monkeypatch.setattr(
        measure, "RoundTimer", lambda device: (devices.append(device), RoundTimer())[1]
    )
    bench({"ours": decoder}, prompts[:2], BenchSettings(max_new_tokens=4))
    assert set(devices) == {decoder.target.device}


def test_parts_of_a_round():
    timer = RoundTimer(
        whole=[5.0, 4.0, 8.0],
        draft=[1.0, 1.0, 2.0],
        verify=[3.0, 3.0, 5.0],
        relay=[0.1, 0.1, 0.3, 0.3, 0.2, 0.2],  # twice a round
        commit=[0.5, 0.2, 0.1],
    )
    medians = round_milliseconds(timer)
    assert medians == pytest.approx(
        {"whole": 5000, "draft": 1000, "verify": 3000, "relay": 400, "commit": 200}
    )
    assert round_milliseconds(RoundTimer(whole=[0.5])) == {"whole": 500}  # compiled: one graph
    assert relay_share({"whole": 500}) is None
    assert relay_share(medians) == pytest.approx(0.4 / 4)


def test_json_contract(folders, capsys):
    out = folders.out / "deep/out.json"
    bench_command(
        target=folders.target,
        drafter=[folders.dflow, folders.dflash],
        temperature=[0.0, 1.0],
        concurrency=[1, 2],
        per_family=2,
        max_new_tokens=4,
        json=out,
    )
    result = json.loads(out.read_text())
    assert result.keys() == {"format", "rows", "environment"}
    assert result["format"] == BENCH_FORMAT
    assert len(result["rows"]) == 2 * 2 * 3 * 3
    for row in result["rows"]:
        assert row.keys() >= CONTRACT
        assert row["lossless"] is True
    assert {row["drafter"] for row in result["rows"]} == {str(folders.dflow), str(folders.dflash)}
    environment = result["environment"]
    assert environment["prompts"] == {"code": 2, "math": 2}
    assert environment["concurrency"] == [1, 2]
    assert (environment["backend"], environment["acceptance"]) == ("eager", "match")
    assert environment["warm_up_seconds"] > 0
    assert environment["enable_thinking"] is False
    assert environment["versions"]["torch"] == torch.__version__
    printed = capsys.readouterr().out
    assert "\x1b" not in printed
    assert max(map(len, printed.splitlines()[:-1])) <= 80
    assert "plain" in printed.splitlines()[2]
    assert not list(out.parent.glob(".*"))


def test_not_lossless_ends_with_status_1_and_the_rows(folders, monkeypatch, capsys):
    run = SpeculativeDecoder.run

    def tampered(self, requests, **options):
        completions = run(self, requests, **options)
        if options.get("speculative", True):
            return [replace(one, token_ids=[0, 0]) for one in completions]
        return completions

    monkeypatch.setattr(SpeculativeDecoder, "run", tampered)
    out = folders.out / "out.json"
    with pytest.raises(SystemExit) as stop:
        bench_command(
            target=folders.target, drafter=[folders.dflash], max_new_tokens=3, json=out, quiet=True
        )
    assert stop.value.code == 1
    assert {row["lossless"] for row in json.loads(out.read_text())["rows"]} == {False}
    captured = capsys.readouterr()
    assert "DIFFERENT: dflash, relay off, T=0, concurrency 1, prompt code-" in captured.out
    assert "NOT LOSSLESS" in captured.err


def test_the_table_fits_80_columns_with_16_slots_and_long_names(decoder, prompts):
    (row, *_) = bench({"ours": decoder}, prompts, BenchSettings(max_new_tokens=4)).rows
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
    show_rows([wide, replace(wide, relay="off", lossless=False)], Console(file=paper, width=200))
    lines = paper.getvalue().splitlines()
    assert max(map(len, lines)) <= 80
    assert "instructions" in paper.getvalue()
    assert "1234" in paper.getvalue()
    assert "90 85 80 75" in paper.getvalue()


def test_the_table_of_concurrencies_fits_80_columns(decoder, prompts):
    (row, *_) = bench({"ours": decoder}, prompts, BenchSettings(max_new_tokens=4)).rows
    rows = [
        replace(
            row,
            drafter=f"runs/2026-01-01/a-rather-long-name-{relay}",
            relay=relay,
            family="pooled",
            concurrency=2**power,
            plain_tokens_per_second=10000.0 + power,
            tokens_per_second=20000.0 + power,
            speedup=10.25 + power,
        )
        for relay in ("on", "off")
        for power in range(8)
    ]
    paper = io.StringIO()
    show_rows(rows, Console(file=paper, width=200))
    lines = paper.getvalue().splitlines()
    assert max(map(len, lines)) <= 80
    for power in range(8):
        assert sum(f"{10000 + power}" in line for line in lines) == 1  # plain once
        assert sum(f"{20000 + power} " in f"{line} " for line in lines) == (4 if power == 0 else 2)
        assert sum(f"{10 + power}.25x" in line for line in lines) == (4 if power == 0 else 2)
    assert sum("concurrency 1:" in line for line in lines) == 1


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
        ({"temperature": [float("nan")]}, "temperature holds nan"),
        ({"temperature": [0.0, 1.0, 0.0]}, "temperature holds 0.0 twice"),
        ({"concurrency": []}, "concurrency: none given"),
        ({"concurrency": [4, 0]}, "concurrency holds 0; give 1 or more"),
        ({"concurrency": [4, 1, 4]}, "concurrency holds 4 twice"),
        ({"concurrency": [1, 4]}, "concurrency holds 4, but family code has 3 prompts"),
        ({"backend": "fast"}, "backend is fast"),
        ({"tree_nodes": 1}, "tree_nodes is 1; give 2 to"),
        ({"tree_nodes": 8, "backend": "compiled"}, "backend is compiled"),
        ({"max_new_tokens": 1}, "max_new_tokens is 1; give 2 or more"),
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
        (["--concurrency", "1,2,4"], ["--concurrency=[1,2,4]"]),
        (["--quiet", "--seed", "3"], ["--quiet=true", "--seed", "3"]),
        (["--quiet", "false"], ["--quiet", "false"]),
        (["--quiet=false", "--json", "x"], ["--quiet=false", "--json", "x"]),
        (["--json", "--quiet"], ["--json=-", "--quiet=true"]),
        (["--quiet", "--json"], ["--quiet=true", "--json=-"]),
    ],
)
def test_options_as_people_write_them(typed, expected):
    assert spell_out(option_types(bench_command), typed) == expected
