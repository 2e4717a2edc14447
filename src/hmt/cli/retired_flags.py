"""What command lines had before: old names are understood for one release, and not shown."""

from collections.abc import Sequence

from hmt.base.errors import ConfigError
from hmt.base.log import warn_once

RETIRED = {
    "--also": "--extra-model",
    "--cache-policy": "--expert-cache-policy",
    "--disk-path": "--spill-dir",
    "--guesses": "--expert-prefetch",
    "--kv-device-memory": "--kv-gpu-memory",
    "--kv-disk": "--kv-offload-dir",
    "--kv-disk-memory": "--kv-offload-disk-memory",
    "--kv-order": "--kv-eviction",
    "--no-guesses": "--no-expert-prefetch",
    "--prefill-chunk": "--max-prefill-tokens",
    "--prefix-disk": "--prefix-cache-dir",
    "--prefix-disk-memory": "--prefix-cache-disk-memory",
    "--trace-experts": "--expert-trace",
}


# Flags without a successor, and the value that says what now always holds.
_GONE = {"--kv-select": "bound"}
_MOVED = {
    *("bigger-than-ram", "cache", "gpu", "hybrid", "kv", "kv-speed", "pages", "peer", "plans"),
    *("predictions", "prefix", "soak", "traces"),
}


def by_new_names(arguments: Sequence[str]) -> list[str]:
    """The arguments of a command line with the new name of each retired flag.

    Warns once for each.  What stands behind "--" stays as it is.  Raises ConfigError for a
    benchmark that left the package, and for a flag that is gone unless it says what now holds.
    """
    if arguments[:1] == ["bench"] and not _MOVED.isdisjoint(arguments[1:2]):
        raise ConfigError(
            f"hmt bench {arguments[1]} is now python -m hmt_bench {arguments[1]}, from a checkout "
            "of HMT (benchmarks/hmt_bench)"
        )
    out: list[str] = []
    rest = iter(arguments)
    for argument in rest:
        if argument == "--":
            return [*out, argument, *rest]
        flag, equals, value = argument.partition("=")
        if flag in _GONE:
            given, held = value if equals else next(rest, ""), _GONE[flag]
            if given != held:
                raise ConfigError(
                    f"{flag} {given} is gone: only {held} proved useful; leave it out"
                )
            warn_once(flag, f"{flag} is gone: {held} is what it always is now")
            continue
        new = RETIRED.get(flag)
        if new is not None:
            warn_once(flag, f"{flag} is now {new}; the old name goes with the next release")
        out.append(argument if new is None else new + equals + value)
    return out
