"""The results of a load as one page of HTML that needs nothing else."""

from collections.abc import Callable
from html import escape
from typing import Any

from hmt.base.units import format_bytes
from hmt.bench.load.chart import chart_svg

_STYLE = """
:root { color-scheme: light dark; }
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 76rem; padding: 0 1rem; }
.charts { display: grid; gap: 1rem; grid-template-columns: repeat(auto-fit, minmax(24rem, 1fr)); }
.table { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { border-bottom: 1px solid #8884; padding: .25rem .6rem; text-align: right; }
th:first-child, td:first-child { text-align: left; }
svg { max-width: 100%; }
"""
_TIMES = {"ttft_s": "first text", "tpot_s": "per token", "e2e_s": "whole answer"}


def report_html(content: dict[str, Any]) -> str:
    """The results of `hmt.bench.load.run`: a table, and charts over users and over rates."""
    title = f"Load on {content['model']}"
    machine, results = content["machine"], content["results"]
    about = (
        f"{content['target']}, {content['form']}; {machine['name']}, {machine['cpus']} processors; "
        f"{machine['system']}; HMT {machine['hmt']}; {machine['date']}"
    )
    parts = [
        '<!doctype html><html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head><body>",
        f"<h1>{escape(title)}</h1><p>{escape(about)}</p>",
    ]
    for name, axis in (("users", "users at once"), ("rate", "requests per second that arrive")):
        cells = [cell for cell in results if cell[name] is not None]
        if cells:
            parts.append(f"<h2>By {escape(axis)}</h2>")
            parts.append(f'<div class="charts">{_charts(cells, name, axis)}</div>')
    parts += [_table(results), "</body></html>"]
    return "\n".join(parts) + "\n"


def row(cell: dict[str, Any]) -> dict[str, str]:
    """A cell as texts, by the heading of their columns; times are P50 / P90 / P99."""
    several = "s" if cell["users"] != 1 else ""
    load = f"{cell['users']} user{several}" if cell["rate"] is None else f"{cell['rate']:g}/s"
    failures = ", ".join(f"{count} x {status}" for status, count in cell["failures"].items())
    memory, cores = cell["server_rss_bytes"], cell["server_cpu_cores"]
    prompt = cell["mean_prompt_tokens"]
    return {
        "load": load,
        "prompt": str(cell["prompt_tokens"] if prompt is None else round(prompt)),
        "answer": str(cell["output_tokens"]) + ("" if not cell["short_answers"] else " or less"),
        "requests": str(cell["requests"]),
        **{name: _times(cell[key]) for key, name in _TIMES.items()},
        "tokens/s": f"{cell['tokens_per_s']:.1f}",
        "requests/s": f"{cell['requests_per_s']:.2f}",
        "memory": "-" if memory is None else format_bytes(memory),
        "cores": "-" if cores is None else f"{cores:.2f}",
        "failed": failures or "-",
    }


def _times(found: dict[str, float] | None) -> str:
    """In milliseconds."""
    if found is None:
        return "-"
    digits = 1 if max(found.values()) < 0.1 else 0
    return " / ".join(f"{seconds * 1e3:.{digits}f}" for seconds in found.values())


def _table(results: list[dict[str, Any]]) -> str:
    rows = [row(cell) for cell in results]
    units = dict.fromkeys(_TIMES.values(), ", ms: P50 / P90 / P99")
    head = "".join(f"<th>{escape(name + units.get(name, ''))}</th>" for name in rows[0])
    lines = [
        "<tr>" + "".join(f"<td>{escape(text)}</td>" for text in one.values()) + "</tr>"
        for one in rows
    ]
    return (
        '<h2>All of it</h2><div class="table"><table>'
        f"<thead><tr>{head}</tr></thead><tbody>{''.join(lines)}</tbody></table></div>"
    )


def _charts(cells: list[dict[str, Any]], name: str, axis: str) -> str:
    places = sorted({cell[name] for cell in cells})
    kinds = list(dict.fromkeys((cell["prompt_tokens"], cell["output_tokens"]) for cell in cells))
    by = {(cell["prompt_tokens"], cell["output_tokens"], cell[name]): cell for cell in cells}

    def lines(marks: dict[str, Callable[[dict[str, Any]], float | None]]) -> dict[str, Any]:
        return {
            f"{prompt} + {output}{mark}": [
                pick(by[prompt, output, place]) if (prompt, output, place) in by else None
                for place in places
            ]
            for prompt, output in kinds
            for mark, pick in marks.items()
        }

    def milliseconds(key: str, percentile: str) -> Callable[[dict[str, Any]], float | None]:
        return lambda cell: None if cell[key] is None else cell[key][percentile] * 1e3

    charts: list[tuple[str, dict[str, Any]]] = [
        ("tokens per second", lines({"": lambda cell: cell["tokens_per_s"]}))
    ]
    for key, title in _TIMES.items():
        marks = {", P50": milliseconds(key, "p50"), ", P99*": milliseconds(key, "p99")}
        charts.append((f"{title}, ms", lines(marks)))
    if any(cell["server_cpu_cores"] is not None for cell in cells):
        charts.append(
            ("the server's busy processors", lines({"": lambda cell: cell["server_cpu_cores"]}))
        )
    labels = [f"{place:g}" for place in places]
    return "\n".join(chart_svg(title, axis, labels, found) for title, found in charts)
