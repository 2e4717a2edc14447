"""Methods by the names that users give."""

import torch
from torch import Tensor

from hmt.base.errors import ConfigError
from hmt.quant.methods.interface import Method, Needs, QuantizedWeight, Statistics, Target


class _Nearest:
    """Rounding to the nearest code, with the scale of the largest number."""

    needs = Needs.NOTHING

    def quantize(self, weight: Tensor, inputs: Statistics, target: Target) -> QuantizedWeight:
        """See Method."""
        most = (1 << target.bits - 1) - 1
        groups = weight.view(len(weight), -1, target.group_size or weight.shape[1])
        scales = groups.abs().amax(-1) / most
        divisors = scales.masked_fill(scales == 0, 1)[..., None]
        codes = (groups / divisors).round_().clamp_(-most - 1, most)
        return QuantizedWeight(target, codes.to(torch.int8).view(weight.shape), scales)


def open_method(name: str) -> Method:
    """The method called `name`.  Raises ConfigError."""
    if name != "rtn":
        raise ConfigError(f"the method {name!r} is unknown; choose rtn")
    return _Nearest()
