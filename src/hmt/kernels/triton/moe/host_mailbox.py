"""Questions to the CPU, and its answers, without a call between them.

A mailbox is pinned host memory that the GPU writes and reads where it is.  Whoever writes, writes
the number of the step last.  csrc/experts/service.h is the other side.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from hmt.kernels.reference.expert_cache import ExpertShares
from hmt.kernels.triton.device_math import interpreted, rounded
from hmt.kernels.triton.pdl import dependent, inputs_are_there, next_may_begin

_NUMBERS = 4096  # that a program sends at a time
_PAIRS = 64
_TAKEN = 1024  # numbers of an answer that a program takes


@dataclass(frozen=True, slots=True)
class Mailbox:
    """One layer's, for up to so many tokens; in pinned host memory but for the last three.

    Layers may share `x` and `total`: both are in use only while the GPU waits for an answer.

    x         [tokens, hidden]
    chosen    int64 [tokens, top_k]: experts that are asked for, -1: none
    scales    f32 [tokens, top_k]
    cut       int32 [2]: see `ExpertShares`
    total     f32 [tokens, hidden]: the answer
    asked     int32 [1], and
    answered  int32 [1]: the step whose question, or answer, is complete
    number    int32 [1] on the device: the step
    first     int32 [1] on the device: whether the answer had come when it was taken; -1 where none
              was asked for
    relay     int32 [1] on the device: the step whose answer one program has seen, for the others
    """

    x: Tensor
    chosen: Tensor
    scales: Tensor
    cut: Tensor
    total: Tensor
    asked: Tensor
    answered: Tensor
    number: Tensor
    first: Tensor
    relay: Tensor


@triton.jit
def _ask_kernel(
    x, chosen, scales, cut, number, left, x_box, chosen_box, scales_box, cut_box, asked,
    x_numbers, pairs,
    NUMBERS: tl.constexpr, PAIRS: tl.constexpr, ASM: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """One program, so that a barrier comes between the question and its number."""
    next_may_begin(DEPENDENT)
    inputs_are_there(DEPENDENT)
    # Where nothing is asked for, the CPU may still be with the layer before, and read its x.
    for first in range(0, tl.where(tl.load(left) > 0, x_numbers, 0), NUMBERS):
        at = first + tl.arange(0, NUMBERS)
        tl.store(x_box + at, tl.load(x + at, mask=at < x_numbers), mask=at < x_numbers)
    for first in range(0, pairs, PAIRS):
        at = first + tl.arange(0, PAIRS)
        tl.store(chosen_box + at, tl.load(chosen + at, mask=at < pairs), mask=at < pairs)
        tl.store(scales_box + at, tl.load(scales + at, mask=at < pairs), mask=at < pairs)
    both = tl.arange(0, 2)
    tl.store(cut_box + both, tl.load(cut + both))
    tl.debug_barrier()
    step = tl.load(number)
    if ASM:
        # Cumulative: what other threads wrote before the barrier is there before it, too.
        tl.inline_asm_elementwise(
            "st.release.sys.global.u32 [$1], $2; mov.u32 $0, 0;",
            "=r,l,r",
            [asked, step],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
    else:
        tl.store(asked, step)


# The first thread waits until [$1] has come to $2; $0 is how far ahead it was at first.
_WAIT = """{
    .reg .pred p;
    .reg .u32 thread;
    .reg .s32 seen;
    mov.s32 $0, 0;
    mov.u32 thread, %tid.x;
    setp.ne.u32 p, thread, 0;
    @p bra DONE;
    ld.acquire.SCOPE.global.s32 seen, [$1];
    sub.s32 seen, seen, $2;
    mov.s32 $0, seen;
LOOK:
    setp.ge.s32 p, seen, 0;
    @p bra SEEN;
    ld.acquire.SCOPE.global.s32 seen, [$1];
    sub.s32 seen, seen, $2;
    bra LOOK;
SEEN:
    RELAY
DONE:
}"""
_RELAY = "st.release.gpu.global.s32 [$3], $2;"
_WAIT_FOR_HOST = tl.constexpr(_WAIT.replace("SCOPE", "sys").replace("RELAY", _RELAY))
_WAIT_FOR_RELAY = tl.constexpr(_WAIT.replace("SCOPE", "gpu").replace("RELAY", ""))


@triton.jit
def _wait(flag, step, relay, LEADS: tl.constexpr, ASM: tl.constexpr):
    """Until the flag, or what the leading program relays, has come to `step`.

    For the first thread: whether it had at first.  One thread looks: the GPU reads one word of host
    memory once a microsecond, whoever asks, and 28 warps that looked at it took 28 us to see what
    had long been there.
    """
    if ASM:
        ahead = tl.inline_asm_elementwise(
            _WAIT_FOR_HOST if LEADS else _WAIT_FOR_RELAY,
            "=&r,l,r,l",
            [flag if LEADS else relay, step, relay],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
    else:
        place = flag if LEADS else relay
        ahead = tl.load(place, volatile=True) - step
        seen = ahead
        while seen < 0:
            seen = tl.load(place, volatile=True) - step
        if LEADS:
            tl.store(relay, step)
    tl.debug_barrier()
    return (ahead >= 0).to(tl.int32)


@triton.jit
def _take_kernel(
    mine, total_box, answered, first, relay, number, left, out, states, shared, hidden,
    NUMBERS: tl.constexpr, ADD: tl.constexpr, ASM: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Axis 0: tokens; axis 1: parts.  out = mine + the answer, or mine if nothing was asked.

    With ADD: states + (that + shared), rounded where torch would round.
    """
    next_may_begin(DEPENDENT)
    inputs_are_there(DEPENDENT)
    KIND: tl.constexpr = out.dtype.element_ty
    row = tl.program_id(0).to(tl.int64) * hidden
    at = tl.program_id(1) * NUMBERS + tl.arange(0, NUMBERS)
    inside = at < hidden
    whole = tl.load(mine + row + at, mask=inside, other=0.0)
    if ADD:
        before = tl.load(states + row + at, mask=inside, other=0.0).to(tl.float32)
        more = tl.load(shared + row + at, mask=inside, other=0.0).to(tl.float32)
    leads = tl.program_id(0) + tl.program_id(1) == 0
    note = tl.full((), -1, tl.int32)
    if tl.load(left) > 0:
        step = tl.load(number)
        if leads:
            note = _wait(answered, step, relay, True, ASM)
        else:
            _wait(answered, step, relay, False, ASM)
        whole += tl.load(total_box + row + at, mask=inside, other=0.0, cache_modifier=".cg")
    if ADD:
        whole = before + rounded(rounded(whole, KIND) + more, KIND)
    tl.store(out + row + at, whole.to(out.dtype.element_ty), mask=inside)
    if leads:
        tl.store(first, note)


def ask(box: Mailbox, x: Tensor, shares: ExpertShares, scales: Tensor) -> None:
    """Ask the CPU for what `shares` leaves to it, for x [tokens, hidden] of the box's dtype."""
    assert x.dtype == box.x.dtype and len(x) <= len(box.x)
    x, scales = x.contiguous(), scales.contiguous()
    _ask_kernel[(1,)](
        x, shares.on_host, scales, shares.cut, box.number, shares.left,
        box.x, box.chosen, box.scales, box.cut, box.asked, x.numel(), scales.numel(),
        NUMBERS=_NUMBERS, PAIRS=_PAIRS, ASM=not interpreted(), num_warps=8,
        **dependent(x.device),
    )  # fmt: skip


def take(
    box: Mailbox, total: Tensor, shares: ExpertShares, added: tuple[Tensor, Tensor] | None = None
) -> Tensor:
    """`total` f32 [tokens, hidden] plus the CPU's answer, in the box's dtype.  Waits for it.

    With `added` (hidden, shared), of the box's dtype: hidden + (that + shared).
    """
    tokens, hidden = total.shape
    states, shared = (total, total) if added is None else (t.contiguous() for t in added)
    out = torch.empty(total.shape, dtype=box.x.dtype, device=total.device)
    _take_kernel[(tokens, triton.cdiv(hidden, _TAKEN))](
        total, box.total, box.answered, box.first, box.relay, box.number, shares.left, out, states,
        shared, hidden, NUMBERS=_TAKEN, ADD=added is not None, ASM=not interpreted(), num_warps=4,
        **dependent(total.device),
    )  # fmt: skip
    return out
