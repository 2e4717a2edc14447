"""A chart of lines as SVG: few points, names on the right, and nothing from elsewhere."""

from collections.abc import Mapping, Sequence
from html import escape
from itertools import pairwise
from math import floor, log10

_WIDTH, _HEIGHT, _LEGEND = 420, 260, 170
_LEFT, _TOP, _BOTTOM = 58, 34, 42
_COLOURS = ("#2f7ed8", "#e07b00", "#2ca02c", "#a05fd0", "#d62728", "#8c6d4f", "#d0559f", "#7f7f7f")


def chart_svg(
    title: str, axis: str, places: Sequence[str], lines: Mapping[str, Sequence[float | None]]
) -> str:
    """Lines over places at equal distances, from 0 up; None leaves a gap.

    lines   by name, a value for each place; one whose name ends in * has dashes, and the colour of
            the line before it

    Texts have the colour of the page (currentColor), so that it may be dark or light.
    """
    values = [value for line in lines.values() for value in line if value is not None]
    top = ceiling(max(values, default=1.0))
    width, height = _WIDTH + _LEGEND, max(_HEIGHT, _TOP + 18 * len(lines) + 8)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" '
        f'aria-label="{escape(title)}" font-size="12" fill="currentColor">',
        f'<text x="{_LEFT}" y="18" font-weight="bold">{escape(title)}</text>',
    ]
    for step in range(5):
        y = _y(top * step / 4, top)
        parts += [
            f'<line x1="{_LEFT}" y1="{y:.1f}" x2="{_WIDTH}" y2="{y:.1f}" stroke="currentColor" '
            'stroke-opacity="0.2"/>',
            f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{top * step / 4:g}</text>',
        ]
    for number, place in enumerate(places):
        x = _x(number, len(places))
        parts.append(
            f'<text x="{x:.1f}" y="{_HEIGHT - _BOTTOM + 18}" text-anchor="middle">'
            f"{escape(place)}</text>"
        )
    middle = (_LEFT + _WIDTH) / 2
    parts.append(f'<text x="{middle}" y="{_HEIGHT - 6}" text-anchor="middle">{escape(axis)}</text>')
    colour = -1
    for number, (name, line) in enumerate(lines.items()):
        colour += not name.endswith("*")
        parts += _line(number, name, line, top, _COLOURS[colour % len(_COLOURS)])
    return "\n".join([*parts, "</svg>"])


def ceiling(value: float) -> float:
    """The least of 1, 2, 4, 6, 8 and 10 times a power of ten that is not below a value."""
    if value <= 0:
        return 1.0
    power = 10.0 ** floor(log10(value))
    return next((power * step for step in (1, 2, 4, 6, 8) if power * step >= value), power * 10)


def _x(number: int, places: int) -> float:
    return _LEFT + (number + 0.5) * (_WIDTH - _LEFT) / places


def _y(value: float, top: float) -> float:
    return _HEIGHT - _BOTTOM - value / top * (_HEIGHT - _BOTTOM - _TOP)


def _line(
    number: int, name: str, line: Sequence[float | None], top: float, colour: str
) -> list[str]:
    stroke = f'stroke="{colour}" stroke-width="2"'
    if name.endswith("*"):
        name, stroke = name.removesuffix("*"), stroke + ' stroke-dasharray="5 4"'
    points = [
        None if value is None else (_x(place, len(line)), _y(value, top))
        for place, value in enumerate(line)
    ]
    parts = [
        f'<line x1="{a[0]:.1f}" y1="{a[1]:.1f}" x2="{b[0]:.1f}" y2="{b[1]:.1f}" {stroke}/>'
        for a, b in pairwise(points)
        if a is not None and b is not None
    ]
    parts += [
        f'<circle cx="{point[0]:.1f}" cy="{point[1]:.1f}" r="3" fill="{colour}"/>'
        for point in points
        if point is not None
    ]
    x, y = _WIDTH + 12, _TOP + 8 + 18 * number
    return [
        *parts,
        f'<line x1="{x}" y1="{y - 4}" x2="{x + 20}" y2="{y - 4}" {stroke}/>',
        f'<text x="{x + 26}" y="{y}">{escape(name)}</text>',
    ]
