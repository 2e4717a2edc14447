"""Paragraphs and list items of the documentation are short enough to read at a glance."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
MAX_PARAGRAPH_CHARACTERS = 600
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))


def paragraphs(page: str) -> list[str]:
    """Paragraphs and list items of a Markdown page, without tables, code blocks and comments."""
    page = re.sub(r"<!--.*?-->|^```.*?^```", "\n", page, flags=re.DOTALL | re.MULTILINE)
    page = re.sub(r"^\|.*$", "", page, flags=re.MULTILINE)
    return [part for part in re.split(r"\n\s*\n|\n(?=\s*(?:[-*]|\d+\.) )", page) if part.strip()]


def test_pages_are_divided_into_paragraphs_and_items():
    page = "one\nline\n\n| table |\n\n```\ncode\n\ncode\n```\n- item\n- item <!-- no -->\n1. item\n"
    found = [part.split() for part in paragraphs(page)]
    assert found == [["one", "line"], ["-", "item"], ["-", "item"], ["1.", "item"]]


def test_paragraphs_are_below_600_characters():
    long = {
        f"{page.relative_to(ROOT)}: {part.strip()[:60]}": len(part.strip())
        for page in PAGES
        for part in paragraphs(page.read_text(encoding="utf-8"))
        if len(part.strip()) >= MAX_PARAGRAPH_CHARACTERS
    }
    assert long == {}
