"""What `hmt bench kernels` times: every encoding of a matrix, attention over pages, and torch.

Numbers are random, codes and scales too: no kernel's speed depends on them.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from math import prod
from typing import Any

import torch
from torch import Tensor

from hmt.base.units import round_up
from hmt.contracts.encoding import PANEL_BLOCK, Activations, Encoding, WeightTensor
from hmt.contracts.model import PAGE_TOKENS
from hmt.kernels import ops
from hmt.kernels.reference import AttentionMetadata, PagedSegment, PageEncoding, PageLayout, Pages
from hmt.memory import PAGE_BYTES, HostBuffer
from hmt.quant import Format, empty_weight

HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128  # of the attention that is timed: Llama 3 8B's
_LINE_BYTES = 64
_INT4_GROUP = 64  # of torch's kernel, as torch's own users choose it


@dataclass(frozen=True, slots=True)
class Competitor:
    """One way to compute, over copies of its memory that no cache holds together.

    calls       the same computation on each copy
    nbytes      read from memory by one call
    operations  of one call, a product and a sum counting as two
    peak        the arithmetic it is measured against: int8, bf16 or f32
    """

    engine: str
    name: str
    calls: tuple[Callable[[], object], ...]
    nbytes: int
    operations: int
    peak: str


def formats() -> dict[str, Format]:
    """Encodings of weights with what they are multiplied with, by the names of schemes."""
    float_, int8 = Activations.FLOAT, Activations.INT8_TOKEN
    found = {
        "bf16": Format(Encoding.BF16),
        "f16": Format(Encoding.F16),
        "fp8 128x128": Format(Encoding.FP8_BLOCK, tile=(128, 128)),
        "w8a16": Format(Encoding.INT8_CHANNEL),
        "w8a8": Format(Encoding.INT8_CHANNEL, activations=int8),
    }
    grouped = [("w4", Encoding.INT4_GROUP, group) for group in (32, 64, 128)]
    grouped += [("nvfp4", Encoding.NVFP4, 16), ("mxfp4", Encoding.MXFP4, 32)]
    for name, encoding, group in grouped:
        suffix = f":{group}" if encoding is Encoding.INT4_GROUP else ""
        for bits, activations in ((16, float_), (8, int8)):
            found[f"{name}a{bits}{suffix}"] = Format(encoding, group, activations=activations)
    return found


def linear_competitors(
    rows: int,
    columns: int,
    tokens: int,
    memory_bytes: int,
    names: set[str] | None = None,
) -> Iterator[Competitor]:
    """Products of bf16 [tokens, columns] with a weight [rows, columns]; HMT's, then torch's.

    On torch's default device.  Each takes as many copies as `memory_bytes` hold, and one more.
    `names` chooses some; those whose groups do not divide the columns are left out.
    """
    x = torch.randn(tokens, columns).bfloat16()
    operations = 2 * tokens * rows * columns
    for name, form in formats().items():
        chosen = names is None or name in names
        if not chosen or (form.group_size and columns % max(form.group_size, PANEL_BLOCK)):
            continue
        weight = random_weight(form, (rows, columns))
        copies = copies_of_weight(weight, 1 + memory_bytes // weight.nbytes)
        calls = tuple(partial(ops.linear, x, w) for w in copies)
        peak = "int8" if form.activations is Activations.INT8_TOKEN else "bf16"
        yield Competitor("hmt", name, calls, weight.nbytes, operations, peak)
    for contender in _torch_linear(x, rows, memory_bytes):
        if names is None or contender.name in names:
            yield contender


def _torch_linear(x: Tensor, rows: int, memory_bytes: int) -> Iterator[Competitor]:
    tokens, columns = x.shape
    operations = 2 * tokens * rows * columns
    wide = (torch.randn(rows, columns) * 0.02).bfloat16()
    yield Competitor(
        "torch",
        "bf16",
        tuple(partial(torch.nn.functional.linear, x, w) for w in _copies(wide, memory_bytes)),
        wide.nbytes,
        operations,
        "bf16",
    )
    if x.is_cuda:
        return  # the rest is made for CPUs
    codes = torch.randint(-127, 128, (rows, columns), dtype=torch.int8)
    rounded = torch.randint(-127, 128, x.shape, dtype=torch.int8)
    yield Competitor(
        "torch",
        "int8 x int8",  # without the rounding of x, and without scales
        tuple(partial(torch._int_mm, rounded, w.t()) for w in _copies(codes, memory_bytes)),
        codes.nbytes,
        operations,
        "int8",
    )
    if columns % _INT4_GROUP or rows % 16:
        return  # torch has no kernel for these
    nibbles = torch.randint(0, 16, (rows, columns), dtype=torch.int32)
    packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(nibbles, 1)
    scales = (torch.rand(columns // _INT4_GROUP, rows, 2) * 0.01 + 0.001).bfloat16()
    yield Competitor(
        "torch",
        f"w4a16:{_INT4_GROUP}",
        tuple(
            partial(torch.ops.aten._weight_int4pack_mm_for_cpu, x, w, _INT4_GROUP, scales)
            for w in _copies(packed, memory_bytes)
        ),
        packed.nbytes + scales.nbytes,
        operations,
        "bf16",
    )


def attention_competitors(
    sequences: int, context: int, memory_bytes: int, names: set[str] | None = None
) -> Iterator[Competitor]:
    """One token of each sequence over `context` positions before it, from pages; torch's without.

    32 query heads share 8 heads of 128 numbers.
    """
    query = torch.randn(sequences, HEADS, HEAD_DIM).bfloat16()
    scale = HEAD_DIM**-0.5
    operations = 4 * sequences * context * HEADS * HEAD_DIM
    for encoding in (
        PageEncoding.BF16,
        PageEncoding.INT8,
        PageEncoding.FP8,
        PageEncoding.INT4,
    ):
        name = f"kv {encoding.name.lower()}"
        if names is not None and name not in names:
            continue
        layout = PageLayout(encoding, KV_HEADS, HEAD_DIM, HEAD_DIM)
        per_sequence = -(-context // PAGE_TOKENS)
        nbytes = sequences * per_sequence * layout.page_bytes
        layers = 1 + memory_bytes // nbytes
        # On huge pages and in any order, as pages lie that stay in host memory.
        shape = (sequences * per_sequence, layers, layout.page_bytes)
        memory = HostBuffer(round_up(prod(shape), PAGE_BYTES)).tensor[: prod(shape)].view(shape)
        pages = Pages(layout, memory.zero_())
        tables = torch.randperm(len(memory)).view(sequences, per_sequence)
        _fill(pages, tables, context)
        runs = AttentionMetadata(
            [PagedSegment(at, 1, context - 1, table) for at, table in enumerate(tables.unbind())]
        )
        attend = partial(ops.paged_attention_output, runs=runs, query=query, scale=scale)
        calls = tuple(partial(attend, pages, layer) for layer in range(layers))
        yield Competitor("hmt", name, calls, nbytes, operations, "bf16")
    if names is not None and "kv bf16" not in names:
        return
    kv = torch.randn(2, sequences, KV_HEADS, context, HEAD_DIM).bfloat16()
    attend = partial(torch.nn.functional.scaled_dot_product_attention, query[:, :, None])
    calls = tuple(
        partial(attend, *copy, scale=scale, enable_gqa=True) for copy in _copies(kv, memory_bytes)
    )
    yield Competitor("torch", "kv bf16", calls, kv.nbytes, operations, "bf16")


def random_weight(form: Format, shape: tuple[int, int]) -> WeightTensor:
    """A weight with random codes and scales, all finite."""
    weight = empty_weight(form, shape)
    for part in form.components(shape):
        target = getattr(weight, part.name)
        if part.name == "data":
            _fill_data(target, form.encoding)
        elif part.dtype is torch.uint8:
            target.fill_(120)  # 2^-7
        else:
            target.copy_(torch.rand(part.shape) * 0.02 + 0.001)
    return weight


def _fill_data(data: Tensor, encoding: Encoding) -> None:
    if encoding.is_float or encoding is Encoding.FP8_BLOCK:
        data.copy_(torch.randn(data.shape) * 0.02)
    elif data.dtype is torch.int8:
        data.random_(-127, 128)
    else:
        data.random_(0, 256)


def _fill(pages: Pages, tables: Tensor, context: int) -> None:
    """Random keys and values in every layer: one layer is written, the others are its copies."""
    runs = AttentionMetadata([PagedSegment(0, context, 0, table) for table in tables.unbind()[:1]])
    rows = torch.randn(2, context, KV_HEADS, HEAD_DIM).bfloat16()
    ops.append_pages(pages, 0, runs, rows[0], rows[1])
    written = pages.memory[tables[0], 0].clone()
    for table in tables.unbind():
        pages.memory[table] = written[:, None]


def copies_of_weight(weight: WeightTensor, count: int) -> list[WeightTensor]:
    """The same numbers at so many places, as an engine's slots lie."""
    parts = ("data", "scales", "zeros", "minima", "factor")
    held = {name: part for name in parts if (part := getattr(weight, name)) is not None}
    copies: list[dict[str, Any]] = [
        dict(zip(held, copy, strict=True)) for copy in _placed(list(held.values()), count)
    ]
    return [replace(weight, **copy) for copy in copies]


def copy_of_weight(weight: WeightTensor) -> WeightTensor:
    """The same numbers at another place."""
    return copies_of_weight(weight, 1)[0]


def _copies(tensor: Tensor, memory_bytes: int) -> list[Tensor]:
    return [copy for (copy,) in _placed([tensor], 1 + memory_bytes // tensor.nbytes)]


def _placed(parts: Sequence[Tensor], count: int) -> Iterator[list[Tensor]]:
    """Copies of what belongs together, side by side; in host memory on huge pages.

    Two Xeon cores read 35 GB/s of those, and 24 of pages of 4 KiB, where torch's tensors lie.
    """
    if parts[0].is_cuda:
        yield from ([part.clone() for part in parts] for _ in range(count))
        return
    sizes = [round_up(part.nbytes, _LINE_BYTES) for part in parts]
    stride = round_up(sum(sizes), PAGE_BYTES)
    memory = HostBuffer(count * stride).tensor
    for begin in range(0, count * stride, stride):
        starts = accumulate(sizes, initial=begin)
        yield [
            memory[at : at + part.nbytes].view(part.dtype).view(part.shape).copy_(part)
            for at, part in zip(starts, parts, strict=False)
        ]
