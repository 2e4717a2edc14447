"""Seams between rooms that types cannot hold."""

import ast
from collections.abc import Iterable
from pathlib import Path

import pytest
from parsed import nodes_of

SOURCE = Path(__file__).parents[2] / "src" / "hmt"


def imported(nodes: Iterable[ast.AST]) -> set[str]:
    """First names of all modules that a module imports, wherever in it."""
    names = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            names.add(node.module.split(".")[0])
    return names


@pytest.mark.parametrize(
    "name",
    [
        "allocator.py",
        "page_pool.py",
        "page_table.py",
        "sequence_slots.py",
        "offload/page_migration.py",
        "offload/write_back.py",
    ],
)
def test_what_allocates_kv_knows_numbers_and_no_tensors(name: str) -> None:
    assert "torch" not in imported(nodes_of(SOURCE / "kvcache" / name))


def test_what_kernels_keep_with_a_weight_is_theirs_alone() -> None:
    """Its lifetime rule stands in one place, and is kept there."""
    users = []
    for path in sorted(SOURCE.rglob("*.py")):
        for node in nodes_of(path):
            if isinstance(node, ast.Attribute) and node.attr == "kernel_cache":
                users.append(path.relative_to(SOURCE).as_posix())
    assert set(users) == {"kernels/weight_cache.py"}
