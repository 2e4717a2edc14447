"""A small random checkpoint, its blocks, and a store over it whose disk can be made to fail."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from hmt.base.errors import DiskReadError
from hmt.base.trace import Tracer
from hmt.contracts.blocks import TRUNK, BlockId, BlockKind, BlockSpec, ParamSpec, Role
from hmt.contracts.model import ModelSpec
from hmt.contracts.plan import Tier
from hmt.contracts.store import Verify
from hmt.formats import open_checkpoint
from hmt.memory import (
    POISON,
    DiskReader,
    HostBuffer,
    HostPool,
    Ledger,
    PreadReader,
    ReadQueue,
)
from hmt.quant import Format, parse_scheme
from hmt.weights import (
    BlockLayout,
    EvictionPolicy,
    SpillFile,
    WeightStore,
    bind,
    lay_out,
    published_bytes,
    row_span_bytes,
)
from hmt.weights.pack import (
    Buffers,
    Manifest,
    PackWriter,
    Subject,
    looks_like_pack,
    open_pack,
)

WIDTH, LAYERS, EXPERTS, VOCABULARY, CHUNKS = 64, 3, 4, 96, 3


def block_specs(tied: bool = True) -> tuple[BlockSpec, ...]:
    """Embedding, layers with attention, router and experts, and a head in chunks."""
    table = ParamSpec("weight", (VOCABULARY, WIDTH), ("embed.weight",), Role.TABLE)
    specs = [BlockSpec(BlockId(TRUNK, BlockKind.EMBEDDING), (table,))]
    for layer in range(LAYERS):
        norm = ParamSpec("norm", (WIDTH,), (f"{layer}.norm",), Role.VECTOR)
        q_proj = ParamSpec("q_proj", (2 * WIDTH, WIDTH), (f"{layer}.q", f"{layer}.q.weight"))
        router = ParamSpec("router", (EXPERTS, WIDTH), (f"{layer}.router",), Role.VECTOR)
        specs.append(BlockSpec(BlockId(layer, BlockKind.ATTENTION), (norm, q_proj)))
        specs.append(BlockSpec(BlockId(layer, BlockKind.ROUTER), (router,)))
        for expert in range(EXPERTS):
            name = f"{layer}.{expert}"
            params = (
                ParamSpec("up", (3 * WIDTH, WIDTH), (f"{name}.up",)),
                ParamSpec("down", (WIDTH, 3 * WIDTH), (f"{name}.down",)),
            )
            specs.append(BlockSpec(BlockId(layer, BlockKind.EXPERT, expert), params))
    step = VOCABULARY // CHUNKS
    for chunk in range(CHUNKS):
        rows = (chunk * step, (chunk + 1) * step)
        source = "embed.weight" if tied else "head.weight"
        head = ParamSpec("weight", (step, WIDTH), (source,), rows=rows)
        specs.append(BlockSpec(BlockId(TRUNK, BlockKind.HEAD, chunk), (head,)))
    return tuple(specs)


def model_spec(tied: bool = True) -> ModelSpec:
    return ModelSpec("Test", LAYERS, WIDTH, VOCABULARY, 128, block_specs(tied), (), 1)


def write_checkpoint(
    folder: Path,
    dtype: torch.dtype = torch.bfloat16,
    tied: bool = True,
    change: Callable[[dict[str, torch.Tensor]], None] | None = None,
) -> dict[str, torch.Tensor]:
    """Two shards of random numbers; returns the tensors."""
    generator = torch.Generator().manual_seed(1)
    tensors = {}
    for block in block_specs(tied):
        for param in block.params:
            rows = VOCABULARY if param.rows else param.shape[0]
            shape = (rows, *param.shape[1:])
            if param.sources[0] not in tensors:
                tensors[param.sources[0]] = torch.randn(shape, generator=generator).to(dtype)
    if change is not None:
        change(tensors)
    names = list(tensors)
    for shard, part in enumerate((names[::2], names[1::2])):
        file = folder / f"model-{shard + 1:05}-of-00002.safetensors"
        save_file({name: tensors[name] for name in part}, file)
    (folder / "config.json").write_text(json.dumps({"architectures": ["Test"]}))
    return tensors


class FaultyReader:
    """Fails where `fails(number of the read)` says so."""

    def __init__(self, fails: Callable[[int], bool] = lambda number: False) -> None:
        self.inner: DiskReader = PreadReader()
        self.fails = fails
        self.reads = 0

    def read_into(self, path: Path, offset: int, view: memoryview) -> int:
        self.reads += 1
        if self.fails(self.reads):
            view[: len(view) // 2] = b"\xff" * (len(view) // 2)
            raise DiskReadError(f"injected: {path} at {offset}")
        return self.inner.read_into(path, offset, view)

    def close(self) -> None:
        self.inner.close()


@dataclass
class Bench:
    """A store and everything under it."""

    store: WeightStore
    layouts: dict[BlockId, BlockLayout]
    ledger: Ledger
    reader: FaultyReader
    pools: list[HostPool]
    spill: SpillFile | None

    def close(self) -> None:
        self.store.close()
        for pool in self.pools:
            pool.close()
            pool.account.close()
        if self.spill is not None:
            self.spill.close()
        assert self.ledger.reserved_bytes(Tier.HOST) == 0, "leaked"


def target(scheme: str) -> Callable[[ParamSpec, BlockKind], Format | None]:
    """What `scheme` makes of a parameter."""
    parsed = parse_scheme(scheme)
    return lambda param, kind: parsed.format_for(param)


def write_pack(
    folder: Path,
    out: Path,
    *,
    scheme: str = "none",
    tied: bool = True,
    pairs: int = 2,
    progress: Callable[[str, int, int], None] = lambda what, done, total: None,
    **options: Any,
) -> Manifest:
    """A pack in `out` of the checkpoint in `folder`, made in `pairs` of buffers.

    Other options are PackWriter's.
    """
    checkpoint = open_checkpoint(folder)
    bound = bind(model_spec(tied), checkpoint)
    layouts = lay_out(bound, target(scheme), in_place=False)
    subject = Subject(checkpoint, layouts, scheme, "Test", published_bytes(bound))
    writer = PackWriter(subject, out, **options)
    tracer = Tracer()
    queue = ReadQueue(PreadReader(), tracer, depth=3)
    try:
        sizes = (writer.slot_bytes, writer.staging_bytes)
        buffers = [Buffers(*map(HostBuffer, sizes)) for _ in range(pairs)]
        for pair in buffers:
            pair.slot.tensor.fill_(POISON)
        return writer.run(queue, tracer, buffers, progress)
    finally:
        queue.close()
        writer.close()


def open_store(
    folder: Path,
    *,
    slots_bytes: int,
    resident: Callable[[BlockId], bool] = lambda block: False,
    scheme: str = "none",
    tied: bool = True,
    spill: bool = False,
    threads: int = 3,
    verify: Verify = Verify.FIRST,
    reader: Any = None,
    poison: bool = True,
    policy: EvictionPolicy | None = None,
    slot_counts: Mapping[int, int] | None = None,
) -> Bench:
    """A store over the checkpoint or pack in `folder`, poisoned unless told otherwise."""
    if looks_like_pack(folder):
        layouts = open_pack(folder).layouts(model_spec(tied), target(scheme))
    else:
        layouts = lay_out(bind(model_spec(tied), open_checkpoint(folder)), target(scheme))
    homes = {block: Tier.HOST if resident(block) else Tier.DISK for block in layouts}
    staging = max(layout.staging_bytes for layout in layouts.values())
    table = layouts[BlockId(TRUNK, BlockKind.EMBEDDING)].tables["weight"]
    limits = {
        "resident": sum(layouts[b].slot_bytes for b, home in homes.items() if home is Tier.HOST),
        "slots": slots_bytes,
        "staging": 2 * staging,
        "rows": 3 * row_span_bytes(table) + (table.sums.file.nbytes if table.sums else 0),
    }
    ledger = Ledger({Tier.HOST: sum(limits.values())})
    sizes = {layout.slot_bytes for layout in layouts.values()}
    pools = {
        name: HostPool(ledger.open(Tier.HOST, name, n), sizes, poison=poison)
        for name, n in limits.items()
    }
    tracer, reader = Tracer(), reader or FaultyReader()
    queue = ReadQueue(reader, tracer, depth=threads, chunk_bytes=4096)
    spilled = SpillFile(folder, layouts.values()) if spill else None
    store = WeightStore(
        layouts,
        [block for block, home in homes.items() if home is Tier.HOST],
        queue,
        tracer,
        **pools,
        slot_counts=slot_counts,
        policy=policy,
        spill=spilled,
        verify=verify,
    )
    return Bench(store, layouts, ledger, reader, list(pools.values()), spilled)
