"""What Gluon's kernels of several modules share: names that Triton changed, indices, dependence."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy

from hmt.kernels.triton import pdl

# Triton 3.9 has other names for them than 3.6.
copy_ahead = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared
barrier = getattr(gl, "thread_barrier", None) or gl.barrier

next_may_begin = gluon.jit(pdl.next_may_begin.fn)
inputs_are_there = gluon.jit(pdl.inputs_are_there.fn)


@gluon.constexpr_function
def _without_others(layout, dim, rank):
    for other in range(rank - 1, -1, -1):
        if other != dim:
            layout = gl.SliceLayout(other, layout)
    return layout


@gluon.jit
def along(COUNT: gl.constexpr, DIM: gl.constexpr, LAYOUT: gl.constexpr):
    """0 .. COUNT as dimension DIM of a tensor of LAYOUT, others being 1."""
    RANK: gl.constexpr = LAYOUT.rank
    at = gl.arange(0, COUNT, layout=_without_others(LAYOUT, DIM, RANK))
    for i in gl.static_range(RANK):
        if i != DIM:
            at = gl.expand_dims(at, i)
    return at


@gluon.jit
def pick(which, first, second, third, COUNT: gl.constexpr):
    """One of the first COUNT."""
    found = first
    if COUNT > 1:  # noqa: SIM102 - known when compiling, `which` when running
        if which > 0:
            found = second
    if COUNT > 2:  # noqa: SIM102
        if which > 1:
            found = third
    return found
