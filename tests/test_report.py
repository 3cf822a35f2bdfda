"""The report page: self-contained, complete, and only of numbers that can be compared."""

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from dflow_lightning.errors import InputError
from dflow_lightning.report.command import report_command
from dflow_lightning.report.conditions import SAME_CONDITIONS

ENVIRONMENT = {
    "command": "dflow-train bench --drafter 'a <b>'",
    "target_fingerprint": "f1",
    "template_hash": "t1",
    "enable_thinking": False,
    "suite_hash": "s1",
    "max_new_tokens": 128,
    "versions": {"torch": "2.13"},
}
VOID = {"meta", "br", "img"}


def row(drafter: str, relay: str, family: str, **changes) -> dict:
    return {
        "drafter": drafter,
        "relay": relay,
        "temperature": 0.0,
        "acceptance": "greedy",
        "backend": "eager",
        "concurrency": 1,
        "requests_in_flight": 1.0,
        "family": family,
        "tau": 2.5,
        "accepted_drafts": 1.5,
        "position_acceptance": [0.8, 0.5, 0.2],
        "histogram": [2, 3, 3, 2],
        "tokens_per_second": 321.5,
        "plain_tokens_per_second": 183.7,
        "speedup": 1.75,
        "time_per_output_token_p50": 0.0031,
        "time_per_output_token_p95": 0.00525,
        "round_milliseconds": {"draft": 0.4, "verify": 1.0, "relay": 0.05, "commit": 0.1},
        "lossless": True,
        "relay_share": 0.0123,
        "excused_ties": 0,
    } | changes


def rows() -> list[dict]:
    return [
        row("runs/<dflow>", relay, family, tau=tau)
        for relay, tau in (("on", 3.0), ("off", 2.7))
        for family in ("math", "code", "pooled")
    ] + [row("runs/dflash", "off", "pooled", temperature=1.0, acceptance="sample_match")]


def write(path: Path, *, content: list[dict] | None = None, **environment) -> Path:
    result = {"rows": content or rows(), "environment": ENVIRONMENT | environment}
    path.write_text(json.dumps(result))
    return path


class Page(HTMLParser):
    """Text of a page, what it loads, and whether every tag that is opened is closed."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text = ""
        self.loads: list[str] = []
        self.ids: list[str] = []
        self.feed(path.read_text())

    def handle_starttag(self, tag, attrs):
        if tag not in VOID:
            self.open.append(tag)
        self.loads += [value for name, value in attrs if name in ("src", "href")]
        self.ids += [value for name, value in attrs if name == "id"]

    def handle_startendtag(self, tag, attrs):
        self.ids += [value for name, value in attrs if name == "id"]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += f" {data}"


@pytest.fixture
def page(tmp_path) -> Page:
    report_command(bench=[write(tmp_path / "a.json")], out=tmp_path / "deep/report.html")
    return Page(tmp_path / "deep/report.html")


def test_nothing_is_loaded_and_every_tag_closed(page, tmp_path):
    assert page.open == []
    assert page.loads == []
    assert len(page.ids) == len(set(page.ids))
    text = (tmp_path / "deep/report.html").read_text()
    assert not re.search(r"https?:|@import|<script|url\((?!#)", text)


def test_the_numbers_are_there(page):
    for expected in ("3.000", "2.700", "0.900", "321.5", "1.750x", "1.23 %", "sample_match"):
        assert expected in page.text
    for expected in ("3.10", "5.25", "draft 0.40, verify 1.00, relay 0.05, commit 0.10"):
        assert expected in page.text
    assert "a <b>" in page.text  # escaped, so that it is text
    assert "<dflow>" in page.text
    assert "target_fingerprint" in page.text


def test_charts_have_labels(page):
    for expected in ("draft position j", "accepted drafts a", "share of rounds"):
        assert expected in page.text
    assert "<dflow>, relay on" in page.text


def test_one_concurrency_has_no_throughput_chart(page):
    assert "Speed and losslessness, concurrency 1" in page.text
    assert "Tokens per second by concurrency" not in page.text


def test_throughput_by_concurrency(tmp_path):
    """One line a way to decode, a point a concurrency; all else shows the smallest alone."""
    content = [
        row(
            "runs/dflow",
            relay,
            "pooled",
            concurrency=level,
            tau=2.0 + level,
            tokens_per_second=rate * level**0.5,
            plain_tokens_per_second=100.0 * level,
            speedup=rate / 100 / level**0.5,
            lossless=level != 16,
        )
        for level in (16, 4, 1)
        for relay, rate in (("on", 250.0), ("off", 200.0))
    ]
    path = write(tmp_path / "a.json", content=content)
    report_command(bench=[path], out=tmp_path / "r.html")
    page, html = Page(tmp_path / "r.html"), (tmp_path / "r.html").read_text()
    assert page.open == []
    for expected in ("concurrency: requests in flight", "tokens per second", "plain", "1000.0"):
        assert expected in page.text
    assert "Speed and losslessness, concurrency 1" in page.text
    assert "3.000" in page.text  # tau of concurrency 1
    assert "6.000" not in page.text
    assert page.text.count("NO") == 2  # a wrong answer shows at whatever concurrency it came
    heights, styles = [], []
    for index in range(3):  # of the last chart: plain, relay on, relay off
        line = re.findall(
            rf'<g id="chart\d+-series{index}">\s*<path d="([^"]*)"[^>]*style="([^"]*)"', html
        )
        path, style = line[-1]
        heights.append([float(y) for _, y in re.findall(r"[ML] ([\d.]+) ([\d.]+)", path)])
        styles.append(style.partition("stroke-dasharray")[2])
    rates = [(100, 400, 1600), (250, 500, 1000), (200, 400, 800)]
    (low, _, high), scale = heights[0], (heights[0][0] - heights[0][2]) / 1500
    assert low > high  # y runs downwards
    for line, expected in zip(heights, rates, strict=True):
        assert line == pytest.approx([low - scale * (rate - 100) for rate in expected], abs=0.1)
    assert len(set(styles)) == 3


def test_concurrencies_of_two_files_are_joined(tmp_path):
    files = [
        write(tmp_path / f"{level}.json", content=[row("x", "off", "pooled", concurrency=level)])
        for level in (1, 8)
    ]
    report_command(bench=files, out=tmp_path / "r.html")
    assert "Tokens per second by concurrency" in Page(tmp_path / "r.html").text


def test_drafters_without_a_common_concurrency_are_not_compared(tmp_path):
    content = [row("x", "off", "pooled"), row("y", "off", "pooled", concurrency=8)]
    path = write(tmp_path / "a.json", content=content)
    with pytest.raises(InputError, match=r"no concurrency .* \(x, relay off: 1; y, relay off: 8\)"):
        report_command(bench=[path], out=tmp_path / "r.html")
    assert not (tmp_path / "r.html").exists()


@pytest.mark.parametrize(
    "other", [{"acceptance": "rejection"}, {"backend": "compiled"}, {"engine": "another eager"}]
)
def test_engines_and_rules_never_share_a_table(tmp_path, other):
    content = [row("x", "off", "pooled", temperature=1.0, acceptance="sample_match", tau=2.5)]
    first = write(tmp_path / "a.json", content=content, engine="ours eager")
    engine = {"engine": other.get("engine", f"ours {other.get('backend', 'eager')}")}
    changes = {key: value for key, value in other.items() if key != "engine"}
    content = [content[0] | changes | {"tau": 2.0}]
    second = write(tmp_path / "b.json", content=content, **engine)
    report_command(bench=[first, second], out=tmp_path / "r.html")
    page = (tmp_path / "r.html").read_text()
    assert page.count("<h2>Temperature 1 ") == 2
    assert page.count("<h3>Acceptance length tau</h3>") == 2
    assert "0.800" not in page  # no ratio of the two


def test_unknown_rates_are_dashes(tmp_path):
    unknown = dict.fromkeys(
        (
            "requests_in_flight",
            "tokens_per_second",
            "plain_tokens_per_second",
            "speedup",
            "time_per_output_token_p50",
            "time_per_output_token_p95",
            "round_milliseconds",
            "relay_share",
        )
    )
    content = [row("x", "on", "pooled", concurrency=level, **unknown) for level in (1, 2)]
    report_command(bench=[write(tmp_path / "a.json", content=content)], out=tmp_path / "r.html")
    text = Page(tmp_path / "r.html").text
    assert "Throughput and latency by concurrency" in text
    assert "Tokens per second by concurrency" not in text
    assert "None" not in text


def test_an_answer_that_differs_stands_out(tmp_path):
    content = [row("x", "off", "pooled", lossless=False), row("y", "off", "pooled", lossless=None)]
    path = write(tmp_path / "a.json", content=content)
    report_command(bench=[path], out=tmp_path / "r.html")
    text = Page(tmp_path / "r.html").text
    assert "NO" in text
    assert "not asserted" in text


def test_two_files_side_by_side(tmp_path, capsys):
    other = [row("runs/other", "off", "pooled", tau=1.5)]
    paths = [write(tmp_path / "a.json"), write(tmp_path / "b.json", content=other)]
    report_command(bench=paths, out=tmp_path / "r.html")
    assert "0.500" in Page(tmp_path / "r.html").text
    assert f"report of 8 rows written to {tmp_path / 'r.html'}" in capsys.readouterr().out


@pytest.mark.parametrize("key", SAME_CONDITIONS)
def test_what_was_measured_differently_is_not_compared(tmp_path, key):
    paths = [write(tmp_path / "a.json"), write(tmp_path / "b.json", **{key: "other"})]
    with pytest.raises(InputError, match=f"differ in {key}"):
        report_command(bench=paths, out=tmp_path / "r.html")


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (None, "does not exist"),
        ("{", "cannot be read as JSON"),
        ("[]", "has no rows and environment"),
        ('{"rows": [], "environment": {}}', "holds no rows"),
        ('{"rows": [{}], "environment": {}}', "row 0 of .* lacks drafter"),
    ],
)
def test_bad_files(tmp_path, content, expected):
    path = tmp_path / "a.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(InputError, match=expected):
        report_command(bench=[path], out=tmp_path / "r.html")


def test_bad_places(tmp_path):
    with pytest.raises(InputError, match="bench: no file given"):
        report_command(bench=[], out=tmp_path / "r.html")
    with pytest.raises(InputError, match="is a folder"):
        report_command(bench=[write(tmp_path / "a.json")], out=tmp_path)
