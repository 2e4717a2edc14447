"""Latent attention in pieces: heads and tokens at a time give what all at once give."""

from types import SimpleNamespace

import pytest
import torch
from plain_memory import PlainKV

from hmt.contracts.encoding import Activations, Encoding, WeightTensor
from hmt.contracts.model import CHUNK_TOKENS
from hmt.contracts.step import Segment, Step
from hmt.kernels import ops
from hmt.kernels.weight_rows import rows_of
from hmt.layers import LatentAttention
from hmt.layers.latent import mla
from hmt.layers.rope import Rotary
from hmt.quant import pack_codes, pack_groups

HIDDEN, HEADS, RANK, NOPE, ROPE, VALUE = 32, 20, 32, 16, 16, 16
DIM = NOPE + ROPE


class CutKV(PlainKV):
    """Shows as much of a context as a run ends at, and notes how many tokens ask at once."""

    def __init__(self, layer: LatentAttention) -> None:
        super().__init__(SimpleNamespace(kv_layers={0: layer.kv}, state_layers={}))
        self.asked: list[int] = []

    def attend(self, layer: int, step: Step, query: torch.Tensor, **options: float) -> torch.Tensor:
        self.asked.append(len(query))
        return super().attend(layer, step, query, **options)

    def read(self, layer: int, run: Segment) -> tuple[torch.Tensor, torch.Tensor]:
        key = self.keys[layer, run.sequence][: run.context]
        return key, key[..., : self.layers[layer].value_dim]


def make_layer(value_dim=VALUE, heads=HEADS):
    rotary = Rotary(ROPE, {"rope_type": "default", "rope_theta": 10000.0}, 4096)
    return LatentAttention(
        HIDDEN, heads, None, RANK, NOPE, ROPE, value_dim, rotary, DIM**-0.5, interleaved=False
    )


def make_params(layer):
    random = torch.Generator().manual_seed(1)

    def weight(*shape):
        data = torch.randn(shape, generator=random) * shape[-1] ** -0.5
        return WeightTensor(Encoding.F32, shape, data)

    heads = layer.heads
    return {
        "q_proj": weight(heads * DIM, HIDDEN),
        "kv_a_proj": weight(RANK + ROPE, HIDDEN),
        "kv_a_norm": WeightTensor(Encoding.F32, (RANK,), torch.ones(RANK)),
        "kv_b_proj": weight(heads * (NOPE + layer.value_dim), RANK),
        "o_proj": weight(HIDDEN, heads * layer.value_dim),
    }


def compute(layer, x, lengths):
    """Tokens x of one sequence in steps of such lengths, and how many were absorbed at once."""
    params, kv = make_params(layer), CutKV(layer)
    found, at = [], 0
    for length in lengths:
        step = Step.build([(0, at, [0] * length, 0)])
        found.append(layer(x[at : at + length], 0, step, params, kv))
        at += length
    assert at == len(x)
    return torch.cat(found), kv.asked


def exact(layer, x):
    """By the definition, in f64: expanded keys and values of all positions."""
    params = {name: w.data.double() for name, w in make_params(layer).items()}
    x, tokens = x.double(), len(x)
    step = Step.build([(0, 0, [0] * tokens, 0)])
    cos, sin = (part.double() for part in layer.rotary.cos_sin(step))

    def turned(values):
        return ops.rope(values.float(), cos.float(), sin.float(), interleaved=False).double()

    query = (x @ params["q_proj"].T).view(tokens, layer.heads, DIM)
    query = torch.cat((query[..., :NOPE], turned(query[..., NOPE:])), -1)
    latent, shared = (x @ params["kv_a_proj"].T).split((RANK, ROPE), -1)
    latent = latent * (latent.square().mean(-1, keepdim=True) + layer.norm_eps).rsqrt()
    both = (latent @ params["kv_b_proj"].T).view(tokens, layer.heads, -1)
    key = torch.cat((both[..., :NOPE], turned(shared[:, None]).expand(-1, layer.heads, -1)), dim=-1)
    scores = torch.einsum("qhd,khd->hqk", query, key) * layer.scale
    hidden = torch.ones(tokens, tokens).triu(1).bool()
    weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
    out = torch.einsum("hqk,khd->qhd", weights, both[..., NOPE:])
    return out.flatten(1) @ params["o_proj"].T


@pytest.mark.parametrize("lengths", [[330], [1] * 3 + [27, 300], [300, 29, 1], [90, 240]])
def test_any_steps_give_the_exact_result(lengths):
    layer = make_layer()  # runs of up to 32 tokens are absorbed
    x = torch.randn(sum(lengths), HIDDEN, generator=torch.Generator().manual_seed(2))
    found, asked = compute(layer, x, lengths)
    assert asked == [length for length in lengths if length <= 32]
    wanted = exact(layer, x)
    assert (found - wanted).norm() < 2e-6 * wanted.norm()


def test_long_runs_are_absorbed_in_pieces():
    layer = make_layer(value_dim=4 * RANK, heads=2)
    assert layer._longest_absorbed == float("inf")
    x = torch.randn(2 * CHUNK_TOKENS + 60, HIDDEN, generator=torch.Generator().manual_seed(3))
    found, asked = compute(layer, x, [len(x)])
    assert asked == [CHUNK_TOKENS, CHUNK_TOKENS, 60]
    wanted = exact(layer, x)
    assert (found - wanted).norm() < 2e-6 * wanted.norm()


def test_short_runs_share_a_piece_and_long_ones_are_cut():
    lengths = [100, 100, CHUNK_TOKENS, 57, 2 * CHUNK_TOKENS + 1, 3]
    offset, runs = 0, []
    for number, length in enumerate(lengths):
        runs.append(Segment(number, 10 * number, offset, length))
        offset += length
    pieces = mla._pieces(runs)
    assert [[run.length for run in piece] for piece in pieces] == [
        [100, 100],
        [CHUNK_TOKENS],
        [57],
        [CHUNK_TOKENS],
        [CHUNK_TOKENS],
        [1, 3],
    ]
    flat = [run for piece in pieces for run in piece]
    assert [run.offset for run in flat] == [
        sum(r.length for r in flat[:n]) for n in range(len(flat))
    ]
    assert [run.start - 40 for run in flat if run.sequence == 4] == [0, 256, 512]
    assert mla._pieces([]) == []


@pytest.mark.parametrize("activations", list(Activations))
def test_rows_of_a_weight_are_a_weight(activations):
    random = torch.Generator().manual_seed(4)
    rows, columns = 96, 64
    codes = torch.randint(0, 16, (rows, columns), generator=random, dtype=torch.uint8)
    scales = torch.rand(rows, columns // 32, generator=random) + 0.1
    eight = torch.randint(-128, 128, (rows, columns), generator=random, dtype=torch.int8)
    floats = torch.randn(rows, columns, generator=random)
    weights = [
        WeightTensor(
            Encoding.INT4_GROUP, (rows, columns), pack_codes(codes), pack_groups(scales), 32,
            activations=activations, minima=pack_groups(-scales),
        ),
        WeightTensor(
            Encoding.INT8_CHANNEL, (rows, columns), eight, scales[:, 0].contiguous(),
            activations=activations,
        ),
        WeightTensor(Encoding.F32, (rows, columns), floats),
        WeightTensor(
            Encoding.FP8_BLOCK, (rows, columns), floats.to(torch.float8_e4m3fn), scales[:3],
            tile=(32, 32),
        ),
    ]  # fmt: skip
    x = torch.randn(5, columns, generator=random)
    for weight in weights:
        whole = ops.linear(x, weight)
        for first, end in ((0, 32), (32, 96), (0, 96)):
            some = rows_of(weight, first, end)
            assert some.shape == (end - first, columns)
            assert torch.equal(ops.linear(x, some), whole[:, first:end])
            assert rows_of(weight, first, end) is some
