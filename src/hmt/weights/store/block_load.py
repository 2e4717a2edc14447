"""Loading one block: its reads, the conversions that follow them, and the check of its numbers."""

import math
import threading
from collections.abc import Callable

import torch

from hmt.base.errors import (
    Cancelled,
    CheckpointError,
    DamagedPackError,
    HMTError,
    NumericsError,
)
from hmt.base.trace import Tracer
from hmt.contracts.encoding import WeightTensor
from hmt.contracts.store import Priority
from hmt.memory import DiskRead, HostBuffer, ReadGroup, ReadQueue, trim_heap
from hmt.quant import quantize
from hmt.weights.checksum import as_text, checksum
from hmt.weights.layout import AlignedRead, BlockLayout, StagedParam, view_placed

Finished = Callable[[HMTError | None], None]

_CHECKED_AT_ONCE = 1 << 18  # numbers; their f32 copy stays in the cache


class BlockLoad:
    """One block on its way from disk into `slot`.

    Stages follow each other: first everything that is read in place, then one staged parameter
    after the other.  Each stage ends on the disk worker that read its last chunk, which converts
    and submits the next one, so no thread ever waits here.
    """

    def __init__(
        self,
        layout: BlockLayout,
        slot: HostBuffer,
        staging: HostBuffer | None,
        queue: ReadQueue,
        tracer: Tracer,
        *,
        check: bool,
        finished: Finished,
    ) -> None:
        """`slot` and `staging` have at least the layout's bytes; with `check` numbers are checked.

        See `check_finite` and, for a pack, `check_seal`.
        """
        self._layout = layout
        self._slot = slot
        self._staging = staging
        self._queue = queue
        self._tracer = tracer
        self._check = check
        self._finished = finished
        self._stages: list[StagedParam | None] = [None] if layout.reads else []
        self._stages += layout.staged
        self._ticket: ReadGroup | None = None
        self._lock = threading.Lock()
        self._priority = Priority.SPECULATIVE
        self._cancelled = False

    def start(self, priority: Priority) -> None:
        """Submit the first reads.  `finished` is called once, on a disk worker."""
        self._priority = priority
        self._submit_next()

    def promote(self, priority: Priority) -> None:
        """Make what is left at least as urgent as `priority`."""
        with self._lock:
            if priority >= self._priority:
                return
            self._priority = priority
            ticket = self._ticket
        if ticket is not None:
            self._queue.promote(ticket, priority)

    def cancel_speculative(self) -> None:
        """Drop what has not begun, if nobody has asked for more than a guess.

        `finished` hears of Cancelled: now, on this thread, or when the reads that run have ended.
        """
        with self._lock:
            if self._priority is not Priority.SPECULATIVE:
                return
            self._cancelled = True
            ticket = self._ticket
        if ticket is not None:
            self._queue.cancel(ticket)

    def _submit_next(self) -> None:
        stage = self._stages.pop(0)
        if stage is None:
            reads, buffer = self._layout.reads, self._slot
        else:
            assert self._staging is not None
            reads, buffer = stage.reads, self._staging
        with self._lock:
            priority = self._priority
        ticket = self._queue.submit(
            [_disk_read(read, buffer) for read in reads],
            priority,
            lambda error: self._stage_ended(stage, error),
            # What follows the reads of a block that is known and lies in place is next to nothing.
            light=stage is None and not self._stages and not self._check,
        )
        with self._lock:
            self._ticket = ticket
            # Perhaps while the ticket was on its way.
            promoted, cancelled = self._priority, self._cancelled
        self._queue.promote(ticket, promoted)
        if cancelled:
            self._queue.cancel(ticket)

    def _stage_ended(self, stage: StagedParam | None, error: HMTError | None) -> None:
        try:
            if error is None and stage is not None:
                self._convert(stage)
                while self._stages and (same := self._stages[0]) is not None and not same.reads:
                    self._convert(same)
                    del self._stages[0]
            if error is None and self._stages:
                if self._cancelled:
                    raise Cancelled(f"the guess that asked for {self._layout.id} is out of date")
                self._submit_next()
                return
            if error is None and self._check:
                self._check_numbers()
        except HMTError as caught:
            error = caught
        except Exception as caught:  # the waiting lease must hear of it, whatever it is
            error = HMTError(f"loading {self._layout.id} failed: {caught!r}")
        self._finished(error)

    def _check_numbers(self) -> None:
        """A pack's block by its checksum, for it was seen to be finite when it was packed."""
        if self._layout.seal is None:
            check_finite(self._layout, self._slot.tensor)
            return
        with self._tracer.span("verify", "host", self._layout.slot_bytes, self._layout.id):
            check_seal(self._layout, self._slot.view)

    def _convert(self, stage: StagedParam) -> None:
        assert self._staging is not None
        param, staging = stage.placed.param, self._staging.tensor
        target = view_placed(stage.placed, self._slot.tensor, stage.rows)
        source = target if stage.source is None else view_placed(stage.source, staging)
        try:
            if param.form is not None:
                with self._tracer.span("unpack", "host", source.nbytes, self._layout.id):
                    _unpack(stage, staging, source)
            if stage.source is None:
                return
            if stage.source.format == stage.placed.format:
                target.data.copy_(source.data)
                if target.scales is not None and source.scales is not None:
                    target.scales.copy_(source.scales)
                return
            with self._tracer.span("convert", "host", target.nbytes, self._layout.id):
                quantize(source, target)
            # The dozen copies of a piece lie in this thread's arena: a process that converted 256
            # experts was 110 MiB larger with what was freed in them.
            trim_heap()
        except (CheckpointError, NumericsError) as error:
            raise type(error)(f"{param.source} of {self._layout.id}: {error}") from error


def _unpack(stage: StagedParam, staging: torch.Tensor, target: WeightTensor) -> None:
    """Bring the bytes in `staging` into the format of `target`."""
    param = stage.placed.param
    assert param.form is not None
    parts = {
        part.name: staging[at : at + nbytes]
        for part, (at, nbytes) in zip(param.parts, stage.parts, strict=True)
    }
    first = 0 if stage.rows is None else stage.rows[0]
    param.form.unpack(parts, target, param.first + first)


def check_seal(layout: BlockLayout, slot: memoryview) -> None:
    """Raise DamagedPackError unless a pack's block in `slot` is what was written."""
    found = checksum(slot[: layout.slot_bytes])
    if layout.seal is not None and found != layout.seal:
        file = layout.reads[0].file
        raise DamagedPackError(
            f"{file.path}: {layout.id}, {file.nbytes} bytes at offset {file.offset}, is not what "
            f"was written (checksum {as_text(found)} instead of {as_text(layout.seal)}): "
            "`hmt verify` lists all damage; convert the checkpoint again"
        )


def check_finite(layout: BlockLayout, slot: torch.Tensor) -> None:
    """Raise NumericsError naming the first parameter in `slot` (uint8) that is not all finite."""
    for placed in layout.placed:
        weight = view_placed(placed, slot)
        numbers = (weight.data, weight.scales, weight.minima, weight.factor)
        if not all(is_finite(part) for part in numbers if part is not None):
            raise NumericsError(
                f"{placed.param.source} of {layout.id} holds NaN or infinite numbers; the "
                f"checkpoint in {placed.param.data.path.parent} is damaged: download it again"
            )


def is_finite(part: torch.Tensor) -> bool:
    """Whether all numbers of `part` are finite; True for codes."""
    if part.dtype == torch.float8_e4m3fn:
        # It has no infinity; its NaNs are 0x7f and 0xff.
        return not bool((part.view(torch.uint8) & 0x7F == 0x7F).any())
    if not part.is_floating_point():
        return True
    # A sum is finite unless some number is not, or it overflows.  In pieces, because torch makes an
    # f32 copy of what it sums, and eight disk workers do this at once.
    return all(
        math.isfinite(piece.sum(dtype=torch.float32)) or bool(torch.isfinite(piece).all())
        for piece in torch.split(part.flatten(), _CHECKED_AT_ONCE)
    )


def _disk_read(read: AlignedRead, buffer: HostBuffer) -> DiskRead:
    return DiskRead(
        read.file.path,
        read.file.offset,
        buffer.view[read.at : read.at + read.file.nbytes],
        read.useful_end,
        read.useful_bytes,
    )
