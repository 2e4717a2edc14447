"""How the prompt tokens of a step are shared out."""

from collections.abc import Sequence

from hmt.contracts.model import PAGE_TOKENS


def split_prefill_budget(left: Sequence[tuple[int, int]], budget: int) -> list[int]:
    """Of `budget` tokens, how many each prompt gets: never more in all, and none that it lacks.

    left   (tokens computed, tokens to go) of each prompt, those that were admitted first first

    The first prompt gets half of the budget at least, so that all end; of the rest the shortest go
    first, so that a short prompt does not wait for a long one; the first takes what they leave.
    Chunks that do not end a prompt end at a page, where the budget allows it: their logits are
    then the same whoever computes beside them.
    """
    counts = [0] * len(left)
    if not left:
        return counts

    def give(number: int, most: int) -> int:
        computed, to_go = left[number]
        begin, before = computed + counts[number], counts[number]
        count = min(to_go - before, most)
        if count < to_go - before:
            count = max(0, (begin + count) // PAGE_TOKENS * PAGE_TOKENS - begin)
        counts[number] += count
        return count

    half = -(-budget // (2 * PAGE_TOKENS)) * PAGE_TOKENS
    give(0, min(budget, half))
    if counts[0] == 0:  # the budget is less than a page
        counts[0] = min(left[0][1], budget)
    rest = budget - counts[0]
    for number in sorted(range(1, len(left)), key=lambda other: (left[other][1], other)):
        rest -= give(number, rest)
    give(0, rest)
    return counts


def to_border(computed: int, tokens: int, count: int, interval: int) -> int:
    """Of the next `count` tokens of a prompt, those up to where a step is to begin, if any.

    That is at its last border of a page, and at multiples of `interval`.

    computed, tokens   of the prompt, until now and in all
    """
    border = (tokens - 1) // PAGE_TOKENS * PAGE_TOKENS
    left = border - computed
    next_multiple = interval - computed % interval
    return min(left if left > 0 else count, next_multiple, count)
