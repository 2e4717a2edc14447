"""Ways to keep pages of keys and values in fewer bytes."""

from hmt.kvcache.codecs.calibration import (
    Calibration,
    positions_of,
    read_ranges,
    read_scales,
    weights_of,
)
from hmt.kvcache.codecs.integers import (
    Int4,
    Int8PerChannel,
    Int8PerToken,
    Int8Static,
    static_scales,
)
from hmt.kvcache.codecs.registry import (
    CODECS,
    STATIC,
    CodecName,
    DiskCodecName,
    LayerCodec,
    layer_codecs,
)
from hmt.kvcache.codecs.residual import Residual
from hmt.kvcache.codecs.sparse import Sparse24, Sparse24Int8
