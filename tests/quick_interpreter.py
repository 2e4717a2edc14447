"""Triton's interpreter without work whose results it drops, which is most of what it does.

* Sums, differences and products of integers are computed once more in 64 bits and compared with the
  type's limits; the interpreter then drops what it found, since it runs without `debug`.  Compiled
  kernels are compared with `debug` only, too.
* Each call of a function by a kernel looks through triton.language for what is to be replaced; that
  was done when the kernel began.
"""

from typing import Any

import triton.language as tl
from triton.runtime import interpreter


def make_quick() -> None:
    """Change the interpreter of this process, by the names of the Triton in constraints.txt."""
    options = interpreter.interpreter_builder.options
    assert not options.debug, "what overflows would be told"
    object.__setattr__(options, "sanitize_overflow", False)

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
