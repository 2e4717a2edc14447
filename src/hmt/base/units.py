"""Sizes and rates: parsing what people type, printing what people read."""

import re

from hmt.base.errors import ConfigError

KIB = 1 << 10
MIB = 1 << 20
GIB = 1 << 30

_FACTORS = {
    "": 1,
    "b": 1,
    "k": KIB,
    "kib": KIB,
    "m": MIB,
    "mib": MIB,
    "g": GIB,
    "gib": GIB,
    "t": 1 << 40,
    "tib": 1 << 40,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
}
_MOST_BYTES = 1 << 60  # an exbibyte
_SIZE = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([a-zA-Z]*)\s*")


def parse_bytes(size: str | int) -> int:
    """Bytes in `size`: an int, or text such as "16GiB", "1.5 GB", "512M" (M is MiB).

    Raises ConfigError for anything else, and for negative numbers.
    """
    if isinstance(size, int) and not isinstance(size, bool):
        if size < 0:
            raise ConfigError(f"a size cannot be negative: {size}")
        if size > _MOST_BYTES:
            raise ConfigError("a size of more bytes than any machine has; write it as 16GiB")
        return size
    match = _SIZE.fullmatch(size) if isinstance(size, str) else None
    factor = _FACTORS.get(match[2].lower()) if match else None
    if match is None or factor is None:
        raise ConfigError(f"cannot read {size!r} as a size; write it as 512MiB, 16GiB or 1.5GB")
    found = float(match[1]) * factor
    if found > _MOST_BYTES:
        raise ConfigError(f"{size!r:.40} is more than any machine has; write it as 512MiB or 16GiB")
    return int(found)


def parse_rate(rate: str) -> int:
    """Bytes per second in text such as "55.4GB/s".  Raises ConfigError for anything else."""
    size, slash, unit = rate.partition("/")
    if not slash or unit.strip() != "s":
        raise ConfigError(f"cannot read {rate!r} as a rate; write it as 55GB/s or 900MB/s")
    return parse_bytes(size)


def format_bytes(count: float) -> str:
    """`count` bytes in binary units with three significant digits, e.g. "3.67 MiB"."""
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024:
            return f"{value:.0f} B" if unit == "B" else f"{_three_digits(value)} {unit}"
        value /= 1024
    return f"{_three_digits(value)} TiB"


def shown_at_least(nbytes: int) -> int:
    """The smallest size from `nbytes` on that is what `format_bytes` shows of it.

    12.92 MiB would be shown as 12.9: who is told to give as much must not give too little.
    """
    factor = 1
    while nbytes >= 1024 * factor and factor < _FACTORS["tib"]:
        factor *= 1024
    parts = 1 if nbytes >= 100 * factor else 10 if nbytes >= 10 * factor else 100
    count = -(-nbytes * parts // factor)
    while (shown := parse_bytes(format_bytes(count * factor / parts))) < nbytes:
        count += 1
    return shown


def format_rate(bytes_per_s: float) -> str:
    """A rate in decimal units, as disks and links are sold: "2.41 GB/s"."""
    value = float(bytes_per_s)
    for unit in ("B/s", "kB/s", "MB/s"):
        if abs(value) < 1000:
            return f"{_three_digits(value)} {unit}"
        value /= 1000
    return f"{_three_digits(value)} GB/s"


def format_seconds(seconds: float) -> str:
    """A duration at a readable scale: "312 µs", "4.20 ms", "1.25 s"."""
    if seconds < 1e-3:
        return f"{_three_digits(seconds * 1e6)} µs"
    if seconds < 1:
        return f"{_three_digits(seconds * 1e3)} ms"
    return f"{_three_digits(seconds)} s"


def round_up(value: int, multiple: int) -> int:
    """The smallest multiple of `multiple` that is at least `value`."""
    return -(-value // multiple) * multiple


def round_down(value: int, multiple: int) -> int:
    """The largest multiple of `multiple` that is at most `value`."""
    return value // multiple * multiple


def _three_digits(value: float) -> str:
    if abs(value) >= 100:
        return f"{value:.0f}"
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"
