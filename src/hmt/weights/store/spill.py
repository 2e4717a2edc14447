"""The spill file: blocks that were converted on load, kept on the disk in converted form.

Without it, a block that was dropped from its slot is read as published and converted again.  The
file lives as long as the engine; a durable one is a pack of its own.
"""

import os
import tempfile
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from hmt.base.errors import MachineError, os_reason
from hmt.base.log import warn_once
from hmt.contracts.blocks import BlockId
from hmt.contracts.checkpoint import FileRange
from hmt.memory import HostBuffer
from hmt.weights.layout import AlignedRead, BlockLayout


class SpillFile:
    """One extent per block, written once.  Thread-safe."""

    def __init__(self, folder: Path, layouts: Iterable[BlockLayout]) -> None:
        """A temporary file in `folder`.  Raises MachineError when it cannot be made there."""
        self._offsets: dict[BlockId, int] = {}
        end = 0
        for layout in layouts:
            if layout.staged:
                self._offsets[layout.id] = end
                end += layout.slot_bytes
        try:
            self._file, name = tempfile.mkstemp(prefix="hmt-spill-", dir=folder)
        except OSError as error:
            raise MachineError(
                f"cannot write in the disk path {folder}: {os_reason(error)}; "
                "choose a folder that exists and is yours, on the fastest disk"
            ) from error
        # Without a name the file vanishes with the process, however that ends.
        os.unlink(name)
        os.ftruncate(self._file, end)  # readers may map the file before all of it is written
        self._path = Path(f"/proc/{os.getpid()}/fd/{self._file}")
        self._folder = folder
        self._full = False

    def keep(self, layout: BlockLayout, slot: HostBuffer) -> BlockLayout:
        """Write a block that has just been converted; returns the layout to load it with next time.

        When the disk is full, says so once and returns `layout` as it is.
        """
        offset = self._offsets.get(layout.id)
        if offset is None or not layout.staged or self._full:
            return layout
        try:
            written = 0
            while written < layout.slot_bytes:
                rest = slot.view[written : layout.slot_bytes]
                written += os.pwrite(self._file, rest, offset + written)
        except OSError as error:
            self._full = True
            warn_once(
                f"spill {self._folder}",
                f"cannot keep converted weights in {self._folder} ({os_reason(error)}); "
                "they are converted again whenever they are read",
            )
            return layout
        extent = FileRange(self._path, offset, layout.slot_bytes)
        whole = AlignedRead(extent, 0, offset + layout.slot_bytes, layout.parameter_bytes)
        return replace(layout, reads=(whole,), staged=())

    def close(self) -> None:
        """Delete the file."""
        os.close(self._file)
