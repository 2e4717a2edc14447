"""What each room exports, and what the core needs in order to be imported."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest
from parsed import tree_of

import hmt

SOURCE = Path(__file__).parents[2] / "src"
STRUCTURE = Path(__file__).parents[2] / "docs" / "structure.md"
ROOMS = sorted(
    ".".join(init.parent.relative_to(SOURCE).parts) for init in SOURCE.glob("hmt/**/__init__.py")
)
CORE = [room for room in ROOMS if not room.startswith("hmt.server")]


def init_of(room: str) -> ast.Module:
    return tree_of(SOURCE / room.replace(".", "/") / "__init__.py")


def test_every_public_name_of_hmt_is_there():
    assert [name for name in hmt.__all__ if not hasattr(hmt, name)] == []
    with pytest.raises(AttributeError):
        hmt.not_a_name  # noqa: B018


@pytest.mark.parametrize("room", [room for room in ROOMS if room.count(".") == 1])
def test_a_room_only_re_exports(room):
    allowed = (ast.Expr, ast.Import, ast.ImportFrom, ast.Assign)
    logic = [type(node).__name__ for node in init_of(room).body if not isinstance(node, allowed)]
    assert logic == []


@pytest.mark.parametrize("room", [room for room in ROOMS if room.count(".") == 1])
def test_the_map_of_rooms_names_the_room(room):
    assert f"`{room.removeprefix('hmt.')}`" in STRUCTURE.read_text(encoding="utf-8")


def run(program: str) -> str:
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_core_imports_without_the_servers_dependencies():
    run(
        "import sys, importlib\n"
        "for name in ('fastapi', 'pydantic', 'uvicorn', 'starlette'):\n"
        "    sys.modules[name] = None\n"  # importing it raises ImportError
        f"for room in {CORE!r}:\n"
        "    importlib.import_module(room)\n"
    )


def test_import_hmt_does_not_import_modelling_code():
    loaded = run("import hmt, sys; print(*sys.modules)").split()
    heavy = [name for name in loaded if name.startswith(("transformers.model", "hmt.cli"))]
    assert heavy == []
