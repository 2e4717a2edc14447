"""Predictions beside measurements: a table for documents, and a picture (SVG, drawn by hand)."""

from collections.abc import Sequence
from html import escape
from math import floor, log10
from typing import Any

from hmt.bench.predictions.compare import error, middle

_SIZE, _LEFT, _BOTTOM, _TOP, _GAP = 300, 56, 44, 30, 24
_PANELS = (("tokens_per_s", "tokens/s"), ("ttft_s", "seconds to the first token"))
_COLOURS = ("#1f77b4", "#ff7f0e")  # all kept in memory, and read from the drive or copied
_NEAR = 1.25  # lines of a quarter too much or too little
_NAMES = {
    "tokens_per_s": "tokens/s",
    "ttft_s": "time to the first token",
    "host_bytes": "bytes of weights from memory per token",
    "disk_bytes": "bytes from the drive per token",
    "link_bytes": "bytes over the link per token",
    "peak_bytes": "peak memory",
    "device_bytes": "peak memory of the GPU",
}


def table(content: dict[str, Any]) -> str:
    """Markdown: a line for each run, and what the errors come to."""
    lines = [
        "| run (prompt x users) | tokens/s: predicted | measured | error | first token: "
        "predicted | measured | error | from the drive per token | memory |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for run in middle(content["runs"]):
        predicted, measured = run["predicted"], run["measured"]
        cells = [run["case"]["name"]]
        for name in ("tokens_per_s", "ttft_s"):
            cells += [_number(predicted[name]), _number(measured[name]), _share(run, name)]
        cells += [_share(run, "disk_bytes"), _share(run, "peak_bytes")]
        lines.append(f"| {' | '.join(cells)} |")
    lines += _sums("cases" if content["apart"] else "runs", content["errors"])
    if content["apart"]:
        lines += _sums("single runs", content["errors_of_runs"])
        apart, worst = (f"{content['apart'][key]:.1%}" for key in ("median", "worst"))
        fastest = f"{apart} more tokens/s than its slowest in the middle, {worst} at most"
        lines += ["", f"The fastest run of a case gave {fastest}."]
    return "\n".join(lines) + "\n"


def _sums(what: str, sums: dict[str, dict[str, float]]) -> list[str]:
    """Lines of a table."""
    lines = ["", f"| | {what} | median error | worst | lowest |", "|---|---|---|---|---|"]
    for name, found in sums.items():
        shares = (f"{found[key]:.1%}" for key in ("median", "worst"))
        lines.append(
            f"| {_NAMES[name]} | {found['runs']} | {' | '.join(shares)} | {found['lowest']:+.1%} |"
        )
    return lines


def scatter_svg(contents: Sequence[dict[str, Any]]) -> str:
    """Predicted over measured, a panel for tokens per second and one for the first token."""
    runs = [run for content in contents for run in middle(content["runs"])]
    width, height = len(_PANELS) * (_SIZE + _LEFT + _GAP), _SIZE + _TOP + _BOTTOM
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
    ]
    for number, (name, text) in enumerate(_PANELS):
        left = number * (_SIZE + _LEFT + _GAP) + _LEFT
        lines.append(f'<g transform="translate({left},{_TOP})">')
        lines += _panel(runs, name, text)
        lines.append("</g>")
    return "\n".join([*lines, "</svg>"]) + "\n"


def _panel(runs: Sequence[dict[str, Any]], name: str, text: str) -> list[str]:
    """One quantity; both axes are logarithmic and alike."""
    seen = [run for run in runs if error(run, name) is not None]
    values = [run[side][name] for run in seen for side in ("predicted", "measured")]
    low = floor(log10(min(values, default=1.0)))
    high = floor(log10(max(values, default=1.0))) + 1

    def at(value: float) -> float:
        return (log10(value) - low) / (high - low) * _SIZE

    lines = [
        f'<text x="0" y="-10" font-weight="bold">{escape(text)}</text>',
        f'<rect width="{_SIZE}" height="{_SIZE}" fill="none" stroke="#888"/>',
        f'<text x="{_SIZE / 2}" y="{_SIZE + 34}" text-anchor="middle">measured</text>',
        f'<text transform="translate(-40,{_SIZE / 2}) rotate(-90)" text-anchor="middle">'
        "predicted</text>",
    ]
    for power in range(low, high + 1):
        place, label = at(10.0**power), f"{10.0**power:g}"
        lines += [
            f'<text x="{place}" y="{_SIZE + 16}" text-anchor="middle">{label}</text>',
            f'<text x="-4" y="{_SIZE - place + 4}" text-anchor="end">{label}</text>',
        ]
    shift = at(10.0**low * _NEAR)
    lines += [
        f'<line x1="0" y1="{_SIZE}" x2="{_SIZE}" y2="0" stroke="#444"/>',
        f'<line x1="{shift}" y1="{_SIZE}" x2="{_SIZE}" y2="{shift}" stroke="#bbb"/>',
        f'<line x1="0" y1="{_SIZE - shift}" x2="{_SIZE - shift}" y2="0" stroke="#bbb"/>',
    ]
    for run in seen:
        predicted, measured = run["predicted"][name], run["measured"][name]
        moved = run["measured"]["disk_bytes"] or run["measured"]["link_bytes"]
        lines.append(
            f'<circle cx="{at(measured):.1f}" cy="{_SIZE - at(predicted):.1f}" r="4" '
            f'fill="{_COLOURS[bool(moved)]}" fill-opacity="0.7">'
            f"<title>{escape(run['case']['name'])}</title></circle>"
        )
    return lines


def _number(value: float) -> str:
    return f"{value:.3g}" if value < 1000 else f"{value:.0f}"


def _share(run: dict[str, Any], name: str) -> str:
    """The error of a case, and those of its runs from the lowest to the highest."""
    found, every = error(run, name), run["errors"].get(name, [])
    if found is None:
        return ""
    if len(every) == 1:
        return f"{found:+.0%}"
    return f"{found:+.0%} ({min(every):+.0%} to {max(every):+.0%})"
