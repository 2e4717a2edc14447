"""Random adapters of rows, and what they add by float64."""

from collections.abc import Sequence

import torch
from torch import Tensor

from hmt.contracts.adapter import AdaptedWeight, AdapterRows, LowRank
from hmt.contracts.encoding import Encoding, WeightTensor

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
RANKS = {1: 3, 2: 256, 3: 16, 4: 1}


def adapted_weight(
    numbers: Sequence[int], outputs: int, inputs: int, dtypes: Sequence[torch.dtype] = DTYPES
) -> AdaptedWeight:
    """With adapters 1, 2, .. of RANKS for rows of these numbers; 5 has no part here."""
    generator = torch.Generator().manual_seed(outputs)
    low_rank = {}
    for number, rank in RANKS.items():
        dtype = dtypes[number % len(dtypes)]
        down = torch.randn(rank, inputs, generator=generator).to(dtype)
        up = torch.randn(rank, outputs, generator=generator).to(dtype)
        low_rank[number] = LowRank(down, up, 0.5 / number)
    base = WeightTensor(Encoding.F32, (outputs, inputs), torch.zeros(outputs, inputs))
    return AdaptedWeight.of(base, AdapterRows(numbers), low_rank, lambda: None)


def exact(out: Tensor, x: Tensor, w: AdaptedWeight) -> Tensor:
    """`add_low_rank` in float64."""
    found = out.double()
    for row, number in enumerate(w.rows.numbers):
        if (part := w.low_rank.get(number)) is not None:
            low = part.down.double() @ x[row].double().to(part.down.device)
            found[row] += (part.scale * (low @ part.up.double())).to(out.device)
    return found
