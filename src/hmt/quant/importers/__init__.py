"""Forms in which others publish weights: what they become in memory, and how they are unpacked."""

from hmt.quant.importers.dequantized import DequantizedImporter
from hmt.quant.importers.interface import InPlaceImporter, WeightImporter
from hmt.quant.importers.joined import JoinedPieces, Piece
from hmt.quant.importers.registry import open_importer
