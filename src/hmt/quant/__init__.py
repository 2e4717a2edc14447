"""Ways to store weights in fewer bits: schemes, packed parameters, rounding."""

from hmt.quant.packed import Format, component_bytes, empty_weight, view_weight
from hmt.quant.rtn import quantize
from hmt.quant.schemes import GROUP_SIZES, Scheme, parse_scheme

__all__ = [
    "GROUP_SIZES",
    "Format",
    "Scheme",
    "component_bytes",
    "empty_weight",
    "parse_scheme",
    "quantize",
    "view_weight",
]
