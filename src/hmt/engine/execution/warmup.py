"""What a GPU would do for the first request only, done while a model is loaded.

Kernels are compiled when a step of some number of tokens first comes, libraries load their own, and
a decoding step is captured.  For an H200 that never ran the model that takes 6 s, which the first
request waited for; where all is compiled already, 80 ms.
"""

import time
from collections.abc import Callable
from collections.abc import Sequence as Many

import torch

from hmt.base.errors import HMTError
from hmt.base.log import logger
from hmt.contracts.blocks import BlockKind
from hmt.contracts.plan import Plan, Tier
from hmt.kernels.backend_registry import backend_on

_DECODED = 4  # tokens: the first is captured, the next replayed, and then there are guesses
_SHORTEST = 12  # tokens of a prompt: kernels for a few are those of decoding
_FIRST_ID = 16  # lower ones often are marks, which routers send where little else goes
_ENOUGH_S = 10.0  # of hundreds of GB of experts in host memory, a prompt reads most


def is_slow_at_first(where: torch.device) -> bool:
    """Whether kernels are compiled there when they are first called."""
    return backend_on(where).compiles_late


def prompts_to_warm(plan: Plan, positions: int) -> list[int]:
    """Tokens of the prompts to begin with.

    A whole piece and the beginning of another, which attends to the first; then a half of a piece,
    a quarter, and so on, for kernels differ by how many tokens there are.

    positions   that keys and values have room for

    None where blocks lie on the disk: to read them takes longer than what would be saved.  Encoders
    of images, which text reads nothing of, do not count.
    """
    if any(block.kind is not BlockKind.VISION for block in plan.blocks_in(Tier.DISK)):
        return []
    room, piece = positions - _DECODED, plan.max_prefill_tokens
    found = [min(piece + _SHORTEST, room)]
    tokens = min(piece // 2, room)
    while tokens >= _SHORTEST:
        found.append(tokens)
        tokens //= 2
    return [tokens for tokens in dict.fromkeys(found) if tokens >= _SHORTEST]


def warm_up(
    forced: Callable[[Many[int], Many[int], int], object],
    prompts: Many[int],
    vocabulary: int,
    enough_s: float = _ENOUGH_S,
) -> bool:
    """Compute each of `prompts`, and a few tokens behind it one by one.

    forced     as `Core.logits`
    enough_s   no other prompt begins after so long

    False, and a warning, where that fails: requests that fail, too, will tell what is wrong.
    """
    end = time.monotonic() + enough_s
    for tokens in prompts:
        # Neighbours differ, as in text: tokens that are alike would all choose the same experts.
        ids = [(_FIRST_ID + 7 * n) % vocabulary for n in range(tokens + _DECODED)]
        try:
            forced(ids, range(tokens - 1, len(ids)), tokens)
        except (HMTError, RuntimeError) as error:
            logger.warning("what the GPU computes first could not be prepared: %s", error)
            return False
        if time.monotonic() > end:
            break
    return True
