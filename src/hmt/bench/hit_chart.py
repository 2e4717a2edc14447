"""Hit curves as a picture: SVG, drawn by hand, for one chart needs no library."""

from collections.abc import Sequence
from html import escape
from typing import Any

_WIDTH, _HEIGHT, _TITLE = 460, 300, 34
_LEFT, _TOP, _RIGHT, _BOTTOM = 48, 12, 150, 40
_COLOURS = ("#1f77b4", "#ff7f0e", "#2ca02c", "#9467bd", "#d62728", "#8c564b", "#e377c2", "#111111")


def hit_curves_svg(content: dict[str, Any]) -> str:
    """The results of `hmt.bench.cache.run` as one SVG image, a chart per trace."""
    results, residencies = content["results"], content["residencies"]
    height = len(results) * (_HEIGHT + _TITLE)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH + _RIGHT}" height="{height}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{_WIDTH + _RIGHT}" height="{height}" fill="white"/>',
    ]
    for number, result in enumerate(results):
        lines.append(f'<g transform="translate(0,{number * (_HEIGHT + _TITLE)})">')
        title = f"{result['model']}, {result['trace']}"
        lines.append(f'<text x="{_LEFT}" y="22" font-weight="bold">{escape(title)}</text>')
        lines.append(f'<g transform="translate(0,{_TITLE})">')
        lines += _axes()
        for place, curve in enumerate(result["curves"]):
            colour = _COLOURS[place % len(_COLOURS)]
            lines += _line(residencies, curve["rates"], colour, curve["policy"], place)
        lines.append("</g></g>")
    return "\n".join([*lines, "</svg>"]) + "\n"


def _x(share: float) -> float:
    return _LEFT + share * (_WIDTH - _LEFT)


def _y(share: float) -> float:
    return _HEIGHT - _BOTTOM - share * (_HEIGHT - _TOP - _BOTTOM)


def _axes() -> list[str]:
    lines = []
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        x, y = _x(share), _y(share)
        lines += [
            f'<line x1="{_x(0)}" y1="{y}" x2="{_x(1)}" y2="{y}" stroke="#ddd"/>',
            f'<line x1="{x}" y1="{_y(0)}" x2="{x}" y2="{_y(1)}" stroke="#ddd"/>',
            f'<text x="{_LEFT - 6}" y="{y + 4}" text-anchor="end">{share:.0%}</text>',
            f'<text x="{x}" y="{_y(0) + 16}" text-anchor="middle">{share:.0%}</text>',
        ]
    middle, bottom = (_x(0) + _x(1)) / 2, _HEIGHT - 6
    lines.append(
        f'<text x="{middle}" y="{bottom}" text-anchor="middle">experts in memory '
        "(how many of those needed were there)</text>"
    )
    return lines


def _line(
    residencies: Sequence[float], rates: Sequence[float], colour: str, name: str, place: int
) -> list[str]:
    points = " ".join(
        f"{_x(residency):.1f},{_y(rate):.1f}"
        for residency, rate in zip(residencies, rates, strict=True)
    )
    x, y = _WIDTH + 14, _TOP + 10 + 18 * place
    return [
        f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="1.6"/>',
        f'<line x1="{x}" y1="{y - 4}" x2="{x + 18}" y2="{y - 4}" stroke="{colour}" '
        'stroke-width="2"/>',
        f'<text x="{x + 24}" y="{y}">{escape(name)}</text>',
    ]
