"""Low-rank adapters of a model: those that are loaded with it, and those that come later."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from hmt.base.errors import AdapterError
from hmt.contracts.model import Model
from hmt.contracts.plan import Tier
from hmt.engine.config import EngineConfig
from hmt.engine.loading.device import OnDevice
from hmt.engine.loading.source import Source
from hmt.formats.adapters import open_adapter
from hmt.memory import Account, Ledger
from hmt.weights.adapters import AdapterHold, AdapterStore, BoundAdapter, bind_adapter

NamedAdapters = Mapping[str, BoundAdapter]


class Adapters:
    """What requests of a loaded model may name.  For any thread.

    store     those that are known, and which of them are in memory
    default   name of what requests are computed with that name none; "": they have none
    """

    def __init__(self, store: AdapterStore, source: Source, model: Model) -> None:
        self.store = store
        self.default = ""
        self._source, self._model = source, model

    def load(self, name: str, path: Path) -> None:
        """See LoadedModel.load_adapter."""
        self.store.add(name, adapter_in(path, self._source, self._model))

    def unload(self, name: str) -> None:
        """See LoadedModel.unload_adapter."""
        self.store.remove(name)
        if self.default == name:
            self.default = ""

    def use(self, name: str) -> None:
        """See LoadedModel.use_adapter."""
        if name:
            self.store.describe(name)
        self.default = name

    def hold(self, name: str) -> AdapterHold | None:
        """Keep the adapter `name`, or the default, in memory; None: none is to be used.

        Raises as `AdapterStore.hold`.
        """
        name = name or self.default
        return self.store.hold(name) if name else None


def adapter_in(path: Path, source: Source, model: Model) -> BoundAdapter:
    """The adapter in `path`, for a model.  Raises what `open_adapter` and `bind_adapter` raise."""
    if source.config.get("linear_value_heads_tiled"):
        raise AdapterError(
            f"{source.path} has the heads of its delta nets in llama.cpp's order, which adapters "
            "are not read in: load the published checkpoint instead of the GGUF file"
        )
    return bind_adapter(model.spec, open_adapter(path, source.config))


def named_adapters(config: EngineConfig, source: Source, model: Model) -> NamedAdapters:
    """Those that options name.  Raises as `adapter_in`."""
    return {name: adapter_in(path, source, model) for name, path in config.adapters}


def adapter_bytes(config: EngineConfig, named: NamedAdapters) -> int:
    """Memory that adapters may take together."""
    if config.adapter_memory_bytes is not None:
        return config.adapter_memory_bytes
    return sum(bound.nbytes for bound in named.values())


def open_adapters(
    named: NamedAdapters,
    source: Source,
    model: Model,
    accounts: Mapping[str, Account],
    ledger: Ledger,
    on_devices: Sequence[OnDevice],
) -> Adapters:
    """The adapters of a model, in what the plan has reserved for them.  Raises BudgetError."""
    account = accounts.get("adapters") or ledger.open(Tier.HOST, "adapters", 0)
    everywhere = (one for there in on_devices for one in there.accounts)
    store = AdapterStore(account, [one for one in everywhere if one.purpose == "adapters"])
    for name, bound in named.items():
        store.add(name, bound)
    return Adapters(store, source, model)
