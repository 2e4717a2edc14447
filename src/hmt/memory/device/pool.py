"""A device's memory for one purpose: one arena, cut once."""

from dataclasses import dataclass, field

import torch

from hmt.base.errors import BudgetError
from hmt.base.units import format_bytes, round_up
from hmt.memory.device.interface import Device, Event
from hmt.memory.ledger import Account

ALIGNMENT = 256


@dataclass(eq=False, slots=True)
class DeviceBuffer:
    """Bytes of a pool: uint8 [nbytes], at an address that is a multiple of 256.

    last_use   a place on the compute queue after which it may be written again; None: at once
    """

    tensor: torch.Tensor
    nbytes: int
    last_use: Event | None = field(default=None)


class DevicePool:
    """Buffers of one arena.  Not thread-safe.

    What is freed waits for the next request of its size; there is no other use for it, for a plan
    says beforehand how many of each size there are.
    """

    def __init__(self, device: Device, account: Account) -> None:
        """The arena is as large as the account's limit.  Raises BudgetError where it is not there.

        `close` gives it back.
        """
        self.account = account
        self._free: dict[int, list[DeviceBuffer]] = {}
        self._at = 0
        self._memory: torch.Tensor | None = None
        if account.limit_bytes:
            self._memory = device.allocate(account.limit_bytes)
            account.charge(account.limit_bytes)

    def try_allocate(self, nbytes: int) -> DeviceBuffer | None:
        """A buffer of `nbytes`; None when neither the arena nor a freed one has it."""
        waiting = self._free.get(nbytes)
        if waiting:
            return waiting.pop()
        end = self._at + round_up(nbytes, ALIGNMENT)
        if end > self.account.limit_bytes or self._memory is None:
            return None
        buffer = DeviceBuffer(self._memory[self._at : self._at + nbytes], nbytes)
        self._at = end
        return buffer

    def allocate(self, nbytes: int) -> DeviceBuffer:
        """Like `try_allocate`, but raises BudgetError."""
        buffer = self.try_allocate(nbytes)
        if buffer is None:
            raise BudgetError(
                f"{self.account.purpose}: {format_bytes(nbytes)} do not fit in what is left of "
                f"{format_bytes(self.account.limit_bytes)} of GPU memory"
            )
        return buffer

    def free(self, buffer: DeviceBuffer) -> None:
        """Take back a buffer of this pool."""
        self._free.setdefault(buffer.nbytes, []).append(buffer)

    def close(self) -> None:
        """Give the arena back.  No buffer may be in use."""
        if self._memory is not None:
            self._memory = None
            self._free.clear()
            self.account.release(self.account.limit_bytes)
