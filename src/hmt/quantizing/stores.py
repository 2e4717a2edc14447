"""Blocks of a checkpoint by lease, inside a budget that is reserved while a store is open."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace

import torch
from torch import Tensor

from hmt.base.trace import Tracer
from hmt.contracts.blocks import TRUNK, BlockId
from hmt.contracts.encoding import Encoding, WeightTensor
from hmt.contracts.plan import Tier
from hmt.contracts.store import LeasedGroup, Priority, ResidentBlock
from hmt.engine import EngineConfig
from hmt.engine.loading.disk import transfer_queue
from hmt.kernels import ops
from hmt.memory import HostPool, Ledger
from hmt.quantizing.changes import Changes
from hmt.quantizing.observed import Observer
from hmt.quantizing.structure import ParamId
from hmt.weights import BlockLayout, WeightStore, row_span_bytes


def store_bytes(layouts: Mapping[BlockId, BlockLayout]) -> dict[str, int]:
    """What a store over `layouts` takes, by purpose.

    Of a layer's blocks the two largest, as some families lease two at a time; of tables some rows.
    """
    leased = (layout.slot_bytes for block, layout in layouts.items() if block.layer != TRUNK)
    sizes = sorted(leased, reverse=True)
    tables = [table for layout in layouts.values() for table in layout.tables.values()]
    return {
        "slots": sum(sizes[:2]),
        "staging": max(
            (one.staging_bytes for block, one in layouts.items() if block.layer != TRUNK), default=0
        ),
        "rows": 4 * max(map(row_span_bytes, tables), default=0),
        "resident": 0,
    }


@contextmanager
def open_store(
    layouts: Mapping[BlockId, BlockLayout],
    ledger: Ledger,
    room: Mapping[str, int] | None = None,
) -> Iterator[WeightStore]:
    """A store of which nothing stays for good.

    room   bytes by purpose; those of `store_bytes` when left out
    Raises BudgetError where the ledger has too little left.
    """
    with ExitStack() as stack:
        pools = {}
        sizes = {layout.slot_bytes for layout in layouts.values()}
        for purpose, nbytes in (room or store_bytes(layouts)).items():
            account = ledger.open(Tier.HOST, purpose, nbytes)
            stack.callback(account.close)
            pools[purpose] = HostPool(account, sizes if purpose == "slots" else ())
            stack.callback(pools[purpose].close)
        store = WeightStore(
            layouts,
            [],
            transfer_queue(EngineConfig.resolve(), Tracer()),  # which the store closes
            Tracer(),
            resident=pools["resident"],
            slots=pools["slots"],
            staging=pools["staging"],
            rows=pools["rows"],
        )
        stack.callback(store.close)
        yield store


def on_device(weight: WeightTensor, where: torch.device) -> WeightTensor:
    """A weight on the device `where`: a copy, unless it is there."""
    if weight.data.device == where:
        return weight
    parts = {name: getattr(weight, name) for name in ("scales", "zeros", "minima", "factor")}
    moved = {name: part.to(where) for name, part in parts.items() if part is not None}
    return replace(weight, data=weight.data.to(where), **moved)


class LayerWeights:
    """Implements Weights for one layer: an observer hears of leases, and rows come from elsewhere.

    Blocks are leased one at a time, and read when they are; they are on the device of `changes`.
    What of them is changed is f32.
    """

    def __init__(
        self,
        store: WeightStore,
        tables: WeightStore | None = None,
        observer: Observer | None = None,
        changes: Changes | None = None,
    ) -> None:
        """`tables` has rows that are looked up; None: `store` has them."""
        self._store = store
        self._observer = observer
        self._tables = store if tables is None else tables
        self._changes = Changes() if changes is None else changes

    def rows(self, block: BlockId, name: str, ids: Tensor) -> Tensor:
        """See Weights."""
        rows, place = self._tables.rows(block, name, ids.cpu()), ParamId(block, name)
        if place in self._changes:
            return self._changes.of(place, rows.float())
        return rows.to(self._changes.where)

    @contextmanager
    def lease(self, block: BlockId) -> Iterator[Mapping[str, WeightTensor]]:
        """See Weights."""
        with self._store.lease(block) as stored:
            params = {name: self._changed(ParamId(block, name), w) for name, w in stored.items()}
            with self._observing(block, params):
                yield params

    def _changed(self, place: ParamId, weight: WeightTensor) -> WeightTensor:
        weight = on_device(weight, self._changes.where)
        if place not in self._changes:
            return weight
        numbers = self._changes.of(place, ops.dequantize(weight, torch.float32))
        return WeightTensor(Encoding.F32, weight.shape, numbers)

    def _observing(
        self, block: BlockId, params: Mapping[str, WeightTensor]
    ) -> AbstractContextManager[None]:
        observer = self._observer
        return nullcontext() if observer is None else observer.leased(block, params)

    @contextmanager
    def lease_each(self, blocks: Sequence[BlockId]) -> Iterator[Iterator[LeasedGroup]]:
        """See Weights: groups of one block."""

        def groups() -> Iterator[LeasedGroup]:
            for number, block in enumerate(blocks):
                if number + 1 < len(blocks):
                    self._store.request(blocks[number + 1 : number + 2], Priority.PREFETCH)
                with self.lease(block) as params:
                    yield [(block, params)]

        yield groups()

    def resident(self, blocks: Sequence[BlockId]) -> Sequence[ResidentBlock] | None:
        """See Weights: none is."""
        return None

    def count(self, nbytes: int) -> None:
        """See Weights."""

    def request(self, blocks: Sequence[BlockId], priority: Priority) -> None:
        """See Weights: not passed on, as there is no room for more than is leased."""

    def moe_backend(self, layer: int) -> None:
        """See Weights: layers lease what they compute with."""

    def routed(self, layer: int, hidden: Tensor, experts: Tensor, scales: Tensor) -> None:
        """See Weights."""

    def request_rows(self, block: BlockId, name: str, ids: Tensor) -> None:
        """See Weights."""
