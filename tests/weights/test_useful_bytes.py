"""What the disk is said to have read usefully: the parameters, and nothing else."""

from pathlib import Path

import pytest
from doubles import block_specs, open_store, write_checkpoint, write_pack

from hmt.contracts.blocks import BlockKind
from hmt.contracts.store import Presence

BLOCKS = [block.id for block in block_specs() if block.id.kind is not BlockKind.EMBEDDING]


@pytest.mark.parametrize("form", ["checkpoint", "pack", "spill"])
def test_useful_bytes_are_those_of_the_parameters(tmp_path: Path, form: str) -> None:
    write_checkpoint(tmp_path)
    folder = tmp_path
    if form == "pack":
        folder = tmp_path / "pack"
        write_pack(tmp_path, folder)
    scheme = "w8a8" if form == "spill" else "none"
    bench = open_store(folder, slots_bytes=1 << 16, spill=form == "spill", scheme=scheme)
    for _ in range(2):  # the second time from the spill file
        before, wanted = bench.store.disk_counters(), 0
        for block in BLOCKS:
            if bench.store.presence(block) is not Presence.HIT:
                wanted += bench.layouts[block].parameter_bytes
            with bench.store.lease(block):
                pass
        after = bench.store.disk_counters()
        useful = after.useful_bytes - before.useful_bytes
        read = after.read_bytes - before.read_bytes
    assert useful == wanted > 0
    # Small blocks: each ends, and a checkpoint's also begins, somewhere in a page.
    assert useful < read <= useful + sum(2 * 4096 for _ in BLOCKS) + 64 * 1024
    bench.close()
