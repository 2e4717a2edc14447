"""Kernels in Gluon on tensors of the CPU, which Triton's interpreter does not take.

Their modules are loaded with a language in which tensors are torch's, pointers are offsets into
one, and layouts are nothing.  Which thread has what of an operand is said where an instruction in
assembler has to know it, in `_int8_product`.
"""

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import triton
from torch import Tensor

PACKAGE = "hmt.kernels.triton.gemm"
IN_A_PIECE = 2  # products in a piece of assembler


class Values(Tensor):
    """A tensor as kernels know them: no operation changes one."""

    def __iadd__(self, other: Any) -> Any:
        return self + other

    def __imul__(self, other: Any) -> Any:
        return self * other

    def to(self, dtype: torch.dtype, *, bitcast: bool = False) -> Any:
        return self.view(dtype) if bitcast else super().to(dtype)


class Pointer:
    """Some addresses in a tensor."""

    def __init__(self, base: Tensor, at: Tensor) -> None:
        self.base, self.at = base, at
        self.dtype = SimpleNamespace(element_ty=base.dtype)

    def __add__(self, offset: Any) -> "Pointer":
        return Pointer(self.base, self.at + offset)

    def __getitem__(self, key: Any) -> "Pointer":
        return Pointer(self.base, self.at[key])

    def load(self, mask: Tensor | None = None, other: float = 0.0) -> Tensor:
        inside = torch.tensor(True) if mask is None else mask
        at = torch.where(inside.expand(self.at.shape), self.at, 0)
        assert ((at >= 0) & (at < len(self.base))).all()
        if self.base.dtype.itemsize == 1:  # torch does not index FP8
            return self.base.view(torch.uint8)[at].view(self.base.dtype).as_subclass(Values)
        found = self.base[at].as_subclass(Values)
        return torch.where(inside, found, torch.tensor(other, dtype=found.dtype))

    def store(self, values: Tensor) -> None:
        assert values.dtype == self.base.dtype
        self.base[self.at] = values


class Shared:
    """Shared memory; what was not written is garbage."""

    def __init__(self, values: Tensor) -> None:
        self.values = values

    def index(self, at: Any) -> "Shared":
        assert 0 <= int(at) < len(self.values)
        return Shared(self.values[int(at)])

    def load(self, _layout: Any) -> Tensor:
        return self.values.clone().as_subclass(Values)

    def store(self, values: Tensor) -> None:
        assert (self.values.shape, self.values.dtype) == (values.shape, values.dtype)
        self.values.copy_(values)

    def reinterpret(self, dtype: torch.dtype, shape: list[int], _layout: Any) -> "Shared":
        return Shared(self.values.view(-1).view(dtype).view(*shape))


class Kernel:
    """A kernel, launched as Triton's are: one program after the other."""

    def __init__(self, function: Callable[..., None], state: dict[str, int]) -> None:
        self.function, self.state = function, state

    def __getitem__(self, grid: tuple[int]) -> Callable[..., None]:
        def launch(*arguments: Any, num_warps: int, **constants: Any) -> None:
            given = [_argument(one) for one in arguments]
            for program in range(*grid):
                self.state["program"] = program
                self.function(*given, **constants)

        return launch


def _argument(given: Any) -> Any:
    if isinstance(given, Tensor):
        return Pointer(given.view(-1), torch.tensor(0).as_subclass(Values))
    return given


def load_kernel(monkeypatch: pytest.MonkeyPatch, name: str, parts: tuple[str, ...]) -> None:
    """Let `name` in the module of that name be for the CPU; `parts` are modules that it imports."""
    state: dict[str, int] = {}
    gl, tl, ampere = _language(state), ModuleType("tl"), ModuleType("ampere")
    tl.constexpr = lambda value: value  # type: ignore[attr-defined]
    no_copies = {"commit_group": _nothing, "wait_group": _nothing, "async_load": _copy}
    ampere.async_copy = SimpleNamespace(**no_copies)  # type: ignore[attr-defined]
    gluon = ModuleType("gluon")
    gluon.jit, gluon.language = _known, gl  # type: ignore[attr-defined]
    experimental = ModuleType("experimental")
    experimental.gluon = gluon  # type: ignore[attr-defined]
    at = "triton.experimental"
    for path, module in (
        (at, experimental),
        (f"{at}.gluon", gluon),
        (f"{at}.gluon.language", gl),
        (f"{at}.gluon.language.nvidia.ampere", ampere),
        ("triton.language", tl),
    ):
        monkeypatch.setitem(sys.modules, path, module)
    monkeypatch.setattr(triton, "language", tl)
    monkeypatch.setattr(triton, "constexpr_function", lambda _function: _nothing)  # layouts
    for part in (*parts, name):
        path = Path(sys.modules[PACKAGE].__file__ or "").with_name(f"{part}.py")
        spec = importlib.util.spec_from_file_location(f"{PACKAGE}.{part}", path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        monkeypatch.setitem(sys.modules, f"{PACKAGE}.{part}", module)
    setattr(module, name, Kernel(getattr(module, name), state))


def _nothing(*_arguments: Any, **_options: Any) -> None:
    return None


def _copy(memory: Shared, source: Pointer) -> None:
    memory.store(source.load())


def _known(function: Callable[..., Any]) -> Callable[..., Any]:
    """What gluon.jit makes of a function: itself, or what stands for one that is in Triton."""
    activations: dict[str, Callable[[Tensor], Tensor]] = {
        "silu": torch.nn.functional.silu,
        "gelu": torch.nn.functional.gelu,
        "gelu_tanh": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
    }
    stand_ins: dict[str, Callable[..., Any]] = {
        "next_may_begin": _nothing,
        "inputs_are_there": _nothing,
        "rounded": lambda values, kind: values.to(kind).to(torch.float32),
        "activated": lambda values, name: activations[name](values),
    }
    return stand_ins.get(function.__name__, function)


def _language(state: dict[str, int]) -> ModuleType:
    def new(values: Tensor) -> Tensor:
        return values.as_subclass(Values)

    def where(condition: Any, one: Any, other: Any) -> Any:
        if not isinstance(condition, Tensor):
            return one if condition else other
        found = torch.where(condition, one, other)
        return found.to(torch.int32) if found.dtype == torch.int64 else found

    def allocate(dtype: torch.dtype, shape: list[int], _layout: Any) -> Shared:
        size = torch.Size(shape).numel() * dtype.itemsize
        return Shared(torch.full((size,), 0x7F, dtype=torch.uint8).view(dtype).view(*shape))

    gl = ModuleType("gl")
    for name in ("float32", "int8", "uint8", "int32", "int64", "abs", "rsqrt"):
        setattr(gl, name, getattr(torch, name))
    for name in ("Blocked", "Slice", "SwizzledShared", "DistributedLinear"):
        setattr(gl, f"{name}Layout", _nothing)
    for name, value in {
        "constexpr": lambda value: value,
        "static_range": range,
        "program_id": lambda _axis: state["program"],
        "where": where,
        "arange": lambda first, end, layout=None: new(torch.arange(first, end)),
        "full": lambda shape, value, dtype, _layout: new(torch.full(shape, value, dtype=dtype)),
        "multiple_of": lambda values, _count: values,
        "convert_layout": lambda values, _layout, assert_trivial=False: values,
        "div_rn": torch.div,
        "reshape": lambda values, shape: values.reshape(shape),
        "permute": lambda values, order: values.permute(order),
        "expand_dims": lambda values, axis: values.unsqueeze(axis),
        "broadcast": torch.broadcast_tensors,
        "join": lambda one, other: torch.stack((one, other), -1),
        "split": lambda values: values.unbind(-1),
        "sum": lambda values, axis: values.sum(axis, dtype=values.dtype),
        "max": lambda values, axis: values.amax(axis),
        "load": Pointer.load,
        "store": Pointer.store,
        "allocate_shared_memory": allocate,
        "shared_memory_descriptor": Shared,
        "inline_asm_elementwise": _assembled,
    }.items():
        setattr(gl, name, value)
    return gl


def _assembled(code: str, _constraints: str, given: list[Tensor], **_options: Any) -> Any:
    """What a piece of assembler does, for all threads."""
    if code.startswith("mul.lo.s32"):
        return given[0] * given[1]
    e2m1 = "prmt.b32" in code
    products = code.count("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32")
    assert products == IN_A_PIECE * (2 if e2m1 else 1)
    words, x, sums = given[:4], given[4:6], given[6:]
    found: list[Tensor] = []
    for part in range(IN_A_PIECE):
        one, other = words[2 * part : 2 * part + 2]
        own = sums[4 * part : 4 * part + 4]
        if not e2m1:
            codes = [w & 0x0F0F0F0F for w in (one, other, one >> 4, other >> 4)]
            found += _int8_product(codes, x, own)
            continue
        for table, kept in ((0x18100C08_06040200, -1), (0xF4F8FAFC_FDFEFF00, 0x77777777)):
            chosen = [w & kept for w in (one, other, one >> 16, other >> 16)]
            own = _int8_product([_permuted(table, w) for w in chosen], x, own)
        found += own
    return tuple(found)


def _permuted(table: int, selectors: Tensor) -> Tensor:
    """prmt.b32: bytes of a table, or all eight bits their sign."""
    numbers = torch.tensor([table >> 8 * i & 255 for i in range(8)]).to(torch.uint8)
    found = torch.zeros_like(selectors, dtype=torch.int64)
    for place in range(4):
        nibble = selectors.long() >> 4 * place & 15
        one = numbers.view(torch.int8).long()[nibble & 7]
        found |= (torch.where(nibble > 7, one >> 7, one) & 255) << 8 * place
    return found.as_subclass(Values)


def _int8_product(a: list[Tensor], b: list[Tensor], c: list[Tensor]) -> list[Tensor]:
    """mma.m16n8k32: PTX says which thread has what."""
    out = [part.clone() for part in c]
    group, place = torch.arange(32) // 4, torch.arange(32) % 4
    for warp in torch.arange(len(c[0])).view(-1, 32):
        left, right = torch.zeros(16, 32, dtype=torch.int64), torch.zeros(32, 8, dtype=torch.int64)
        for i in range(4):
            for part in range(4):
                rows, columns = group + part % 2 * 8, place * 4 + part // 2 * 16 + i
                left[rows, columns] = _byte(a[part][warp], i)
            for half in range(2):
                right[place * 4 + half * 16 + i, group] = _byte(b[half][warp], i)
        product = left @ right
        for part in range(4):
            rows, columns = group + part // 2 * 8, place * 2 + part % 2
            out[part][warp] += product[rows, columns].to(torch.int32)
    return out


def _byte(words: Tensor, number: int) -> Tensor:
    return (words.long() >> 8 * number).as_subclass(Tensor).to(torch.int8).long()
