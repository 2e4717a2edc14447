"""Devices are asked for in one place: everything else asks the registry, or the device."""

import ast
import re
from collections.abc import Iterable, Iterator

import pytest
from import_graph import SOURCE, imports, modules
from parsed import nodes_of, tree_of

# Backends and the registry that chooses between them; memory of devices.
ALLOWED = (
    "hmt/kernels/backend_registry.py",
    "hmt/kernels/cpu/",
    "hmt/kernels/reference/",
    "hmt/kernels/triton/",
    "hmt/memory/device/",
    "hmt/bench/competitors.py",  # measure kernels of one backend
    "hmt/bench/gpu_kernels.py",
)
NAME = re.compile(r"\b(cuda|xpu|mps)(:|$)")
TYPES = {"cpu", "cuda", "xpu", "mps"}
ASKED = {"is_cuda", "is_cpu", "is_xpu", "is_mps"}


def asks_for_a_device(nodes: Iterable[ast.AST]) -> Iterator[int]:
    """Lines that name a kind of device, or ask a tensor for its own."""
    nodes = list(nodes)
    # A string as a statement is a docstring.
    docstrings = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    for node in nodes:
        match node:
            case ast.Attribute(attr=name) if name in ASKED:
                yield node.lineno
            case ast.Attribute(value=ast.Name(id="torch"), attr="cuda" | "xpu" | "mps"):
                yield node.lineno
            case ast.Compare(left=left, comparators=others):
                sides = [left, *others]
                kinds = [s for s in sides if isinstance(s, ast.Attribute) and s.attr == "type"]
                named = {n.value for s in sides for n in ast.walk(s) if isinstance(n, ast.Constant)}
                if kinds and named & TYPES:
                    yield node.lineno
            case ast.Constant(value=str(text)) if id(node) not in docstrings and NAME.search(text):
                yield node.lineno


@pytest.mark.parametrize(
    "line",
    [
        "x.is_cuda",
        "x.cpu() if x.is_cpu else x",
        "if x.device.type == 'cpu': pass",
        "ok = where.type not in ('cpu', 'meta')",
        "torch.cuda.synchronize()",
        "open_device(f'cuda:{number}')",
        "x.to('cuda')",
    ],
)
def test_asking_is_seen(line):
    assert list(asks_for_a_device(ast.walk(ast.parse(line))))


@pytest.mark.parametrize(
    "line",
    ["'''A CUDA graph, on cuda: so.'''", "torch.device('cpu')", "x.to(where)", "cuda_graph=1"],
)
def test_other_things_are_not(line):
    assert not list(asks_for_a_device(ast.walk(ast.parse(line))))


def test_nothing_else_asks_for_a_device():
    found = {}
    for path in modules().values():
        file = path.relative_to(SOURCE).as_posix()
        if not file.startswith(ALLOWED):
            lines = list(asks_for_a_device(nodes_of(path)))
            found |= {file: lines} if lines else {}
    assert found == {}


def test_triton_is_imported_by_the_registry_only():
    users = {
        name
        for name, imported in imports().items()
        if any(module.startswith("hmt.kernels.triton") for module in imported)
        and not name.startswith(("hmt.kernels.triton", "hmt.bench."))
    }
    assert users == {"hmt.kernels.backend_registry"}


@pytest.mark.parametrize("folder", ["attention", "elementwise", "gemm", "moe", "transfer"])
def test_the_dispatch_table_names_every_file(folder):
    room = SOURCE / "hmt" / "kernels" / "triton" / folder
    table = ast.get_docstring(tree_of(room / "__init__.py"))
    assert table is not None
    files = {path.name for path in room.glob("*.py")} - {"__init__.py"}
    assert set(re.findall(r"\w+\.py", table)) == files
