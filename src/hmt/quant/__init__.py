"""Ways to store weights in fewer bits: schemes, packed parameters, rounding."""

from hmt.quant.packed import (
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
from hmt.quant.schemes import Scheme, parse_scheme
from hmt.quant.sensitive import Sensitive, read_sensitive
