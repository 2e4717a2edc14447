"""Looking at a model once, with zeros for numbers: what its layers call, in which order."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from hmt.base.log import logger
from hmt.contracts.blocks import BlockId
from hmt.contracts.model import KVKind, KVLayer
from hmt.models.fallback.call_context import CallContext, in_context
from hmt.models.fallback.features import not_followed
from hmt.models.fallback.interfaces import Mask, OneSequence
from hmt.models.fallback.module_tree import Tree, refused

_TOKENS = 6


@dataclass
class LayerTrace:
    """What one layer did.

    units       names of the children with parameters, as they were called
    attention   the one that attention was called in
    experts     the module that stands for routed experts, and the child that it was called in
    top_k       experts that a token goes to
    widths      numbers per token that the linear layers of each child made
    answers     whether the layer returns its hidden states as the first of several
    """

    kv: list[KVLayer] = field(default_factory=list)
    units: list[str] = field(default_factory=list)
    attention: str = ""
    experts: list[tuple[Any, str]] = field(default_factory=list)
    top_k: int = 0
    heads: int = 1
    widths: dict[str, int] = field(default_factory=dict)
    answers: int = 0
    unusual: str = ""


class TracedCall(nn.Module):
    """A layer while the model is looked at."""

    def __init__(self, inner: nn.Module, index: int, trace: "ModelTrace") -> None:
        super().__init__()
        self.inner = inner
        self.index = index
        object.__setattr__(self, "_model_trace", trace)

    def __getattr__(self, name: str) -> Any:
        """What the model asks its layer for."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("inner"), name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """As the layer's."""
        return object.__getattribute__(self, "_model_trace").layer(
            self.inner, self.index, args, kwargs
        )


class ModelTrace:
    """The record of one look."""

    def __init__(self, count: int, hidden_size: int) -> None:
        self.layers = [LayerTrace() for _ in range(count)]
        self.head = False
        self.problem = ""
        self._hidden_size = hidden_size
        self._at = -1
        self._inside = False
        self._unit = ""
        self.last = torch.empty(0)
        self._made: list[Tensor] = []  # what layers returned besides hidden states

    def layer(
        self, inner: nn.Module, index: int, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Call a layer, and note what is unusual about it."""
        hidden = args[0] if args else kwargs.get("hidden_states")
        if not isinstance(hidden, Tensor):
            self._complain("its layers are not given hidden states")
        elif hidden.shape != (1, _TOKENS, self._hidden_size):
            self._complain(
                f"between its layers are numbers of shape {list(hidden.shape)} for {_TOKENS} "
                f"tokens, and not {self._hidden_size} for each"
            )
        if index != self._at + 1:
            self._complain("its layers do not follow each other once each")
        if index and hidden is not self.last:
            self._complain("something is computed between its layers")
        given = [*args[1:], *kwargs.values()]
        if any(value is made for value in given for made in self._made):
            self._complain("its layers hand each other more than hidden states")
        self._at, self._inside = index, True
        result = inner(*args, **kwargs)
        self._inside = False
        rest: tuple[Any, ...] = ()
        if isinstance(result, tuple):
            result, rest = result[0], result[1:]
            self.layers[index].answers = 1 + len(rest)
            self._made += [made for made in rest if isinstance(made, Tensor)]
        self.last = result
        return (result, *rest) if self.layers[index].answers else result

    @contextmanager
    def unit(self, name: str) -> Iterator[None]:
        """A layer's child is called in the body."""
        outside, self._unit = self._unit, name
        if self._inside:
            self.layers[self._at].units.append(name)
        try:
            yield
        finally:
            self._unit = outside

    def table(self, block: BlockId) -> None:
        """Rows of a table were looked up."""

    def linear(self, width: int) -> None:
        """A linear layer was called."""
        if self._inside:
            widths = self.layers[self._at].widths
            widths[self._unit] = widths.get(self._unit, 0) + width

    def attention(
        self, module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, options: Any
    ) -> None:
        """Attention was asked for."""
        window = options.get("sliding_window") or 0
        if isinstance(mask, Mask):
            window = mask.window
            if not mask.usual:
                self._complain("its masks are neither causal nor windows")
        elif mask is not None:
            self._complain("it makes its own masks")
        else:
            self._complain("it has no mask: its tokens see those behind them")
        if options.get("is_causal", getattr(module, "is_causal", True)) is False:
            self._complain("its attention is not causal")
        self._keep(query.shape[1], key, value, window)

    def cached(self, key: Tensor, value: Tensor) -> None:
        """Keys and values went to the cache."""
        self._keep(key.shape[1], key, value, 0)

    def experts(self, module: Any, top_k: int) -> None:
        """Experts were asked for."""
        layer = self.layers[self._at]
        layer.experts.append((module, self._unit))
        layer.top_k = top_k

    def _keep(self, heads: int, key: Tensor, value: Tensor, window: int) -> None:
        layer = self.layers[self._at]
        if key.dim() != 4 or value.dim() != 4 or key.shape[:3] != value.shape[:3]:
            self._complain(
                f"it keeps keys {list(key.shape)} and values {list(value.shape)}, not one row "
                "for each token and head"
            )
            return
        kind = KVKind.SLIDING if window else KVKind.FULL
        layer.kv.append(KVLayer(kind, key.shape[1], key.shape[3], value.shape[3], window))
        layer.attention, layer.heads = self._unit, max(layer.heads, heads)

    def _complain(self, problem: str) -> None:
        self.problem = self.problem or problem


def trace_model(
    tree: Tree, layers: list[nn.Module], hidden_size: int, architecture: str
) -> ModelTrace:
    """Run the model over a few tokens.  Raises UnknownArchitectureError for one that cannot run.

    Attention yields nothing meanwhile, so that tokens must not depend on each other: what passes
    from one to the next by another way (a convolution, a shift) would be lost between steps.
    """
    tokens = list(range(1, _TOKENS + 1))
    trace, hidden = _run(tree, layers, hidden_size, architecture, tokens)
    if trace.problem:
        return trace
    _, other = _run(tree, layers, hidden_size, architecture, [_TOKENS + 1, *tokens[1:]])
    if _differ(hidden[:, 1:].nan_to_num(), other[:, 1:].nan_to_num()):
        trace.problem = "tokens reach each other by other ways than attention"
    if not trace.head:
        trace.problem = trace.problem or "its output layer is not one matrix"
    counts = {len(layer.kv) for layer in trace.layers}
    if counts != {1} and not (counts == {0} and not tree.own_attention):
        trace.problem = trace.problem or (
            f"its layers have {' or '.join(map(str, sorted(counts)))} attentions that keep "
            "something, and not one each"
        )
    return trace


def _differ(one: Tensor, other: Tensor) -> bool:
    """Whether two results differ by more than the order of sums.

    That changes with how many tokens go to an expert, where a model's code multiplies all at once.
    """
    near = 64 * torch.finfo(one.dtype).eps * float(one.abs().max())
    return float((one - other).abs().max()) > near


def _run(
    tree: Tree, layers: list[nn.Module], hidden_size: int, architecture: str, tokens: list[int]
) -> tuple[ModelTrace, Tensor]:
    """What was seen, and hidden states behind the layers."""
    trace = ModelTrace(len(layers), hidden_size)
    for index, layer in enumerate(layers):
        tree.layers[index] = TracedCall(layer, index, trace)
    cache = OneSequence(None, len(layers)) if tree.own_attention else None
    try:
        with torch.no_grad(), in_context(CallContext(None, record=trace)):
            options = call_surroundings(tree, torch.arange(_TOKENS), cache)
            tree.model(input_ids=torch.tensor([tokens]), **options)
    except Exception as error:
        logger.debug("%s failed when it was tried", architecture, exc_info=error)
        raise refused(architecture, trace.problem or not_followed(error)) from error
    finally:
        for index, layer in enumerate(layers):
            tree.layers[index] = layer
    return trace, trace.last


def call_surroundings(tree: Tree, positions: Tensor, cache: OneSequence | None) -> dict[str, Any]:
    """What the model is called with besides tokens; positions int64 [tokens] or [3, tokens]."""
    options: dict[str, Any] = {"use_cache": cache is not None, "return_dict": True}
    if cache is not None:
        options["cache"] = cache
    if tree.takes_positions:
        options["position_ids"] = positions.unsqueeze(-2)
    return options
