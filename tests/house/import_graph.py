"""The imports of hmt's modules: of functions and of TYPE_CHECKING, too."""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from parsed import nodes_of

SOURCE = Path(__file__).parents[2] / "src"


@cache
def modules() -> dict[str, Path]:
    """Every module of the package by name, and its file."""
    return dict(_named())


@cache
def imports() -> dict[str, frozenset[str]]:
    """What each module imports of the package, by name; a package stands for its `__init__`."""
    return {name: frozenset(_imports_of(name, path) - {name}) for name, path in modules().items()}


def with_packages(name: str, imported: frozenset[str]) -> set[str]:
    """`imported`, and the packages around these that are imported with them.

    Not those that hold the module itself: they have begun to load when it does.
    """
    parts = (module.split(".")[:n] for module in imported for n in range(1, module.count(".") + 1))
    packages = {".".join(part) for part in parts}
    return imported | {package for package in packages if not f"{name}.".startswith(f"{package}.")}


def _named() -> Iterator[tuple[str, Path]]:
    for path in sorted(SOURCE.glob("hmt/**/*.py")):
        parts = path.relative_to(SOURCE).with_suffix("").parts
        yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts), path


def _imports_of(name: str, path: Path) -> set[str]:
    imported = set()
    for node in nodes_of(path):
        if isinstance(node, ast.Import):
            imported |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}: imports are absolute"
            assert node.module is not None
            for alias in node.names:
                module = f"{node.module}.{alias.name}"
                imported.add(module if module in modules() else node.module)
    return imported & set(modules())
