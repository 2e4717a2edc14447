"""Changes of what sequences hold in a KV cache, as data: logged where they are made, and repeated.

The scheduler makes them; a worker of another process repeats them in its own cache before a step.
"""

from dataclasses import replace

from hmt.contracts.step import KVOperation, SchedulerOutput
from hmt.kvcache import KVAllocator


class KVOperationLog:
    """What the scheduler asks of a KVAllocator; notes what changes it."""

    def __init__(self, kv: KVAllocator) -> None:
        self._kv = kv
        self._log: list[KVOperation] = []
        self.can_open = kv.can_open
        self.can_fork = kv.can_fork
        self.can_grow = kv.can_grow
        self.can_resume = kv.can_resume

    def take(self) -> tuple[KVOperation, ...]:
        """What was done since the last call."""
        taken, self._log = tuple(self._log), []
        return taken

    @property
    def capacity_tokens(self) -> int:
        """Positions in all."""
        return self._kv.capacity_tokens

    @property
    def free_tokens(self) -> int:
        """Positions that no sequence has reserved."""
        return self._kv.free_tokens

    def can_rewind(self) -> bool:
        """Whether `rewind` is possible."""
        return self._kv.can_rewind()

    def can_park(self) -> bool:
        """Whether others can have the place of a parked sequence."""
        return self._kv.can_park()

    def open(self, tokens: int, /) -> int:
        """Reserve positions for a new sequence."""
        opened = self._kv.open(tokens)
        self._log.append(KVOperation("open", (tokens,), opened))
        return opened

    def fork(self, sequence: int, held: int, tokens: int, /) -> int:
        """Share the beginning of a sequence with a new one."""
        opened = self._kv.fork(sequence, held, tokens)
        self._log.append(KVOperation("fork", (sequence, held, tokens), opened))
        return opened

    def grow(self, sequence: int, tokens: int, /) -> None:
        """Reserve more positions for a sequence."""
        self._kv.grow(sequence, tokens)
        self._log.append(KVOperation("grow", (sequence, tokens)))

    def shrink(self, sequence: int, tokens: int, /) -> None:
        """Take back what a sequence has reserved and not begun."""
        self._kv.shrink(sequence, tokens)
        self._log.append(KVOperation("shrink", (sequence, tokens)))

    def rewind(self, sequence: int, tokens: int, /) -> None:
        """Take back what a sequence holds behind its first positions."""
        self._kv.rewind(sequence, tokens)
        self._log.append(KVOperation("rewind", (sequence, tokens)))

    def park(self, sequence: int, /) -> None:
        """Leave a sequence out of steps."""
        self._kv.park(sequence)
        self._log.append(KVOperation("park", (sequence,)))

    def resume(self, sequence: int, tokens: int, /) -> None:
        """Let a parked sequence take part again."""
        self._kv.resume(sequence, tokens)
        self._log.append(KVOperation("resume", (sequence, tokens)))

    def close(self, sequence: int, /) -> None:
        """Free what a sequence has."""
        self._kv.close(sequence)
        self._log.append(KVOperation("close", (sequence,)))


def repeat_operations(
    output: SchedulerOutput, kv: KVAllocator, handles: dict[int, int]
) -> SchedulerOutput:
    """Do in `kv` what a step's scheduler did in a cache of the same size; the step as of `kv`.

    handles   changed: of each sequence that is open, its handle there, and in `kv`
    """
    for name, arguments, opened in output.kv_operations:
        if name == "open":
            handles[opened] = kv.open(*arguments)
            continue
        sequence, *positions = arguments
        result = getattr(kv, name)(handles[sequence], *positions)
        if name == "fork":
            handles[opened] = result
        elif name == "close":
            del handles[sequence]
    segments = (s._replace(sequence=handles[s.sequence]) for s in output.segments)
    return replace(output, segments=tuple(segments))
