"""The store of a model's blocks in higher precision."""

from contextlib import ExitStack

from hmt.base.trace import Tracer
from hmt.contracts.plan import Tier
from hmt.engine.config import EngineConfig
from hmt.engine.loading.copies import Copies
from hmt.engine.loading.disk import transfer_queue
from hmt.memory import Account, HostPool, Ledger
from hmt.weights import WeightStore


def open_copies(
    copies: Copies, config: EngineConfig, ledger: Ledger, tracer: Tracer, stack: ExitStack
) -> tuple[WeightStore, list[Account]]:
    """A store that reads them, until `stack` ends, and its memory.  Raises BudgetError."""
    pools, accounts = {}, []
    sizes = {layout.slot_bytes for layout in copies.layouts.values()}
    for purpose, nbytes in copies.sizes.items():
        account = ledger.open(Tier.HOST, f"fallback {purpose}", nbytes)
        stack.callback(account.close)
        pools[purpose] = HostPool(account, sizes if purpose == "slots" else ())
        stack.callback(pools[purpose].close)
        accounts.append(account)
    store = WeightStore(
        copies.layouts,
        [],
        transfer_queue(config, tracer),  # which the store closes
        tracer,
        resident=pools["resident"],
        slots=pools["slots"],
        staging=pools["staging"],
        rows=pools["rows"],
        verify=config.verify_reads,
    )
    stack.callback(store.close)
    return store, accounts
