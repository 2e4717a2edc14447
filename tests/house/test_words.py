"""Names and flags use the words of the glossary (CONTRIBUTING.md)."""

import ast
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from parsed import nodes_of

SOURCE = Path(__file__).parents[2] / "src" / "hmt"

# A word here is a part of a name between underscores or capitals.
RETIRED = {
    "cold": "disk",
    "desk": "channel",
    "drive": "disk",
    "drives": "disks",
    "far": "host",
    "foreseen": "predicted",
    "foresight": "predictor",
    "guesser": "prefetcher",
    "hot": "device",
    "near": "device",
    "onlooker": "reader",
    "pretended": "fake",
    "shelf": "manager",
    "stepped": "graph",
    "teams": "backends",
    "voice": "dialect",
    "warm": "host",
    "yardstick": "probe",
}
# The field's own uses.
ALLOWED = {"so_far", "_so_far", "warm_up", "_warm_up", "prompts_to_warm"}


def defined(nodes: Iterable[ast.AST]) -> Iterator[tuple[int, str]]:
    """Names of classes, functions, parameters, fields and attributes; not of local variables."""
    for node in nodes:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.lineno, node.name
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            for argument in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs):
                yield argument.lineno, argument.arg
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.attr
        if isinstance(node, ast.ClassDef):
            for field in node.body:
                if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
                    yield field.lineno, field.target.id


def parts(name: str) -> set[str]:
    return {part.lower() for part in re.findall(r"[a-z0-9]+|[A-Z]+[a-z0-9]*", name)}


def test_names_use_the_words_of_the_glossary():
    wrong = []
    for path in sorted(SOURCE.rglob("*.py")):
        at = path.relative_to(SOURCE).as_posix()
        wrong += [f"{at}: {word}" for word in parts(path.stem) & set(RETIRED)]
        for line, name in defined(nodes_of(path)):
            if name not in ALLOWED:
                wrong += [f"{at}:{line} {name}: {RETIRED[w]}" for w in parts(name) & set(RETIRED)]
    assert wrong == []


def test_flags_use_the_words_of_the_glossary():
    flags = set()
    for path in sorted((SOURCE / "cli").rglob("*.py")):
        if path.stem != "retired_flags":
            flags |= set(re.findall(r"--[a-z][a-z-]+", path.read_text(encoding="utf-8")))
    wrong = {
        flag for flag in flags if parts(flag) & (set(RETIRED) | {"guesses", "texts", "pieces"})
    }
    assert wrong == set()
