"""Bits that were chosen for the weights of each layer, as lines of text with bars."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

_BAR: Final = 32  # characters for 16 bits
_EIGHTHS: Final = " ▏▎▍▌▋▊▉"


def chosen_lines(groups: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """A line for each layer: bits of its weights and their mean; none without `groups`.

    groups   of a report: "layer", "name" ("ffn/down_proj"), "bits", "numbers"
    """
    layers: dict[int, list[Mapping[str, Any]]] = {}
    for group in groups:
        layers.setdefault(group["layer"], []).append(group)
    if not layers:
        return
    yield "bits of each layer's weights (16: as published), and their mean:"
    for layer, members in layers.items():
        bits = "  ".join(f"{_short(one['name'])} {one['bits']:>2}" for one in members)
        yield f"{layer:>4}  {bits}  {_bar(_mean(members))} {_mean(members):.1f}"


def _short(name: str) -> str:
    return name.rpartition("/")[2].removesuffix("_proj")


def _mean(members: Sequence[Mapping[str, Any]]) -> float:
    numbers = sum(one["numbers"] for one in members)
    total: float = sum(one["bits"] * one["numbers"] for one in members)
    return total / numbers


def _bar(bits: float) -> str:
    eighths = round(bits / 16 * _BAR * 8)
    return "█" * (eighths // 8) + _EIGHTHS[eighths % 8].strip()
