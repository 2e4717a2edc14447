"""Launches of the kernel for one token, and which weights it takes."""

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from hmt.base.units import round_down
from hmt.contracts.encoding import Activations, Encoding, Packing, WeightTensor
from hmt.kernels.reference.sublayers import NormOptions
from hmt.kernels.triton.dependent import dependent
from hmt.kernels.triton.dequantize import offset_kind

_STEP_BLOCKS = 8  # of 32 inputs, that a warp takes at once
_ROWS = 32  # of a program

# Between products, while attention has little to read, the cache is asked for what comes next: for
# all of a small weight, and for a part of a large one: FAR bytes by the product two before it, NEAR
# more by the one before a large one if it is small, or BEHIND if it is large.
_SMALL_BYTES = 16 << 20
_FAR, _NEAR, _BEHIND = 16 << 20, 4 << 20, 12 << 20
_AFTER = "after"  # of `WeightTensor.derived`: the weights of the product that followed
_ASKED_PIECES = 4  # of a program, each of a multiple of 16 bytes

# Steps that are copied ahead.  By warps: what fits beside programs of the kernels around it.
_SLOTS = {2: 4, 4: 4, 8: 3}
_GATED_SLOTS = 2


@dataclass(frozen=True, slots=True)
class Norm:
    """An RMS norm of the input: its weight, and its options."""

    weight: Tensor
    options: NormOptions


@dataclass(frozen=True, slots=True)
class Turn:
    """Rotary positions of a token: cos and sin [head_dim] as for `rope`."""

    cos: Tensor
    sin: Tensor


def takes_one_token(x: Tensor, weights: Sequence[WeightTensor], *, gated: bool = False) -> bool:
    """Whether `multiply_one` takes x [tokens, in] and up to three weights of one kind."""
    if len(x) != 1 or x.dtype is not torch.bfloat16 or not x.is_cuda or x.stride(1) != 1:
        return False
    if torch.cuda.get_device_capability(x.device)[0] != 9:
        return False
    return all(_takes(w, gated) for w in weights)


def _takes(w: WeightTensor, gated: bool) -> bool:
    plain = w.encoding is Encoding.INT4_GROUP and w.activations is Activations.FLOAT
    if not plain or w.encoding.packing is not Packing.PANELS or offset_kind(w):
        return False
    warps = _warps(w.shape[1], gated)
    whole = warps > 0 and w.shape[0] % _ROWS == 0 and w.group_size % 32 == 0
    if not whole or _STEP_BLOCKS * warps % (w.group_size // 32):
        return False
    assert w.scales is not None
    return w.data.data_ptr() % 16 == 0 and w.scales.data_ptr() % 16 == 0


def _warps(columns: int, gated: bool) -> int:
    """Warps of a program that all have as many steps, which are not few; 0 for none."""
    for warps in (4, 2) if gated else (8, 4, 2):
        of_step = 32 * _STEP_BLOCKS * warps
        # With a single step Triton 3.6 stops with an assertion.
        if columns % of_step == 0 and columns > of_step:
            return warps
    return 0


def multiply_one(
    out: Tensor,
    x: Tensor,
    weights: Sequence[WeightTensor],
    biases: Sequence[Tensor | None],
    *,
    more: Tensor | None = None,
    norm: Norm | None = None,
    activation: str = "",
    turn: Turn | None = None,
    add: bool = False,
) -> None:
    """x [1, in] times weights, side by side, to out [1, rows of all].

    norm         x is normed first, and before that `more` [1, in] is added to it
    activation   of the product with the first weight of two; it is multiplied with the other then
    turn         heads of the first two weights are rotated
    add          products are added to what out holds, and before that `more` [1, rows] is
    """
    # What this is written in changes more often than Triton: others shall not load it.
    from hmt.kernels.triton.one_token import one_token

    w = weights[0]
    given: list[WeightTensor | None] = [*weights, None, None][:3]
    sizes = sizes_of(w.shape[1], bool(activation))
    rows = w.shape[0] if activation else sum(one.shape[0] for one in weights)
    options = NormOptions(0.0) if norm is None else norm.options
    constants: dict[str, Any] = dependent(x.device)
    programs = rows // _ROWS
    pieces = _ASKED_PIECES * programs
    ahead = [(at, round_down(size // pieces, 16)) for at, size in _ahead(weights)]
    nothing = w.data.data_ptr(), 0  # of the type of an address
    ahead = [*ahead, nothing, nothing, nothing][:3]
    _follow(weights)
    one_token[(programs,)](
        out,
        x,
        more,
        None if norm is None else norm.weight,
        *(None if one is None else one.data.view(torch.int32) for one in given),
        *(None if one is None else one.scales for one in given),
        *[*biases, None, None][:3],
        None if turn is None else turn.cos,
        None if turn is None else turn.sin,
        *(at for at, _ in ahead),
        *(share for _, share in ahead),
        *(0 if one is None else one.shape[0] for one in given[:2]),
        options.eps,
        options.offset,
        COUNT=1 if activation else len(weights),
        GROUP_BLOCKS=w.group_size // 32,
        **sizes,
        APART=1 if turn is None else turn.cos.shape[-1] // 32,
        NORM=norm is not None,
        GEMMA=options.offset != 0,
        ACTIVATION=activation,
        TURN=turn is not None,
        ADD=add,
        num_warps=sizes["WARPS"],
        **constants,
    )


class _Order(threading.local):
    """What this thread multiplied with last: a model is computed by one thread."""

    derived: dict[Any, Any] | None = None


@dataclass(frozen=True, slots=True)
class _After:
    """What a product with a weight is followed by, where it lies: (address, bytes) of its weights.

    Nothing is held by this: it is a hint for a cache.
    """

    places: tuple[tuple[int, int], ...]
    derived: dict[Any, Any]

    @property
    def nbytes(self) -> int:
        """Of all weights."""
        return sum(size for _, size in self.places)

    def parts(self, first: int, size: int) -> list[tuple[int, int]]:
        """`size` bytes from `first` on, as far as there are so many, of all weights alike."""
        total, parts = self.nbytes, []
        for at, there in self.places:
            begin, count = (round_down(n * there // total, 128) for n in (first, size))
            parts.append((at + begin, max(0, min(count, there - begin))))
        return parts


_order = _Order()


def _follow(weights: Sequence[WeightTensor]) -> None:
    """Note that these are multiplied after what was last."""
    last, _order.derived = _order.derived, weights[0].derived
    if last is not None:
        places = tuple((w.data.data_ptr(), w.data.nbytes) for w in weights)
        last[_AFTER] = _After(places, weights[0].derived)


def _ahead(weights: Sequence[WeightTensor]) -> list[tuple[int, int]]:
    """What to ask the cache for: what followed the last time; addresses and bytes."""
    after: _After | None = weights[0].derived.get(_AFTER)
    if after is None:
        return []
    if sum(w.data.nbytes for w in weights) > _SMALL_BYTES:
        return after.parts(0, _BEHIND)
    if after.nbytes > _SMALL_BYTES:
        return after.parts(_FAR, _NEAR)
    farther: _After | None = after.derived.get(_AFTER)
    return after.parts(0, _SMALL_BYTES) + ([] if farther is None else farther.parts(0, _FAR))


def sizes_of(columns: int, gated: bool) -> dict[str, int]:
    """Block sizes: of inputs alone, so that parts of a matrix have the results of all of it."""
    warps = _warps(columns, gated)
    steps = columns // (32 * _STEP_BLOCKS * warps)
    slots = _GATED_SLOTS if gated else min(steps, _SLOTS[warps])
    return {
        "WARPS": warps,
        "STEPS": steps,
        "PADDED": triton.next_power_of_2(steps),
        "SLOTS": slots,
    }
