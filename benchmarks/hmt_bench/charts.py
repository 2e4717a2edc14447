"""Several charts as one SVG image."""

import re
from collections.abc import Sequence

_SIZE = re.compile(r'viewBox="0 0 ([\d.]+) ([\d.]+)"')


def stacked_svg(charts: Sequence[str]) -> str:
    """Charts of `hmt.bench.load.chart`, one below the other, black on white."""
    sizes = [tuple(map(float, _size(chart))) for chart in charts]
    width, height = max(w for w, _ in sizes), sum(h for _, h in sizes)
    placed, top = [], 0.0
    for chart, (own_width, own_height) in zip(charts, sizes, strict=True):
        at = f'<svg y="{top:g}" width="{own_width:g}" height="{own_height:g}" '
        placed.append(chart.replace("<svg ", at, 1))
        top += own_height
    begin = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:g}" height="{height:g}" '
        'font-family="sans-serif" color="black">\n'
        f'<rect width="{width:g}" height="{height:g}" fill="white"/>'
    )
    return "\n".join([begin, *placed, "</svg>"]) + "\n"


def _size(chart: str) -> tuple[str, str]:
    found = _SIZE.search(chart)
    assert found is not None, "charts have a viewBox"
    return found[1], found[2]
