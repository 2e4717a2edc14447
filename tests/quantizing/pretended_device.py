"""A device whose tensors lie in host memory, and which mixes with no others, as a GPU's do not.

Its tensors say that they are on torch's device "meta".  An operation on one of them and one of host
memory fails, so that code is seen to have all of its tensors where it computes.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from hmt.memory.device import FakeDevice

WHERE = torch.device("meta")
_HOST = torch.device("cpu")
_MIXING = ("aten._to_copy", "aten.copy_", "aten.index")  # copies; indices may be the host's


class There(torch.Tensor):
    """A tensor of the device; `inner` has its numbers."""

    inner: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> "There":
        made = torch.Tensor._make_wrapper_subclass(
            cls, inner.shape, strides=inner.stride(), dtype=inner.dtype, device=WHERE
        )
        made.inner = inner
        return made

    def data_ptr(self) -> int:
        return self.inner.data_ptr()

    def tolist(self) -> Any:
        return self.inner.tolist()

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        return _dispatch(function, args, kwargs or {})


def _dispatch(function: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    seen: set[bool] = set()  # whether tensors are there

    def inner(one: Any) -> Any:
        if isinstance(one, There):
            seen.add(True)
            return one.inner
        if isinstance(one, torch.Tensor):
            if one.dim():
                seen.add(False)
        elif isinstance(one, list | tuple):
            return [inner(part) for part in one]
        return one

    given = [inner(one) for one in args]
    named = {name: inner(one) for name, one in kwargs.items()}
    mixes = len(seen) == 2 and not str(function).startswith(_MIXING)
    assert not mixes, f"{function} of tensors on both devices"
    asked = kwargs.get("device")
    there = True in seen if asked is None else torch.device(asked) == WHERE
    if asked is not None and there:
        named["device"] = _HOST
    found = function(*given, **named)
    written = function._schema.arguments[0].alias_info if args else None
    if written is not None and written.is_write:
        return args[0]
    if kwargs.get("out") is not None:
        return kwargs["out"]
    if not there:
        return found
    if isinstance(found, list | tuple):
        return type(found)(There(one) for one in found)
    return There(found) if isinstance(found, torch.Tensor) else found


class _Factories(TorchDispatchMode):
    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # True would import it, which takes seconds

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return _dispatch(function, args, kwargs or {})


class _Numbers(TorchFunctionMode):
    """Of `torch.tensor`, which makes tensors of "meta" without numbers."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        asked = kwargs.get("device")
        if function is torch.tensor and asked is not None and torch.device(asked) == WHERE:
            return function(*args, **kwargs | {"device": "cpu"}).to(WHERE)
        return function(*args, **kwargs)


class PretendedDevice(FakeDevice):
    """A fake device with tensors of its own.

    free   bytes of its memory that are
    """

    def __init__(self, free: int = 1 << 40) -> None:
        super().__init__()
        self.name, self.where, self.free = "a pretended device", WHERE, free

    def free_bytes(self) -> int:
        return self.free

    @contextmanager
    def compute_stream(self) -> Iterator[None]:
        # In inference mode operations come whole that are made of others, copies among them.
        off = {"__enter__": lambda mode: None, "__exit__": lambda mode, *error: None}
        whole = patch.multiple(torch.inference_mode, **off)
        with whole, torch.no_grad(), _Factories(), _Numbers():
            yield
