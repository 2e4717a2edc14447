"""What pages of a size waste, for texts of given lengths: a Monte Carlo over the real allocator.

Texts come and go in a memory of fixed size, as many at once as fit.  A page that is not full wastes
its rest; a text that found no place in one piece is read in several.
"""

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from statistics import mean
from typing import Any

from hmt.bench.load.chart import chart_svg
from hmt.memory import Bitmap
from hmt_bench.charts import stacked_svg

PAGE_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 1024, 4096)
_ENTRY_BYTES = 8  # of a text's table, for each page


@dataclass(frozen=True, slots=True)
class Lengths:
    """Texts' lengths in tokens: normal, at least 1, at most `longest`."""

    mean: float = 200.0
    deviation: float = 120.0
    longest: int = 4096

    def draw(self, chance: random.Random) -> int:
        """One length."""
        return min(self.longest, max(1, round(chance.gauss(self.mean, self.deviation))))


@dataclass(frozen=True, slots=True)
class PageCost:
    """What pages of `tokens` tokens cost, as means over texts.

    wasted         share of the positions that texts took that hold nothing, when they are complete
    wasted_growing the same while they grow, token by token, from an empty text on
    unusable       share of the memory that was free, and yet too little for the next text
    runs           pieces in which a text's pages lie
    table_bytes    of its table
    taken_s        to find its pages and to give them back
    """

    tokens: int
    wasted: float
    wasted_growing: float
    unusable: float
    runs: float
    table_bytes: float
    taken_s: float


def run(
    lengths: Lengths,
    *,
    texts: int = 100_000,
    memory_tokens: int = 1 << 20,
    sizes: Sequence[int] = PAGE_SIZES,
    seed: int = 0,
    progress: Callable[[str], None] = lambda what: None,
) -> dict[str, Any]:
    """`PageCost` for each size of page; the content of a benchmark file."""
    costs = []
    for tokens in sizes:
        progress(f"pages of {tokens} tokens")
        costs.append(page_cost(tokens, lengths, texts, memory_tokens, random.Random(seed)))
    return {
        "benchmark": "pages",
        "lengths": asdict(lengths),
        "texts": texts,
        "memory_tokens": memory_tokens,
        "results": [asdict(cost) for cost in costs],
    }


def page_cost(
    tokens: int, lengths: Lengths, texts: int, memory_tokens: int, chance: random.Random
) -> PageCost:
    """Let `texts` texts come; those that leave to make room are chosen by chance."""
    free = Bitmap(memory_tokens // tokens)
    held: list[list[int]] = []
    used = taken = used_growing = taken_growing = runs = 0
    unusable, spent_s = [], 0.0
    for _ in range(texts):
        length = lengths.draw(chance)
        wanted = -(-length // tokens)
        if wanted > free.free:
            unusable.append(free.free * tokens / memory_tokens)
        begin = time.perf_counter()
        while wanted > free.free:
            at = chance.randrange(len(held))
            held[at], held[-1] = held[-1], held[at]
            free.give(held.pop())
        pages = free.take(wanted)
        spent_s += time.perf_counter() - begin
        held.append(pages)
        used, taken = used + length, taken + wanted * tokens
        used_growing += length * (length + 1) // 2
        taken_growing += _taken_growing(length, tokens)
        runs += 1 + sum(after != before + 1 for before, after in pairwise(pages))
    return PageCost(
        tokens,
        wasted=1 - used / taken,
        wasted_growing=1 - used_growing / taken_growing,
        unusable=mean(unusable) if unusable else 0.0,
        runs=runs / texts,
        table_bytes=_ENTRY_BYTES * taken / tokens / texts,
        taken_s=spent_s / texts,
    )


def _taken_growing(length: int, tokens: int) -> int:
    """Positions that a text takes, summed over its lengths from 1 to `length`."""
    whole, rest = divmod(length, tokens)
    return tokens * tokens * whole * (whole + 1) // 2 + rest * (whole + 1) * tokens


def waste_svg(content: dict[str, Any]) -> str:
    """Waste against the size of pages, as an SVG image."""
    results = content["results"]
    lines = {
        "of complete texts": [result["wasted"] for result in results],
        "while they grow": [result["wasted_growing"] for result in results],
    }
    places = [str(result["tokens"]) for result in results]
    axis = "tokens in a page; share of its positions that is wasted"
    return stacked_svg([chart_svg("Waste of pages", axis, places, lines)])
