"""Keys as distances from the middle of their channel, in units of how far these go.

Channels of keys differ in where they lie and how far they spread (KIVI, arXiv 2402.02750), and 32
of them share a scale in 4 bits.  What is subtracted from all keys changes all scores of a query by
the same number, which softmax does not see; queries are multiplied with what keys are divided by.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

_LEAST_SHARE = 1e-3  # of the largest spread of a head: channels that stood still


@dataclass(frozen=True, slots=True, eq=False)
class KeyRange:
    """Of one layer's keys, from calibration: f32 [heads, key_dim] each.

    middle   the mean of each channel
    spread   the largest distance from it, never 0, and a number of bfloat16, so that queries are
             rounded once
    """

    middle: Tensor
    spread: Tensor

    @staticmethod
    def of(middle: Tensor, furthest: Tensor) -> "KeyRange":
        """From means, and the largest distances from them, which may be 0."""
        largest = furthest.amax(-1, keepdim=True)
        spread = torch.maximum(furthest, largest * _LEAST_SHARE)
        spread = torch.where(largest == 0, 1.0, spread)
        return KeyRange(middle.float(), spread.bfloat16().float())

    def to(self, device: torch.device) -> "KeyRange":
        """The same on a device."""
        return KeyRange(self.middle.to(device), self.spread.to(device))

    def normalized(self, key: Tensor) -> Tensor:
        """Keys [tokens, heads, key_dim] as the cache has them, in their dtype."""
        return ((key.float() - self.middle) / self.spread).to(key.dtype)

    def restored(self, kept: Tensor) -> Tensor:
        """The keys that `normalized` was given."""
        return (kept.float() * self.spread + self.middle).to(kept.dtype)

    def scaled_query(self, query: Tensor) -> Tensor:
        """Queries [tokens, q_heads, key_dim] whose scores with normalized keys are those with keys.

        But for a number that is the same for all keys of a row.
        """
        by_head = query.unflatten(1, (len(self.spread), -1))
        return (by_head * self.spread[:, None].to(query.dtype)).flatten(1, 2)

    def restored_values(self, found: Tensor) -> Tensor:
        """Attention [tokens, q_heads, value_dim] to values that are the first numbers of keys.

        found   the same to those of normalized keys
        """
        dim = found.shape[-1]
        by_head = found.float().unflatten(1, (len(self.spread), -1))
        out = by_head * self.spread[:, None, :dim] + self.middle[:, None, :dim]
        return out.flatten(1, 2).to(found.dtype)
