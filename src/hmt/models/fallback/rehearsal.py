"""Looking at a model whose forward pass runs whole: which modules it calls, what its cache keeps.

It is run with made-up numbers: once over all tokens of a short sequence, and once over parts of
it, each with a cache made of what was kept of the parts before.  Both must give the same.  So
anything that passes between tokens by another way, or in another direction, is met here.
"""

import inspect
import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hmt.base.errors import CheckpointError
from hmt.base.log import logger
from hmt.models.config import Config
from hmt.models.fallback import key_map, module_tree
from hmt.models.fallback.blocks import Parts
from hmt.models.fallback.call_context import CallContext, in_context
from hmt.models.fallback.features import encoder, not_followed
from hmt.models.fallback.lengths import border_in, by_length, check_share
from hmt.models.fallback.sequence_cache import (
    RowSlot,
    SequenceCache,
    StageSlots,
    StateSlot,
    UnknownStateError,
)
from hmt.models.fallback.sizes import ignored_names
from hmt.models.fallback.whole_tree import Sight, WholeTree, open_gates

TOKENS = 12
PARTS = (range(7), range(7, 8), range(8, 11), range(11, 12))
_CACHES = ("cache", "past_key_values", "cache_params")


@dataclass(frozen=True)
class Whole:
    """A tree whose modules are replaced, and what is known of it.

    slots        by layer: what is kept while it runs
    tied         the output layer multiplies with the embedding
    ignored      regexes of tensors that are not needed for text
    """

    tree: WholeTree
    parts: Parts
    sight: Sight
    slots: tuple[StageSlots, ...]
    published: key_map.Published
    tied: bool
    hidden_size: int
    ignored: tuple[str, ...]


def open_tree(config: Config, architecture: str, dtype: torch.dtype) -> Whole:
    """Build, take apart and look.  Raises CheckpointError or UnknownArchitectureError."""
    built = module_tree.build(config, architecture, dtype, by_name=False, listed=False)
    border = border_in(config.get_text_config())
    check_share(built.model, config.get_text_config())
    if border is not None:
        by_length(built.model, border)
    if built.base is built.model:
        raise module_tree.refused(architecture, "its output layer is no part of its own")
    tree = WholeTree(**vars(built))
    output = tree.model.get_output_embeddings()
    tied = output is not None and output.weight is tree.model.get_input_embeddings().weight
    published = key_map.find(tree.model)
    parts = open_gates(tree, architecture)
    with torch.no_grad():
        sight, slots, hidden_size = _rehearse(tree, architecture)
    unused = _keep_used(tree, parts, sight, published)
    ignored = (*ignored_names(tree.model), *unused)
    return Whole(tree, parts, sight, slots, published, tied, hidden_size, ignored)


def call_base(
    tree: WholeTree, inputs: Mapping[str, Tensor], positions: Tensor, cache: SequenceCache
) -> Tensor:
    """Hidden states [1, tokens, hidden_size] behind the last layer's norm.

    inputs      tokens or their embeddings (`inputs_of`), and what else it is to be given
    positions   int64 [tokens], or [axes, tokens]
    """
    known = inspect.signature(tree.base.forward).parameters
    name = next((each for each in _CACHES if each in known), _CACHES[0])
    options: dict[str, Any] = {"use_cache": True, "return_dict": True, name: cache}
    if tree.takes_positions:
        options["position_ids"] = positions.unsqueeze(-2) + tree.first_position
    result: Tensor = tree.base(**inputs, **options)[0]
    return result


def _rehearse(tree: WholeTree, architecture: str) -> tuple[Sight, tuple[StageSlots, ...], int]:
    sight = Sight()
    try:
        whole, seen = run_parts(tree, [range(TOKENS)], sight)
        whole = _with_own_positions(tree, whole)
        with in_context(CallContext(None, record=sight)):
            tree.model(input_ids=torch.arange(1, 3)[None], use_cache=False, return_dict=True)
        for index, gate in enumerate(sight.layers):
            gate.index = index
        parts, _ = run_parts(tree, PARTS, Sight())
        early, _ = run_parts(tree, [range(TOKENS - 1)], Sight())
    except Exception as error:
        logger.debug("%s failed when it was tried", architecture, exc_info=error)
        raise module_tree.refused(architecture, not_followed(error)) from error
    if not sight.layers:
        raise module_tree.refused(architecture, "its layers are in no list")
    if differ(whole[:, :-1], early):
        why = encoder(tree.model.config) or "its tokens see those behind them"
        raise module_tree.refused(architecture, why)
    slots = tuple(StageSlots(*seen[stage]) for stage in range(len(sight.layers)))
    if not any(each.rows or each.states for each in slots):
        raise module_tree.refused(
            architecture, "transformers' code of it keeps nothing of earlier tokens"
        )
    if differ(whole, parts):
        raise module_tree.refused(
            architecture,
            "transformers' code of it cannot go on with several tokens from what it keeps",
        )
    return sight, slots, whole.shape[-1]


def _with_own_positions(tree: WholeTree, whole: Tensor) -> Tensor:
    """Hidden states by the positions that a model takes where it is told none, as it then is.

    Some begin behind the id of padding.
    """
    told = tree.takes_positions
    if not told:
        return whole
    tree.takes_positions = False
    try:
        alone, _ = run_parts(tree, [range(TOKENS)], Sight())
    except Exception:  # of a model that must be told
        alone = whole
    tree.takes_positions = True
    if not differ(whole, alone):
        return whole
    tree.first_position = 1 + (getattr(tree.model.config, "pad_token_id", None) or 0)
    later, _ = run_parts(tree, [range(TOKENS)], Sight())
    if differ(later, alone):
        tree.first_position, tree.takes_positions = 0, False
    return alone


def run_parts(
    tree: WholeTree,
    parts: Sequence[range],
    sight: Sight,
    inputs: Callable[[range], dict[str, Any]] | None = None,
    axes: int = 0,
) -> tuple[Tensor, dict[int, tuple[tuple[RowSlot, ...], tuple[StateSlot, ...]]]]:
    """Hidden states, and what the cache keeps, by the layer of the model that it comes from.

    inputs   what a part is called with; None: tokens
    axes     of its positions, which agree; 0: they are places
    """
    rows: dict[int, tuple[Tensor, ...]] = {}
    states: list[tuple[StateSlot, Tensor]] = []
    stages: dict[int, int] = {}
    out = []

    def noted(layer: int) -> None:
        stages.setdefault(layer, max(0, sight.stage))
        sight.attends()

    for part in parts:
        cache = SequenceCache(tree.model.config, part.start, rows.__getitem__, noted)
        for slot, value in states:
            cache.put_state(slot, value[0])
        positions = torch.tensor(part)
        lengths = positions + 1
        given: dict[str, Any] = {"input_ids": some_tokens(tree, positions)[None]}
        if inputs is not None:
            given = inputs(part)
        places = positions.expand(axes, -1) if axes else positions
        with in_context(CallContext(None, record=sight, lengths=lengths)):
            out.append(call_base(tree, given, places, cache))
        for layer in range(len(cache.layers)):
            new = cache.kept_rows(layer)
            if any(each.shape[2] != len(part) or len(each) != 1 for each in new):
                raise UnknownStateError("rows that are not those of tokens")
            if new:
                old = rows.get(layer, [each[:, :, :0] for each in new])
                rows[layer] = tuple(torch.cat(pair, 2) for pair in zip(old, new, strict=True))
        states = list(cache.states())
    return torch.cat(out, dim=1), _slots(rows, states, stages)


def check_embedded(tree: WholeTree, *, axes: int) -> None:
    """Raise CheckpointError unless a model makes of tokens' embeddings what it makes of tokens.

    axes   and has positions of so many axes, which agree for text; 0: of one
    """
    if axes and not tree.takes_positions:
        raise CheckpointError("its language model counts positions by itself")
    positions = torch.arange(TOKENS)
    ids = some_tokens(tree, positions)[None]
    table = cast(PreTrainedModel, tree.base).get_input_embeddings()
    found = []
    for embedded in (False, True):
        cache = SequenceCache(tree.model.config, 0, lambda layer: ())
        work = CallContext(None, record=Sight(), lengths=positions + 1)
        with in_context(work), torch.no_grad():
            inputs = {"input_ids": ids}
            if embedded:
                inputs = {"inputs_embeds": table(ids)}
            places = positions.expand(axes, -1) if axes and embedded else positions
            found.append(call_base(tree, inputs, places, cache))
    if differ(*found):
        raise CheckpointError("its language model reads tokens besides their embeddings")


def some_tokens(tree: WholeTree, positions: Tensor) -> Tensor:
    """Ids, none of which is that of padding, which some models count otherwise."""
    ids = positions * 5 % 31
    padding = getattr(tree.model.config.get_text_config(), "pad_token_id", None)
    return torch.where(ids == (0 if padding is None else padding), 31, ids)


def _slots(
    rows: dict[int, tuple[Tensor, ...]],
    states: list[tuple[StateSlot, Tensor]],
    stages: dict[int, int],
) -> dict[int, tuple[tuple[RowSlot, ...], tuple[StateSlot, ...]]]:
    found: dict[int, tuple[tuple[RowSlot, ...], tuple[StateSlot, ...]]] = defaultdict(
        lambda: ((), ())
    )
    for layer, tensors in rows.items():
        stage = stages[layer]
        slot = RowSlot(layer, tuple((each.shape[1], each.shape[3]) for each in tensors))
        found[stage] = ((*found[stage][0], slot), found[stage][1])
    for state, _ in states:
        stage = stages[state.layer]
        found[stage] = (found[stage][0], (*found[stage][1], state))
    return found


def differ(one: Tensor, other: Tensor) -> bool:
    """Whether two results differ by more than the order of sums."""
    one, other = one.float().nan_to_num(), other.float().nan_to_num()
    near = 1e-3 * float(one.abs().max())
    return float((one - other).abs().max()) > near


def _keep_used(
    tree: WholeTree, parts: Parts, sight: Sight, published: key_map.Published
) -> tuple[str, ...]:
    """Drop what was not called.  Returns regexes of the names of its tensors."""
    tree.gates = list(sight.layers)
    parts.layers = [gate.layer for gate in tree.gates]
    parts.tables = [pair for pair in parts.tables if pair[1] in sight.tables]
    parts.trunk = [u for u in parts.trunk if id(u) in sight.used or u.name in sight.names]
    used = {f"{name}.weight" for name, _ in parts.tables}
    begins = [f"{gate.path}." for gate in tree.gates] + [f"{unit.name}." for unit in parts.trunk]
    head = next(n for n, module in tree.model.named_modules() if module is parts.head)
    begins.append(f"{head}.")
    names: set[str] = set()
    for param in published.shapes:
        if param in used or param.startswith(tuple(begins)):
            continue
        names.add(param)
        names.update(name for piece in published.slices.get(param, ()) for name in piece.names)
    return tuple(sorted({"^" + re.sub(r"\d+", r"\\d+", re.escape(name)) + "$" for name in names}))
