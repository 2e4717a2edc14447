"""Attention in parts: each over some of the positions, added up as they come."""

from collections.abc import Sequence

import torch


class Merged:
    """Attention over the union of disjoint positions, in f32 (arXiv 2501.01005).

    out   f32 [tokens, q_heads, value_dim]
    lse   f32 [tokens, q_heads]: the natural log of the sum of exponentials; -inf without any
    """

    def __init__(self, shape: Sequence[int], device: torch.device) -> None:
        """Without any positions yet; shape: tokens, q_heads, value_dim."""
        self.out = torch.zeros(shape, device=device)
        self.lse = torch.full(shape[:2], -torch.inf, device=device)

    def like(self) -> "Merged":
        """Room for a part of the same rows, empty."""
        return Merged(self.out.shape, self.out.device)

    def add(self, part: "Merged") -> None:
        """Count the positions of `part`, too.  Rows that have none there do not change."""
        top = torch.maximum(self.lse, part.lse)
        top = top.masked_fill(top.isneginf(), 0)
        ours, theirs = (self.lse - top).exp_(), (part.lse - top).exp_()
        total = ours + theirs
        divisor = total.masked_fill(total == 0, 1)
        self.out.mul_((ours / divisor)[..., None])
        self.out.addcmul_(part.out, (theirs / divisor)[..., None])
        self.lse = top + total.log()
