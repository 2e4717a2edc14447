"""Random weights of 4 bits, and the named shapes."""

from pathlib import Path

import torch

from hmt.formats import open_checkpoint
from hmt.profiling.random_model import Shape
from hmt_bench.four_bits import SHAPES, write_four_bit_model

EXPERTS = Shape(2, 64, 32, 4, 2, 32, vocab_size=96, experts=4, experts_per_token=2)


def test_four_bits_hold_every_group_without_loss(tmp_path: Path) -> None:
    write_four_bit_model(tmp_path, EXPERTS)
    for record in open_checkpoint(tmp_path).records.values():
        if len(record.shape) < 2:
            continue
        with record.file.open("rb") as file:
            file.seek(record.offset)
            data = bytearray(file.read(record.nbytes))
        codes = torch.frombuffer(data, dtype=torch.bfloat16).float().mul(128).view(-1, 32)
        assert torch.equal(codes, codes.round()) and codes.abs().amax() == 8
        peaks = codes.gather(1, codes.abs().argmax(1, keepdim=True))
        assert torch.equal(peaks.abs(), torch.full_like(peaks, 8))
        assert (codes * -peaks.sign()).amax() <= 7  # -8..7, or -7..8 with a negative scale
        assert abs(codes.mean()) < 0.5 and 2 < codes.std() < 4


def test_the_named_shapes_are_as_large_as_they_say() -> None:
    tiny, moe = SHAPES["llama-1b"], SHAPES["qwen3-moe"]
    assert tiny.layers * 3 * tiny.hidden_size * tiny.intermediate_size == 761266176
    assert moe.layers * moe.experts * 3 * moe.hidden_size * moe.intermediate_size == 2415919104
