"""Methods by the names that users give."""

import torch
from torch import Tensor

from hmt.base.errors import ConfigError
from hmt.quant.fp4 import nvfp4_factor, round_mxfp4, round_nvfp4
from hmt.quant.methods.interface import Method, Needs, QuantizedWeight, Statistics, Target


class _Nearest:
    """Rounding to the nearest code: integers with the scale of the largest number of a group."""

    needs = Needs.NOTHING

    def quantize(self, weight: Tensor, inputs: Statistics, target: Target) -> QuantizedWeight:
        """See Method."""
        groups = weight.view(len(weight), -1, target.group_size or weight.shape[1])
        if target.kind == "int":
            rounding = _symmetric if target.symmetric else _asymmetric
            codes, scales, zeros = rounding(groups, target.bits)
            return QuantizedWeight(target, codes.view(weight.shape), scales, zeros)
        factor = nvfp4_factor(weight.abs().amax()) if target.kind == "nvfp4" else None
        rows = groups.flatten(0, 1)
        found, scales = round_mxfp4(rows) if factor is None else round_nvfp4(rows, factor)
        codes = found.to(torch.int8).view(weight.shape)
        scales = scales.view(groups.shape[:2])
        whole = None if factor is None else factor[0]
        return QuantizedWeight(target, codes, scales, global_scale=whole)


def _symmetric(groups: Tensor, bits: int) -> tuple[Tensor, Tensor, None]:
    """Codes, and scales [outputs, groups], which bf16 has."""
    most = (1 << bits - 1) - 1
    scales = (groups.abs().amax(-1) / most).bfloat16().float()
    codes = torch.round(groups / scales.masked_fill(scales == 0, 1)[..., None])
    return codes.clamp_(-most - 1, most).to(torch.int8), scales, None


def _asymmetric(groups: Tensor, bits: int) -> tuple[Tensor, Tensor, Tensor]:
    """The same with zero points, for a range that has 0 in it."""
    half = 1 << bits - 1
    low, high = groups.amin(-1).clamp_max(0), groups.amax(-1).clamp_min(0)
    scales = ((high - low) / (2 * half - 1)).bfloat16().float()
    divisors = scales.masked_fill(scales == 0, 1)
    zeros = (-half - torch.round(low / divisors)).clamp_(-half, half - 1)
    codes = torch.round(groups / divisors[..., None]) + zeros[..., None]
    return codes.clamp_(-half, half - 1).to(torch.int8), scales, zeros.to(torch.int8)


def open_method(name: str) -> Method:
    """The method called `name`.  Raises ConfigError."""
    if name != "rtn":
        raise ConfigError(f"the method {name!r} is unknown; choose rtn")
    return _Nearest()
