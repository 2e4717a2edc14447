"""Machines written down in TOML: the fields of `Machine`, sizes and rates as people write them.

name = "desktop"
ram_bytes = "64GiB"
disk_read_rate = "6GB/s"

[cpu]
read_rate = "68GB/s"

[cpu.gemm]
"bf16@512" = 1.6e12

[[devices]]
name = "RTX 4090"
memory_bytes = "23.5GiB"
link_rate = "25GB/s"
"""

import difflib
import re
import sys
import tomllib
from collections.abc import Mapping
from dataclasses import MISSING, Field, fields
from typing import Any, TypeVar

from hmt.base.errors import ConfigError
from hmt.base.units import parse_bytes, parse_rate
from hmt.contracts.machine import ComputeRates, DeviceRates, Machine
from hmt.planner.builtin import builtin_names, builtin_text

KERNELS = (
    *("f32", "f16", "bf16", "fp8", "w8a8", "w8a16", "w4a8", "w4a16"),
    *("nvfp4a8", "nvfp4a16", "mxfp4a8", "mxfp4a16"),
)
"""What rates are known by: see hmt.quant.Format.kernel."""

T = TypeVar("T", ComputeRates, DeviceRates, Machine)

_GEMM_KEY = re.compile(f"({'|'.join(KERNELS)})@[1-9][0-9]{{0,5}}")
_TEXTS = ("name", "note")
_COUNTS = ("cores", "numa_nodes")
# Keys of machine files before 0.2, and where their values went.
_MOVED = {
    "ram_read_rate": "read_rate in [cpu]",
    "cpu_rates": '[cpu.gemm], as "w4a8@1"',
    "cpu_ops": '[cpu.gemm], as "w4a8@512"',
    "step_s": "step_overhead_s in [cpu]",
    "row_s": "sequence_overhead_s in [cpu]",
    "layer_s": "layer_overhead_s in [cpu]",
    "launch_s": "layer_overhead_s in [devices.compute]",
    "sync_s": "sync_overhead_s in [[devices]]",
    "device_name": "name in [[devices]]",
    "device_bytes": "memory_bytes in [[devices]]",
    "device_read_rate": "read_rate in [devices.compute]",
    "device_ops": '[devices.compute.gemm], as "bf16@512"',
    "device_rates": '[devices.compute.gemm], as "w4a16@1"',
    "link_rate": "link_rate in [[devices]]",
    "shared_link_rate": "shared_link_rate in [[devices]]",
    "shared_cpu_rate": "shared_cpu_rate in [[devices]]",
}


def machine_names() -> list[str]:
    """Descriptions that come with HMT."""
    return builtin_names("machines", ".toml")


def read_machine(source: str) -> Machine:
    """The machine of a TOML file, or one of `machine_names`.

    Raises MissingFileError, and ConfigError for a key that is unknown, missing or makes no sense.
    """
    try:
        content = tomllib.loads(builtin_text(source, "machines", ".toml", "machines"))
    except (ValueError, RecursionError) as error:  # of numbers and brackets without end, too
        raise ConfigError(f"{source} is not valid TOML: {error}") from None
    return machine_of(content, source)


def machine_of(content: Mapping[str, Any], source: str) -> Machine:
    """The machine of a parsed file; `source` is its name, for messages.  Raises ConfigError."""
    machine = _of_kind(Machine, content, source, "")
    if not machine.cores or not machine.ram_bytes:
        raise ConfigError(f"{source}: cores and ram_bytes must be more than 0")
    for device in machine.devices:
        if not (device.name and device.memory_bytes and device.link_rate):
            raise ConfigError(f"{source}: a GPU needs name, memory_bytes and link_rate")
    if machine.numa_distances and len(machine.numa_distances) != machine.numa_nodes:
        raise ConfigError(f"{source}: numa_distances needs a row for each of numa_nodes")
    return machine


def machine_toml(machine: Machine) -> str:
    """The file of `machine`; reading it gives an equal one."""
    return "\n".join([*_lines(machine, ""), ""])


def _lines(values: Machine | ComputeRates | DeviceRates, table: str) -> list[str]:
    """Of one table and those inside of it, which TOML wants last."""
    lines: list[str] = []
    tables: list[str] = []
    for entry in fields(values):
        value = getattr(values, entry.name)
        inner = f"{table}{entry.name}"
        if isinstance(value, ComputeRates):
            if rates := _lines(value, f"{inner}."):
                tables += ["", f"[{inner}]", *rates]
        elif isinstance(value, Mapping):
            if value:
                tables += ["", f"[{inner}]"]
                tables += [f"{_text(key)} = {number!r}" for key, number in value.items()]
        elif entry.name == "devices":
            for device in value:
                tables += ["", f"[[{inner}]]", *_lines(device, f"{inner}.")]
        elif isinstance(value, tuple):
            if value:
                lines.append(f"{entry.name} = {[list(row) for row in value]!r}")
        elif value or entry.default is MISSING:
            shown = _text(value) if isinstance(value, str) else repr(value)
            lines.append(f"{entry.name} = {shown}")
    return lines + tables


def _of_kind(kind: type[T], content: object, source: str, table: str) -> T:
    """A dataclass of numbers, strings and tables, from a table of a parsed file."""
    if not isinstance(content, Mapping):
        raise ConfigError(f"{source}: {table.rstrip('.')} must be a table, not {content!r:.80}")
    known: dict[str, Field[Any]] = {entry.name: entry for entry in fields(kind)}
    for key in content:
        if key not in known:
            near = difflib.get_close_matches(key, known, 1)
            hint = f"did you mean {table}{near[0]}?" if near else f"known: {', '.join(known)}"
            if not table and key in _MOVED:
                hint = f"it is now {_MOVED[key]}"
            raise ConfigError(f"{source}: {table}{key} is unknown; {hint}")
    for name, entry in known.items():
        needed = entry.default is MISSING and entry.default_factory is MISSING
        if needed and name not in content:
            raise ConfigError(f"{source}: {table}{name} is missing")
    values = {name: _value(name, given, source, table) for name, given in content.items()}
    return kind(**values)


def _value(name: str, given: Any, source: str, table: str) -> Any:
    inner = f"{table}{name}."
    if name in ("cpu", "compute"):
        return _of_kind(ComputeRates, given, source, inner)
    if name == "devices":
        if not isinstance(given, list):
            raise ConfigError(f"{source}: write each GPU as [[devices]]")
        return tuple(_of_kind(DeviceRates, each, source, inner) for each in given)
    try:
        return _plain_value(name, given)
    except ConfigError as error:
        raise ConfigError(f"{source}: {table}{name} = {given!r:.200}: {error}") from None


def _plain_value(name: str, given: Any) -> Any:
    if name == "gemm":
        return _gemm_rates(given)
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


def _gemm_rates(given: Any) -> dict[str, float]:
    """What is unknown would count for nothing, and would not be noticed."""
    if not isinstance(given, dict):
        raise ConfigError("must be a table, from encodings and tokens to rates")
    for key in given:
        if not _GEMM_KEY.fullmatch(key):
            raise ConfigError(
                f"{key!r} is unknown; write ENCODING@TOKENS, such as w4a8@1, with one of "
                f"{', '.join(KERNELS)}"
            )
    return {key: _number(value) for key, value in given.items()}


def _distances(given: Any) -> tuple[tuple[int, ...], ...]:
    """As many rows as columns, of whole numbers."""
    rows = given if isinstance(given, list) else [None]
    for row in rows:
        if not isinstance(row, list) or len(row) != len(rows):
            raise ConfigError("must be a list of rows, one per node, with as many distances each")
        if any(type(distance) is not int or distance < 1 for distance in row):
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
