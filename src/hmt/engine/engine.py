"""The engine: options, a device and a memory budget, and the models that are loaded with them."""

from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from hmt.base.errors import BudgetError
from hmt.base.units import format_bytes
from hmt.contracts.plan import Tier
from hmt.engine.api import LoadedModel
from hmt.engine.config import EngineConfig
from hmt.engine.loading.device import device_budgets, open_devices
from hmt.engine.loading.draft import prepare_both
from hmt.formats import located
from hmt.kernels.cpu.threads import set_threads
from hmt.memory import Ledger
from hmt.memory.device import Device
from hmt.memory.numa import Binding, bytes_by_node, choose, verify


class Engine:
    """Loads models and holds the options and the memory budget that they share.

    engine = hmt.Engine(quantization="w4a8", host_memory="64GiB")
    model = engine.load_model("path/to/checkpoint")
    print(model.infer(hmt.Request(input="Hello", max_new_tokens=64)).text)
    """

    def __init__(self, **options: Any) -> None:
        """Options are those of EngineConfig, sizes and paths as text.  Raises ConfigError.

        Binds the calling thread, and all that it starts later, to `numa` if asked to, and sets the
        threads of torch and of the compiled kernels.
        """
        self._all_ranks = EngineConfig.resolve(**options)
        self.config = self._all_ranks.of_rank(0)
        self._devices = open_devices(self.config)
        self._binding, self._elsewhere = Binding(), dict[int, int]()
        if self.config.numa is not None:
            self._elsewhere = bytes_by_node()
            address = self._devices[0].pci if self._devices else ""
            budget = self.config.host_memory_bytes
            self._binding = choose(self.config.numa, host_bytes=budget, device=address)
            self._binding.apply()
        set_threads(self.config.threads)
        there = device_budgets(self._devices, self.config) if self._devices else ()
        self._ledger = Ledger({Tier.HOST: self.config.host_memory_bytes, Tier.DEVICE: there})
        self._models: list[LoadedModel] = []

    def load_model(
        self,
        path: str | Path,
        progress: Callable[[int, int], None] | None = None,
        *,
        host_memory: int | None = None,
    ) -> LoadedModel:
        """Plan and load the checkpoint or pack in folder `path`, in what is left of the budget.

        `host_memory`: the most that it may take of it, in bytes, so that others have room.
        `progress(bytes done, bytes in all)` is called while resident weights are read, on another
        thread.  Raises CheckpointError, BudgetError, DiskReadError or NumericsError; nothing stays
        allocated then.
        """
        left = self._ledger.budget_bytes(Tier.HOST) - self._ledger.reserved_bytes(Tier.HOST)
        left = left if host_memory is None else min(left, host_memory)
        path, devices, room = located(path), self.devices, self.device_left()
        try:
            prepared, draft = prepare_both(path, self.config, left, devices, room)
        except BudgetError as error:
            taken = self._ledger.reserved_bytes(Tier.HOST)
            if not taken:
                raise
            raise BudgetError(
                f"{error}.  Other models of this engine hold {format_bytes(taken)}: close one, or "
                "give the engine more host_memory"
            ) from error
        config = self._all_ranks
        model = LoadedModel(prepared, config, self._ledger, progress, self._devices, draft)
        self._models = [other for other in self._models if not other.closed]
        self._models.append(model)
        return model

    @property
    def numa(self) -> str:
        """Where threads and memory are, as the kernel says; "" where nothing was to be bound.

        For the thread that made the engine.
        """
        return verify(self._binding, self._elsewhere) if self.config.numa is not None else ""

    @property
    def devices(self) -> tuple[Device, ...]:
        """Those that layers are spread over, in their order."""
        return self._devices

    @property
    def _device(self) -> Device | None:
        """The first of them; None without one."""
        return self._devices[0] if self._devices else None

    def device_left(self) -> tuple[int, ...]:
        """Of each device's budget, what no model has."""
        return self._ledger.left_bytes(Tier.DEVICE)

    def close(self) -> None:
        """Close all models."""
        while self._models:
            self._models.pop().close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
