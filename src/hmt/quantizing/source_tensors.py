"""Tensors of a checkpoint as they are published, read past the page cache."""

import os
from collections.abc import Iterator
from typing import Final

import torch
from torch import Tensor

from hmt.base.errors import CheckpointError, os_reason
from hmt.base.units import MIB
from hmt.contracts.checkpoint import TensorRecord
from hmt.quant.repacking.bits import DTYPES
from hmt.quantizing.experts import Transposed
from hmt.quantizing.shards import bytes_of, read_at

PIECE_BYTES: Final = 4 * MIB  # that are read at once


def numbers(record: TensorRecord) -> Tensor:
    """All of a tensor of floats, in its dtype.  Raises CheckpointError."""
    if isinstance(record, Transposed):
        return _turned(record)
    return tensor(record, DTYPES[record.dtype])


def pieces(record: TensorRecord) -> Iterator[tuple[int, memoryview]]:
    """A tensor's bytes, a few at a time, each with its place."""
    if isinstance(record, Transposed):
        yield 0, bytes_of(_turned(record))
        return
    buffer = memoryview(bytearray(min(PIECE_BYTES, record.nbytes)))
    try:
        with record.file.open("rb", buffering=0) as file:
            for at in range(0, record.nbytes, PIECE_BYTES):
                wanted = buffer[: min(PIECE_BYTES, record.nbytes - at)]
                read_at(file.fileno(), wanted, record.offset + at)
                os.posix_fadvise(
                    file.fileno(), record.offset + at, len(wanted), os.POSIX_FADV_DONTNEED
                )
                yield at, wanted
    except OSError as error:
        raise CheckpointError(
            f"{record.file} cannot be read ({os_reason(error)}): download it again"
        ) from error


def _turned(record: Transposed) -> Tensor:
    """A matrix that is published transposed."""
    rows, inputs = record.shape
    whole = (inputs, record.columns)
    nbytes = record.nbytes // rows * record.columns
    published = TensorRecord(record.name, record.dtype, whole, record.file, record.offset, nbytes)
    columns = slice(record.column, record.column + rows)
    return tensor(published, DTYPES[record.dtype])[:, columns].T.contiguous()


def tensor(record: TensorRecord, dtype: torch.dtype) -> Tensor:
    """All of a tensor that lies as it is, of `dtype`.  Raises CheckpointError."""
    content = bytearray(record.nbytes)
    for at, piece in pieces(record):
        content[at : at + len(piece)] = piece
    return torch.frombuffer(content, dtype=torch.uint8).view(dtype).view(record.shape)
