"""Packs: a model's blocks on disk as they lie in memory, converted, with checksums."""

from hmt.weights.pack.manifest import (
    MANIFEST,
    CopiedFile,
    Manifest,
    PackedBlock,
    encode,
    read_manifest,
)
from hmt.weights.pack.partial_pack import looks_like_pack
from hmt.weights.pack.pipeline import Buffers
from hmt.weights.pack.reader import Pack, open_pack
from hmt.weights.pack.source import Subject
from hmt.weights.pack.tables import lay_out_pack
from hmt.weights.pack.verify import Damage, verify_pack
from hmt.weights.pack.writer import PackWriter
