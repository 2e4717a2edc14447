"""Under python -O asserts are gone: none may be all that stands between input and what it breaks.

In rooms that read what users, clients and files say, an assert only tells the type checker what a
value is.  The others get their input from these, and may state what they rely on.
"""

import ast
from pathlib import Path

from parsed import nodes_of

PACKAGE = Path(__file__).parents[2] / "src" / "hmt"
# What these get has been checked by rooms above them, or is measured by ourselves.
INNER = ("bench", "kernels", "kvcache", "layers", "memory", "quant", "weights")


def narrows(test: ast.expr) -> bool:
    """Whether a condition is about types alone: `is`, `is not`, `isinstance`."""
    if isinstance(test, ast.BoolOp):
        return all(map(narrows, test.values))
    if isinstance(test, ast.UnaryOp):
        return narrows(test.operand)
    if isinstance(test, ast.Compare):
        return all(isinstance(operator, ast.Is | ast.IsNot) for operator in test.ops)
    return (
        isinstance(test, ast.Call)
        and isinstance(test.func, ast.Name)
        and test.func.id == "isinstance"
    )


def test_an_assert_is_never_the_check_of_input() -> None:
    odd = [
        f"{file.relative_to(PACKAGE)}:{node.lineno}: {ast.unparse(node.test)}"
        for file in sorted(PACKAGE.rglob("*.py"))
        if file.relative_to(PACKAGE).parts[0] not in INNER
        for node in nodes_of(file)
        if isinstance(node, ast.Assert) and not narrows(node.test)
    ]
    assert odd == [], "raise a subclass of HMTError, or AssertionError for a fault of our own"


def test_asserts_of_tests_count_in_any_case() -> None:
    """pytest makes statements of them, so that `python -O -m pytest` checks something."""
    try:
        assert INNER == ()
    except AssertionError:
        return
    raise RuntimeError("this assert was not executed")
