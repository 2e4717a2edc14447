"""docs/server.md has the fields that the schemas have."""

import importlib.machinery
import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest

from hmt.server.fields import Fields

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "write-field-tables"


@pytest.fixture(scope="module")
def script() -> Any:
    loader = importlib.machinery.SourceFileLoader("write_field_tables", str(SCRIPT))
    spec = importlib.util.spec_from_loader("write_field_tables", loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


def test_the_page_is_up_to_date(script: Any) -> None:
    page = (ROOT / "docs" / "server.md").read_text(encoding="utf-8")
    assert page == script.written(page), "run scripts/write-field-tables"


def test_the_tables_have_every_field(script: Any) -> None:
    text = script.tables()
    for _, kinds in script.TABLES:
        for kind in kinds:
            for name in (*kind.accepted(), *kind.IGNORED, *kind.REFUSED):
                assert f"`{name}`" in text


def test_a_field_has_one_fate(script: Any) -> None:
    def of(kind: type[Fields]) -> set[type[Fields]]:
        return {kind, *(one for child in kind.__subclasses__() for one in of(child))}

    for kind in of(Fields):
        groups = [set(kind.accepted()), set(kind.IGNORED), set(kind.REFUSED)]
        assert sum(map(len, groups)) == len(set().union(*groups)), kind
        for why in (*kind.IGNORED.values(), *(one.why for one in kind.REFUSED.values())):
            assert re.fullmatch(r"\S[^|\n]{5,95}\S", why), why
