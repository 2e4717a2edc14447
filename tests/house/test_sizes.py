"""Files and functions stay small enough to read, and the tree small enough to travel."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest
from parsed import nodes_of

ROOT = Path(__file__).parents[2]
MAX_FILE_LINES = 500
MAX_FUNCTION_LINES = 80
MAX_TREE_BYTES = 64_000_000  # 49 of them are four trained models
SOURCES = {".py", ".cpp", ".cc", ".cu", ".h", ".hpp"}
EMPTY_NAMES = {"utils", "util", "helpers", "helper", "common", "misc"}


def tree() -> list[Path]:
    """Every file that is, or would be, in the repository."""
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout: which files belong to the tree is unknown")
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    )
    paths = (ROOT / name for name in listed.stdout.split("\0") if name)
    return [path for path in paths if path.is_file()]


def test_files_are_at_most_500_lines():
    lines = {
        path.relative_to(ROOT): len(path.read_text(encoding="utf-8").splitlines())
        for path in tree()
        if path.suffix in SOURCES
    }
    assert lines
    assert {path: n for path, n in lines.items() if n > MAX_FILE_LINES} == {}


def test_functions_are_at_most_80_lines():
    long = {}
    for path in tree():
        if path.suffix != ".py":
            continue
        for node in nodes_of(path):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                length = (node.end_lineno or node.lineno) - node.lineno + 1
                if length > MAX_FUNCTION_LINES:
                    long[f"{path.relative_to(ROOT)}:{node.name}"] = length
    assert long == {}


def test_no_file_is_named_after_nothing():
    named = [path for path in tree() if EMPTY_NAMES & {path.stem, *path.relative_to(ROOT).parts}]
    assert named == []


def test_the_tree_is_below_64_megabytes():
    assert sum(path.stat().st_size for path in tree()) < MAX_TREE_BYTES


def test_nothing_names_the_machine_it_was_written_on():
    # In pieces, so that this file does not name them either.
    words = ["/".join(["", name, ""]) for name in ("work", "farm")] + ["/".join(["..", "shared"])]
    found = []
    for path in tree():
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue  # weights
        found += [f"{path.relative_to(ROOT)}: {word}" for word in words if word in text]
    assert found == []


def test_modules_of_tests_have_names_of_their_own():
    # pytest puts each folder of tests on sys.path: the second `doubles` would be the first one.
    names = [path.stem for path in (ROOT / "tests").rglob("*.py") if path.stem != "conftest"]
    assert sorted(names) == sorted(set(names))


@pytest.mark.parametrize("name", ["speed_figures.py", "quality_figures.py"])
def test_figures_are_those_that_were_measured(name):
    script = ROOT / "benchmarks" / name
    subprocess.run([sys.executable, str(script), "--check"], cwd=ROOT, check=True)
