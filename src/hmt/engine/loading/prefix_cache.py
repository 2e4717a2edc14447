"""Prompts that begin like earlier ones: what loading opens for them, and what tells them apart."""

import hashlib
import json
from collections.abc import Mapping
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from hmt.base.errors import ConfigError, DiskReadError
from hmt.base.log import logger
from hmt.base.units import round_up
from hmt.contracts.model import Model, RotaryBorder
from hmt.engine.config import EngineConfig
from hmt.engine.loading.source import Source
from hmt.kvcache import AnyKV, KeyRange, SplitKVCache, page_encoding
from hmt.kvcache.prefix import (
    PageExtents,
    PrefixCache,
    PrefixStore,
    SavedStates,
    keep_prefixes,
    state_piece_bytes,
    store_buffer_bytes,
)
from hmt.memory import HostPool

if TYPE_CHECKING:
    from hmt.engine.scheduling.sequence import SequenceState

# Of a conversation, where its last two prompts and answers end.
_CHECKPOINTS_EACH = 4
_ALIGNMENT = 4096  # of what a pool gives


def spare_states(model: Model, config: EngineConfig) -> int:
    """Recurrent states that there is room for besides those of `max_batch` sequences.

    They are checkpoints, of sequences that were sent back, and what steps write on a guess.
    """
    if not model.spec.state_bytes:
        return 0
    if config.prefix_cache:
        return _CHECKPOINTS_EACH * config.max_batch
    return -(-config.max_batch // 2)


def prefix_bytes(model: Model, config: EngineConfig) -> int:
    """Host memory that pages pass through on their way to the disk and back."""
    if not config.prefix_cache or config.prefix_cache_dir is None:
        return 0
    nbytes = store_buffer_bytes(_extents(model, config.kv_quant[0]).page_bytes)
    if state := model.spec.state_bytes:
        nbytes += round_up(nbytes, _ALIGNMENT) - nbytes
        nbytes += store_buffer_bytes(state_piece_bytes(state))
    return nbytes


def open_prefixes(
    model: Model,
    source: Source,
    config: EngineConfig,
    kv: AnyKV,
    pool: HostPool,
    stack: ExitStack,
    ranges: Mapping[int, KeyRange],
) -> PrefixCache | None:
    """The prefix cache of `kv`, which keeps keys as `ranges` say, if there is to be one.

    Closed by `stack`.

    Raises ConfigError where this model or this placement has none, or the folder cannot be used.
    """
    if not config.prefix_cache:
        return None
    if isinstance(kv, SplitKVCache) and kv.is_on_devices and kv.states is not None:
        raise ConfigError(
            f"prompts of {model.spec.architecture} cannot share recurrent state that is on several "
            "GPUs: name one with --gpus, or leave the prefix cache off"
        )
    if isinstance(kv, SplitKVCache) and not kv.is_on_devices:
        raise ConfigError(
            "prompts cannot share keys and values while some layers compute on the CPU beside a "
            "GPU: give --gpu-memory enough for all attention, or leave the prefix cache off"
        )
    if config.kv_policy != "exact":
        raise ConfigError(
            "with --kv-policy select sequences hold KV pages that depend on what was left out; "
            "leave the prefix cache off, or choose --kv-policy exact"
        )
    store, extents = None, _extents(model, config.kv_quant[0])
    saved_states = None
    if config.prefix_cache_dir is not None:
        fingerprint = _fingerprint(source, config, extents, ranges)

        def opened(fingerprint: str, page_bytes: int) -> PrefixStore:
            assert config.prefix_cache_dir is not None
            capacity = config.prefix_cache_disk_memory_bytes
            made = PrefixStore(
                config.prefix_cache_dir, fingerprint, page_bytes, pool, capacity_bytes=capacity
            )
            stack.callback(made.close)
            return made

        store = opened(fingerprint, extents.page_bytes)
        if kv.states is not None:
            layout = f"{fingerprint} {model.spec.state}"
            states = opened(layout, state_piece_bytes(model.spec.state_bytes))
            saved_states = SavedStates(kv.states, states)
    checkpoints = None if kv.states is None else kv.states.checkpoints
    tree = keep_prefixes(kv.allocator, checkpoints=checkpoints)
    return PrefixCache(kv, tree, store, extents, saved_states)


def save_some(prefixes: PrefixCache) -> bool:
    """Save a file's worth of what ended sequences leave; whether there may be more."""
    try:
        return prefixes.tend()
    except DiskReadError as error:
        logger.warning("the beginning of a text could not be kept: %s", error)
        return False


def scope_of(sequence: "SequenceState", border: RotaryBorder | None, *, shared: bool) -> str:
    """What two requests must have in common, besides their tokens, to share KV pages.

    The owner, unless prefixes are `shared`; the request's own salt; what `salt_of` says; and its
    adapter, which changes all of the KV cache.  No two of these are written alike, and a request
    without any has the scope "".
    """
    salt = salt_of(sequence, border)
    owner = "" if shared else sequence.owner
    said = [owner, sequence.cache_salt, salt]
    if sequence.adapter is not None:
        return json.dumps([*said, sequence.adapter.fingerprint])
    return json.dumps(said) if owner or sequence.cache_salt else salt


def salt_of(sequence: "SequenceState", border: RotaryBorder | None) -> str:
    """What two sequences must have in common, besides their tokens, to have the same keys.

    Behind `whole` positions keys go by their own position, which is the same for all.
    """
    if border is None or sequence.whole <= border.positions:
        return ""
    return str(sequence.whole) if border.gradual else "long"


def _extents(model: Model, device_format: str) -> PageExtents:
    return PageExtents(model.spec.kv_layers, page_encoding(device_format, model.dtype))


def _fingerprint(
    source: Source, config: EngineConfig, extents: PageExtents, ranges: Mapping[int, KeyRange]
) -> str:
    """Of all that keys and values depend on: weights, how they are computed with, and how kept."""
    files = {record.file for record in source.checkpoint.records.values()}
    seen = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in sorted(files)]
    said: list[Any] = [
        dict(source.config),
        seen,
        extents.description,
        config.dtype,
        config.activations,
        str(config.quantization),
        config.kv_quant if config.kv_gpu_memory_bytes is not None else config.kv_quant[0],
    ]
    if config.depth != 1:  # who is in a recursion decides what is kept of it
        said.append(config.depth)
    said += [(n, own.middle.tolist(), own.spread.tolist()) for n, own in sorted(ranges.items())]
    return hashlib.blake2b(json.dumps(said, default=str, sort_keys=True).encode()).hexdigest()
