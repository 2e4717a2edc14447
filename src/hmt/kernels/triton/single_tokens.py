"""Steps whose tokens have the bits that each has in a step of its own.

Most weights are multiplied with one token by another kernel than with several, and experts with
few pairs by another than with many: sums have other orders then.  While `single_tokens` is on,
kernels for one token are used for each of a step's tokens.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_ON: ContextVar[bool] = ContextVar("single tokens", default=False)


@contextmanager
def single_tokens() -> Iterator[None]:
    """In the body, each token is computed as if it were alone; for this thread."""
    before = _ON.set(True)
    try:
        yield
    finally:
        _ON.reset(before)


def are_single() -> bool:
    """Whether tokens are computed so."""
    return _ON.get()
