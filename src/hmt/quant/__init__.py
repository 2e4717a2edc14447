"""Ways to store weights in fewer bits: schemes, packed parameters, rounding."""

from hmt.quant.packed import (
    Component,
    Format,
    component_bytes,
    empty_weight,
    pack_codes,
    pack_groups,
    pack_pairs,
    row_slice,
    view_weight,
)
from hmt.quant.rtn import quantize
from hmt.quant.schemes import GROUP_SIZES, Scheme, parse_scheme
from hmt.quant.sensitive import Sensitive, read_sensitive

__all__ = [
    "GROUP_SIZES",
    "Component",
    "Format",
    "Scheme",
    "Sensitive",
    "component_bytes",
    "empty_weight",
    "pack_codes",
    "pack_groups",
    "pack_pairs",
    "parse_scheme",
    "quantize",
    "read_sensitive",
    "row_slice",
    "view_weight",
]
