"""Writes generated tables of docs from measurements; `--check` only compares."""

import json
import sys
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).resolve().parent.parent
_RESULTS = _ROOT / "benchmarks" / "results"
_MODELS = {"dense": "kv-quality-dense", "moe": "kv-quality-moe"}
_FORMATS = "published-formats-xeon-amx-2-cores.json"
_ACTIVATIONS = "activation-quality-xeon-2-cores.json"
_METHODS = "quantized-methods-xeon-2-cores.json"
_LARGE = ("quantize-killed-xeon-2-cores.json", "quantize-12gb-xeon-2-cores.json")
_RANGES = "key-ranges-xeon-2-cores.json"
_BEGIN, _END = "<!-- figures: benchmarks/quality_figures.py {} -->", "<!-- /figures -->"


def formats() -> list[str]:
    """Sizes and scores of both models in the formats of others, in the order of measuring."""
    results = json.loads((_RESULTS / _FORMATS).read_text())["results"]
    models = list(dict.fromkeys(one["model"] for one in results))
    found = {(one["model"], one["format"]): one for one in results}
    heads = ("bits in the file", "in memory", "MB", "tasks", "retrieval", "perplexity")
    columns = [f"{model.removeprefix('mini-')}: {head}" for model in models for head in heads]
    lines = [f"| published as | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|"]
    for form in dict.fromkeys(form for _, form in found):
        cells = [cell for model in models for cell in _scores(found.get((model, form)))]
        lines.append(f"| {form} | {' | '.join(cells)} |")
    return lines


def _scores(one: dict[str, Any] | None) -> list[str]:
    if one is None:
        return ["-"] * 6
    bits = [8 * one[key] / one["numbers"] for key in ("published_bytes", "memory_bytes")]
    [(right, _)] = one["retrieval"].values()
    return [
        *(f"{count:.2f}" for count in bits),
        f"{one['published_bytes'] / 1e6:.1f}",
        str(one["tasks"][0]),
        str(right),
        f"{one['heldout_ppl']:.2f}",
    ]


def activations() -> list[str]:
    """Divergence from the truth, in thousandths of a nat, by file and engine."""
    results = json.loads((_RESULTS / _ACTIVATIONS).read_text())["results"]
    engines = list(results[0]["engines"])
    heads = [f"{engine}: {head}" for engine in engines for head in ("KL / 1000", "perplexity")]
    lines = [f"| file | {' | '.join(heads)} |", "|---" * (len(heads) + 1) + "|"]
    for one in results:
        scores = (one["engines"][engine] for engine in engines)
        cells = [
            cell
            for score in scores
            for cell in (f"{1000 * score['kl_mean']:.1f}", f"{score['perplexity']:.2f}")
        ]
        lines.append(f"| {one['model']}, {one['type']} | {' | '.join(cells)} |")
    return lines


def methods() -> list[str]:
    """What a model still knows by method and form of `hmt quantize`."""
    results = json.loads((_RESULTS / _METHODS).read_text())["results"]
    heads = ("tasks, A16", "tasks, A8", "perplexity, A16", "perplexity, A8", "KL, A16", "KL, A8")
    lines = [f"| | MB | {' | '.join(heads)} |", "|---" * (len(heads) + 2) + "|"]
    for one in results:
        rows: dict[str, dict[str, Any]] = {}
        for row in one["rows"]:
            rows.setdefault(row["row"], {})[row["activations"]] = row
        for name, both in rows.items():
            pair = both["a16"], both["a8"]
            count = f"{pair[0]['bytes'] / 1e6:.1f}" if "bytes" in pair[0] else ""
            cells = [str(row["tasks"][0]) for row in pair]
            cells += [f"{row['heldout_ppl']:.1f}" for row in pair]
            cells += [f"{1000 * row['kl']:.0f}" if "kl" in row else "" for row in pair]
            label = f"{one['model']}, {name.replace(':', ', ')}"
            lines.append(f"| {label} | {count} | {' | '.join(cells)} |")
    return lines


def limits() -> list[str]:
    """Models that were quantised under a limit of the operating system, and killed."""
    heads = ("limit", "planned", "group's peak", "process's peak", "s", "kills", "same bytes")
    lines = [f"| | {' | '.join(heads)} |", "|---" * (len(heads) + 1) + "|"]
    for name in _LARGE:
        one = json.loads((_RESULTS / name).read_text())
        sizes = [one["limit_bytes"], one["plan"]["total"]]
        sizes += [one["group_peak_bytes"], one["resident_peak_bytes"]]
        label = f"{one['model_bytes'] / 1e9:.2f} GB, {one['layers']} layers"
        label += f", {one['hidden_size']} wide, {one['options']['method']}"
        cells = [f"{nbytes / 1e9:.2f} GB" for nbytes in sizes] + [f"{one['seconds']:.0f}"]
        cells.append(str(sum(not moment["complete"] for moment in one["kills"])))
        cells.append("yes" if one["equal_bytes"] else "no")
        lines.append(f"| {label} | {' | '.join(cells)} |")
    return lines


def ranges() -> list[str]:
    """Divergence of next tokens with keys and values in fewer bits, in thousandths."""
    results = json.loads((_RESULTS / _RANGES).read_text())["results"]
    heads = [f"{one['length']}: {head}" for one in results for head in ("KL", "perplexity")]
    lines = [f"| pages on the disk | {' | '.join(heads)} |", "|---" * (len(heads) + 1) + "|"]
    for rows in zip(*(one["rows"] for one in results), strict=True):
        kept = rows[0]["kept"].removeprefix("cold:").replace("full", "none: all in memory")
        cells = [f"{1000 * row['kl']:.1f} | {row['perplexity']:.2f}" for row in rows]
        label = f"{kept}, ranges" if rows[0]["ranges"] else kept
        lines.append(f"| {label} | {' | '.join(cells)} |")
    return lines


def kv() -> list[str]:
    """Scores and bytes of every setting, for both models and all lengths that were measured."""
    found = {model: _by_setting(prefix) for model, prefix in _MODELS.items()}
    lengths = {model: sorted({n for _, n in results}) for model, results in found.items()}
    columns = [
        f"{model}: {head}"
        for model in found
        for head in (
            "bytes per position",
            *(f"retrieval {n}" for n in lengths[model]),
            "perplexity",
        )
    ]
    lines = [f"| keys and values | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|"]
    for setting in dict.fromkeys(name for results in found.values() for name, _ in results):
        cells = []
        for model, results in found.items():
            mine = {n: results[setting, n] for n in lengths[model] if (setting, n) in results}
            cells.append(_bytes(next(iter(mine.values()), None)))
            cells += [_retrieval(mine.get(length)) for length in lengths[model]]
            cells.append(_perplexity(mine.get(lengths[model][0])))
        lines.append(f"| {setting} | {' | '.join(cells)} |")
    return lines


def _by_setting(prefix: str) -> dict[tuple[str, int], dict[str, Any]]:
    """Results by setting and length."""
    files = sorted(_RESULTS.glob(f"{prefix}*.json"))
    results = [result for file in files for result in json.loads(file.read_text())["results"]]
    return {(result["setting"], result["length"]): result for result in results}


def _bytes(result: dict[str, Any] | None) -> str:
    """At each level, the near ones left out where there are others."""
    if result is None:
        return "-"
    levels = result["bytes_per_token"]
    far = [count for level, count in levels.items() if level != "near"]
    return ", ".join(f"{count:.0f}" for count in far or levels.values())


def _retrieval(result: dict[str, Any] | None) -> str:
    if result is None:
        return "-"
    right, total = result["retrieval"][str(result["length"])]
    return f"{right} of {total}"


def _perplexity(result: dict[str, Any] | None) -> str:
    return f"{result['heldout_ppl']:.2f}" if result and "heldout_ppl" in result else "-"


_PAGES = {
    "quality.md": (activations, formats, kv, ranges),
    "quantize.md": (methods, limits),
}


def main() -> int:
    """Bring the pages up to date; 1 where `--check` finds that one is not."""
    differs = False
    for name, tables in _PAGES.items():
        page = _ROOT / "docs" / name
        text = wanted = page.read_text()
        for table in tables:
            begin = _BEGIN.format(table.__name__)
            before, rest = wanted.split(begin)
            wanted = before + "\n".join([begin, *table(), _END]) + rest.split(_END, 1)[1]
        differs |= wanted != text
        if "--check" not in sys.argv:
            page.write_text(wanted)
    return int(differs and "--check" in sys.argv)


if __name__ == "__main__":
    sys.exit(main())
