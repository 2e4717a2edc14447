"""Making packs of checkpoints, and verifying them."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch

from hmt.base.errors import BudgetError, CheckpointError, ConfigError
from hmt.base.log import logger
from hmt.base.trace import Tracer
from hmt.base.units import MIB, format_bytes
from hmt.contracts.plan import Tier
from hmt.engine.config import EngineConfig
from hmt.engine.loading.disk import transfer_queue
from hmt.engine.loading.source import opened, sensitive_of, target
from hmt.kernels.cpu.threads import set_threads
from hmt.memory import HostPool, Ledger
from hmt.models import IMAGES_REFUSED, open_model, with_vision
from hmt.quant import Scheme
from hmt.weights import bind, named, published_bytes
from hmt.weights.pack import (
    Buffers,
    Damage,
    Manifest,
    PackWriter,
    Subject,
    lay_out_pack,
    looks_like_pack,
    read_manifest,
    verify_pack,
)

_VERIFY_PIECE_BYTES = 8 * MIB
_VERIFY_PIECES = 8


@dataclass(frozen=True, slots=True)
class Verified:
    """A pack that was read whole."""

    manifest: Manifest
    damages: list[Damage]


def convert(
    checkpoint: Path,
    out: Path,
    config: EngineConfig,
    *,
    force: bool = False,
    progress: Callable[[str, int, int], None] = lambda what, done, total: None,
) -> Manifest:
    """Make a pack in folder `out` of the checkpoint in `checkpoint`, as `config` says.

    Of the options, quantization, host_memory, threads and those of the disk count.  Memory holds a
    few blocks at a time, whatever the model's size: one for each thread and one that is read, or
    as many as fit in host_memory.  What an earlier call that was ended has written is checked and
    gone on with.  `progress(what, bytes done, bytes in all)` is called on this thread.

    Raises ConfigError where `out` cannot be or exists (with `force` a pack there is replaced, once
    the new one is complete), BudgetError where not one block fits, CheckpointError, DiskReadError,
    DiskWriteError and NumericsError.
    """
    if looks_like_pack(checkpoint):
        raise ConfigError(f"{checkpoint} is a pack already: give the checkpoint it was made of")
    subject = _subject(checkpoint, config.quantization or Scheme())
    set_threads(config.threads)
    with ExitStack() as stack:
        writer = PackWriter(subject, out, force=force)
        stack.callback(writer.close)
        most = torch.get_num_threads() + 1
        buffers = _buffers(stack, config, writer.slot_bytes, writer.staging_bytes, most)
        tracer = Tracer()
        queue = transfer_queue(config, tracer)
        stack.callback(queue.close)
        return writer.run(queue, tracer, buffers, progress)


def verify(
    folder: Path,
    config: EngineConfig,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Verified:
    """Read all of the pack in `folder` and compare every checksum.

    Of the options, host_memory and those of the disk count.  Raises CheckpointError where the
    manifest cannot be believed; all other damage is in the result.
    """
    manifest = read_manifest(folder)
    with ExitStack() as stack:
        buffers = _buffers(stack, config, _VERIFY_PIECE_BYTES, 0, _VERIFY_PIECES)
        queue = transfer_queue(config, Tracer())
        stack.callback(queue.close)
        return Verified(manifest, verify_pack(folder, manifest, queue, buffers, progress))


def _subject(path: Path, scheme: Scheme) -> Subject:
    checkpoint = opened(path)
    model = open_model(checkpoint.config, checkpoint.path, torch.float32)
    model = with_vision(model, checkpoint.config, checkpoint.path, checkpoint.records)
    for remark in model.spec.remarks:
        if remark.startswith(IMAGES_REFUSED):
            logger.warning("the pack holds no encoder of images: %s", remark)
    bound = bind(model.spec, checkpoint)
    if named(model.spec, checkpoint).headless:
        raise CheckpointError(
            f"{path} has no output layer (it is of a bare model, whose embedding is not tied): a "
            "pack would not know that; load it as it is, for embeddings"
        )
    wanted = target(scheme, sensitive_of(checkpoint.path, model.spec))
    layouts = lay_out_pack(bound, wanted)
    return Subject(
        checkpoint, layouts, str(scheme), model.spec.architecture, published_bytes(bound)
    )


def _buffers(
    stack: ExitStack, config: EngineConfig, slot_bytes: int, staging_bytes: int, most: int
) -> Sequence[Buffers]:
    """As many pairs of buffers as the budget holds, `most` at most, until `stack` ends."""
    budget, pair = config.host_memory_bytes, slot_bytes + staging_bytes
    count = min(most, budget // pair)
    if not count:
        raise BudgetError(
            f"{format_bytes(budget)} of host memory were given; the largest block needs "
            f"{format_bytes(slot_bytes)}, and {format_bytes(staging_bytes)} while it is converted: "
            f"give --host-memory {pair} or more"
        )
    ledger = Ledger({Tier.HOST: budget})
    slots = _pool(stack, ledger, "slots", count * slot_bytes)
    stagings = _pool(stack, ledger, "staging", count * staging_bytes)
    pairs = []
    for _ in range(count):
        slot = slots.allocate(slot_bytes)
        stack.callback(slots.free, slot)
        staging = stagings.allocate(staging_bytes) if staging_bytes else None
        if staging is not None:
            stack.callback(stagings.free, staging)
        pairs.append(Buffers(slot, staging))
    return pairs


def _pool(stack: ExitStack, ledger: Ledger, purpose: str, nbytes: int) -> HostPool:
    account = ledger.open(Tier.HOST, purpose, nbytes)
    stack.callback(account.close)
    pool = HostPool(account)
    stack.callback(pool.close)
    return pool
