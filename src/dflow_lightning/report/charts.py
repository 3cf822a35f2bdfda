"""Charts as inline SVG that can be read in black and white."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

# Readable without colour: every series has its own grey, dash, marker and hatch.
GREYS = ("#000000", "#555555", "#222222", "#888888", "#444444", "#777777")
DASHES = ("", "7 4", "2 3", "9 3 2 3", "4 2", "12 4")
MARKERS = ("circle", "square", "triangle", "diamond", "cross", "ring")
WIDTH, HEIGHT, LEFT, BOTTOM, TOP = 640, 300, 64, 44, 16


@dataclass(frozen=True)
class Series:
    """One line of a chart: what it is called and its value at each x; None leaves a place out."""

    name: str
    values: Sequence[float | None]


def share_chart(title: str, x_label: str, series: list[Series]) -> str:
    """Lines of shares between 0 and 1 over 1, 2, ..."""
    num_x = max(len(one.values) for one in series)
    names = [str(i + 1) for i in range(num_x)]
    return line_chart(title, x_label, names, "share of rounds", 1.0, percent, series)


def rate_chart(
    title: str, x_label: str, x_names: list[str], y_label: str, series: list[Series]
) -> str:
    """Lines of positive numbers; the named places of x are equally far apart."""
    values = [value for one in series for value in one.values if value is not None]
    return line_chart(
        title, x_label, x_names, y_label, round_up(max(values)), "{:g}".format, series
    )


def line_chart(
    title: str,
    x_label: str,
    x_names: list[str],
    y_label: str,
    top: float,
    y_name: Callable[[float], str],
    series: list[Series],
) -> str:
    step = (WIDTH - LEFT - 20) / max(1, len(x_names) - 1)
    ticks = [(LEFT + i * step, name) for i, name in enumerate(x_names)]
    marks = [axes(x_label, y_label, top, y_name, ticks)]
    for index, one in enumerate(series):
        points = [
            (LEFT + i * step, y_at(value, top))
            for i, value in enumerate(one.values)
            if value is not None
        ]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        grey, dash = GREYS[index % len(GREYS)], DASHES[index % len(DASHES)]
        marks.append(
            f'<polyline points="{path}" fill="none" stroke="{grey}" stroke-width="1.8" '
            f'stroke-dasharray="{dash}"/>'
        )
        marks += [marker(index, x, y) for x, y in points]
    legend = [(one.name, line_key(index)) for index, one in enumerate(series)]
    return figure(title, marks, legend)


def bar_chart(title: str, x_label: str, series: list[Series]) -> str:
    num_x = max(len(one.values) for one in series)
    slot = (WIDTH - LEFT - 10) / num_x
    bar = 0.8 * slot / len(series)
    top = max(0.05, max(value or 0.0 for one in series for value in one.values))
    ticks = [(LEFT + (i + 0.5) * slot, str(i)) for i in range(num_x)]
    marks = [axes(x_label, "share of rounds", top, percent, ticks)]
    for index, one in enumerate(series):
        for i, value in enumerate(one.values):
            x, y = LEFT + i * slot + 0.1 * slot + index * bar, y_at(value or 0.0, top)
            marks.append(box(index, x, y, bar, HEIGHT - BOTTOM - y))
    legend = [(one.name, bar_key(index)) for index, one in enumerate(series)]
    return figure(title, marks, legend)


def y_at(value: float, top: float) -> float:
    return TOP + (HEIGHT - BOTTOM - TOP) * (1 - value / top)


def percent(share: float) -> str:
    return f"{100 * share:.0f}%"


def round_up(value: float) -> float:
    """The next number of one digit whose quarters are short as well."""
    power = 10.0 ** math.floor(math.log10(value))
    return next(digit * power for digit in (1, 2, 4, 6, 8, 10) if digit * power >= value)


def axes(
    x_label: str,
    y_label: str,
    top: float,
    y_name: Callable[[float], str],
    ticks: list[tuple[float, str]],
) -> str:
    floor, right = HEIGHT - BOTTOM, WIDTH - 5
    parts = [
        f'<path d="M{LEFT - 8} {TOP}V{floor}H{right}" fill="none" stroke="#000"/>',
        text(WIDTH / 2, HEIGHT - 6, x_label),
        f'<g transform="rotate(-90 14 {HEIGHT / 2})">{text(14, HEIGHT / 2, y_label)}</g>',
    ]
    for fraction in (0.0, 0.25, 0.5, 0.75, 1.0):
        y = y_at(fraction * top, top)
        parts.append(f'<path d="M{LEFT - 8} {y:.1f}H{right}" stroke="#ddd"/>')
        parts.append(text(LEFT - 12, y + 4, y_name(fraction * top), anchor="end"))
    parts += [text(x, floor + 16, label) for x, label in ticks]
    return "".join(parts)


def text(x: float, y: float, content: str, anchor: str = "middle") -> str:
    place = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"'
    return f'<text {place} font-size="12">{escape(content)}</text>'


def marker(index: int, x: float, y: float) -> str:
    grey, shape = GREYS[index % len(GREYS)], MARKERS[index % len(MARKERS)]
    path = {
        "square": f"M{x - 4:.1f} {y - 4:.1f}h8v8h-8z",
        "triangle": f"M{x:.1f} {y - 5:.1f}l5 9h-10z",
        "diamond": f"M{x:.1f} {y - 5:.1f}l5 5l-5 5l-5 -5z",
        "cross": f"M{x - 4:.1f} {y - 4:.1f}l8 8m0 -8l-8 8",
    }.get(shape)
    if path:
        return f'<path d="{path}" fill="{grey}" stroke="{grey}"/>'
    fill = "#fff" if shape == "ring" else grey
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{fill}" stroke="{grey}"/>'


def box(index: int, x: float, y: float, width: float, height: float) -> str:
    """A bar; each series has its own hatch."""
    return (
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{max(0.0, height):.1f}" '
        f'fill="url(#hatch{index % len(GREYS)})" stroke="#000"/>'
    )


def line_key(index: int) -> str:
    grey, dash = GREYS[index % len(GREYS)], DASHES[index % len(DASHES)]
    line = f'<path d="M2 8H46" stroke="{grey}" stroke-width="1.8" stroke-dasharray="{dash}"/>'
    return line + marker(index, 24, 8)


def bar_key(index: int) -> str:
    return box(index, 12, 1, 24, 14)


HATCHES = (
    '<rect width="8" height="8" fill="#000"/>',
    '<rect width="8" height="8" fill="#fff"/><path d="M0 8L8 0" stroke="#000"/>',
    '<rect width="8" height="8" fill="#bbb"/>',
    '<rect width="8" height="8" fill="#fff"/><path d="M0 4H8" stroke="#000"/>',
    '<rect width="8" height="8" fill="#fff"/><path d="M0 0L8 8M0 8L8 0" stroke="#000"/>',
    '<rect width="8" height="8" fill="#fff"/><circle cx="4" cy="4" r="1.5"/>',
)


def hatch_definitions() -> str:
    """What bars are filled with; a page needs it once."""
    patterns = "".join(
        f'<pattern id="hatch{index}" width="8" height="8" patternUnits="userSpaceOnUse">'
        f"{shape}</pattern>"
        for index, shape in enumerate(HATCHES)
    )
    return f'<svg width="0" height="0" aria-hidden="true"><defs>{patterns}</defs></svg>'


def figure(title: str, marks: list[str], legend: list[tuple[str, str]]) -> str:
    height = HEIGHT + 20 * len(legend) + 4
    keys = [
        f'<g transform="translate({LEFT} {HEIGHT + 20 * line})">'
        f"{key}{text(56, 12, name, 'start')}</g>"
        for line, (name, key) in enumerate(legend)
    ]
    return (
        f'<figure><figcaption>{escape(title)}</figcaption><svg viewBox="0 0 {WIDTH} {height}" '
        f'width="{WIDTH}" role="img" aria-label="{escape(title)}">'
        f"{''.join(marks)}{''.join(keys)}</svg></figure>"
    )
