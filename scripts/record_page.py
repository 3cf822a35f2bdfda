"""Put tables of a report page into docs/results.md, as Markdown.

    python scripts/record_page.py overlap runs/overlap.html --tables "by accepted drafts" "by slot"
    python scripts/record_page.py ablations runs/ablations.html --tables "length tau"

`dflow-train report` writes the page; the first word is the mark in docs/results.md that the tables
go to, and `--tables` chooses those whose captions hold one of the words, all when left out.
"""

import argparse
from html.parser import HTMLParser
from pathlib import Path

from compare_tables import header, line, publish


class TableReader(HTMLParser):
    """The captions and cells of a page that `report_page.table` made.

    Attributes:
        tables: caption, and rows of cells, the header first.
    """

    def __init__(self) -> None:
        super().__init__()
        self.tables: list[tuple[str, list[list[str]]]] = []
        self._text: str | None = None

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in ("h3", "th", "td"):
            self._text = ""
        elif tag == "tr":
            self.tables[-1][1].append([])

    def handle_data(self, data: str) -> None:
        if self._text is not None:
            self._text += data

    def handle_endtag(self, tag: str) -> None:
        if self._text is None:
            return
        if tag == "h3":
            self.tables.append((self._text, []))
        elif tag in ("th", "td"):
            self.tables[-1][1][-1].append(self._text)
        else:
            return
        self._text = None


def markdown(page: str, chosen: list[str]) -> list[str]:
    """Lines of the tables whose captions hold one of the words; of all tables without words."""
    reader = TableReader()
    reader.feed(page)
    lines: list[str] = []
    for caption, rows in reader.tables:
        if rows and (not chosen or any(word in caption for word in chosen)):
            lines += ["", caption, "", *header(rows[0]), *map(line, rows[1:])]
    if not lines:
        captions = ", ".join(caption for caption, rows in reader.tables if rows)
        raise SystemExit(f"--tables: no caption holds one of {chosen}; there are: {captions}")
    return lines[1:]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("mark", help="of docs/results.md, without its brackets")
    parser.add_argument("page", type=Path, help="written by dflow-train report")
    parser.add_argument("--tables", nargs="+", default=[], help="words of the captions")
    options = parser.parse_args()
    publish(options.mark, markdown(options.page.read_text(encoding="utf-8"), options.tables))
