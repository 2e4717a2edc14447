"""Changes of what sequences hold in a KV cache, as data: logged where they are made, and repeated.

The scheduler makes them; a worker of another process repeats them in its own cache before a step.
"""

from dataclasses import replace

from hmt.contracts.step import KVOperation, SchedulerOutput
from hmt.kvcache import KVAllocator


class KVOperationLog:
    """Changes what sequences hold as `allocator` does, and notes each change.

    allocator   what is asked of it changes nothing
    """

    def __init__(self, allocator: KVAllocator) -> None:
        self.allocator = allocator
        self._log: list[KVOperation] = []

    def take(self) -> tuple[KVOperation, ...]:
        """What was done since the last call."""
        taken, self._log = tuple(self._log), []
        return taken

    def put_back(self, operations: tuple[KVOperation, ...]) -> None:
        """Let these come first in the next `take`: the step that had them is not run."""
        self._log[:0] = operations

    def open(self, tokens: int, /) -> int:
        """Reserve positions for a new sequence."""
        return self._do("open", tokens)

    def fork(self, sequence: int, held: int, tokens: int, /) -> int:
        """Share the beginning of a sequence with a new one."""
        return self._do("fork", sequence, held, tokens)

    def grow(self, sequence: int, tokens: int, /) -> None:
        """Reserve more positions for a sequence."""
        self._do("grow", sequence, tokens)

    def shrink(self, sequence: int, tokens: int, /) -> None:
        """Take back what a sequence has reserved and not begun."""
        self._do("shrink", sequence, tokens)

    def rewind(self, sequence: int, tokens: int, /) -> None:
        """Take back what a sequence holds behind its first positions."""
        self._do("rewind", sequence, tokens)

    def rollback(self, sequence: int, tokens: int, /) -> None:
        """Take back draft tokens of the last step."""
        self._do("rollback", sequence, tokens)

    def park(self, sequence: int, /) -> None:
        """Leave a sequence out of steps."""
        self._do("park", sequence)

    def resume(self, sequence: int, tokens: int, /) -> None:
        """Let a parked sequence take part again."""
        self._do("resume", sequence, tokens)

    def close(self, sequence: int, /) -> None:
        """Free what a sequence has."""
        self._do("close", sequence)

    def _do(self, name: str, *arguments: int) -> int:
        """Do it; the handle of the sequence that it opened, if any."""
        opened: int = getattr(self.allocator, name)(*arguments) or 0
        self._log.append(KVOperation(name, arguments, opened))
        return opened


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
