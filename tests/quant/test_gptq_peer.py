"""GPTQ's numbers beside those that llm-compressor gives for the same weight, Hessian and scales."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from hmt.quant.methods.gptq import GPTQ, output_errors
from hmt.quant.methods.interface import Statistics, Target
from hmt.quant.methods.rounding import importance, round_weight

RECORDED = load_file(Path(__file__).parent / "gptq.safetensors")  # by record_gptq.py
CASES = {
    "int4": (Target(), False),
    "int4-ordered": (Target(), True),
    "int3-ordered": (Target(bits=3), True),
    "int2-ordered": (Target(bits=2, group_size=16), True),
    "zeros4-ordered": (Target(symmetric=False), True),
}


@pytest.mark.parametrize("case", CASES)
def test_numbers_are_those_of_llm_compressor(case: str):
    target, ordered = CASES[case]
    weight, hessian = RECORDED["weight"], RECORDED["hessian"]
    rounded = round_weight(weight, target, importance(hessian))
    torch.testing.assert_close(rounded.scales, RECORDED[f"{case}/scales"], rtol=0, atol=0)
    if not target.symmetric:
        assert torch.equal(rounded.zero_points, RECORDED[f"{case}/zeros"])
    method = GPTQ(act_order=ordered, sweeps=0)
    found = method.quantize(weight, Statistics(1, hessian=hessian), target)
    # Rows that rounding to the nearest serves better stay so rounded here.
    kept = (found.codes == rounded.codes).all(1)
    ours, theirs = found.dequantized()[~kept], RECORDED[f"{case}/numbers"][~kept]
    assert len(ours) >= 8
    # It factors in f32, HMT in f64: a number between two codes may fall to the other, and what
    # follows with it.
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("case", CASES)
def test_what_follows_gptq_errs_less_than_llm_compressor(case: str):
    target, ordered = CASES[case]
    weight, hessian = RECORDED["weight"], RECORDED["hessian"]
    found = GPTQ(act_order=ordered).quantize(weight, Statistics(1, hessian=hessian), target)
    lost = RECORDED[f"{case}/numbers"].double() - weight
    theirs = ((lost @ hessian.double()) * lost).sum()
    assert output_errors(weight, found, hessian).sum() < 0.97 * theirs
