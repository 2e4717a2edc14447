"""What `hmt plan` says of several processes that compute a model together."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from hmt.base.errors import ConfigError
from hmt.base.units import format_bytes
from hmt.cli.options import EngineOptions, choose_model

if TYPE_CHECKING:
    from hmt.contracts.plan import Plan


def refuse_ranks(engine: EngineOptions, what: str) -> None:
    """Raise ConfigError for several processes: so far `what` is for one."""
    numbers = ("tp", engine.tp), ("ep", engine.ep), ("pp", engine.pp)
    asked = [f"--{name} {n}" for name, n in numbers if n is not None]
    if asked:
        raise ConfigError(
            f"{what} of one process, and {' and '.join(asked)} was given: leave it out"
        )


def other_ranks(engine: EngineOptions, model: str | None, first: "Plan") -> list[str]:
    """A line on each process beside the one that `first` is the plan of; none where it is alone."""
    from hmt.contracts.plan import Tier
    from hmt.engine import EngineConfig, prepare
    from hmt.engine.loading.device import device_budgets, open_devices

    config = EngineConfig.resolve(**engine.arguments())
    if config.ranks == 1:
        return []
    lines = ["", f"{config.ranks} processes; the plan above is of the first one, rank 0"]
    context, chunk = first.kv_tokens, first.max_prefill_tokens
    for rank in range(1, config.ranks):
        own = replace(config.of_rank(rank), context=context, max_prefill_tokens=chunk)
        devices = open_devices(own)
        room = device_budgets(devices, own) if devices else ()
        path = choose_model(None) if model is None else Path(model).expanduser()
        prepared = prepare(path, own, None, devices, room, rank)
        plan, sizes = prepared.plan, {block.id: block for block in prepared.demand.blocks}
        disk = sum(sizes[block].slot_bytes for block in plan.blocks_in(Tier.DISK))
        lines.append(
            f"  rank {rank}: {format_bytes(prepared.demand.weight_bytes)} of weights, "
            f"{format_bytes(disk)} of them on disk; {format_bytes(sum(plan.reserved.values()))} "
            f"of {format_bytes(plan.budgets[Tier.HOST])} host memory reserved"
        )
    return [*lines, "  speeds are rank 0's own, without what the processes wait for one another"]
