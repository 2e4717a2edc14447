"""What a device leaves to the CPU in the middle of its work, and how numbers pass between them."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from torch import Tensor

from hmt.kernels.backend import backend_of

FeedForwardHandler = Callable[..., None]  # takes what `ops.feed_forward` takes

# Per thread: each engine has its own.
_handler: ContextVar[FeedForwardHandler | None] = ContextVar("elsewhere", default=None)


@contextmanager
def feed_forward_on_host(handler: FeedForwardHandler) -> Iterator[None]:
    """In the body, `handler` gets calls of `feed_forward` whose weights are on another device."""
    token = _handler.set(handler)
    try:
        yield
    finally:
        _handler.reset(token)


def feed_forward_handler() -> FeedForwardHandler | None:
    """Who computes feed-forward networks whose weights are elsewhere, if somebody does."""
    return _handler.get()


def copy_pairs(pairs: list[tuple[Tensor, Tensor]]) -> None:
    """`reference.copy_pairs`, by the device that one side of each pair is on."""
    first, second = pairs[0]
    backend = backend_of(first)
    (backend_of(second) if backend.on_host else backend).copy_pairs(pairs)
