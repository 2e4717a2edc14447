"""Seams between rooms that types cannot hold."""

import ast
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src" / "hmt"


def imported(tree: ast.AST) -> set[str]:
    """First names of all modules that a module imports, wherever in it."""
    names = set()
    for node in ast.walk(tree):
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
    tree = ast.parse((SOURCE / "kvcache" / name).read_text(encoding="utf-8"))
    assert "torch" not in imported(tree)


def test_what_kernels_keep_with_a_weight_is_theirs_alone() -> None:
    """Its lifetime rule stands in one place, and is kept there."""
    users = []
    for path in sorted(SOURCE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute) and node.attr == "kernel_cache":
                users.append(path.relative_to(SOURCE).as_posix())
    assert set(users) == {"kernels/weight_cache.py"}
