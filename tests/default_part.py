"""Which tests a run leaves for `--whole`.

A run covers every behaviour once; what repeats the same path with other parameters waits for
`--whole`.  Two markers say so:

* `whole`, on a parameter: `pytest.param(..., marks=pytest.mark.whole)`, or `after_first` of many.
* `each_once`, on a test or a module: of its parameters' combinations as few are run as contain each
  value of each; the others are `whole`.  Those written out in one `parametrize` all run.

No test function is left as a whole: each runs with some of its parameters.  Tests that are named
(`file::test`) or failed last (`--lf`) run always.

Of random examples CI has a third, hypothesis's and those that a test draws itself (`rounds`): there
they follow from the tests alone, and the others would be the same in each run.  With `--whole` it
has all; elsewhere hypothesis draws new ones each time, and all are tried.
"""

import os
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import settings

_LEFT = pytest.StashKey[int]()
_few = False  # whether random examples are a third
_THIRDS: dict[int, settings] = {}  # which this made: a function has one for all its parameters


def after_first(cases: Iterable[Any], count: int = 1) -> list[Any]:
    """`cases` for `pytest.mark.parametrize`, of which all but the first `count` are `whole`."""
    return [
        case if place < count else pytest.param(case, marks=pytest.mark.whole)
        for place, case in enumerate(cases)
    ]


def rounds(count: int) -> int:
    """How many of `count` random examples a test tries: a third of them in CI."""
    return max(count // 3, min(count, 5)) if _few else count


def first_of_each(cases: Iterable[Any]) -> list[Any]:
    """`cases` named `family-number`, or whose names are so: all but number 0 are `whole`."""
    return [
        case
        if getattr(case, "name", case).endswith("-0")
        else pytest.param(case, marks=pytest.mark.whole)
        for case in cases
    ]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--whole", action="store_true", help="run what repeats with other parameters")


def pytest_configure(config: pytest.Config) -> None:
    global _few
    _few = os.environ.get("CI") == "true" and not config.option.whole


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave tests marked `whole`, unless they are asked for, by their own names or `--whole`."""
    functions: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        functions[item.nodeid.partition("[")[0]].append(item)
    left: set[pytest.Item] = set()
    asked_for = config.option.whole or getattr(config.option, "lf", False)
    if not asked_for and not any("::" in name for name in config.args):
        for name, cases in functions.items():
            runs = _default_part([case for case in cases if not case.get_closest_marker("whole")])
            if not runs:
                raise pytest.UsageError(f"{name} is never run without --whole: mark parameters")
            left.update(set(cases) - set(runs))
    for item in items if _few else ():
        _try_a_third(item)
    config.stash[_LEFT] = len(left)
    if left:
        config.hook.pytest_deselected(items=[item for item in items if item in left])
        items[:] = [item for item in items if item not in left]


def _default_part(cases: list[pytest.Item]) -> list[pytest.Item]:
    """`cases`, or those that `each_once` leaves of them: of tests that need a GPU, all."""
    chosen: list[pytest.Item] = []
    values: dict[pytest.Item, set[tuple[int, str]]] = {}  # of a case: one of each `parametrize`
    for case in cases:
        spec = getattr(case, "callspec", None)
        if spec and case.get_closest_marker("each_once") and not case.get_closest_marker("gpu"):
            values[case] = set(enumerate(spec._idlist))
        else:
            chosen.append(case)
    missing = set().union(*values.values())
    while missing:
        best = max(values, key=lambda case: len(values[case] & missing))  # the first of several
        chosen.append(best)
        missing -= values[best]
    return chosen


def _try_a_third(item: pytest.Item) -> None:
    """Of hypothesis's examples, where `item` is a property or a state machine."""
    function: Any = getattr(item, "obj", None)
    function = getattr(function, "__func__", function)
    if getattr(function, "is_hypothesis_test", False):
        # The test case of a state machine has other settings, which are public.
        _set_third(function, "_hypothesis_internal_use_settings")
        _set_third(getattr(item, "cls", None), "settings")


def _set_third(owner: Any, name: str) -> None:
    before = getattr(owner, name, None)
    if isinstance(before, settings) and id(before) not in _THIRDS:
        third = settings(before, max_examples=rounds(before.max_examples))
        _THIRDS[id(third)] = third
        setattr(owner, name, third)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Processes of xdist tell the one that reports."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["left"] = session.config.stash.get(_LEFT, 0)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    node.config.stash[_LEFT] = getattr(node, "workeroutput", {}).get("left", 0)


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    left = config.stash.get(_LEFT, 0)
    if left:
        terminalreporter.write_line(
            f"{left} tests were left for --whole (./scripts/test --whole): "
            "what runs here, with more parameters"
        )
