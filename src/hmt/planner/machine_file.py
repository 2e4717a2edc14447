"""Machines written down in TOML: the fields of `Machine`, sizes and rates as people write them.

name = "desktop"
ram_bytes = "64GiB"
ram_read_rate = "68GB/s"

[cpu_ops]
bf16 = 1.6e12
"""

import difflib
import re
import sys
import tomllib
from collections.abc import Mapping
from dataclasses import MISSING, fields
from typing import Any

from hmt.base.errors import ConfigError
from hmt.base.units import parse_bytes, parse_rate
from hmt.contracts.machine import Machine
from hmt.planner.shipped import shipped_names, text_of

KERNELS = (
    *("f32", "f16", "bf16", "fp8", "w8a8", "w8a16", "w4a8", "w4a16"),
    *("nvfp4a8", "nvfp4a16", "mxfp4a8", "mxfp4a16"),
)
"""What rates are known by: see hmt.quant.Format.kernel."""

_TOKENS = "@[1-9][0-9]{0,5}"  # "w4a8@8": with so many tokens or users
# By table: what its keys may have behind an encoding.  None: they are sizes.
_MAPS: Mapping[str, str | None] = {
    "cpu_rates": "",
    "cpu_ops": f"({_TOKENS})?",
    "cpu_in_layers": f"({_TOKENS})?",
    "cpu_row_s": f"({_TOKENS})?",
    "cached_rates": None,
    "cold_calls": None,
    "cpu_cached_rates": "",
    "device_rates": "",
    "device_ops": f"({_TOKENS})?",
    "device_layers": f"( experts)?({_TOKENS})?",
    "device_launches": f"( experts)?({_TOKENS})?",
}
_TEXTS = ("name", "device_name", "note")
_COUNTS = ("cores", "numa_nodes")


def machine_names() -> list[str]:
    """Descriptions that come with HMT."""
    return shipped_names("machines", ".toml")


def read_machine(source: str) -> Machine:
    """The machine of a TOML file, or one of `machine_names`.

    Raises MissingFileError, and ConfigError for a key that is unknown, missing or makes no sense.
    """
    try:
        content = tomllib.loads(text_of(source, "machines", ".toml", "machines"))
    except (ValueError, RecursionError) as error:  # of numbers and brackets without end, too
        raise ConfigError(f"{source} is not valid TOML: {error}") from None
    return machine_of(content, source)


def machine_of(content: Mapping[str, Any], source: str) -> Machine:
    """The machine of a parsed file; `source` is its name, for messages.  Raises ConfigError."""
    known = {entry.name: entry for entry in fields(Machine)}
    for key in content:
        if key not in known:
            near = difflib.get_close_matches(key, known, 1)
            hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(known)}"
            raise ConfigError(f"{source}: {key} is unknown; {hint}")
    for name, entry in known.items():
        needed = entry.default is MISSING and entry.default_factory is MISSING
        if needed and name not in content:
            raise ConfigError(f"{source}: {name} is missing")
    values = {name: _value(name, given, source) for name, given in content.items()}
    machine = Machine(**values)
    if machine.device_name and not (machine.device_bytes and machine.link_rate):
        raise ConfigError(f"{source}: a GPU needs device_bytes and link_rate")
    if machine.device_bytes and not machine.device_name:
        raise ConfigError(f"{source}: a GPU needs device_name, too, which is what plans call it")
    if machine.numa_distances and len(machine.numa_distances) != machine.numa_nodes:
        raise ConfigError(f"{source}: numa_distances needs a row for each of numa_nodes")
    if not machine.cores or not machine.ram_bytes:
        raise ConfigError(f"{source}: cores and ram_bytes must be more than 0")
    return machine


def machine_toml(machine: Machine) -> str:
    """The file of `machine`; reading it gives an equal one."""
    lines, tables = [], []
    for entry in fields(Machine):
        value = getattr(machine, entry.name)
        if isinstance(value, Mapping):
            if value:
                tables.append(f"\n[{entry.name}]")
                tables += [f"{_text(key)} = {number!r}" for key, number in value.items()]
        elif isinstance(value, tuple):
            if value:
                lines.append(f"{entry.name} = {[list(row) for row in value]!r}")
        elif value or entry.default is MISSING:
            shown = _text(value) if isinstance(value, str) else repr(value)
            lines.append(f"{entry.name} = {shown}")
    return "\n".join([*lines, *tables]) + "\n"


def _value(name: str, given: Any, source: str) -> Any:
    try:
        if name in _MAPS:
            if not isinstance(given, dict):
                raise ConfigError("must be a table, from encodings to rates")
            for key in given:
                _check_key(key, _MAPS[name])
            numbers = {key: _number(value) for key, value in given.items()}
            if name == "cold_calls" and any(number < 1 for number in numbers.values()):
                raise ConfigError("calls take 1 time as long, or more")
            return numbers
        if name in _TEXTS:
            if not isinstance(given, str):
                raise ConfigError("must be text")
            return given
        if name == "numa_distances":
            return _distances(given)
        if name.endswith("_bytes"):
            return parse_bytes(given)
        number = _number(given)
        if name in _COUNTS and (number < 1 or number != int(number)):
            raise ConfigError("must be a whole number of at least 1")
        if name == "remote_share" and number > 1:
            raise ConfigError("is a share of at most 1")
        return int(number) if name in _COUNTS else number
    except ConfigError as error:
        raise ConfigError(f"{source}: {name} = {given!r:.200}: {error}") from None


def _check_key(key: str, behind: str | None) -> None:
    """Of a table: what is unknown would count for nothing, and nobody would see it."""
    if behind is None:
        if not parse_bytes(key):
            raise ConfigError("sizes are more than 0")
    elif not re.fullmatch(f"({'|'.join(KERNELS)}){behind}", key):
        more = ", also with so many tokens or users as in w4a8@8" if "@" in behind else ""
        more += ", and w4a8 experts" if "experts" in behind else ""
        raise ConfigError(f"{key!r} is unknown; known: {', '.join(KERNELS)}{more}")


def _distances(given: Any) -> tuple[tuple[int, ...], ...]:
    """As many rows as columns, of whole numbers."""
    rows = given if isinstance(given, list) else [None]
    for row in rows:
        if not isinstance(row, list) or len(row) != len(rows):
            raise ConfigError("must be a list of rows, one per node, with as many distances each")
        if any(type(far) is not int or far < 1 for far in row):
            raise ConfigError("distances must be whole numbers of at least 1")
    return tuple(map(tuple, rows))


def _number(given: Any) -> float:
    number = parse_rate(given) if isinstance(given, str) else given
    if isinstance(number, bool) or not isinstance(number, int | float):
        raise ConfigError("must be a number, or a rate such as 55GB/s")
    if not 0 <= number <= sys.float_info.max:
        raise ConfigError("must be a number of at least 0")
    return float(number)


def _text(text: str) -> str:
    """A basic string of TOML."""
    escaped = "".join(
        f"\\u{ord(character):04x}" if ord(character) < 32 or character in '"\\\x7f' else character
        for character in text
    )
    return f'"{escaped}"'
