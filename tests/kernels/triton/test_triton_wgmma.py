"""Products of several tokens on Hopper's tensor cores, and the adding of their parts."""

import pytest
import torch
import triton
from triton_weights import assert_is_product, numbers, random_weight

from hmt.contracts.encoding import Activations, Encoding
from hmt.kernels.reference import gated_pair
from hmt.kernels.triton.gemm import dispatch as kernels
from hmt.kernels.triton.gemm import wgmma_launch
from hmt.kernels.triton.gemm.splitk_reduce import add_parts
from hmt.kernels.triton.pdl import dependent

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
TOKENS = pytest.mark.parametrize("tokens", [5, 16, 33, 64])


def random_x(tokens: int, columns: int, device: torch.device, seed: int = 1) -> torch.Tensor:
    random = torch.Generator().manual_seed(seed)
    return torch.randn(tokens, columns, generator=random).to(device, torch.bfloat16)


@pytest.mark.parametrize("add", [False, True])
@pytest.mark.parametrize("parts", [2, 5])
def test_parts_are_added_with_biases(device, parts, add):
    random = torch.Generator().manual_seed(0)
    rows = (70, 33, 5)
    sums = torch.randn(parts, 3, 108, generator=random).to(device)
    biases = [torch.randn(count, generator=random).to(device) for count in rows]
    out = torch.randn(3, 200, generator=random).to(device)
    before = out.clone()
    given = (biases[0], None, biases[2])
    add_parts[(triton.cdiv(108, 64), 3)](
        out, sums, *given, 70, 33, 108, 3, out.stride(0),
        SPLIT=parts, COLUMNS=64, ADD=add, **dependent(device),
    )  # fmt: skip
    expected = sums.sum(0)
    expected[:, :70] += biases[0]
    expected[:, 103:] += biases[2]
    if add:
        expected += before[:, :108]
    torch.testing.assert_close(out[:, :108], expected)
    assert torch.equal(out[:, 108:], before[:, 108:])


def test_one_program_has_all_inputs_where_rows_are_many():
    for rows, inputs, tiles in ((128256, 4096, 501), (28672, 8192, 112)):
        sizes = wgmma_launch.panel_sizes(32, rows, inputs // 32, gated=False)
        assert triton.cdiv(rows, 32 * sizes["WARPS"]) == tiles
        assert sizes["SPLIT"] == 1
        fewer = wgmma_launch.panel_sizes(8, rows, inputs // 32, gated=False)
        assert (fewer["WARPS"], fewer["SPLIT"]) == (4, 1)


@pytest.mark.parametrize("rows", [600, 4096, 6144])
def test_parts_do_not_depend_on_tokens(rows):
    """So that a token's sums have the same bits whoever else is there."""
    sizes = [wgmma_launch.panel_sizes(tokens, rows, 128, gated=False) for tokens in (5, 32, 64)]
    assert len({one["SPLIT"] for one in sizes}) == 1
    assert sizes[0]["SPLIT"] > 1


@pytest.mark.gpu
@pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")
class TestOnHopper:
    """Through the operations, of weights that these kernels take."""

    @TOKENS
    @pytest.mark.parametrize("activations", list(Activations))
    @pytest.mark.parametrize(
        ("encoding", "columns", "group"),
        [
            (Encoding.INT4_GROUP, 512, 32),
            (Encoding.INT4_GROUP, 544, 32),
            (Encoding.INT4_GROUP, 1120, 32),
            (Encoding.INT4_GROUP, 2048, 256),
            (Encoding.NVFP4, 1120, 16),
            (Encoding.MXFP4, 1120, 32),
        ],
    )
    def test_weights_side_by_side(self, device, tokens, encoding, columns, group, activations):
        names, rows = ("a", "b", "c"), (600, 64, 333)
        kind = {"group": group, "activations": activations}
        params = {
            name: random_weight(encoding, count, columns, device=device, seed=count, **kind)
            for name, count in zip(names, rows, strict=True)
        }
        x = random_x(tokens, columns, device)
        codes = activations is Activations.INT8_TOKEN
        given = kernels.quantize_activations(x)[0] if codes else x
        few = wgmma_launch._few_are_faster(tokens, params["a"])
        assert wgmma_launch.takes_panels(given, params["a"]) == (not codes or not few)
        out = kernels.linear_many(x, params, names)
        for name, part in zip(names, out.split(rows, dim=1), strict=True):
            assert_is_product(part, x, params[name])

    @TOKENS
    @pytest.mark.parametrize("activations", list(Activations))
    @pytest.mark.parametrize("rows", [70, 5000])
    @pytest.mark.parametrize(
        "encoding", [Encoding.INT4_GROUP, Encoding.NVFP4, Encoding.INT8_CHANNEL]
    )
    def test_product_is_added(self, device, encoding, rows, tokens, activations):
        w = random_weight(encoding, rows, 1024, device=device, activations=activations)
        bias = random_x(1, rows, device, seed=2)[0]
        x, total = random_x(tokens, 1024, device), random_x(tokens, rows, device, seed=3)
        expected = total + kernels.linear(x, w, bias)
        assert_is_product(kernels.linear(x, w, bias), x, w, bias)
        kernels.linear_add(total, x, w, bias)
        assert torch.equal(total, expected)

    @TOKENS
    @pytest.mark.parametrize("rows", [70, 5000])
    @pytest.mark.parametrize("columns", [1040, 4096])
    @pytest.mark.parametrize(
        ("encoding", "tile"),
        [
            (Encoding.F16, (0, 0)),
            (Encoding.FP8_BLOCK, (128, 128)),
            (Encoding.FP8_BLOCK, (128, 256)),
            (Encoding.FP8_BLOCK, (8192, 8192)),
        ],
    )
    def test_rows_of_numbers(self, device, encoding, tile, columns, rows, tokens):
        w = random_weight(encoding, rows, columns, device=device, tile=tile)
        bias = random_x(1, rows, device, seed=2)[0]
        x, total = random_x(tokens, columns, device), random_x(tokens, rows, device, seed=3)
        few = tokens <= 8 and encoding is Encoding.FP8_BLOCK and rows > 4352
        assert wgmma_launch.takes_rows(x, w) == (not few)
        expected = total + kernels.linear(x, w, bias)
        assert_is_product(kernels.linear(x, w, bias), x, w, bias)
        kernels.linear_add(total, x, w, bias)
        assert torch.equal(total, expected)

    @TOKENS
    @pytest.mark.parametrize("rows", [64, 600, 4100])
    @pytest.mark.parametrize("encoding", [Encoding.INT4_GROUP, Encoding.NVFP4])
    def test_gate(self, device, encoding, rows, tokens):
        params = {
            name: random_weight(encoding, rows, 768, device=device, seed=seed)
            for seed, name in enumerate(("gate", "up"))
        }
        x = random_x(tokens, 768, device) / 30
        found = kernels.linear_gated(x, params, ("gate", "up"), "silu")
        both = [x.double() @ numbers(w).t() for w in params.values()]
        expected = gated_pair(torch.cat(both, 1), "silu")
        assert ((found.double() - expected).norm() / expected.norm()).item() < 0.01

    @TOKENS
    @pytest.mark.parametrize("activations", list(Activations))
    def test_int8_parts_of_a_matrix(self, device, activations, tokens):
        rows, names = (512, 512, 200), ("a", "b", "c")
        params = {
            name: random_weight(
                Encoding.INT8_CHANNEL, count, 1040, device=device, activations=activations, seed=7
            )
            for name, count in zip(names, rows, strict=True)
        }
        x = random_x(tokens, 1040, device)
        out = kernels.linear_many(x, params, names)
        for name, part in zip(names, out.split(rows, dim=1), strict=True):
            assert_is_product(part, x, params[name])
            alone = torch.empty_like(part)
            kernels.linear_into(alone, x, params[name])
            assert torch.equal(alone, part)

    def test_bits_do_not_depend_on_other_tokens(self, device):
        w = random_weight(Encoding.INT4_GROUP, 4096, 4096, device=device)
        x = random_x(32, 4096, device)
        out = kernels.linear(x, w)
        assert torch.equal(kernels.linear(x[7:12], w), out[7:12])
        assert torch.equal(kernels.linear(x, w), out)

    def test_launches_can_be_captured(self, device):
        w = random_weight(Encoding.INT4_GROUP, 4096, 1024, device=device)
        x = random_x(32, 1024, device)
        expected = kernels.linear(x, w)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = kernels.linear(x, w)
        out.fill_(torch.nan)
        graph.replay()
        assert torch.equal(out, expected)
