"""How the prompt tokens of a step are shared out."""

from collections.abc import Sequence

from hmt.base.errors import RequestError
from hmt.contracts.model import PAGE_TOKENS
from hmt.engine.scheduling.sequence import SequenceState


def prefill_shares(sequences: Sequence[SequenceState], budget: int, interval: int) -> list[int]:
    """Of `budget` tokens, how many each sequence gets of its prompt.

    interval   of `to_border`; 0: steps may begin anywhere
    """
    left = [(one.computed, len(one.tokens) - one.computed) for one in sequences]
    shares = split_prefill_budget(left, budget)
    shares = keep_blocks([(one.computed, one.blocks) for one in sequences], shares, budget)
    if not interval:
        return shares
    asked = zip(sequences, shares, strict=True)
    return [to_border(one.computed, len(one.tokens), count, interval) for one, count in asked]


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


def check_blocks(blocks: Sequence[tuple[int, int]], budget: int) -> None:
    """Raise RequestError where a block has more tokens than a step's `budget`."""
    most = max((end - first for first, end in blocks), default=0)
    if most > budget:
        raise RequestError(
            f"an image has {most} tokens that see each other, and a step has at most {budget} of "
            f"prompts: load the model with --max-prefill-tokens {most}"
        )


def keep_blocks(
    left: Sequence[tuple[int, Sequence[tuple[int, int]]]], counts: Sequence[int], budget: int
) -> list[int]:
    """`counts` by which no chunk ends within a block, whose tokens see each other.

    left   (tokens computed, blocks) of each prompt; no block has more tokens than `budget`

    A chunk ends at the last page, or else the last token, before a block that it would cut.  The
    first prompt gets what its next block needs, if others then wait.
    """
    kept: list[int] = []
    for number, ((computed, blocks), count) in enumerate(zip(left, counts, strict=True)):
        if number and sum(kept) + count > budget:  # the first took of it
            count = (computed + max(0, budget - sum(kept))) // PAGE_TOKENS * PAGE_TOKENS - computed
            count = max(0, count)
        end = computed + count
        for first, behind in blocks:
            if first < end < behind:
                page = first // PAGE_TOKENS * PAGE_TOKENS
                end = page if page > computed else max(first, computed)
        if end == computed and not number:
            end = next((behind for first, behind in blocks if first <= computed < behind), end)
        kept.append(end - computed)
    return kept


def to_border(computed: int, tokens: int, count: int, interval: int) -> int:
    """Of the next `count` tokens of a prompt, those up to where a step is to begin, if any.

    That is at its last border of a page, and at multiples of `interval`.

    computed, tokens   of the prompt, until now and in all
    """
    border = (tokens - 1) // PAGE_TOKENS * PAGE_TOKENS
    left = border - computed
    next_multiple = interval - computed % interval
    return min(left if left > 0 else count, next_multiple, count)
