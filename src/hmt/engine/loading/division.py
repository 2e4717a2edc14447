"""A model that several processes compute: what each of them has of it."""

from collections.abc import Mapping
from dataclasses import replace
from math import gcd, lcm

from hmt.contracts.blocks import BlockKind
from hmt.contracts.model import Model
from hmt.distributed import RankGroup
from hmt.engine.config import EngineConfig
from hmt.engine.loading.source import Divided, Source
from hmt.models.config import head_dim
from hmt.models.sharding import (
    Units,
    check_divisible,
    divided_parts,
    open_share,
    shares_of,
    stages_of,
    text_config,
)

_Units = Mapping[tuple[BlockKind, str], tuple[int, int]]


def divide(source: Source, whole: Model, config: EngineConfig, rank: int) -> tuple[Model, Divided]:
    """The model that a rank computes, and what it is divided from.

    Raises ConfigError where it cannot be divided among so many, and as `Source.weights`.
    """
    check_divisible(whole, tp=config.tp, ep=config.ep, pp=config.pp)
    described = text_config(source.config, source.path)
    units = Units()
    if config.ranks > config.pp:  # layers are divided, too
        units = _units(source.units(whole.spec, config.quantization), head_dim(described))
    group = RankGroup(rank, config.ranks, config.pp)
    shares, remarks = shares_of(
        described, divided_parts(whole), units, group,
        tp=config.tp, ep=config.ep, stages=stages_of(whole.spec, config.pp),
    )  # fmt: skip
    model = open_share(source.config, source.path, whole.dtype, shares[rank])
    model.spec = replace(model.spec, remarks=(*whole.spec.remarks, *remarks))
    return model, Divided(whole.spec, shares[rank])


def _units(found: _Units, dim: int) -> Units:
    """In heads, and in rows of a dense network, what `found` says by parameter."""

    def rows(kind: BlockKind, *names: str) -> int:
        return lcm(*(found.get((kind, name), (1, 1))[0] for name in names))

    def columns(kind: BlockKind, name: str) -> int:
        return found.get((kind, name), (1, 1))[1]

    query = lcm(rows(BlockKind.ATTENTION, "q_proj"), columns(BlockKind.ATTENTION, "o_proj"))
    keys = rows(BlockKind.ATTENTION, "k_proj", "v_proj")
    network = rows(BlockKind.FFN, "gate_proj", "up_proj")
    return Units(
        heads=query // gcd(query, dim),
        kv_heads=keys // gcd(keys, dim),
        width=lcm(network, columns(BlockKind.FFN, "down_proj")),
    )
