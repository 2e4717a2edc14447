"""Random inputs of state spaces."""

import torch
from torch import Tensor


def inputs(sizes: tuple[int, ...], tokens: int, dtype: torch.dtype) -> list[Tensor]:
    """x, keys, queries, as parts of one tensor; decay, step and skip."""
    groups, heads, state_dim, head_dim = sizes
    generator = torch.Generator().manual_seed(sum(sizes) + tokens)
    widths = [heads * head_dim, groups * state_dim, groups * state_dim]
    parts = torch.randn(tokens, sum(widths), generator=generator).to(dtype).split(widths, 1)
    x, keys, queries = (
        part.unflatten(1, (count, -1))
        for part, count in zip(parts, (heads, groups, groups), strict=True)
    )
    decay = torch.rand(tokens, heads, generator=generator)
    step = 2 * torch.rand(tokens, heads, generator=generator)
    return [x, keys, queries, decay, step, torch.randn(heads, generator=generator)]
