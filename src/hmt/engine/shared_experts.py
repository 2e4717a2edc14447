"""A model of which some layers' experts are others': for measuring what memory cannot hold.

Layers take turns in the experts of the first few.  All else is that of the whole model: what is
planned and cached on a GPU, which bytes a step reads and copies, and by whom.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace

from hmt.base.errors import ConfigError
from hmt.contracts.blocks import BlockId, BlockKind
from hmt.contracts.plan import Plan, Tier
from hmt.weights import BlockLayout, laid_out_alike


def same_experts(blocks: Iterable[BlockId], own: int) -> dict[BlockId, BlockId]:
    """The experts that are another's: each with the one whose memory it has.

    own   layers with experts of their own.  The layer after them has those of the first, and so on

    Raises ConfigError where that would be no layer.
    """
    if own < 1:
        raise ConfigError(f"{own} layers with experts of their own: give one or more")
    experts = [block for block in blocks if block.kind is BlockKind.EXPERT]
    layers = list(dict.fromkeys(block.layer for block in experts))
    turn = {layer: number for number, layer in enumerate(layers)}
    return {
        block: block._replace(layer=layers[turn[block.layer] % own])
        for block in experts
        if turn[block.layer] >= own
    }


def saved_bytes(same: Mapping[BlockId, BlockId], layouts: Mapping[BlockId, BlockLayout]) -> int:
    """Host memory that blocks do not take which have another's.

    Raises ConfigError where they are not laid out as those are.
    """
    for block, other in same.items():
        if not laid_out_alike([layouts[block], layouts[other]]):
            raise ConfigError(f"{block} cannot have the memory of {other}: other shapes or formats")
    return sum(layouts[block].slot_bytes for block in same)


def without(plan: Plan, same: Mapping[BlockId, BlockId], nbytes: int) -> Plan:
    """A plan of all blocks, less the `nbytes` that those in `same` do not take.

    Raises ConfigError unless all of them live in host memory: elsewhere they are moved, and each
    would bring the other along.
    """
    away = [block for block in same if plan.homes[block] is not Tier.HOST]
    if away:
        home = plan.homes[away[0]]
        more = "raise --host-memory" if home is Tier.DISK else "lower --gpu-memory"
        raise ConfigError(
            f"only experts in host memory can share it, and {len(away)} of {len(same)} would live "
            f"on {'the drive' if home is Tier.DISK else 'the GPU'}: {more}, or leave "
            "--expert-layers out"
        )
    resident = plan.reserved["resident"] - nbytes
    budgets = {**plan.budgets, Tier.HOST: plan.budgets[Tier.HOST] - nbytes}
    return replace(plan, reserved={**plan.reserved, "resident": resident}, budgets=budgets)
