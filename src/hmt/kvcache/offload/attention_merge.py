"""Attention in parts: each over some of the positions, added up as they come."""

from collections.abc import Sequence

import torch

from hmt.kernels import ops


class LseMerge:
    """Attention over the union of disjoint positions, in f32.

    out  f32 [tokens, q_heads, value_dim]
    lse  f32 [tokens, q_heads]: the natural log of the sum of exponentials; -inf without any
    """

    def __init__(self, shape: Sequence[int], device: torch.device) -> None:
        """Without any positions yet; shape: tokens, q_heads, value_dim."""
        self.out = torch.zeros(shape, device=device)
        self.lse = torch.full(shape[:2], -torch.inf, device=device)

    def like(self) -> "LseMerge":
        """Room for a part of the same rows, empty."""
        return LseMerge(self.out.shape, self.out.device)

    def to(self, device: torch.device) -> "LseMerge":
        """The same on `device`, without waiting for it."""
        moved = LseMerge.__new__(LseMerge)
        moved.out, moved.lse = (x.to(device, non_blocking=True) for x in (self.out, self.lse))
        return moved

    def add(self, part: "LseMerge") -> None:
        """Count the positions of `part`, too.  Rows that have none there do not change."""
        parts = (self.out, self.lse), (part.out, part.lse)
        self.out, self.lse = ops.merge_attention(parts)

    def add_rows(self, rows: slice, part: "LseMerge") -> None:
        """`add` of a part that has only `rows`."""
        parts = (self.out[rows], self.lse[rows]), (part.out, part.lse)
        self.out[rows], self.lse[rows] = ops.merge_attention(parts)
