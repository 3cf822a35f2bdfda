"""The report of runs: what it reads, what it adds up, and what it refuses."""

import json
import re
from pathlib import Path

import pytest
from test_report import Page

from dflow_lightning.errors import InputError
from dflow_lightning.report.command import report_command
from dflow_lightning.report.relay_table import unpaired_table
from dflow_lightning.report.runs import read_curves

PNG = b"\x89PNG"


def write_run(folder: Path, tau: float, relay: bool = False, **about) -> Path:
    rows = [
        {
            "relay": setting,
            "temperature": 0.0,
            "family": family,
            "tau": tau + 0.25 * (setting == "on"),
            "position_acceptance": [0.8, 0.5, 0.2],
            "histogram": [2, 3, 3, 2],
            "joint_histogram": [[1, 1, 0, 0], [0, 0, 2, 0], [0] * 4, [0] * 4],
            "tokens_per_second": 100.0,
            "speedup": 1.5,
            "round_milliseconds": {"whole": 9.0, "draft": 2.0},
        }
        for setting in (("on", "off") if relay else ("off",))
        for family in ("math", "pooled")
    ]
    folder.mkdir(parents=True)
    content = {"rows": rows, "environment": {"suite_hash": "s", **about}}
    (folder / "bench.json").write_text(json.dumps(content))
    (folder / "seconds.json").write_text(json.dumps({"seconds": 40.0, "steps": 200}))
    return folder


@pytest.fixture
def runs(tmp_path) -> Path:
    """Two seeds of two recipes, as a sweep leaves them."""
    for seed, tau in ((0, 2.0), (1, 2.5)):
        write_run(tmp_path / f"s/base-{seed}", tau)
        write_run(tmp_path / f"s/re<lay>-{seed}", tau + 0.5, relay=True)
    (tmp_path / "s/sweep.json").write_text("{}")
    return tmp_path / "s"


def test_page_and_pictures(runs, tmp_path, capsys):
    report_command(sweep=runs, out=tmp_path / "r.html")
    page = Page(tmp_path / "r.html")
    assert page.open == []
    assert f"report of 4 runs written to {tmp_path / 'r.html'}" in capsys.readouterr().out
    for source in page.loads:  # all that is loaded lies beside the page
        assert (tmp_path / source).read_bytes().startswith(PNG)
    assert {Path(source).stem for source in page.loads} == {
        "tau", "positions-T0", "histogram-T0",
    }  # fmt: skip
    assert not re.search(r"https?:|<script", (tmp_path / "r.html").read_text())
    assert "2.250 ± 0.500" in page.text  # base
    assert "3.000 ± 0.500" in page.text  # with relay
    assert "1.333" in page.text  # over the first row
    assert "re<lay>, relay on" in page.text
    assert "200" in page.text  # ms of a step
    assert "3.00 (4)" in page.text  # tau after a = 1, both seeds


def test_runs_by_name_and_by_folder(runs, tmp_path):
    chosen = [runs / "base-0", runs / "base-1"]
    report_command(runs=chosen, out=tmp_path / "r.html")
    assert "relay" not in Page(tmp_path / "r.html").text.partition("Acceptance length tau")[2][:80]
    report_command(runs=[runs], out=tmp_path / "all.html")
    assert "re<lay>" in Page(tmp_path / "all.html").text


def test_old_runs_are_read(tmp_path):
    """Bench files of the first format know neither the round before nor parts of a round."""
    folder = write_run(tmp_path / "x-0", 2.0, relay=True)
    content = json.loads((folder / "bench.json").read_text())
    for row in content["rows"]:
        del row["joint_histogram"], row["round_milliseconds"]
    (folder / "bench.json").write_text(json.dumps(content))
    (folder / "seconds.json").unlink()
    report_command(runs=[folder], out=tmp_path / "r.html")
    assert "Where the relay helps" not in Page(tmp_path / "r.html").text


def test_refused(runs, tmp_path):
    out = tmp_path / "r.html"
    with pytest.raises(InputError, match=r"has no sweep.json"):
        report_command(sweep=runs / "base-0", out=out)
    with pytest.raises(InputError, match="sweep: given beside runs"):
        report_command(runs=[runs], sweep=runs, out=out)
    with pytest.raises(InputError, match=r"holds no bench.json"):
        report_command(runs=[tmp_path / "nowhere"], out=out)
    with pytest.raises(InputError, match="is given twice"):
        report_command(runs=[runs, runs / "base-0"], out=out)
    write_run(tmp_path / "other-0", 2.0, suite_hash="t")
    with pytest.raises(InputError, match=r"runs: .* differ in suite_hash"):
        report_command(runs=[runs, tmp_path / "other-0"], out=out)
    (runs / "base-0/bench.json").write_text('{"rows": [{"tau": 1}], "environment": {}}')
    with pytest.raises(InputError, match="lacks family, histogram"):
        report_command(runs=[runs], out=out)
    (runs / "base-0/bench.json").write_text("{")
    with pytest.raises(InputError, match="is no result of dflow-train bench"):
        report_command(runs=[runs], out=out)
    assert not out.exists()


def test_pictures_never_take_the_place_of_something_else(runs, tmp_path):
    precious = tmp_path / "r_files/notes.txt"
    precious.parent.mkdir()
    precious.write_text("mine")
    with pytest.raises(InputError, match="holds something else"):
        report_command(sweep=runs, out=tmp_path / "r.html")
    assert precious.read_text() == "mine"


def test_curves_of_a_store_for_one_run_or_many(tmp_path):
    from mlflow import MlflowClient

    for store, name in ((tmp_path / "s", "a-0"), (tmp_path / "own/a-0", "a-0")):
        store.mkdir(parents=True, exist_ok=True)
        client = MlflowClient(f"sqlite:///{store / 'mlflow.db'}")
        experiment = client.create_experiment("e", artifact_location=store.as_uri())
        for run_name, tau in (("other", 9.0), (name, 1.5)):
            run = client.create_run(experiment, run_name=run_name).info.run_id
            for step in (20, 10):
                client.log_metric(run, "train/tau_round0", tau + step / 100, step=step)
                client.log_metric(run, "train/loss", 5.0, step=step)
    for folder in (tmp_path / "s/a-0", tmp_path / "own/a-0"):
        assert read_curves(folder) == {"train/tau_round0": [(10, 1.6), (20, 1.7)]}
    assert read_curves(tmp_path / "nowhere/a-0") == {}


def test_tau_by_the_round_before():
    joint = [[1, 1, 0], [0, 0, 2], [0, 0, 0]]
    rows = [{"family": "math", "relay": relay, "joint_histogram": joint} for relay in ("on", "off")]
    html = "".join(unpaired_table([*rows, rows[0]], "x"))
    cells = re.findall(r"<td>([^<]*)</td>", html)
    assert cells == ["math", "on", "1.50 (4)", "3.00 (4)", "-", "math", "off", "1.50 (2)",
                     "3.00 (2)", "-"]  # fmt: skip
    assert unpaired_table([{"family": "math", "relay": "on"}], "x") == []


def test_costs_are_shown_of_every_part_of_a_round_that_is_timed():
    from dflow_lightning import stopwatch
    from dflow_lightning.report import runs_page

    assert runs_page._ROUND_PARTS == stopwatch.ROUND_PARTS
