"""Configuration: what the user asked for, resolved once into frozen data."""

import difflib
import math
import os
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal

from hmt.base.errors import ConfigError
from hmt.base.log import warn_once
from hmt.base.units import GIB, parse_bytes
from hmt.contracts.store import Verify
from hmt.kernels.cpu.threads import usable_threads
from hmt.kvcache import KV_EVICTION
from hmt.kvcache.codecs import CodecName, DiskCodecName
from hmt.memory import READERS, available_host_bytes
from hmt.planner import GOALS, Profile, read_profile
from hmt.quant import Scheme, parse_scheme
from hmt.weights import POLICIES

DTYPES = ("auto", "bfloat16", "float32", "float16")
EXECUTORS = ("overlapped", "plain")
ACTIVATIONS = ("auto", "exact")
KV_ENCODINGS = ("exact", "fp8", "int8", "int4")
KV_NEAR = ("exact", "fp8")

# Options that have new names: the old ones are understood for one release.
RETIRED = {
    "cache_policy": "expert_cache_policy",
    "disk_path": "spill_dir",
    "gpu_id": "gpus",
    "guesses": "expert_prefetch",
    "kv_device_memory": "kv_gpu_memory",
    "kv_disk": "kv_offload_dir",
    "kv_disk_memory": "kv_offload_disk_memory",
    "kv_order": "kv_eviction",
    "prefill_chunk": "max_prefill_tokens",
    "prefix_disk": "prefix_cache_dir",
    "prefix_disk_memory": "prefix_cache_disk_memory",
    "trace_experts": "expert_trace",
}
# Options without a successor, and the value that says what now always holds.
GONE = {"kv_select": "bound"}
SPECULATE = ("auto", "off", "lookup", "mtp")
_SHARE_OF_AVAILABLE = 0.8  # the rest is for the process itself and its neighbours


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Everything an engine is told, checked.  `resolve` makes one.

    quantization          how linear weights are stored in memory: see hmt.quant.parse_scheme; None:
                          as the checkpoint or the pack has them
    host_memory_bytes     budget for weights, KV, activations and buffers; not for the Python
                          process
    gpu_memory_bytes      memory that HMT may take of each GPU, the driver's share included, or of
                          all of them the same; (0,): compute on the CPU alone; None: that too, or
                          with gpus 90% of what is free
    gpus                  which GPUs, by their numbers, in the order in which layers are spread over
                          them: "0,1"; "fake" to try the tier without one; None: 0
    tp                    processes that divide each layer's heads, widths and experts
    ep                    processes that divide each layer's experts, and have the rest whole; with
                          tp, the same number
    pp                    stages of processes, each with some of the layers; times tp or ep, as many
                          processes.  Of several processes each has its part of host_memory and of
                          threads, and one of gpus
    context               positions of KV over all requests; None: the planner's choice
    adapters              (name, path) of low-rank adapters that requests may name: folders of
                          peft, or GGUF files; given as "NAME=PATH", or several of these
    adapter_memory_bytes  host memory that adapters in use may take together, also such as come
                          later; None: what `adapters` take
    mmproj                GGUF file with the encoder of images of a model in another GGUF file;
                          None: mmproj*.gguf beside that one, if one belongs to it
    dtype                 of activations; "auto" follows the checkpoint
    activations           "auto" multiplies weights that were published in 8 bits and fewer with
                          activations rounded to int8; "exact" with activations as they are
    fallback_model        checkpoint of the same model in higher precision, of which requests that
                          drift are computed with; None: with the model's own weights
    executor              "overlapped" reads ahead while it computes, "plain" reads when it needs
    prefetch_distance     layers read ahead; None: learned while it runs, from the planner's choice
    max_prefill_tokens    prompt tokens per step; None: the planner's choice, by model
    max_batch             requests that run at once
    speculate             "lookup" drafts next tokens by what the text said before, and verifies
                          several in a step, where that changes no answer and takes less time; "mtp"
                          also by the checkpoint's multi-token prediction layers, "draft=PATH" by a
                          smaller model of the same tokenizer, or by a drafter that was trained for
                          it; "off" does not; "auto" does what needs no memory: lookup
    depth                 of a mixture of recursions, layers that tokens pass through on average, as
                          a share of all: 1, or a depth that the checkpoint has thresholds for
    draft_tokens          draft tokens that a step may end with for each sequence of a model with
                          recurrent state, which has a journal for so many; None: 8, or as many as
                          there are in 1/64 of the host memory
    kv_gpu_memory_bytes   KV pages that stay where layers compute; what does not fit goes to
                          host memory, or to the disk; None: all stay
    kv_host_memory_bytes  of host memory for those that do not; None: what is needed
    kv_offload_dir        folder on a fast disk for the rest; None: none goes there
    kv_offload_disk_memory_bytes  of that disk; None: what is needed
    kv_quant              how KV is kept where layers compute, in host memory and on the disk: given
                          as "exact", "int8", "int4", or two of these and "fp8", how those are kept
                          that do not stay: "int8,int4"; "fp8": all of them, wherever they lie; of
                          three the first one, "exact" or "fp8", is for those that stay.  "exact"
                          elsewhere is as there.  The disk also knows codecs, also one for pages
                          of little attention: see hmt.kvcache.codecs.CodecName and DiskCodecName
    kv_eviction           whose pages go first: those that "a2cr", "lru" or "lfu" value least
    kv_policy             "exact": attention to all of the context; "select": tokens that are
                          decoded attend to the share `kv_share` of each sequence's pages, those
                          with the best bounds on scores, chosen anew for each
    prefix_cache          keep KV pages of ended sequences, for ones that begin alike
    prefix_cache_dir      folder to keep them in for later runs, too (made if need be); implies
                          prefix_cache
    prefix_cache_disk_memory_bytes  the most to take of that disk
    prefix_shared         let requests of all owners share them; else only those of one owner do
    idle_unload_s         seconds without images after which what images need leaves memory: the
                          tower's weights, and the process that decodes; None: when others need the
                          room
    spill_dir             folder on a fast disk for weights that were quantised on load and do not
                          fit in memory, in a file without a name; None: HMT's cache folder
    disk_reader           "io_uring", "direct" (threads, O_DIRECT), "buffered" (also called "mmap");
                          None: of the first two, the one that was measured to be faster on the
                          model's disk
    disk_depth            reads of disk_chunk_bytes at a time, and their size; None: as measured
    numa                  (CPU node, memory node) to bind to; "auto": the GPU's, or without one
                          memory is spread over all nodes (see hmt.memory.numa.choose); None: no
                          binding
    threads               that compute; None: torch's setting, up to one per physical core within
                          the affinity mask and the quota of the cgroup
    expert_cache_policy   which experts stay in memory: "heat", "lru", ...; see hmt.weights.eviction
    expert_prefetch       read experts that are likely to be needed, while that gains time
    goal                  search for the plan that is best for "latency", "throughput" or "balanced"
                          (see hmt.planner.what_if.objectives); None: attention first, then as much
                          as fits
    profile               choices written down: a YAML file, or "latency", "throughput", "balanced"
                          (see hmt.planner.what_if.profiles); prefetch_distance and max_batch, where
                          they are given, come first
    trace                 file to write what was read, computed and waited for, and when, for
                          ui.perfetto.dev; .gz compresses it
    expert_trace          file to write the routers' choices to, for `hmt plan --routing`
    check_weights         look for NaN when a block is first read (not of a pack, which holds none)
    verify_reads          compare the checksum of a pack's block when it is "first" read, "always",
                          or "never"; rows of an embedding on disk are compared unless "never"
    """

    quantization: Scheme | None
    host_memory_bytes: int
    gpu_memory_bytes: tuple[int, ...] | None = None
    gpus: tuple[str, ...] | None = None
    tp: int = 1
    pp: int = 1
    ep: int = 1
    context: int | None = None
    adapters: tuple[tuple[str, Path], ...] = ()
    adapter_memory_bytes: int | None = None
    mmproj: Path | None = None
    dtype: str = "auto"
    activations: str = "auto"
    fallback_model: Path | None = None
    executor: str = "overlapped"
    prefetch_distance: int | None = None
    max_prefill_tokens: int | None = None
    max_batch: int = 16
    speculate: str = "auto"
    depth: float = 1.0
    draft_tokens: int | None = None
    kv_gpu_memory_bytes: int | None = None
    kv_host_memory_bytes: int | None = None
    kv_offload_dir: Path | None = None
    kv_offload_disk_memory_bytes: int | None = None
    kv_quant: tuple[str, str, str] = ("exact", "exact", "exact")
    kv_eviction: str = "a2cr"
    kv_policy: str = "exact"
    kv_share: float = 0.1
    prefix_cache: bool = False
    prefix_cache_dir: Path | None = None
    prefix_cache_disk_memory_bytes: int = 4 * GIB
    prefix_shared: bool = False
    idle_unload_s: float | None = None
    spill_dir: Path | None = None
    disk_reader: str | None = None
    disk_depth: int | None = None
    disk_chunk_bytes: int | None = None
    numa: tuple[int, int] | Literal["auto"] | None = None
    threads: int | None = None
    check_weights: bool = True
    expert_cache_policy: str = "heat"
    expert_prefetch: bool = True
    goal: str | None = None
    profile: Profile | None = None
    trace: Path | None = None
    expert_trace: Path | None = None
    verify_reads: Verify = Verify.FIRST

    @staticmethod
    def resolve(**options: Any) -> "EngineConfig":
        """Check options as users write them: sizes as text, paths as text.

        `host_memory` defaults to 80% of the memory that is available now.  Raises ConfigError for
        an unknown option (naming the nearest known one), or a value that makes no sense.
        """
        options = _by_new_names(options)
        known = {_spoken(field.name) for field in fields(EngineConfig)}
        for name in options:
            if name not in known:
                near = difflib.get_close_matches(name, known, 1)
                hint = (
                    f"did you mean {near[0]!r}?" if near else f"known: {', '.join(sorted(known))}"
                )
                raise ConfigError(f"unknown option {name!r}; {hint}")
        values = {name: value for name, value in options.items() if value is not None}
        scheme = values.get("quantization")
        values["quantization"] = None if scheme is None else parse_scheme(scheme)
        if "gpu_memory" in values:
            values["gpu_memory_bytes"] = _sizes(values.pop("gpu_memory"))
        for field in fields(EngineConfig):
            if field.name.endswith("_bytes") and _spoken(field.name) in values:
                values[field.name] = parse_bytes(values.pop(_spoken(field.name)))
        if "idle_unload" in values:
            values["idle_unload_s"] = _idle_seconds(values.pop("idle_unload"))
        if "host_memory_bytes" not in values:
            values["host_memory_bytes"] = int(available_host_bytes() * _SHARE_OF_AVAILABLE)
        if "prefix_cache_dir" in values:
            values["prefix_cache_dir"] = Path(values["prefix_cache_dir"]).expanduser()
            values.setdefault("prefix_cache", True)
        if "kv_quant" in values:
            values["kv_quant"] = _kv_quant(values["kv_quant"])
        if "adapters" in values:
            values["adapters"] = _adapters(values["adapters"])
        if "gpus" in values:
            values["gpus"] = _gpus(values["gpus"])
        if isinstance(values.get("numa"), list):
            values["numa"] = tuple(values["numa"])
        for name in ("trace", "expert_trace", "mmproj", "fallback_model"):
            if name in values:
                values[name] = Path(values[name]).expanduser()
        for name in ("spill_dir", "kv_offload_dir"):
            if name in values:
                values[name] = _writable_folder(name, values[name])
        if "profile" in values:
            _with_profile(values)
        _check(values)
        values["verify_reads"] = Verify(values.get("verify_reads", Verify.FIRST))
        config = EngineConfig(**values)
        check_ranks(config)
        return config

    @property
    def ranks(self) -> int:
        """Processes that compute a model together."""
        return max(self.tp, self.ep) * self.pp

    def of_rank(self, rank: int) -> "EngineConfig":
        """What one of these processes is told: its part of the memory and of the threads."""
        if self.ranks == 1:
            return self
        sizes = self.gpu_memory_bytes
        if sizes is not None and len(sizes) > 1:
            sizes = sizes[rank : rank + 1]
        return replace(
            self,
            host_memory_bytes=self.host_memory_bytes // self.ranks,
            threads=self.threads or max(1, usable_threads() // self.ranks),
            gpus=None if self.gpus is None else self.gpus[rank : rank + 1],
            gpu_memory_bytes=sizes,
        )

    @property
    def on_gpu(self) -> bool:
        """Whether a GPU is asked for."""
        if self.gpu_memory_bytes is None:
            return self.gpus is not None
        return any(self.gpu_memory_bytes)


def check_ranks(config: EngineConfig) -> None:
    """Raise ConfigError for options that several processes do not have yet."""
    if config.ranks == 1:
        return
    numbers = ("tp", config.tp), ("ep", config.ep), ("pp", config.pp)
    asked = " and ".join(f"{name}={number}" for name, number in numbers if number > 1)
    if 1 < min(config.tp, config.ep) < max(config.tp, config.ep):
        raise ConfigError(
            f"{asked}: processes divide both, so give the same number, or one of them"
        )
    reasons = {
        "goal": (config.goal, "the search for a plan chooses for one process"),
        "profile": (config.profile, "a profile says what one process gets"),
        "kv_gpu_memory": (
            config.kv_gpu_memory_bytes,
            "each process keeps the KV cache of its heads",
        ),
        "prefix_cache": (
            config.prefix_cache,
            "other processes do not hear of pages that are shared",
        ),
        "adapters": (
            config.adapters or config.adapter_memory_bytes,
            "a process has its part of a layer, and an adapter all of it",
        ),
        "fallback_model": (config.fallback_model, "precision is raised by one process"),
        "speculate": (
            config.speculate.startswith(("mtp", "draft")) or None,
            "a draft model computes beside a model of one process",
        ),
        "numa": (config.numa, "it binds one process"),
        "trace": (config.trace, "it is of one process"),
        "expert_trace": (config.expert_trace, "it is of one process"),
    }
    for name, (given, reason) in reasons.items():
        if given:
            raise ConfigError(f"{name} and {asked} were asked for, and {reason}: leave one out")
    if config.on_gpu and len(config.gpus or ("0",)) != config.ranks:
        raise ConfigError(
            f"{asked} with {len(config.gpus or ('0',))} GPUs: give each process one, as in "
            f"gpus={','.join(map(str, range(config.ranks)))}"
        )


def _by_new_names(options: dict[str, Any]) -> dict[str, Any]:
    """Options with the new name of each that was renamed; warns once for each."""
    for old, new in RETIRED.items():
        if old in options:
            warn_once(old, f"{old} is now {new}; the old name goes with the next release")
    for old, held in GONE.items():
        if options.get(old, held) != held:
            raise ConfigError(f"{old}={options[old]!r} is gone: only {held} proved useful")
    return {RETIRED.get(name, name): given for name, given in options.items() if name not in GONE}


def _with_profile(values: dict[str, Any]) -> None:
    """Read the profile, and what it says of options that nobody gives."""
    if "goal" in values:
        raise ConfigError("a profile has a goal of its own: give --profile or --goal, not both")
    values["profile"] = profile = read_profile(str(values["profile"]))
    ahead = profile.prefetch if profile.parallel else 0
    for name, chosen in (("prefetch_distance", ahead), ("max_batch", profile.batch_size)):
        if chosen is not None:
            values.setdefault(name, chosen)


def _kv_quant(given: object) -> tuple[str, str, str]:
    """For where layers compute, host memory and the disk; see EngineConfig."""
    parts = str(given).split(",")
    if len(parts) == 1:
        parts = ["fp8", "exact", "exact"] if parts[0].lower() == "fp8" else parts * 2
    on_device, on_host, on_disk = parts if len(parts) == 3 else ("exact", parts[0], parts[-1])
    on_device, on_host = on_device.lower(), on_host.lower()
    if on_device not in KV_NEAR or on_host not in KV_ENCODINGS or len(parts) > 3:
        raise ConfigError(
            f"kv_quant={given!r}; choose {', '.join(KV_ENCODINGS)}, or two of them: for host "
            "memory and for the disk, which knows others as well, such as exact,int8+parts; "
            f"in front of these may be {' or '.join(KV_NEAR)} for what stays near"
        )
    name = DiskCodecName.parse(on_disk)  # says what is wrong with it, as the next does
    if name.usual.lower() in KV_ENCODINGS:
        return on_device, on_host, str(replace(name, usual=name.usual.lower()))
    CodecName.parse(name.usual)
    return on_device, on_host, on_disk


def _idle_seconds(given: object) -> float:
    number = isinstance(given, int | float) and not isinstance(given, bool)
    if not number or not 0 < float(given) < math.inf:  # type: ignore[arg-type]
        raise ConfigError(f"idle_unload={given!r} must be a number of seconds above 0")
    return float(given)  # type: ignore[arg-type]


def _parts(given: object) -> list[str]:
    """Of what is given as a list, or with commas between."""
    parts = given if isinstance(given, list | tuple) else str(given).split(",")
    return [str(part).strip() for part in parts]


def _sizes(given: object) -> tuple[int, ...]:
    if isinstance(given, int) and not isinstance(given, bool):
        return (given,)
    given = given if isinstance(given, list | tuple) else str(given).split(",")
    return tuple(parse_bytes(part.strip() if isinstance(part, str) else part) for part in given)


def _adapters(given: object) -> tuple[tuple[str, Path], ...]:
    """Names and paths, of "NAME=PATH" or several of these."""
    found: dict[str, Path] = {}
    for part in given if isinstance(given, list | tuple) else [given]:
        name, separator, path = str(part).partition("=")
        if not name or not separator or not path:
            raise ConfigError(f"adapters={part!r}; give NAME=PATH, with a name that requests use")
        if name in found:
            raise ConfigError(f"adapters: {name!r} is given twice; give each its own name")
        found[name] = Path(path).expanduser()
    return tuple(found.items())


def _gpus(given: object) -> tuple[str, ...]:
    names = _parts(given)
    real = all(name.isdecimal() for name in names) and len(set(names)) == len(names)
    if real or all(name == "fake" for name in names):
        return tuple(names)
    raise ConfigError(
        f"gpus is {given!r}: give the number of a GPU, 0 for the first one, or several numbers "
        "with commas between, each once"
    )


def _spoken(field: str) -> str:
    """Sizes are given with a unit, so users leave out "_bytes"; and times in seconds alone."""
    return field.removesuffix("_bytes").removesuffix("_s")


def _check(values: dict[str, Any]) -> None:
    choices = {
        "activations": ACTIVATIONS,
        "dtype": DTYPES,
        "executor": EXECUTORS,
        "disk_reader": READERS,
        "expert_cache_policy": tuple(POLICIES),
        "kv_eviction": tuple(KV_EVICTION),
        "goal": GOALS,
        "kv_policy": ("exact", "select"),
        "verify_reads": tuple(Verify),
    }
    for name, allowed in choices.items():
        if name in values and values[name] not in allowed:
            raise ConfigError(f"{name}={values[name]!r}; choose one of {', '.join(allowed)}")
    speculate = values.get("speculate", "auto")
    if speculate not in SPECULATE and not str(speculate).removeprefix("draft="):
        raise ConfigError("speculate=draft= names no model: give a folder or a file behind it")
    if speculate not in SPECULATE and not str(speculate).startswith("draft="):
        raise ConfigError(
            f"speculate={speculate!r}; choose one of {', '.join(SPECULATE)}, draft=PATH"
        )
    least = {
        "context": 1,
        "prefetch_distance": 0,
        "max_prefill_tokens": 1,
        "max_batch": 1,
        "draft_tokens": 0,
        "disk_depth": 1,
        "disk_chunk_bytes": 4096,
        "threads": 1,
        "tp": 1,
        "ep": 1,
        "pp": 1,
    }
    for name, minimum in least.items():
        value = values.get(name, minimum)
        if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
            raise ConfigError(f"{name}={value!r} must be a whole number of at least {minimum}")
    if values.get("disk_chunk_bytes", 4096) % 4096:
        raise ConfigError("disk_chunk must be a multiple of 4096 bytes, as O_DIRECT needs")
    for name in ("check_weights", "expert_prefetch", "prefix_cache", "prefix_shared"):
        if not isinstance(values.get(name, True), bool):
            raise ConfigError(f"{name}={values[name]!r} must be True or False")
    others = [name for name in values if name.startswith("kv_") and name != "kv_gpu_memory_bytes"]
    if values.get("kv_quant", ("",))[1:] == ("exact", "exact"):  # of these all may stay
        others.remove("kv_quant")
    if others and "kv_gpu_memory_bytes" not in values:
        raise ConfigError(
            f"{_spoken(others[0])} is for keys and values that do not stay where layers compute: "
            "say with kv_gpu_memory how much stays"
        )
    for name in ("kv_share", "depth"):
        if not 0 < values.get(name, 1) <= 1:
            raise ConfigError(f"{name}={values[name]!r} must be above 0 and at most 1")
    quant, order = values.get("kv_quant", ("", "", "")), values.get("kv_eviction", "a2cr")
    if DiskCodecName.parse(quant[2]).low is not None and order != "a2cr":
        raise ConfigError(
            f"kv_quant={','.join(quant)!r} keeps pages by the attention they get, which "
            f"kv_eviction {order!r} does not know: choose a2cr"
        )
    if "kv_offload_disk_memory_bytes" in values and "kv_offload_dir" not in values:
        raise ConfigError("kv_offload_disk_memory needs a folder: name one with kv_offload_dir")
    numa = values.get("numa")
    pair = isinstance(numa, tuple) and len(numa) == 2 and all(isinstance(n, int) for n in numa)
    if numa not in (None, "auto") and not pair:
        raise ConfigError(
            f'numa={numa!r} must be a pair (CPU node, memory node), such as (0, 0), or "auto"'
        )


def _writable_folder(name: str, path: str | Path) -> Path:
    folder = Path(path)
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        raise ConfigError(f"{name} {folder} must be a folder that exists and can be written to")
    return folder
