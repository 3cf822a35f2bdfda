"""The tables of scripts/compare.py: means, ratios by seed, goals and the paper's order."""

import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).resolve().parents[1] / "scripts"


@pytest.fixture(autouse=True)
def scripts(monkeypatch):
    monkeypatch.setattr(sys, "path", [str(SCRIPTS), *sys.path])
    monkeypatch.chdir(SCRIPTS.parent)


def rows(off: float, on: float | None = None, lossless: bool | None = True) -> list[dict]:
    found = []
    for temperature in (0.0, 1.0):
        for relay, tau in (("off", off), ("on", on)):
            for family in ("math", "pooled"):
                row = {"relay": relay, "temperature": temperature, "family": family}
                found.append(row | {"tau": tau, "lossless": lossless})
    return [row for row in found if row["tau"] is not None]


def table() -> dict:
    from compare_tables import collect

    return collect(
        {
            ("dflow", 0): rows(2.0, 2.4),
            ("dflow", 1): rows(2.2, 2.6),
            ("dflash", 1): rows(2.0),
            ("dflash", 0): rows(1.6),
            ("dflow-clean-features", 1): rows(2.0, 2.4),
            ("domino", 0): rows(1.5, lossless=False),
        }
    )


def test_rows_in_order_and_by_seed():
    from compare_tables import ratios, tau_table

    assert list(table()) == [
        "dflash", "dflow, relay off", "dflow, relay on", "domino",
        "dflow-clean-features, relay off", "dflow-clean-features, relay on",
    ]  # fmt: skip
    assert ratios(table(), "dflow, relay on", "dflash", "0/pooled") == pytest.approx([1.5, 1.3])
    cell = "0/pooled"
    assert ratios(table(), "dflow, relay on", "dflow-clean-features, relay on", cell) == [2.6 / 2.4]
    text = "\n".join(tau_table(table(), 32))
    assert "| dflash | 2 | 1.800 ± 0.400 | 1.800 ± 0.400 |" in text
    assert "| domino | 1 | 1.500 | 1.500 | 1.500 | 1.500 | NO |" in text


def test_beside_the_paper():
    from compare_tables import paper_table

    text = "\n".join(paper_table(table()))
    assert "| dflow, relay on | 2.500 ± 0.200 | 1.400 | 3.93 | 1.104 |" in text
    assert "| dflow-clean-features, relay off | 2.000 | 1.000 | - | - |" in text
    assert "dflash (1.800) is above domino (1.500) here, in the paper the other way round" in text
    assert "dflow, relay on (2.500) is above dflow, relay off" not in text  # as in the paper


def test_goals():
    from compare_tables import goals_table

    found = {tuple(line.split(" | ")[:3]): line for line in goals_table(table())[2:]}
    met = {(one.removeprefix("| "), other, t): line for (one, other, t), line in found.items()}
    assert met["dflow, relay on", "dflash", "0"].endswith("| 1.134 | yes |")
    assert met["domino", "dflash", "0"].endswith("| above 1 | no |")
    clean = met["dflow, relay on", "dflow-clean-features, relay on", "0"]
    assert clean.endswith("more than the spread above | no |")  # 0.1 above, and the spread is 0.2
    assert not any("domino-dflow" in one for one, _, _ in met)


def test_every_row_names_a_recipe_that_can_be_read():
    from compare_rows import PAPER, rolls_out, variants

    known = {one.name: one for one in variants()}
    assert known["dflash-equal-blocks"].changes == ("--model.num_anchors", "16")
    assert known["dflow-share-1"].changes == ("--rollout.num_anchors", "8")
    assert known["dflash-share-1-blocks"].changes == ("--model.num_anchors", "24")
    assert {name.partition(",")[0] for name in PAPER} <= known.keys()
    there = [one for one in known.values() if one.path.is_file()]
    assert {one.name for one in there if rolls_out(one)} >= {"dflow", "dflash-sc"}
    assert not rolls_out(known["dflash"])


def test_publish_replaces_what_is_between_its_marks(tmp_path, monkeypatch):
    import compare_tables

    page = tmp_path / "results.md"
    monkeypatch.setattr(compare_tables, "RESULTS", page)
    page.write_text("head\n<!-- a -->\nold\n<!-- /a -->\nfoot\n")
    compare_tables.publish("a", ["| new |"])
    text = page.read_text()
    assert text.startswith("head\n<!-- a -->\nMade by `python ")
    assert text.endswith("| new |\n<!-- /a -->\nfoot\n")
    assert "old" not in text
    with pytest.raises(SystemExit, match="has no place for this"):
        compare_tables.publish("b", [])
    assert page.read_text() == text


def test_tables_of_a_report_page_become_markdown():
    from record_page import markdown

    from dflow_lightning.html import html_table, page

    tables = [
        html_table("tau at T=0", ["drafter", "math & code"], [["<a>", "2.1"], ["b", "3"]]),
        "<h3>no table</h3><p>text</p>",
        html_table("cost", ["drafter", "ms"], [["a", "1"]]),
    ]
    text = page("runs", tables)
    lines = [
        "tau at T=0", "", "| drafter | math & code |", "|---|---|", "| <a> | 2.1 |", "| b | 3 |"
    ]  # fmt: skip
    assert markdown(text, ["tau"]) == lines
    assert markdown(text, [])[:7] == [*lines, ""]
    with pytest.raises(SystemExit, match="there are: tau at T=0, cost"):
        markdown(text, ["speed"])
