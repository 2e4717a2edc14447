"""Process groups of the ranks of one model: Gloo between CPUs, NCCL between GPUs."""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from threading import Thread
from typing import Any, Final

import torch

from hmt.base.errors import ConfigError, RankError

# A rank that waits longer than this for another one gives up.  Disks and prompts of ranks differ,
# and a rank that has ended closes its connections at once: only one that hangs comes to this.
_PATIENCE: Final = timedelta(minutes=10)
_PARTING_S: Final = 10.0
_UNRECEIVED: Final = 2  # tensors that a stage may be ahead of the next one, besides the last


class RankGroup:
    """Implements Collective.  Of each model its own, so that a process may have several.

    rank, ranks   its number, from 0, and how many there are
    """

    def __init__(self, rank: int, ranks: int, stages: int = 1) -> None:
        """Not connected: nothing can be added yet.  As many ranks are in each of `stages`."""
        self.rank, self.ranks = rank, ranks
        self.announce: Callable[[], None] | None = None
        self._width, self._stages = ranks // stages, stages
        # torch's stubs do not know what groups can do.
        self._sums: Any = None  # of the ranks of this stage
        self._pipeline: Any = None  # of the ranks that have the same part of each stage's layers
        self._sent: deque[tuple[Any, torch.Tensor]] = deque()
        self._broken = ""
        self._parting: Thread | None = None
        self._rehearses = self._on_gpu = False

    def connect(self, folder: Path, *, on_gpu: bool = False) -> None:
        """Wait for all ranks to connect.

        folder   that only these processes can read, the same for all
        on_gpu   each rank computes on another GPU, its current one: sums go through NCCL

        What stages send goes through host memory, with Gloo.  Gloo listens on the loopback
        interface alone.  Raises RankError, and ConfigError where torch was built without what it
        takes.
        """
        self._on_gpu = on_gpu
        stage, part = divmod(self.rank, self._width)
        if self._width > 1:
            file = folder / f"stage-{stage}"
            self._sums = self._open(file, part, self._width, on_gpu=on_gpu)
        if self._stages > 1:
            self._pipeline = self._open(folder / f"part-{part}", stage, self._stages, on_gpu=False)

    def _open(self, file: Path, rank: int, ranks: int, *, on_gpu: bool) -> Any:
        """A group of some ranks, which find each other by `file`."""
        import torch.distributed as dist  # half a second

        name = "nccl" if on_gpu else "gloo"
        available = dist.is_nccl_available() if on_gpu else dist.is_gloo_available()
        if not available:
            raise ConfigError(
                f"torch {torch.__version__} was built without {name}, which ranks meet through: "
                "leave tp, ep and pp out, or install another torch"
            )
        store = dist.FileStore(str(file), ranks)
        try:
            if on_gpu:
                options = dist.ProcessGroupNCCL.Options()
                options._timeout = _PATIENCE
                return dist.ProcessGroupNCCL(store, rank, ranks, options)
            own = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
            own._timeout = _PATIENCE
            own._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
            return dist.ProcessGroupGloo(store, rank, ranks, own)
        except RuntimeError as error:
            raise RankError(f"rank {self.rank} of {self.ranks} found no other: {error}") from error

    def add(self, partial: torch.Tensor) -> torch.Tensor:
        """Implements Collective.

        Two ranks let the library add, in `partial` itself: there is one sum of two numbers.  More
        gather what all have and add in the order of ranks, in f32: rings add parts of a tensor in
        an order that depends on its size, and so on how many tokens there are.  Captured on two
        H200, a sum of 8192 numbers took 8 us by NCCL's all-reduce, and 11 gathered.
        """
        if self._rehearses:
            return partial
        own = partial.contiguous()
        if self._width == 2:
            with self._talking(self._sums) as group:
                group.allreduce([own]).wait()
            return own
        gathered = own.new_empty(self._width * len(own), *own.shape[1:])
        with self._talking(self._sums) as group:
            group._allgather_base(gathered, own).wait()
        first, *others = gathered.chunk(self._width)
        total = first.float()
        for part in others:
            total = total + part
        return total.to(partial.dtype)

    def share(self, tensor: torch.Tensor) -> None:
        """Implements Collective."""
        with self._talking(self._sums) as group:
            group.broadcast(tensor, 0).wait()

    def send(self, tensor: torch.Tensor, stage: int) -> None:
        """Implements Collective.  A send is done only once the other rank wants it."""
        own = tensor.contiguous()
        with self._talking(self._pipeline) as group:
            self._sent.append((group.send([own], stage, 0), own))
            while len(self._sent) > _UNRECEIVED:
                self._sent.popleft()[0].wait()

    def receive(self, shape: Sequence[int], dtype: torch.dtype, stage: int) -> torch.Tensor:
        """Implements Collective."""
        tensor = torch.empty(*shape, dtype=dtype)
        with self._talking(self._pipeline) as group:
            group.recv([tensor], stage, 0).wait()
        return tensor

    @contextmanager
    def _talking(self, group: Any) -> Iterator[Any]:
        """In the body, `group`; what ends it there becomes RankError."""
        try:
            if group is None or self._broken:
                raise RankError(self._broken or "the ranks have not been connected")
            yield group
        except RuntimeError as error:
            self.abort(f"another process that computes this model has ended: {_first_line(error)}")
            raise RankError(self._broken) from error

    @contextmanager
    def rehearsal(self) -> Iterator[None]:
        """Implements Collective."""
        self._rehearses = True
        try:
            yield
        finally:
            self._rehearses = False

    def abort(self, why: str) -> None:
        """Let what waits for other ranks, and all that comes, raise RankError.  For any thread."""
        self._broken = self._broken or why
        sums, pipeline = self._sums, self._pipeline
        self._sums = self._pipeline = None
        if pipeline is not None:
            pipeline.abort()
        if sums is None:
            return
        if self._on_gpu:
            # It lets kernels end that wait for a rank, and then waits itself until no capture has
            # its sums any more: seen to last for ever where the caller held these.
            self._parting = Thread(target=sums.abort, name="ranks part", daemon=True)
            self._parting.start()
        else:
            sums.abort()

    def close(self, why: str) -> None:
        """`abort`, and wait for it, where what was captured has been let go."""
        self.abort(why)
        if self._parting is not None:
            self._parting.join(_PARTING_S)


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)
