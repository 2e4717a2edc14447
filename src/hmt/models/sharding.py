"""A model as one of several ranks computes it: with its own layers, heads, width and experts.

A rank's model is made of the configuration with the rank's sizes, so that the family's own code
says which shape each parameter has there; a parameter that is smaller than the whole model's is cut
along that axis.  For families that transformers has a plan for (`base_model_tp_plan`), these are
the plan's cuts.  After Megatron-LM (arXiv 1909.08053): query, key, value, gate and up by rows, the
output projection and down by columns, and a sum behind these.  Stages of a pipeline have whole
layers that follow one another, after GPipe (arXiv 1811.06965).
"""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import gcd, lcm, prod
from pathlib import Path
from typing import Any

import torch

from hmt.base.errors import ConfigError
from hmt.contracts.blocks import TRUNK, BlockKind
from hmt.contracts.model import Model, ModelSpec
from hmt.contracts.sharding import Collective, RankShare, Span
from hmt.models.config import Config, head_dim
from hmt.models.decoder import Decoder
from hmt.models.registry import errors_of, family_of

_EXPERTS = ("n_routed_experts", "num_experts", "num_local_experts")


@dataclass(frozen=True, slots=True)
class Units:
    """What cuts have to be multiples of, in rows or columns of the parameters that are cut.

    heads, kv_heads   numbers of these heads together
    width             of a dense network
    """

    heads: int = 1
    kv_heads: int = 1
    width: int = 1


def divided_parts(model: Model) -> tuple[str, ...]:
    """What of a family's layers ranks may divide: "heads", "width", "experts".

    A family says so itself, in `divides`, and so does each class that is made of one: what it adds
    may know of no ranks.
    """
    parts: tuple[str, ...] = type(model).__dict__.get("divides", ())
    return parts


def check_divisible(model: Model, *, tp: int, ep: int, pp: int = 1) -> None:
    """Raise ConfigError where the model cannot be divided as is asked."""
    parts, name = divided_parts(model), model.spec.architecture
    if model.encoder is not None:
        raise ConfigError(
            f"{name} sees images, which one process encodes alone: leave tp, ep and pp out"
        )
    if not parts and max(tp, ep) > 1:
        raise ConfigError(
            f"layers of {name} cannot be divided among processes yet: leave tp and ep out; whole "
            "ones are spread over several GPUs (gpus), or over processes of many families (pp)"
        )
    if pp > 1 and not (isinstance(model, Decoder) and model.staged):
        raise ConfigError(
            f"more than hidden states goes from layer to layer of {name}, so processes cannot "
            "have some of them each: leave pp out, or name several GPUs with gpus"
        )
    if pp > model.spec.layers:
        raise ConfigError(
            f"{name} has {model.spec.layers} layers, fewer than pp={pp} stages: ask for "
            f"pp={model.spec.layers} at most"
        )
    if ep > 1 and "experts" not in parts:
        raise ConfigError(f"{name} has no experts to divide (ep={ep}): use tp={ep}")


def shares_of(
    config: Config,
    parts: Sequence[str],
    units: Units,
    collective: Collective,
    *,
    tp: int,
    ep: int,
    stages: Sequence[Span | None] = (None,),
) -> tuple[list[RankShare], tuple[str, ...]]:
    """What each rank has of a model whose configuration this is, by stage the largest shares first.

    stages   layers of each, from `stages_of`

    And what the user should know of it.  With `tp` above 1 all `parts` are divided, with `ep` alone
    the experts.  Heads that cannot be divided among so many stay together: then each rank computes
    attention whole.  Raises ConfigError where there is less of something else than ranks, or there
    are fewer cuts that the weights' encoding allows.
    """
    ranks = max(tp, ep)
    divided = parts if tp > 1 else [part for part in parts if part == "experts" and ep > 1]
    none: list[Span | None] = [None] * ranks
    heads, kv_heads, width, experts = none, none, none, none
    remarks: tuple[str, ...] = ()
    if "heads" in divided:
        try:
            heads, kv_heads = _head_spans(config, units, ranks)
        except ConfigError as error:
            remarks = (f"{error}.  Each process computes attention whole",)
    if "width" in divided:
        whole = config.intermediate_size
        width = _spans(whole, ranks, units.width, f"an intermediate size of {whole}")
    if "experts" in divided:
        count = next(int(n) for name in _EXPERTS if (n := getattr(config, name, None)))
        experts = _spans(count, ranks, 1, f"{count} experts")
    parts_of_layers = list(zip(heads, kv_heads, width, experts, strict=True))
    shares = [
        RankShare(
            stage * ranks + part, ranks * len(stages), collective, *spans,
            layers=layers, stage=stage, stages=len(stages),
        )
        for stage, layers in enumerate(stages)
        for part, spans in enumerate(parts_of_layers)
    ]  # fmt: skip
    return shares, remarks


def stages_of(spec: ModelSpec, count: int) -> list[Span | None]:
    """Layers of each of `count` stages, so that the largest has as few weights as can be.

    The output layer belongs to the first stage, whose rank draws tokens.
    """
    if count == 1:
        return [None]
    head = 0
    sizes = [0] * spec.layers
    for block in spec.blocks:
        numbers = sum(prod(param.shape) for param in block.params)
        if block.id.kind is BlockKind.HEAD:
            head += numbers
        elif block.id.layer != TRUNK:
            sizes[block.id.layer] += numbers
    before = [0, *accumulate(sizes)]
    # For each number of layers: the least that the largest of so many stages has, and its borders.
    best: dict[int, tuple[int, tuple[int, ...]]]
    best = {end: (head + before[end], (0, end)) for end in range(1, spec.layers + 1)}
    for stage in range(1, count):
        best = {
            end: min(
                (max(best[first][0], before[end] - before[first]), (*best[first][1], end))
                for first in range(stage, end)
            )
            for end in range(stage + 1, spec.layers + 1)
        }
    return [Span(first, end, spec.layers) for first, end in pairwise(best[spec.layers][1])]


def text_config(config: Mapping[str, Any], path: Path) -> Config:
    """The configuration that HMT's family reads of a parsed config.json, which has one."""
    return family_of(config, path)[1]


def open_share(
    config: Mapping[str, Any], path: Path, dtype: torch.dtype, share: RankShare
) -> Model:
    """`open_model` as a rank has it, of a family that can be divided."""
    family, whole = family_of(config, path)
    with errors_of(path):
        return family(_with_share(whole, share), dtype)


def _with_share(config: Config, share: RankShare) -> Config:
    """A copy of a configuration with the sizes that a rank has."""
    own = copy.deepcopy(config)
    own.share = share
    if share.heads is not None and share.kv_heads is not None:
        own.head_dim = head_dim(config)  # which some take from the number of heads
        own.num_attention_heads = share.heads.count
        own.num_key_value_heads = share.kv_heads.count
    if share.width is not None:
        own.intermediate_size = share.width.count
    return own


def _spans(count: int, ranks: int, unit: int, what: str) -> list[Span | None]:
    """`count` cut at multiples of `unit`, the larger parts first."""
    units = -(-count // unit)
    if units < ranks:
        together = (
            f", of which {unit} belong together in the weights' encoding," if unit > 1 else ""
        )
        raise ConfigError(
            f"{what}{together} cannot be divided among {ranks} processes: ask for {units} at most"
        )
    borders = [-(-units * rank // ranks) * unit for rank in range(ranks)] + [count]
    return [Span(first, end, count) for first, end in pairwise(borders)]


def _head_spans(
    config: Config, units: Units, ranks: int
) -> tuple[list[Span | None], list[Span | None]]:
    """Query heads of each rank, and the KV heads that they attend with.

    Where there are fewer of these than ranks, several ranks have the same one.
    """
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    group = heads // kv_heads
    if ranks <= kv_heads:
        unit = lcm(units.kv_heads, units.heads // gcd(units.heads, group))
        keys = _spans(kv_heads, ranks, unit, f"{kv_heads} KV heads")
        queries = [
            None if span is None else Span(span.first * group, span.end * group, heads)
            for span in keys
        ]
        return queries, keys
    found: list[tuple[Span, Span]] = []
    sharers = [end - first for first, end in _evenly(ranks, kv_heads)]
    for head, count in enumerate(sharers):
        what = f"{group} query heads of each of {kv_heads} KV heads"
        for span in _spans(group, count, units.heads, what):
            assert span is not None
            first = head * group
            own = Span(first + span.first, first + span.end, heads)
            found.append((own, Span(head, head + 1, kv_heads)))
    if units.kv_heads > 1:
        raise ConfigError(
            f"{kv_heads} KV heads cannot be divided among {ranks} processes: "
            f"{units.kv_heads} of them belong together in the weights' encoding"
        )
    found.sort(key=lambda spans: -spans[0].count)
    return [own for own, _ in found], [keys for _, keys in found]


def _evenly(count: int, parts: int) -> list[tuple[int, int]]:
    borders = [-(-count * part // parts) for part in range(parts + 1)]
    return list(pairwise(borders))
