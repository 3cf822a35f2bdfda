"""One self-contained HTML page from the JSON files that `dflow-train bench` writes."""

from pathlib import Path

from dflow_lightning import files
from dflow_lightning.errors import InputError
from dflow_lightning.report.bench_page import bench_page, read_result
from dflow_lightning.report.conditions import check_same_conditions


def report_command(
    *,
    out: Path,
    bench: list[Path] = [],  # noqa: B006  (read by the command line, never changed)
    runs: list[Path] = [],  # noqa: B006
    sweep: Path | None = None,
) -> None:
    """Turn results into one HTML page: of bench files, or of whole runs, with pictures beside it.

    Args:
        out: the HTML file to write; pictures of runs go to a folder of that name.
        bench: JSON files written by `dflow-train bench`, measured under the same conditions.
        runs: run folders with a `bench.json`, or folders of such; `<name>-<seed>` tells seeds.
        sweep: the folder of a `dflow-train sweep`.
    """
    given = [name for name, value in (("bench", bench), ("runs", runs), ("sweep", sweep)) if value]
    if not given:
        raise InputError("bench: no file given; pass --bench out.json, --runs DIR or --sweep DIR")
    if len(given) > 1:
        raise InputError(f"{given[1]}: given beside {given[0]}; write a report of each")
    files.check_writable(out, "out")
    if not bench:
        from dflow_lightning.report.runs_page import report_runs

        report_runs(runs, sweep, out)
        return
    results = [read_result(path) for path in bench]
    check_same_conditions([str(path) for path in bench], results)
    files.write_text(out, bench_page([str(path) for path in bench], results))
    num_rows = sum(len(result["rows"]) for result in results)
    print(f"report of {num_rows} rows written to {out}")
