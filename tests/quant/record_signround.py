"""Writes signround.safetensors: weights as auto-round's SignRound rounds them, for its peer test.

`test_signround_peer.py` runs without the package.  Made with auto-round 0.16.1 (on a CPU), by

    pip install auto-round==0.16.1
    python tests/quant/record_signround.py

Weight and Hessian are those of gptq.safetensors; the inputs are rows whose mean of x x^T is this
Hessian, so that both see the same errors.  Scales begin as HMT's.  Each row of the weight is a
layer by itself, as HMT keeps the best step of each row.  CASE/start is where scales begin,
CASE/codes and CASE/scales are what the package makes of the weight, and CASE/errors is the least
loss that it saw for each row: the squared error of the output, a mean over inputs.
"""

from pathlib import Path

import torch
from auto_round.algorithms.quantization.sign_round.sign_sgd import SignSGD
from auto_round.wrapper import WrapperLinear
from safetensors.torch import load_file, save_file

from hmt.quant.methods.interface import Target
from hmt.quant.methods.rounding import importance, round_weight

STEPS = 200
CASES = {
    "int4": Target(),
    "int4-row": Target(group_size=0),
    "int3": Target(bits=3),
    "int2": Target(bits=2, group_size=16),
}


def learned(
    row: torch.Tensor, inputs: torch.Tensor, scales: torch.Tensor, target: Target
) -> tuple[torch.Tensor, torch.Tensor, float]:
    """The numbers of the best step, f32 [1, inputs], its scales and its loss."""
    layer = torch.nn.Linear(row.shape[1], 1, bias=False)
    layer.weight.data.copy_(row)
    layer.bits, layer.group_size, layer.sym = target.bits, target.group_size or -1, True
    layer.data_type, layer.act_bits, layer.scale_dtype = "int", 16, torch.bfloat16
    wrapped = WrapperLinear(layer, enable_torch_compile=False, iters=STEPS)
    wrapped.init_scale, wrapped.minmax_scale_bound = scales.view(-1, 1), (0.8, 1.2)
    steps = SignSGD([wrapped.value, wrapped.max_scale], lr=torch.tensor(1 / STEPS))
    falling = torch.optim.lr_scheduler.LinearLR(
        steps, start_factor=1.0, end_factor=0.0, total_iters=STEPS
    )
    wanted = inputs @ row.T
    best: tuple[float, torch.Tensor, torch.Tensor] | None = None
    for _ in range(STEPS + 1):
        numbers, now, _ = wrapped._qdq_weight(wrapped.value, wrapped.min_scale, wrapped.max_scale)
        loss = torch.nn.functional.mse_loss(inputs @ numbers.T, wanted)
        if best is None or loss.item() < best[0]:
            best = loss.item(), numbers.detach().clone(), now.detach().clone()
        loss.backward()
        steps.step()
        falling.step()
        steps.zero_grad()
    assert best is not None
    return best[1], best[2].view(1, -1), best[0]


def main() -> None:
    """Write the file."""
    given = load_file(Path(__file__).parent / "gptq.safetensors")
    weight, hessian = given["weight"], given["hessian"]
    inputs = torch.linalg.cholesky(hessian.double()).T.float() * len(hessian) ** 0.5
    made = {}
    for case, target in CASES.items():
        start = round_weight(weight, target, importance(hessian)).scales
        rows = [
            learned(weight[row : row + 1], inputs, start[row : row + 1], target)
            for row in range(len(weight))
        ]
        numbers, scales = torch.cat([row[0] for row in rows]), torch.cat([row[1] for row in rows])
        codes = numbers.view(*scales.shape, -1) / scales[..., None].float()
        made[f"{case}/start"] = start
        made[f"{case}/codes"] = codes.round().to(torch.int8).view(weight.shape)
        made[f"{case}/scales"] = scales.float()
        made[f"{case}/errors"] = torch.tensor([row[2] for row in rows])
    save_file(made, Path(__file__).parent / "signround.safetensors")


if __name__ == "__main__":
    main()
