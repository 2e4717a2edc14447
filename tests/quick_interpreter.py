"""Triton's interpreter without work whose results it drops, which is most of what it does.

* Sums, differences and products of integers are computed once more in 64 bits and compared with the
  type's limits; the interpreter then drops what it found, since it runs without `debug`.  Compiled
  kernels are compared with `debug` only, too.
* Each call of a function by a kernel looks through triton.language for what is to be replaced; that
  was done when the kernel began.
* Each result gets its own type, whose shape is checked, wrapped and written out.  There are
  few types, and nothing changes one: each is made once.
* Shapes are compared by wrapping both anew.
"""

from typing import Any

import triton.language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter


def make_quick() -> None:
    """Change the interpreter of this process, by the names of the Triton in constraints.txt."""
    options = interpreter.interpreter_builder.options
    assert not options.debug, "what overflows would be told"
    object.__setattr__(options, "sanitize_overflow", False)
    _patch_once()
    _make_types_once()
    _compare_shapes_quickly()


def _patch_once() -> None:
    patch, restore = interpreter._patch_lang, interpreter._LangPatchScope.restore
    running: list[tuple[Any, set[int]]] = []  # of the kernel that runs: its scope, what it replaced

    def patch_once(fn: Any) -> Any:
        seen = {id(value) for value in fn.__globals__.values() if value is tl or value is tl.core}
        if not running:
            running.append((patch(fn), seen))
            return running[0][0]
        scope, replaced = running[0]
        if not seen <= replaced:  # a function of a module that calls the language by another name
            scope._changes += patch(fn)._changes  # given back when the kernel has run
            replaced |= seen
        return scope

    def restore_once(scope: Any) -> None:
        restore(scope)
        if running and running[0][0] is scope:
            running.clear()

    interpreter._patch_lang = patch_once
    interpreter._LangPatchScope.restore = restore_once


def _make_types_once() -> None:
    core = tl.core
    make_type, make_tensor, equal = (
        core.block_type.__init__,
        core.tensor.__init__,
        core.dtype.__eq__,
    )
    numpy_type, common_type = interpreter._get_np_dtype, TritonSemantic.computation_type_impl
    types: dict[Any, dict[str, Any]] = {}  # attributes of a type, by what it is made of
    numpy_types: dict[str, Any] = {}
    common_types: dict[Any, Any] = {}  # what two operands are computed in

    def type_once(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = [n if type(n) is int else core._unwrap_if_constexpr(n) for n in shape]
        key = (element_ty.name, *sizes)
        known = types.get(key)
        if known is None or known["element_ty"] != element_ty:
            make_type(self, element_ty, shape)
            types[key] = self.__dict__
        else:
            self.__dict__ = known

    def tensor_once(self: Any, handle: Any, type: Any) -> None:
        known = type.__dict__.get("_of_tensors") if type.is_block() else None
        if known is None:
            make_tensor(self, handle, type)
            if type.is_block():
                type._of_tensors = (self.shape, self.numel, self.dtype)
        else:
            self.handle, self.type = handle, type
            self.shape, self.numel, self.dtype = known

    def common_once(
        self: Any, a_ty: Any, a_scalar: bool, b_ty: Any, b_scalar: bool, div: bool
    ) -> Any:
        key = (a_ty.name, a_scalar, b_ty.name, b_scalar, div)
        if key not in common_types:
            common_types[key] = common_type(self, a_ty, a_scalar, b_ty, b_scalar, div)
        return common_types[key]

    def is_equal(self: Any, other: Any) -> bool:
        return self is other or equal(self, other)

    def numpy_once(tt_dtype: Any) -> Any:
        name = tt_dtype.scalar.name
        if name not in numpy_types:
            numpy_types[name] = numpy_type(tt_dtype)
        return numpy_types[name]

    core.block_type.__init__ = type_once
    core.tensor.__init__ = tensor_once
    core.dtype.__eq__ = is_equal
    TritonSemantic.computation_type_impl = common_once
    interpreter._get_np_dtype = numpy_once


def _compare_shapes_quickly() -> None:
    broadcast = TritonSemantic.broadcast_impl_value

    def spread(self: Any, side: Any, shape: list[int]) -> Any:
        kind = tl.block_type(side.type.scalar, shape)
        return self.make_tensor(self.builder.create_broadcast(side.handle, shape), kind)

    def quickly(self: Any, lhs: Any, rhs: Any) -> Any:
        if not (lhs.type.is_block() and rhs.type.is_block()):
            return broadcast(self, lhs, rhs)
        left, right = lhs.type.shape.values, rhs.type.shape.values
        if left == right:
            return lhs, rhs
        both = list(zip(left, right, strict=False))
        if len(left) != len(right) or any(a != b and 1 not in (a, b) for a, b in both):
            return broadcast(self, lhs, rhs)  # it adds axes, or says what is wrong
        wanted = [b if a == 1 else a for a, b in both]
        if left != wanted:
            lhs = spread(self, lhs, wanted)
        if right != wanted:
            rhs = spread(self, rhs, wanted)
        return lhs, rhs

    TritonSemantic.broadcast_impl_value = quickly
