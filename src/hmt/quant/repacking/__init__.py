"""Forms in which others publish weights: what they become in memory, and how they are unpacked."""

from hmt.quant.repacking.columns import ColumnSlice, column_unit
from hmt.quant.repacking.dequantized import DequantizedImporter
from hmt.quant.repacking.gguf import gguf_format
from hmt.quant.repacking.interface import InPlaceImporter, WeightImporter
from hmt.quant.repacking.joined import JoinedPieces, Piece
from hmt.quant.repacking.registry import open_importer
