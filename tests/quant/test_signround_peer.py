"""Signed rounding beside auto-round's for the same weight, inputs and first scales."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from hmt.quant.methods.gptq import output_errors
from hmt.quant.methods.interface import QuantizedWeight, Statistics, Target
from hmt.quant.methods.rounding import importance, round_weight
from hmt.quant.methods.signround import SignRound

FOLDER = Path(__file__).parent
GIVEN = load_file(FOLDER / "gptq.safetensors")  # by record_gptq.py
RECORDED = load_file(FOLDER / "signround.safetensors")  # by record_signround.py
CASES = {
    "int4": Target(),
    "int4-row": Target(group_size=0),
    "int3": Target(bits=3),
    "int2": Target(bits=2, group_size=16),
}


@pytest.mark.parametrize("case", CASES)
def test_codes_scales_and_errors_are_those_of_auto_round(case: str):
    target, weight, hessian = CASES[case], GIVEN["weight"], GIVEN["hessian"]
    start = round_weight(weight, target, importance(hessian))
    torch.testing.assert_close(start.scales, RECORDED[f"{case}/start"], rtol=0, atol=0)
    found = SignRound().quantize(weight, Statistics(1, hessian=hessian), target)
    # Where a gradient is about zero its sign follows the last bits, which differ between products
    # with inputs and with their Hessian; from there on a row goes another way, to an error as good.
    equal = (found.codes == RECORDED[f"{case}/codes"]).all(1)
    assert equal.sum() >= 6
    scales = RECORDED[f"{case}/scales"]
    # Of steps whose errors are about the same either may be the best.
    torch.testing.assert_close(found.scales[equal], scales[equal], rtol=0.05, atol=0)
    theirs = QuantizedWeight(target, RECORDED[f"{case}/codes"], scales)
    ours = output_errors(weight, found, hessian.double())
    recorded = RECORDED[f"{case}/errors"].double()
    torch.testing.assert_close(
        output_errors(weight, theirs, hessian.double()), recorded, rtol=1e-5, atol=0
    )
    torch.testing.assert_close(ours.sum(), recorded.sum(), rtol=0.05, atol=0)
