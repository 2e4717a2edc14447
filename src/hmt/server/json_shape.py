"""How much JSON a body may have, found without reading it: many small things cost more than text.

Of 4 MiB of `[],` Python makes 90 MB of lists, and pydantic complains of each.
"""

import re
from typing import Any, Final

from hmt.server.errors import ApiError

MOST_PARTS: Final = 1 << 15  # objects, lists, strings and names; 4600 messages have so many
MOST_NUMBERS: Final = 1 << 20  # and other values, such as tokens
_FIRST_BYTES: Final = 1 << 18

# Possessive, and to the end where a string does not end: so each byte is looked at once.
_TEXT: Final = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+(?:"|\\?\Z)', re.DOTALL)


def check_shape(body: bytearray) -> None:
    """Raise ApiError 400 for more parts than any request needs.

    Takes 10 to 100 ms for 4 MiB.
    """
    if len(body) <= MOST_PARTS:
        return
    if _parts(body) <= MOST_PARTS and body.count(b",") <= MOST_NUMBERS:
        return  # even if all of it were outside of strings
    size = 0
    while size < len(body):  # what is too much shows soon, and costs most
        size = 4 * size or _FIRST_BYTES
        bare = _TEXT.sub(b'"', body[:size])
        for found, most, what in (
            (_parts(bare), MOST_PARTS, "objects, lists, names and strings"),
            (bare.count(b","), MOST_NUMBERS, "values"),
        ):
            if found > most:
                raise ApiError(
                    400,
                    f"the first {min(size, len(body))} bytes of the body have {found} {what}, "
                    f"and {most} are read at most: send less at once",
                    code="invalid_json",
                )


def fail_fast(schema: Any) -> None:
    """Have the lists of a schema of pydantic_core, in place, end at their first wrong item.

    To complain of two million took 36 s and 4 GB.
    """
    if isinstance(schema, list | tuple):
        for part in schema:
            fail_fast(part)
    elif isinstance(schema, dict):
        if schema.get("type") == "list":
            schema["fail_fast"] = True
        for part in schema.values():
            fail_fast(part)


def _parts(text: bytes | bytearray) -> int:
    return text.count(b"{") + text.count(b"[") + text.count(b'"')
