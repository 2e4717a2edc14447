"""Tiled packs: as many layers as asked for, each where the one that it repeats lies."""

from pathlib import Path

import torch

import hmt
from hmt.bench.random_model import Shape
from hmt.bench.tiled_pack import write_tiled_pack
from hmt.engine import EngineConfig
from hmt.engine.packs import verify


def test_a_tiled_pack_is_a_model_of_all_its_layers(tmp_path: Path) -> None:
    shape = Shape(7, 64, 96, 4, 2, vocab_size=512)
    write_tiled_pack(tmp_path, shape, "w4a8:32", written_layers=2)
    found = []
    for memory in ("64MiB", "1MiB"):
        with hmt.Engine(host_memory=memory, context=64, prefill_chunk=16) as engine:
            model = engine.load_model(tmp_path / "pack")
            assert model.prepared.model.spec.layers == 7
            reads = {b: layout.reads for b, layout in model.prepared.layouts.items()}
            for block, own in reads.items():
                if block.layer >= 2:
                    assert own == reads[block._replace(layer=block.layer % 2)]
            found.append(model.logits(list(range(20)), range(20)))
    assert torch.equal(*found) and found[0].isfinite().all()
    assert not verify(tmp_path / "pack", EngineConfig.resolve()).damages
