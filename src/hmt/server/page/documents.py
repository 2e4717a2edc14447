"""The page's files, as they are sent: read once, and nothing but these."""

import hashlib
from dataclasses import dataclass
from importlib.resources import files
from typing import Final

_TYPES: Final = {
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}

# Nothing from elsewhere, nothing that stands in the document itself, and no text that becomes
# markup: what models write is only ever set as text.
_POLICY: Final = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self' data:",  # those that people send
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
)


@dataclass(frozen=True, slots=True)
class Document:
    """A file and its headers."""

    content: bytes
    headers: dict[str, str]


def _document(name: str, content: bytes) -> Document:
    headers = {
        "Content-Type": _TYPES[name[name.rindex(".") :]],
        "Content-Security-Policy": _POLICY,
        "Cross-Origin-Opener-Policy": "same-origin",
        "Referrer-Policy": "no-referrer",
        "X-Content-Type-Options": "nosniff",
        "Cache-Control": "no-cache",  # it is asked each time whether it has changed
        "ETag": f'"{hashlib.sha256(content).hexdigest()[:16]}"',
    }
    return Document(content, headers)


def _read() -> dict[str, Document]:
    found = {
        f"/page/{file.name}": _document(file.name, file.read_bytes())
        for file in (files(__package__) / "files").iterdir()
        if file.name[file.name.rfind(".") :] in _TYPES
    }
    found["/"] = found.pop("/page/index.html")
    return found


# By path.  They need no key: they hold no secret, and ask for the key themselves.
DOCUMENTS: Final = _read()
