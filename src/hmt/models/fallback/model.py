"""Any causal language model of transformers, computed by its own modules.

transformers' module tree is made on the meta device.  Modules that hold numbers are replaced by
ours, which take them by lease; attention and experts, which the modules call by name, are HMT's.
What is around the layers is run once per step without them, to learn what each is called with, and
once behind them, for the norm and the output layer.  No forward pass is changed.
"""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from typing_extensions import override

from hmt.base.errors import CheckpointError
from hmt.base.log import logger, warn_once
from hmt.contracts.blocks import TRUNK, BlockId, BlockKind
from hmt.contracts.model import Model, ModelSpec
from hmt.contracts.step import Segment, Step
from hmt.contracts.store import KVCache, Weights
from hmt.models.config import Config
from hmt.models.fallback import key_map, module_tree
from hmt.models.fallback.blocks import BlockMaker, Parts, split_blocks, units
from hmt.models.fallback.call_context import (
    Call,
    CallContext,
    StoppedError,
    in_context,
    inputs_of,
    positions_of,
)
from hmt.models.fallback.device_cache import Known, moved_to
from hmt.models.fallback.features import encoder, not_followed
from hmt.models.fallback.interfaces import OneSequence
from hmt.models.fallback.lengths import border_in, by_length, check_share, lengths_of
from hmt.models.fallback.modules import Layer, Stage
from hmt.models.fallback.sizes import REMARK, UNCAPTURED, ignored_names, longest_context
from hmt.models.fallback.trace import LayerTrace, ModelTrace, call_surroundings, trace_model


class Fallback(Model):
    """Implements Model around a module tree of transformers.

    Where its attention asks for an implementation by name, that is HMT's, over all sequences of a
    step at once.  Else the model's own code computes attention, sequence by sequence, over keys and
    values that are read out of the pages.
    """

    def __init__(self, read: Config, architecture: str, dtype: torch.dtype) -> None:
        """Raises UnknownArchitectureError for a model that cannot run so, and CheckpointError."""
        self.dtype = dtype
        module_tree.refuse_others(read, architecture)
        self._border = border_in(read.get_text_config())
        opened = _open(read, architecture, dtype)
        self._tree, self._parts, trace = opened.tree, opened.parts, opened.traces
        maker = BlockMaker(self._tree, self._parts, opened.published, architecture)
        layers = len(self._parts.layers)
        blocks = (
            *maker.trunk(opened.tied),
            *(block for i in range(layers) for block in maker.layer(i, trace.layers[i])),
            *maker.head(opened.tied),
        )
        text = self._tree.model.config.get_text_config()
        self.spec = ModelSpec(
            architecture=architecture,
            layers=layers,
            hidden_size=text.hidden_size,
            vocab_size=self._parts.head.out_features,
            max_context=longest_context(text),
            blocks=blocks,
            kv=tuple(layer_trace.kv[0] for layer_trace in trace.layers),
            activation_width=max(
                _width(layer_trace, text.hidden_size) for layer_trace in trace.layers
            ),
            attention_heads=max(layer_trace.heads for layer_trace in trace.layers),
            experts_per_token=max(layer_trace.top_k for layer_trace in trace.layers),
            ignored=ignored_names(self._tree.model),
            uncaptured=UNCAPTURED,
            together=False,
            exact_runs=False,
            remarks=(REMARK,),
            rotary_border=self._border,
        )
        self._after = [_after_attention(layer_trace) for layer_trace in trace.layers]
        self._layer_blocks: list[list[BlockId]] = [[] for _ in range(layers)]
        for block in blocks:
            if block.id.layer != TRUNK and block.id.kind is not BlockKind.EXPERT:
                self._layer_blocks[block.id.layer].append(block.id)
        for index, layer in enumerate(self._parts.layers):
            answer = _answering(trace.layers[index].answers)
            self._tree.layers[index] = Stage(layer, index, answer)
        self._input_width = next(b for b in blocks if b.params).params[0].shape[1]
        self._prepared: tuple[Step | None, Tensor, list[dict[int, Call]]]
        self._prepared = (None, torch.empty(0), [])
        self._known: Known = {}  # what calls hold, where layers compute
        self._try_behind()
        warn_once(f"fallback {architecture}", f"{architecture} {REMARK}")

    def check_embedded(self, *, axes: int) -> None:
        """Raise CheckpointError unless it computes from embeddings, too, as those of images.

        axes   and from positions of so many axes; 0: of one
        """
        positions = torch.arange(3)
        ids, layers = positions[None] + 2, len(self._parts.layers)
        given: list[list[Any]] = []
        for embedded in (False, True):
            cache = OneSequence(None, layers) if self._tree.own_attention else None
            record = ModelTrace(layers, self.spec.hidden_size)
            work = CallContext(None, record=record, ends=layers - 1, lengths=positions + 1)
            try:
                with in_context(work), suppress(StoppedError), torch.no_grad():
                    inputs = {"input_ids": ids}
                    if embedded:
                        inputs = {"inputs_embeds": self._tree.model.get_input_embeddings()(ids)}
                    places = positions.expand(axes, -1) if axes and embedded else positions
                    self._tree.base(**inputs, **call_surroundings(self._tree, places, cache))
            except Exception as error:  # of transformers' code
                raise CheckpointError(f"its language model takes tokens alone ({error})") from error
            given.append([work.calls[index] for index in range(layers)])
        if not _same(*given):
            raise CheckpointError("its language model reads tokens besides their embeddings")

    @override
    def embed(self, step: Step, weights: Weights) -> Tensor:
        return self._prepare(step, weights)[0].clone()

    @override
    def layer(
        self, index: int, hidden: Tensor, step: Step, weights: Weights, kv: KVCache
    ) -> Tensor:
        calls = self._prepare(step, weights)[1]
        layer = self._parts.layers[index]
        lengths = self._lengths(step.segments)
        if not self._tree.own_attention:
            with in_context(CallContext(weights, step=step, kv=kv, layer=index, lengths=lengths)):
                return _called(layer, calls[0][index], hidden, self._known)
        work = CallContext(weights, step=step, kv=kv, layer=index)
        out = torch.empty_like(hidden)
        with in_context(work):
            for run, call in zip(step.segments, calls, strict=True):
                work.run = run
                work.lengths = None if lengths is None else lengths[run.tokens]
                out[run.tokens] = _called(layer, call[index], hidden[run.tokens], self._known)
        key, value = (torch.cat(rows).contiguous() for rows in zip(*work.new, strict=True))
        kv.append(index, step, key, value)
        return out

    def fused_layers(self, layers: range, weights: Weights, kv: KVCache) -> None:
        """See Model: there are none, as modules of transformers have no kernels for this."""
        return None

    @override
    def normed(self, hidden: Tensor, weights: Weights) -> Tensor:
        with in_context(CallContext(weights, instead=hidden[None], stops=True)) as work:
            with suppress(StoppedError):
                self._behind(hidden)
            assert work.seen is not None
            return work.seen[0].float()

    @override
    def head(self, hidden: Tensor, weights: Weights) -> Tensor:
        with in_context(CallContext(weights, instead=hidden[None])):
            logits: Tensor = self._behind(hidden)
            return logits[0].float()

    def angles(self, step: Step) -> tuple[int, ...]:
        """See Model: those of keys never change, and steps are not captured."""
        return ()

    def expected_experts(self, index: int, hidden: Tensor, weights: Weights) -> Tensor:
        """See Model.  Calls what follows attention in the layer, as far as its choice."""
        by_name = units(self._parts.layers[index])
        x = hidden[None]
        with in_context(CallContext(weights, layer=index, predicting=True)) as work:
            with suppress(StoppedError):
                for name in self._after[index]:
                    x = by_name[name](x)
            assert work.chosen is not None
            return work.chosen

    @override
    def layer_blocks(self, index: int) -> tuple[BlockId, ...]:
        return tuple(self._layer_blocks[index])

    def _behind(self, hidden: Tensor) -> Any:
        """What the model makes of the layers' result, of which the work at hand has the rows.

        What is in front of the layers has no rows: it goes through the CPU, as in `_around`.
        """
        options = call_surroundings(self._tree, torch.zeros(len(hidden), dtype=torch.int64), None)
        nothing = torch.zeros(1, len(hidden), self._input_width, dtype=hidden.dtype)
        return self._tree.model(inputs_embeds=nothing, **options).logits

    def _try_behind(self) -> None:
        """Raise UnknownArchitectureError where what is behind the layers cannot be run alone.

        Such as with embeddings that are looked up by tokens, of which `_behind` has none.
        """
        hidden = torch.zeros(2, self.spec.hidden_size, dtype=self.dtype)
        record = ModelTrace(self.spec.layers, self.spec.hidden_size)
        try:
            work = CallContext(None, record=record, instead=hidden[None], stops=True)
            with in_context(work), suppress(StoppedError):
                self._behind(hidden)
        except Exception as error:
            raise module_tree.refused(self.spec.architecture, not_followed(error)) from error
        if work.seen is None:
            raise module_tree.refused(self.spec.architecture, "its output layer is not reached")

    def _prepare(self, step: Step, weights: Weights) -> tuple[Tensor, list[dict[int, Call]]]:
        """Hidden states before the layers, and what these are called with: by run, by layer.

        All in host memory.  A step is known by its runs: where layers compute on a device, they are
        given a copy of it with the same ones.
        """
        known, hidden, calls = self._prepared
        if known is not None and known.segments is step.segments:
            return hidden, calls
        parts, calls = [], []
        runs = step.segments if self._tree.own_attention else (None,)
        for run in runs:
            parts.append(self._around(step, run, weights))
            calls.append(parts[-1].calls)
        first = [call[0] for call in calls]
        hidden = torch.cat([args[0] if args else kw["hidden_states"] for args, kw in first], dim=1)
        self._prepared, self._known = (step, hidden[0], calls), {}
        return hidden[0], calls

    def _lengths(self, runs: tuple[Segment, ...]) -> Tensor | None:
        return None if self._border is None else lengths_of(runs)

    def _around(self, step: Step, run: Segment | None, weights: Weights) -> CallContext:
        """Run what is around the layers, for the tokens of a step.

        run   the only one that is meant, where the model's own code computes attention
        """
        cache = None
        if self._tree.own_attention:
            cache = OneSequence(run, len(self._parts.layers))
        tokens = slice(None) if run is None else run.tokens
        options = call_surroundings(self._tree, positions_of(step, tokens), cache)
        lengths = self._lengths(step.segments if run is None else (run,))
        work = CallContext(weights, ends=len(self._parts.layers) - 1, lengths=lengths)
        with in_context(work), suppress(StoppedError):
            self._tree.base(**inputs_of(self._tree.model, step, tokens), **options)
        return work


@dataclass(frozen=True)
class _Opened:
    """A tree whose modules are replaced, and what is known of it.

    tied   the output layer multiplies with the embedding
    """

    tree: module_tree.Tree
    parts: Parts
    traces: ModelTrace
    published: key_map.Published
    tied: bool


def _open(config: Config, architecture: str, dtype: torch.dtype) -> _Opened:
    """Build, take apart and look; with the model's own attention where that is needed."""
    problem: CheckpointError | None = None
    for by_name in (True, False):
        try:
            opened = _attempt(config, architecture, dtype, by_name=by_name)
        except CheckpointError as error:
            problem = problem or error
        except Exception as error:  # of transformers' code, which is met in a way of our own
            logger.debug("%s failed when it was tried", architecture, exc_info=error)
            problem = problem or module_tree.refused(architecture, not_followed(error))
        else:
            if opened is not None and encoder(config) is None:
                return opened
    problem = problem or module_tree.refused(
        architecture, "its layers have no attention that keeps anything"
    )
    if (why := encoder(config)) is not None:
        also = str(problem).partition("either: ")[2]
        raise module_tree.refused(architecture, f"{why}; besides, {also}" if also else why)
    raise problem


def _attempt(
    config: Config, architecture: str, dtype: torch.dtype, *, by_name: bool
) -> _Opened | None:
    """The same in one of both ways; None where the other one is wanted."""
    built = module_tree.build(config, architecture, dtype, by_name=by_name)
    border = border_in(config.get_text_config())
    check_share(built.model, config.get_text_config())
    if border is not None:
        by_length(built.model, border)
    if by_name and not built.takes_positions:
        return None
    output = built.model.get_output_embeddings()
    tied = output is not None and output.weight is built.model.get_input_embeddings().weight
    published = key_map.find(built.model)
    parts = split_blocks(built, architecture)
    BlockMaker(built, parts, published, architecture).values()
    hidden_size = built.model.config.get_text_config().hidden_size
    trace = trace_model(built, list(parts.layers), hidden_size, architecture)
    if trace.problem:
        raise module_tree.refused(architecture, trace.problem)
    return _Opened(built, parts, trace, published, tied) if trace.layers[0].kv else None


def _called(layer: Layer, call: Call, hidden: Tensor, known: Known) -> Tensor:
    """A layer's hidden states [tokens, hidden_size] for hidden of that shape, where that lies."""
    args, kwargs = call
    others = {name: value for name, value in kwargs.items() if name != "hidden_states"}
    rest, others = moved_to((args[1:], others), hidden.device, known)
    if args:
        result = layer(hidden[None], *rest, **others)
    else:
        result = layer(hidden_states=hidden[None], **others)
    found: Tensor = result[0] if isinstance(result, tuple) else result
    return found[0]


def _same(one: Any, other: Any) -> bool:
    """Whether layers were called with the same tensors, wherever these are."""
    first, second = (
        [leaf for leaf in tree_leaves(calls) if isinstance(leaf, Tensor)] for calls in (one, other)
    )
    return len(first) == len(second) and all(
        torch.equal(left, right)
        for left, right in zip(first, second, strict=True)
        if left.is_floating_point()
    )


def _answering(count: int) -> Callable[[Tensor], Any]:
    """How a layer returns its hidden states: alone, or as the first of `count`."""
    return (lambda hidden: (hidden, *[None] * (count - 1))) if count else (lambda hidden: hidden)


def _width(trace: LayerTrace, hidden_size: int) -> int:
    """Numbers alive per token: what the widest child's layers make, once more behind activations.

    And hidden states: the residual stream, two norms in 32 bits, and queries before and after.
    """
    return 8 * hidden_size + 2 * max(trace.widths.values(), default=0)


def _after_attention(trace: LayerTrace) -> list[str]:
    """Children that are called behind attention, up to the one with experts."""
    if not trace.experts:
        return []
    order = list(dict.fromkeys(trace.units))
    return order[order.index(trace.attention) + 1 : order.index(trace.experts[0][1]) + 1]
