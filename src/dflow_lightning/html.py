"""The frame of a report page: its style, tables and numbers."""

from collections.abc import Sequence
from html import escape
from urllib.parse import quote

PAGE_STYLE = """
body{font:16px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;color:#111}
table{border-collapse:collapse;margin:1rem 0;font-variant-numeric:tabular-nums;display:block;
overflow-x:auto}
th,td{padding:.25rem .7rem;border-bottom:1px solid #ccc;text-align:right;white-space:nowrap}
th:first-child,td:first-child{text-align:left}
thead th{border-bottom:2px solid #111}
code,pre{background:#f2f2f2;padding:.1rem .3rem;overflow-wrap:anywhere}
pre{padding:.6rem;overflow-x:auto}
svg,img{max-width:100%;height:auto;margin:.5rem 0}
figcaption{color:#444}
"""


def page(title: str, parts: Sequence[str], style: str = PAGE_STYLE) -> str:
    """A whole HTML page."""
    body = "\n".join(parts)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{escape(title)}</title><style>{style}</style></head>\n"
        f"<body>\n{body}\n</body></html>\n"
    )


def html_table(caption: str, header: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{escape(name)}</th>" for name in header)
    body = "".join(
        "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in line) + "</tr>" for line in lines
    )
    return (
        f"<h3>{escape(caption)}</h3><table><thead><tr>{head}</tr></thead>"
        f"<tbody>{body}</tbody></table>"
    )


def image(source: str, caption: str) -> str:
    """A picture beside the page.

    Args:
        source: its path from there; a browser reads `#`, `?` and `%` of an address otherwise.
    """
    return (
        f'<figure><img src="{escape(quote(source))}" alt="{escape(caption)}">'
        f"<figcaption>{escape(caption)}</figcaption></figure>"
    )


def number(value: float | None, digits: int = 3, unit: str = "") -> str:
    return "-" if value is None else f"{value:.{digits}f}{unit}"


def milliseconds(seconds: float | None) -> str:
    return number(None if seconds is None else 1000 * seconds, 2)


def with_spread(values: Sequence[float], sign: str = "±") -> str:
    """A mean, and largest minus smallest where there is more than one."""
    if not values:
        return "-"
    middle = f"{sum(values) / len(values):.3f}"
    return middle if len(values) == 1 else f"{middle} {sign} {max(values) - min(values):.3f}"
