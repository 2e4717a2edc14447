"""Pages between a device and host memory, each in the form that the other side's kernels take.

A device's pages are plain rows, those of host memory words of 16 tokens, in fewer bits or as they
are; see `reference.pages`.  One kernel moves any number of pages and layers: it reads, turns them
around in registers, and writes over the link.  Host memory has to be pinned.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from hmt.contracts.model import PAGE_TOKENS
from hmt.kernels.reference.kv_pages import PageEncoding, PageLayout, Pages
from hmt.kernels.triton.attention.append import coded, e4m3_codes, page_numbers
from hmt.kernels.triton.attention.kv_tiles import FP8, INT8, numbers_of

_FLOATS = torch.float32  # of scales


def can_rewrite(device: PageLayout, host: PageLayout) -> bool:
    """Whether there is a kernel between plain rows `device` and words `host`: not to other floats.

    Numbers of 16 or 32 bits become those of 8; others stay as they are.
    """
    same = host.encoding is device.encoding and not device.encoding.has_scales
    fewer = device.encoding.bits > 8 and host.encoding.bits == 8
    return device.rows and not host.rows and (same or fewer)


def send_pages(device: Pages, numbers: Tensor, host: Pages, slots: Tensor) -> None:
    """Write pages `numbers` of `device`, all layers, to `slots` of `host`, for which `can_rewrite`.

    Both int64, on the device.  In the order of the current stream; the CPU waits for nothing.
    Writes the bytes that `reference.append_pages` writes.
    """
    assert can_rewrite(device.layout, host.layout)
    layers = device.memory.shape[1]
    source, target = page_numbers(device), _numbers(host)
    grid = (len(numbers), layers, device.layout.heads)
    if not len(numbers):
        return
    _send[grid](
        source, target, target.view(_FLOATS) if _has_scales(host) else target, numbers, slots,
        source.stride(0), source.shape[1] // layers, target.stride(0), target.shape[1] // layers,
        host.memory.stride(0) // 4, host.layout.page_bytes // 4,
        **_constants(device.layout, host.layout), num_warps=4,
    )  # fmt: skip


def fetch_pages(device: Pages, numbers: Tensor, host: Pages, slots: Tensor) -> None:
    """`send_pages` the other way: pages `slots` of `host` to `numbers` of `device`, all layers."""
    layers = device.memory.shape[1]
    key, strides, value, value_strides = _page_strides(device)
    _launch_fetch(
        device.layout, key, value, strides, value_strides, numbers, host, slots, 0, layers
    )


def fetch_layer(device: Pages, host: Pages, layer: int, slots: Tensor) -> None:
    """Pages `slots` of a layer of `host` to the first pages of `device`, which are of one layer.

    slots   int64, on the device: nothing is fetched for those below 0
    """
    assert device.memory.shape[1] == 1 and len(slots) <= len(device.memory)
    key, strides, value, value_strides = _page_strides(device)
    _launch_fetch(device.layout, key, value, strides, value_strides, None, host, slots, layer, 1)


def fetch_rows(key: Tensor, value: Tensor, host: Pages, layer: int, slots: Tensor) -> None:
    """Keys and values of pages `slots` of a layer of `host`, in a row, as numbers of their dtype.

    key [16 * len(slots), heads, key_dim] and value [.., heads, value_dim], contiguous; of latents
    only key is written.  Other arguments are those of `fetch_pages`.
    """
    layout = host.layout
    device = PageLayout(
        PageEncoding.of(key.dtype), layout.heads, layout.key_dim, layout.value_dim, layout.latent,
        rows=True,
    )  # fmt: skip
    assert key.is_contiguous() and (layout.latent or value.is_contiguous())
    _launch_fetch(device, key, value, _row_strides(key), _row_strides(value), None, host, slots,
                  layer, 1)  # fmt: skip


def _page_strides(
    device: Pages,
) -> tuple[Tensor, tuple[int, int, int, int], Tensor, tuple[int, int, int, int]]:
    """Keys and values of pages, each with numbers between pages, layers, heads and tokens."""
    layout, key = device.layout, page_numbers(device)
    each, behind = (
        key.shape[1] // device.memory.shape[1],
        layout.heads * PAGE_TOKENS * layout.key_dim,
    )
    first, second = (
        (key.stride(0), each, PAGE_TOKENS * dim, dim) for dim in (layout.key_dim, layout.value_dim)
    )
    return key, first, key[:, behind:], second


def _row_strides(rows: Tensor) -> tuple[int, int, int, int]:
    """Numbers between pages, layers (there is one), heads and tokens."""
    token, head = rows.stride()[:2]
    return PAGE_TOKENS * token, 0, head, token


def _launch_fetch(
    device: PageLayout,
    key: Tensor,
    value: Tensor,
    key_strides: tuple[int, int, int, int],
    value_strides: tuple[int, int, int, int],
    numbers: Tensor | None,
    host: Pages,
    slots: Tensor,
    first: int,
    layers: int,
) -> None:
    assert can_rewrite(device, host.layout)
    if not len(slots):
        return
    source, of = _numbers(host), host.memory.shape[1]
    _fetch[(len(slots), layers, device.heads)](
        source, source.view(_FLOATS) if _has_scales(host) else source, key, value, slots if numbers
        is None else numbers, slots, source.stride(0), source.shape[1] // of,
        host.memory.stride(0) // 4, host.layout.page_bytes // 4, first,
        *key_strides, *value_strides,
        IN_A_ROW=numbers is None, **_constants(device, host.layout), num_warps=4,
    )  # fmt: skip


def _constants(device: PageLayout, host: PageLayout) -> dict[str, int]:
    return {
        # What is kept as it is is moved.
        "ENCODING": -1 if host.encoding is device.encoding else int(host.encoding),
        "UNIT": host.per_word,
        "HEADS": device.heads,
        "KEY_DIM": device.key_dim,
        "VALUE_DIM": 0 if device.latent else device.value_dim,
    }


def _has_scales(host: Pages) -> bool:
    return host.layout.encoding is PageEncoding.INT8


def _numbers(host: Pages) -> Tensor:
    """The memory of pages as numbers of their encoding, FP8's as bytes: [pages, numbers]."""
    encoding = host.layout.encoding
    if encoding is PageEncoding.FP8:
        return host.memory.flatten(1)
    return host.memory.view(encoding.dtype).flatten(1)


# Kernels have many parameters; one on each line, functions would be too long to read.
# fmt: off
@triton.jit
def _send_rows(
    rows, at, scales, DIM: tl.constexpr, UNIT: tl.constexpr, ENCODING: tl.constexpr,
    KEYS: tl.constexpr,
):
    """16 rows of one head of a page, as words at `at`; codes with their scales at `scales`."""
    PADDED: tl.constexpr = triton.next_power_of_2(DIM)
    token, dim = tl.arange(0, 16), tl.arange(0, PADDED)
    mask = (dim < DIM)[None, :] & (token >= 0)[:, None]
    found = tl.load(rows + token[:, None] * DIM + dim[None, :], mask, 0.0)
    kept = found
    if ENCODING == INT8:
        numbers = found.to(tl.float32)
        scale = tl.max(tl.abs(numbers), 1)
        scale = tl.div_rn(scale, tl.full((16,), 127.0, tl.float32))
        tl.store(scales + token, scale)
        kept = coded(numbers, scale)
    elif ENCODING == FP8:
        kept = e4m3_codes(found.to(tl.float32))
    # Numbers that lie side by side there are brought together, so that whole lines are written.
    if KEYS:
        words = tl.permute(tl.reshape(kept, (16, PADDED // UNIT, UNIT)), (1, 0, 2))
        word = tl.arange(0, PADDED // UNIT)[:, None, None]
        place = word * 16 * UNIT + token[None, :, None] * UNIT
        inside = word * UNIT < DIM
    else:
        words = tl.permute(tl.reshape(kept, (16 // UNIT, UNIT, PADDED)), (0, 2, 1))
        word = tl.arange(0, 16 // UNIT)[:, None, None]
        place = word * DIM * UNIT + dim[None, :, None] * UNIT
        inside = dim[None, :, None] < DIM
    unit = tl.arange(0, UNIT)[None, None, :]
    tl.store(at + place + unit, words, inside & (place + unit >= 0))


@triton.jit(do_not_specialize=["layer_numbers"])
def _send(
    source, target, floats, numbers, slots, page_stride, layer_numbers, host_stride,
    host_layer_numbers, float_stride, layer_floats, ENCODING: tl.constexpr, UNIT: tl.constexpr,
    HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
):
    """Program (page, layer, head)."""
    layer, head = tl.program_id(1), tl.program_id(2)
    number = tl.load(numbers + tl.program_id(0))
    slot = tl.load(slots + tl.program_id(0))
    rows = source + number * page_stride + layer * layer_numbers
    at = target + slot * host_stride + layer * host_layer_numbers
    # Scales lie behind all numbers, those of keys first.
    scales = floats
    if ENCODING == INT8:
        scales += slot * float_stride + layer * layer_floats
        scales += HEADS * 16 * (KEY_DIM + VALUE_DIM) // 4 + head * 16
    _send_rows(rows + head * 16 * KEY_DIM, at + head * 16 * KEY_DIM, scales, KEY_DIM, UNIT,
               ENCODING, True)
    if VALUE_DIM:
        behind = HEADS * 16 * KEY_DIM + head * 16 * VALUE_DIM
        _send_rows(rows + behind, at + behind, scales + HEADS * 16, VALUE_DIM, UNIT, ENCODING,
                   False)


@triton.jit
def _fetch_rows(
    at, scales, rows, token_stride, DIM: tl.constexpr, UNIT: tl.constexpr,
    ENCODING: tl.constexpr, KEYS: tl.constexpr,
):
    """What `_send_rows` wrote, as 16 rows `token_stride` apart."""
    PADDED: tl.constexpr = triton.next_power_of_2(DIM)
    token, dim = tl.arange(0, 16), tl.arange(0, PADDED)
    unit = tl.arange(0, UNIT)[None, None, :]
    if KEYS:
        word = tl.arange(0, PADDED // UNIT)[:, None, None]
        place = word * 16 * UNIT + token[None, :, None] * UNIT
        inside = (word * UNIT < DIM) & (place + unit >= 0)
        words = tl.load(at + place + unit, inside, 0)
        found = tl.reshape(tl.permute(words, (1, 0, 2)), (16, PADDED))
    else:
        word = tl.arange(0, 16 // UNIT)[:, None, None]
        place = word * DIM * UNIT + dim[None, :, None] * UNIT
        inside = (dim[None, :, None] < DIM) & (place + unit >= 0)
        words = tl.load(at + place + unit, inside, 0)
        found = tl.reshape(tl.permute(words, (0, 2, 1)), (16, PADDED))
    mask = (dim < DIM)[None, :] & (token >= 0)[:, None]
    if ENCODING == INT8:
        scale = tl.load(scales + token)
        decoded = found.to(tl.float32) * scale[:, None]
        tl.store(rows + token[:, None] * token_stride + dim[None, :],
                 decoded.to(rows.dtype.element_ty), mask)
    elif ENCODING == FP8:
        decoded = numbers_of(found, FP8, rows.dtype.element_ty)
        tl.store(rows + token[:, None] * token_stride + dim[None, :], decoded, mask)
    else:
        tl.store(rows + token[:, None] * token_stride + dim[None, :], found, mask)


@triton.jit(do_not_specialize=["first"])
def _fetch(
    source, floats, key, value, numbers, slots, host_stride, host_layer_numbers, float_stride,
    layer_floats, first, key_page, key_layer, key_head, key_token, value_page, value_layer,
    value_head, value_token, IN_A_ROW: tl.constexpr, ENCODING: tl.constexpr, UNIT: tl.constexpr,
    HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
):
    """Program (page, layer, head)."""
    layer, head = tl.program_id(1), tl.program_id(2)
    slot = tl.load(slots + tl.program_id(0))
    if slot < 0:
        return
    number = tl.program_id(0).to(tl.int64)
    if not IN_A_ROW:
        number = tl.load(numbers + tl.program_id(0))
    at = source + slot * host_stride + (first + layer) * host_layer_numbers
    scales = floats
    if ENCODING == INT8:
        scales += slot * float_stride + (first + layer) * layer_floats
        scales += HEADS * 16 * (KEY_DIM + VALUE_DIM) // 4 + head * 16
    rows = key + number * key_page + layer * key_layer + head * key_head
    _fetch_rows(at + head * 16 * KEY_DIM, scales, rows, key_token, KEY_DIM, UNIT, ENCODING, True)
    if VALUE_DIM:
        behind = HEADS * 16 * KEY_DIM + head * 16 * VALUE_DIM
        rows = value + number * value_page + layer * value_layer + head * value_head
        _fetch_rows(at + behind, scales + HEADS * 16, rows, value_token, VALUE_DIM, UNIT,
                    ENCODING, False)
