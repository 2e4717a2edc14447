"""Files that HMT keeps for later runs: written as a whole or not at all, read with suspicion."""

import contextlib
import os
import tempfile
from collections.abc import Mapping
from dataclasses import fields
from math import isfinite
from pathlib import Path
from typing import Any, TypeVar, get_args, get_type_hints

from hmt.base.errors import ConfigError
from hmt.base.units import parse_bytes

T = TypeVar("T")


def write_atomically(file: Path, text: str) -> None:
    """Make `text` the content of `file`, whatever it was; where it cannot be, nothing changes.

    Never fails, and leaves nothing half written, also on a full disk.  Makes the folder.
    """
    with contextlib.suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        descriptor, temporary = tempfile.mkstemp(dir=file.parent, prefix=file.name)
        try:
            with open(descriptor, "w") as output:
                output.write(text)
            os.replace(temporary, file)
        except OSError:
            os.unlink(temporary)
            raise


def parse_as(kind: type[T], content: Mapping[str, Any]) -> T:
    """A dataclass of numbers, strings and tables of numbers, from what JSON has kept of it.

    Fields that this version does not know are left out, so that another version's file is still
    of use.  Raises TypeError or ValueError for what no measurement gives: NaN, what is endless or
    negative, a text where a number is wanted.
    """
    hints = get_type_hints(kind)
    names = {field.name for field in fields(kind)}  # type: ignore[arg-type]
    return kind(**{name: _sound(hints[name], content[name]) for name in content if name in names})


def number_of(value: object) -> float:
    """What was measured: finite, and not negative.  Raises TypeError and ValueError."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{value!r:.40} is not a number")
    if not (0 <= value < 1e300 and isfinite(value)):
        raise ValueError(f"{value!r:.40} was not measured")
    return value


def sizes_of(content: Mapping[str, Any]) -> dict[str, float]:
    """Numbers by sizes, such as "64MiB".  Raises TypeError and ValueError."""
    found = {str(size): number_of(each) for size, each in content.items()}
    try:
        for size in found:
            parse_bytes(size)
    except ConfigError as error:
        raise ValueError(str(error)) from None
    return found


def _sound(hint: Any, value: Any) -> Any:
    if hint is str:
        if not isinstance(value, str):
            raise TypeError(f"{value!r:.40} is not a text")
        return value
    if get_args(hint):  # dict[str, float]
        return {str(key): number_of(each) for key, each in value.items()}
    found = number_of(value)
    return int(found) if hint is int else float(found)
