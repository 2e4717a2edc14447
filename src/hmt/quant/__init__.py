"""Ways to store weights in fewer bits: schemes, packed parameters, rounding."""

from hmt.kernels.panel_packing import pack_codes, pack_pairs
from hmt.quant.packed import (
    Format,
    component_bytes,
    empty_weight,
    pack_groups,
    row_slice,
    view_weight,
)
from hmt.quant.rtn import quantize
from hmt.quant.schemes import Scheme, parse_scheme
from hmt.quant.sensitive import Sensitive, read_sensitive
