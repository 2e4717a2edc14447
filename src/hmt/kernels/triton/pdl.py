"""Kernels that begin before the one ahead of them has ended (programmatic dependent launch).

A step is a chain of short kernels, and between two of them the memory rests while programs end and
begin.  On Hopper and later a kernel's programs may take their places while the one ahead still
runs: they prepare, and ask the cache for weights, which no kernel writes, and then wait for what
the others made.  For that every kernel of a chain calls `next_may_begin` first of all, and
`inputs_are_there` before it reads or writes anything that a kernel ahead of it could write or read;
and each is launched with `dependent(...)`.  A kernel that never waits would let those behind it
overtake the ones ahead of it.

Now and then a chain wants an end, a kernel that is launched plainly (tokens are rounded to int8 and
sent to experts by such ones): without it an H200 took 1.6 times as long for steps of many small
kernels.

CUDA C++ Programming Guide, "Programmatic Dependent Launch and Synchronization".
"""

from functools import cache

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@cache
def dependent(where: torch.device) -> dict[str, bool]:
    """Options of a launch on `where`: DEPENDENT for the kernel, and what the launcher takes."""
    if where.type != "cuda" or torch.cuda.get_device_capability(where)[0] < 9:
        return {"DEPENDENT": False}
    return {"DEPENDENT": True, "launch_pdl": True}


@triton.jit
def next_may_begin(DEPENDENT: tl.constexpr):
    """Programs of the next kernel may take their places as soon as all of this one have theirs."""
    if DEPENDENT:
        gdc_launch_dependents()


@triton.jit
def inputs_are_there(DEPENDENT: tl.constexpr):
    """Wait until all kernels ahead have ended."""
    if DEPENDENT:
        gdc_wait()


@triton.jit
def ask_cache(at, DEPENDENT: tl.constexpr):
    """Let the L2 cache fetch the lines at `at`, a tensor of pointers; nothing waits for them."""
    if DEPENDENT:
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
            "=r,l",
            [at],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


@triton.jit
def ask_cache_for_rows(first, stride, count, size, DEPENDENT: tl.constexpr):
    """Let the L2 cache fetch `size` bytes of each of `count` rows, `stride` bytes apart.

    A thread asks for a row.  Sizes are rounded down to multiples of 16.
    """
    if DEPENDENT:
        tl.inline_asm_elementwise(
            """
            {
            .reg .pred p;
            .reg .b32 t, n;
            .reg .b64 a;
            mov.u32 t, %tid.x;
            and.b32 n, $4, -16;
            setp.lt.s32 p, t, $3;
            setp.gt.and.s32 p, n, 0, p;
            mad.wide.s32 a, t, $2, $1;
            and.b64 a, a, -16;
            @p cp.async.bulk.prefetch.L2.global [a], n;
            mov.u32 $0, 0;
            }
            """,
            "=r,l,r,r,r",
            [first, stride, count, size],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
