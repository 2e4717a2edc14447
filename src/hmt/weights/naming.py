"""Checkpoints that call their tensors by other beginnings than the model's own names.

A bare model's have no "model." in front, wrappers leave theirs ("module.", "_orig_mod.",
"base_model.model."), and language models that were part of a larger one have its path in front
("language_model.model.", "model.language_model.").  The embedding says which: whatever stands in
front of "embed_tokens.weight" stands in front of all others of the model's body.

transformers writes some of them with another name for the list of layers, which its rules for an
image encoder's layers give to all lists ("encoder.layers.", "blocks."): the first layer says which.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from hmt.contracts.blocks import BlockKind, ParamSpec
from hmt.contracts.checkpoint import Checkpoint, Form
from hmt.contracts.model import ModelSpec

_LAYERS = "layers."


@dataclass(frozen=True, slots=True)
class Named:
    """A checkpoint whose parameters are found by the model's names.

    headless   It is of a bare model and the configuration ties no head to the embedding.  The
               output layer is bound to the embedding, so that there is one, and must not be used.
    """

    checkpoint: Checkpoint
    headless: bool = False


def named(spec: ModelSpec, checkpoint: Checkpoint) -> Named:
    """`checkpoint` with the names of `spec`, where one beginning is another throughout.

    As it is where nothing is missing, or nothing can be made of its names.
    """
    there: dict[str, Form] = {**checkpoint.records, **checkpoint.forms}
    params = [(b.id, param) for b in spec.blocks for param in b.params]
    missing = [(b, param) for b, param in params if not _first(param, there)]
    tables = [param for block, param in params if block.kind is BlockKind.EMBEDDING]
    if not missing or not tables:
        return Named(checkpoint)
    root, _, rest = tables[0].sources[0].partition(".")
    fronts = [name.removesuffix(rest) for name in there if f".{name}".endswith(f".{rest}")]
    choices = [_aliases((param for _, param in params), there, root, front) for front in fronts]
    names = max(choices, key=len, default={})
    table = _first(tables[0], names) or _first(tables[0], there)
    left = [(block, param) for block, param in missing if not _first(param, names)]
    bare = table is not None and not any(name.startswith(f"{root}.") for name in there)
    headless = bool(left) and bare and all(_is_head_weight(b.kind, p) for b, p in left)
    if headless and table is not None:
        names |= {param.sources[0]: table for _, param in left}
    return Named(replace(checkpoint, forms={**checkpoint.forms, **names}), headless)


def beginnings(checkpoint: Checkpoint) -> str:
    """How the names of most tensors begin, in words."""
    counts = Counter(name.partition(".")[0] for name in checkpoint.records)
    return ", ".join(f"{first}. ({count})" for first, count in counts.most_common(3))


def _is_head_weight(kind: BlockKind, param: ParamSpec) -> bool:
    return kind is BlockKind.HEAD and param.name == "weight"


def _first(param: ParamSpec, there: Mapping[str, Form]) -> Form | None:
    return next((there[name] for name in param.sources if name in there), None)


def _aliases(
    params: Iterator[ParamSpec], there: Mapping[str, Form], root: str, front: str
) -> dict[str, Form]:
    """Parameters that are found with `front` in the place of `root`, by their own names."""
    names: dict[str, Form] = {}
    missing = [param for param in params if not _first(param, there)]
    layers = _layers(missing, there, root, front)
    for param in missing:
        spelled = (
            (own, other) for own in param.sources for other in _spelled(own, root, front, layers)
        )
        match = next((pair for pair in spelled if pair[1] in there), None)
        if match is not None:
            names[match[0]] = there[match[1]]
    return names


def _layers(missing: Sequence[ParamSpec], there: Mapping[str, Form], root: str, front: str) -> str:
    """What stands between `front` and a layer's number."""
    first = f"{root}.{_LAYERS}0."
    tails = (name.removeprefix(first) for p in missing for name in p.sources if first in name)
    tail = next(tails, None)
    if tail is None or f"{front}{_LAYERS}0.{tail}" in there:
        return _LAYERS
    end = f".0.{tail}"
    found = (name for name in there if name.startswith(front) and name.endswith(end))
    between = next((name[len(front) : -len(end) + 1] for name in found), _LAYERS)
    return _LAYERS if any(map(str.isdigit, between)) else between


def _spelled(name: str, root: str, front: str, layers: str) -> Iterator[str]:
    """What `name` may be called: in the body behind `front`, else behind a part of that."""
    if name.startswith(f"{root}."):
        rest = name.removeprefix(f"{root}.")
        own = rest.startswith(_LAYERS)
        yield front + (layers + rest.removeprefix(_LAYERS) if own else rest)
        return
    while front:
        yield front + name
        front = front[: front.rstrip(".").rfind(".") + 1]
    yield name
