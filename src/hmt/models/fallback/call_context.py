"""What a call of the model is about: replaced modules look here for weights, step and KV."""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from hmt.contracts.blocks import BlockId
from hmt.contracts.encoding import WeightTensor
from hmt.contracts.step import Segment, Step
from hmt.contracts.store import KVCache, Weights

Call = tuple[tuple[Any, ...], dict[str, Any]]  # what a module was called with


class StoppedError(Exception):
    """Ends a forward pass of which no more is wanted; never leaves this room."""


@dataclass(slots=True)
class CallContext:
    """One call of `embed`, `layer` or `head`; gone when it returns.

    weights     where leases come from; None while the model is only looked at
    record      told of calls while it is looked at
    step, kv    of `layer`
    layer       its index
    run         the one sequence that is computed, where the model's own code does attention
    lengths     that rotary frequencies of its tokens go by, int64 [tokens]; None: by positions
    new         of that sequence: keys and values that attention has seen, [tokens, heads, dim]
    residual    what came into the first module behind attention: [1, tokens, hidden_size]
    predicting  stop when experts are chosen, which `chosen` then are
    calls       what stages were called with, by layer
    instead     hidden states that take the place of all layers' result
    ends        stop at this stage
    stops       stop before the output layer, whose input is then in `seen`
    passage     the forward pass that stops in front of layers
    place       where its attention and experts lie; it computes everything else on the CPU.  Of an
                encoder of images: where all of it computes.
    """

    weights: Weights | None
    record: Any = None
    step: Step | None = None
    kv: KVCache | None = None
    layer: int = -1
    run: Segment | None = None
    lengths: Tensor | None = None
    new: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    residual: Tensor | None = None
    predicting: bool = False
    chosen: Tensor | None = None
    calls: dict[int, Call] = field(default_factory=dict)
    instead: Tensor | None = None
    ends: int = -1
    stops: bool = False
    seen: Tensor | None = None
    passage: Any = None
    place: torch.device | None = None
    _leased: BlockId | None = None
    _params: Mapping[str, WeightTensor] = field(default_factory=dict)
    _closing: ExitStack = field(default_factory=ExitStack)

    def use(self, block: BlockId) -> Mapping[str, WeightTensor]:
        """The parameters of `block`, leased until another one is used or the call ends."""
        assert self.weights is not None
        if block != self._leased:
            self.release()
            self._params = self._closing.enter_context(self.weights.lease(block))
            self._leased = block
        return self._params

    def release(self) -> None:
        """End the lease, if there is one."""
        self._leased, self._params = None, {}
        self._closing.close()


_HOST = torch.device("cpu")
_current: ContextVar[CallContext] = ContextVar("call_context")


@contextmanager
def in_context(context: CallContext) -> Iterator[CallContext]:
    """Replaced modules that are called in the body are about `context`."""
    token = _current.set(context)
    try:
        yield context
    finally:
        _current.reset(token)
        context.release()


def current_context() -> CallContext:
    """What the call at hand is about."""
    return _current.get()


def inputs_of(model: Any, step: Step, tokens: slice) -> dict[str, Tensor]:
    """Tokens, or their embeddings where some are of images, whose features those then have.

    model   transformers', whose table is looked up by the work at hand
    """
    ids = step.token_ids[tokens].to(_HOST)[None]
    if step.image_rows is None or step.image_features is None:
        return {"input_ids": ids}
    rows = step.image_rows.to(_HOST)
    first, end = tokens.start or 0, len(step.token_ids) if tokens.stop is None else tokens.stop
    own = (rows >= first) & (rows < end)
    if not bool(own.any()):
        return {"input_ids": ids}
    embeddings = model.get_input_embeddings()(ids).clone()
    features = step.image_features.to(embeddings.device, embeddings.dtype)
    embeddings[0, rows[own] - first] = features[own]
    return {"inputs_embeds": embeddings}


def positions_of(step: Step, tokens: slice) -> Tensor:
    """int64 [tokens], or [3, tokens] where the step's have three axes."""
    places = step.positions if step.axes is None else step.axes
    return places[..., tokens].to(_HOST)


def current_place() -> torch.device:
    """Where the call at hand computes, if there is one."""
    work = _current.get(None)
    return _HOST if work is None or work.place is None or work.step is not None else work.place
