"""What mkdocs does besides: README.md is the first page, and links stay on the site.

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
    path = target.partition("#")[0]
    if "://" in target or not path or (_ROOT / "docs" / path).exists():
        return link[0]
    return f"{text} (`{path}` in the repository)"
