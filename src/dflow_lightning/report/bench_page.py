"""The page of bench files: tables and charts."""

import json
from html import escape
from pathlib import Path

from dflow_lightning.bench.table import short_names
from dflow_lightning.errors import InputError
from dflow_lightning.html import html_table, milliseconds, number, page
from dflow_lightning.report.charts import (
    Series,
    bar_chart,
    own_ids,
    rate_chart,
    share_chart,
)
from dflow_lightning.report.relay_table import unpaired_table

ROW_KEYS = (
    "drafter",
    "relay",
    "temperature",
    "acceptance",
    "backend",
    "concurrency",
    "requests_in_flight",
    "family",
    "tau",
    "position_acceptance",
    "tokens_per_second",
    "plain_tokens_per_second",
    "speedup",
    "time_per_output_token_p50",
    "time_per_output_token_p95",
    "lossless",
)


LOSSLESS = {True: "yes", False: "NO", None: "not asserted"}


def read_result(path: Path) -> dict:
    """A bench file, checked for what the page shows."""
    try:
        result = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InputError(
            f"bench: {path} does not exist; write it with dflow-train bench --json"
        ) from None
    except (ValueError, OSError) as error:
        raise InputError(f"bench: {path} cannot be read as JSON ({error})") from None
    if not isinstance(result, dict) or not {"rows", "environment"} <= result.keys():
        raise InputError(
            f"bench: {path} has no rows and environment; dflow-train bench writes both"
        )
    if not result["rows"]:
        raise InputError(f"bench: {path} holds no rows; measure at least one drafter")
    for index, row in enumerate(result["rows"]):
        missing = [key for key in ROW_KEYS if key not in row]
        if missing:
            raise InputError(
                f"bench: row {index} of {path} lacks {', '.join(missing)}; measure again"
            )
    return result


def bench_page(sources: list[str], results: list[dict]) -> str:
    """The whole page."""
    rows = [
        row | {"engine": result["environment"].get("engine", row["backend"])}
        for result in results
        for row in result["rows"]
    ]
    parts = ["<h1>Speculative decoding: measured results</h1>", _INTRODUCTION]
    for key, chosen in comparable(rows).items():
        temperature, rule, engine = key
        parts.append(f"<h2>Temperature {temperature:g} ({escape(rule)}, {escape(engine)})</h2>")
        parts += section(with_names(chosen))
    for source, result in zip(sources, results, strict=True):
        parts.append(environment_table(source, result["environment"]))
    numbered = [own_ids(part, number) for number, part in enumerate(parts)]
    return page("dflow-lightning bench", numbered)


def comparable(rows: list[dict]) -> dict[tuple[float, str, str], list[dict]]:
    """Rows by temperature, acceptance rule, and engine: others never share a table or a chart."""
    found: dict[tuple[float, str, str], list[dict]] = {}
    for row in sorted(rows, key=lambda row: row["temperature"]):
        engine = row["engine"] if row["backend"] in row["engine"] else row["backend"]
        found.setdefault((row["temperature"], row["acceptance"], engine), []).append(row)
    return found


def with_names(rows: list[dict]) -> list[dict]:
    """Short drafter names."""
    names = short_names([row["drafter"] for row in rows])
    return [row | {"drafter": names[row["drafter"]], "plain": "plain"} for row in rows]


def section(rows: list[dict]) -> list[str]:
    """Tables and charts of one temperature, none of which mixes concurrencies unless it says so."""
    common = common_concurrency(rows)
    one = [row for row in rows if row["concurrency"] == common]
    parts = [_tau_table(one), _speed_table(one, common), *charts(one)]
    for drafter in dict.fromkeys(row["drafter"] for row in one if row["relay"] == "on"):
        parts += unpaired_table([row for row in one if row["drafter"] == drafter], drafter)
    if len({row["concurrency"] for row in rows}) > 1:
        parts += [_throughput_table(rows), *throughput_chart(rows)]
    return parts


def common_concurrency(rows: list[dict]) -> int:
    """The smallest at which every drafter was measured."""
    levels = [
        {row["concurrency"] for row in rows if (row["drafter"], row["relay"]) == arm}
        for arm in _arms(rows)
    ]
    common = set.intersection(*levels)
    if not common:
        measured = "; ".join(
            f"{drafter}, relay {relay}: {', '.join(map(str, sorted(found)))}"
            for (drafter, relay), found in zip(_arms(rows), levels, strict=True)
        )
        raise InputError(
            f"bench: no concurrency was measured for all drafters ({measured}), so their numbers "
            "cannot be in one table; measure at a common one, or write a report of each"
        )
    return min(common)


_INTRODUCTION = (
    "<p>tau is the acceptance length: accepted drafts + 1 bonus token per round, pooled over all "
    "rounds. Speed-up is tokens per second against plain decoding by the same target in the same "
    "run, at the same concurrency (requests in flight at the same time). Lossless means that every "
    "answer equals the plain one token for token.</p>"
)


def _arms(rows: list[dict]) -> list[tuple[str, str]]:
    """(drafter, relay) in the order in which they were measured."""
    return list(dict.fromkeys((row["drafter"], row["relay"]) for row in rows))


def families(rows: list[dict]) -> list[str]:
    names = dict.fromkeys(row["family"] for row in rows)
    return [name for name in names if name != "pooled"] + ["pooled"] * ("pooled" in names)


def _tau_table(rows: list[dict]) -> str:
    """tau per family; the last column compares the pooled value to the first row."""
    cells = {(row["drafter"], row["relay"], row["family"]): row["tau"] for row in rows}
    names, lines, reference = families(rows), [], None
    for drafter, relay in _arms(rows):
        values = [cells.get((drafter, relay, name)) for name in names]
        pooled = cells.get((drafter, relay, "pooled"))
        reference = pooled if reference is None else reference
        ratio = pooled / reference if pooled and reference else None
        lines.append([drafter, relay, *(number(value) for value in values), number(ratio)])
    return html_table(
        "Acceptance length tau", ["drafter", "relay", *names, "pooled / first row"], lines
    )


def _speed_table(rows: list[dict], concurrency: int) -> str:
    lines = []
    for row in rows:
        share = row.get("relay_share")
        lines.append(
            [
                row["drafter"],
                row["relay"],
                row["family"],
                number(row["tokens_per_second"], 1),
                number(row["speedup"], 3, "x"),
                milliseconds(row["time_per_output_token_p50"]),
                milliseconds(row["time_per_output_token_p95"]),
                round_parts(row.get("round_milliseconds")),
                "-" if share is None else f"{100 * share:.2f} %",
                LOSSLESS[row["lossless"]],
                str(row.get("excused_ties", "-")),
            ]
        )
    header = [
        "drafter", "relay", "family", "tokens/s", "speed-up", "ms/token p50",
        "ms/token p95", "round, ms", "relay share", "lossless", "ties",
    ]  # fmt: skip
    return html_table(f"Speed and losslessness, concurrency {concurrency}", header, lines)


def round_parts(parts: dict[str, float] | None) -> str:
    """`draft 0.41, verify 1.02, ...`"""
    return ", ".join(f"{name} {value:.2f}" for name, value in (parts or {}).items()) or "-"


def pooled_rows(rows: list[dict]) -> list[dict]:
    return [row for row in rows if row["family"] == "pooled"]


def _throughput_table(rows: list[dict]) -> str:
    """Every concurrency, all families pooled."""
    lines = []
    for row in sorted(pooled_rows(rows), key=lambda row: row["concurrency"]):
        lines.append(
            [
                row["drafter"],
                row["relay"],
                str(row["concurrency"]),
                number(row["requests_in_flight"], 1),
                number(row["plain_tokens_per_second"], 1),
                number(row["tokens_per_second"], 1),
                number(row["speedup"], 3, "x"),
                milliseconds(row["time_per_output_token_p50"]),
                milliseconds(row["time_per_output_token_p95"]),
                LOSSLESS[row["lossless"]],
            ]
        )
    header = [
        "drafter", "relay", "concurrency", "in flight, mean", "plain tokens/s",
        "tokens/s", "speed-up", "ms/token p50", "ms/token p95", "lossless",
    ]  # fmt: skip
    return html_table("Throughput and latency by concurrency", header, lines)


def throughput_chart(rows: list[dict]) -> list[str]:
    """Tokens per second of all requests together, of plain decoding and of each drafter."""
    pooled = pooled_rows(rows)
    named = [(row["plain"], "plain_tokens_per_second", row) for row in pooled]
    named += [
        (f"{row['drafter']}, relay {row['relay']}", "tokens_per_second", row) for row in pooled
    ]
    found: dict[str, dict[int, float]] = {}
    for name, key, row in named:
        if row[key]:  # where several files measured the same, the first one counts
            found.setdefault(name, {}).setdefault(row["concurrency"], row[key])
    levels = sorted({level for rates in found.values() for level in rates})
    if not levels:
        return []
    series = [Series(name, [rates.get(level) for level in levels]) for name, rates in found.items()]
    return [
        rate_chart(
            "Tokens per second by concurrency, all families",
            "concurrency: requests in flight at the same time",
            [str(level) for level in levels],
            "tokens per second",
            series,
        )
    ]


def charts(rows: list[dict]) -> list[str]:
    """Per-position acceptance and the histogram of accepted drafts, all families pooled."""
    pooled = pooled_rows(rows)
    if not pooled:
        return []
    names = [f"{row['drafter']}, relay {row['relay']}" for row in pooled]
    positions = [
        Series(name, row["position_acceptance"]) for name, row in zip(names, pooled, strict=True)
    ]
    figures = [share_chart("Share of rounds that accept draft j", "draft position j", positions)]
    counted = [
        (name, row["histogram"])
        for name, row in zip(names, pooled, strict=True)
        if row.get("histogram")
    ]
    if counted:
        shares = [
            Series(name, [n / max(1, sum(counts)) for n in counts]) for name, counts in counted
        ]
        figures.append(
            bar_chart("Rounds by number of accepted drafts", "accepted drafts a", shares)
        )
    return figures


def environment_table(source: str, environment: dict) -> str:
    """Everything the run recorded, the command first."""
    rest = {key: value for key, value in environment.items() if key != "command"}
    lines = [
        [key, value if isinstance(value, str) else json.dumps(value)] for key, value in rest.items()
    ]
    command = environment.get("command", "not recorded")
    return (
        f"<h2>How {escape(source)} was measured</h2><pre>{escape(str(command))}</pre>"
        + html_table("Environment", ["what", "value"], lines)
    )
