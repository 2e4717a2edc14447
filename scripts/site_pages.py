"""What mkdocs does besides: README.md is the first page, and links leave the repository's files out.

Pages link to files that are in the repository and not in docs/.  On the site their names are told.
"""

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

_ROOT = Path(__file__).parents[1]
_LINK = re.compile(r"(?<!!)\[([^\]]+)\]\(([^)\s]+)\)")
_IMAGE = re.compile(r"(!\[[^\]]*\])\(docs/")


def on_files(files: Files, config: Any) -> Files:
    """Make the first page of README.md."""
    text = (_ROOT / "README.md").read_text(encoding="utf-8")
    files.append(File.generated(config, "index.md", content=_of_readme(text)))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Tell links to files outside docs/ as names."""
    return _LINK.sub(_outside, markdown)


def _of_readme(text: str) -> str:
    return _IMAGE.sub(r"\1(", text).replace("](docs/", "](")


def _outside(link: re.Match[str]) -> str:
    text, target = link[1], link[2]
    if target.startswith("../"):
        return f"{text} (`{target[3:].partition('#')[0]}` in the repository)"
    if "://" in target or target.startswith("#") or target.partition("#")[0].endswith(".md"):
        if not target.startswith(("CONTRIBUTING", "CHANGELOG", "training/", "SECURITY")):
            return link[0]
    if "://" in target:
        return link[0]
    known = (_ROOT / "docs" / target.partition("#")[0]).exists()
    return link[0] if known else f"{text} (`{target.partition('#')[0]}` in the repository)"
