"""No module imports itself by way of others, and none imports too many."""

from graphlib import CycleError, TopologicalSorter

import pytest
from import_graph import imports, with_packages

MOST_IMPORTS = 18


def test_there_is_no_circle_of_imports():
    # Those inside of functions count: they only put off what a circle makes hard to follow.
    graph = {name: with_packages(name, found) for name, found in imports().items()}
    assert len(graph) > 400, "all modules are seen"
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(reversed(error.args[1])))


def test_a_circle_is_seen():
    with pytest.raises(CycleError):
        TopologicalSorter({"a": {"b"}, "b": {"c"}, "c": {"a"}}).prepare()


def test_imports_of_functions_are_seen():
    assert "hmt.kernels.triton.operations" in imports()["hmt.kernels.backend_registry"]


def test_modules_import_few_others():
    many = {name: len(found) for name, found in imports().items() if len(found) > MOST_IMPORTS}
    assert many == {}
