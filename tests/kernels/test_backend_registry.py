"""The registry of backends: what one registration changes, and what it need not bring along."""

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import hmt
from hmt.cli.options import embedded_model
from hmt.contracts.encoding import Encoding, WeightTensor
from hmt.kernels import backend_registry, graph_ops, ops, page_copies, reference
from hmt.kernels.ops import FeedForward, NormOptions
from hmt.kernels.reference import matmul
from hmt.kernels.reference.kv_pages import PageEncoding, PageLayout

META = torch.device("meta")  # a device of torch's that the package knows nothing of

Register = Callable[[str, backend_registry.Backend], None]


@pytest.fixture
def register() -> Iterator[Register]:
    """Registers backends for the test only."""
    before: dict[str, backend_registry.Maker | None] = {}

    def register(device_type: str, made: backend_registry.Backend) -> None:
        replaced = backend_registry.register(device_type, lambda: made)
        before.setdefault(device_type, replaced)

    yield register
    for device_type, make in before.items():
        backend_registry.register(device_type, make)


def weight(rows: int, columns: int, device: torch.device | None = None) -> WeightTensor:
    data = torch.randn(rows, columns, device=device)
    return WeightTensor(Encoding.F32, (rows, columns), data)


class OwnLinear:
    """A backend that has products only, in float64."""

    def __init__(self) -> None:
        self.calls = 0

    def linear(
        self, x: torch.Tensor, w: WeightTensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        self.calls += 1
        out = x.double() @ w.data.double().T
        return (out if bias is None else out + bias.double()).to(x.dtype)

    def linear_many(
        self, x: torch.Tensor, params: dict[str, WeightTensor], names: tuple[str, ...]
    ) -> torch.Tensor:
        parts = []
        for name in names:
            bias = params.get(f"{name}_bias")
            parts.append(self.linear(x, params[name], None if bias is None else bias.data))
        return torch.cat(parts, dim=1)


def test_a_device_of_its_own_is_one_registration(register: Register) -> None:
    own = OwnLinear()
    x, w = torch.randn(3, 8, device=META), weight(5, 8, META)
    assert backend_registry.backend_of(x).name == "plain torch" and not graph_ops.has_kernels(META)
    assert ops.linear(x, w).shape == (3, 5) and not own.calls
    register("meta", backend_registry.Backend("own", own))
    assert backend_registry.backend_of(x).name == "own" and graph_ops.has_kernels(META)
    assert ops.linear(x, w).shape == (3, 5) and own.calls == 1
    # What it has no kernel for, plain torch computes.
    assert ops.rms_norm(x, torch.ones(8, device=META), 1e-6).device == META
    assert backend_registry.backend_of(torch.ones(1)).name != "own", "others stay where they were"


def test_chains_are_made_of_the_backends_own_operations(register: Register) -> None:
    own, seen = OwnLinear(), torch.randn(4, 16)
    params = {
        "norm": WeightTensor(Encoding.F32, (16,), torch.rand(16)),
        "gate_proj": weight(32, 16),
        "up_proj": weight(32, 16),
        "down_proj": weight(16, 32),
    }
    # The oracle: the chain in float64.
    x = seen.double()
    normed = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * params["norm"].data
    gate, up = (normed @ params[f"{name}_proj"].data.double().T for name in ("gate", "up"))
    inner = torch.nn.functional.silu(gate) * up
    expected = x + inner @ params["down_proj"].data.double().T
    register("cpu", backend_registry.Backend("own", own, on_host=True))
    hidden = seen.clone()
    ops.feed_forward(hidden, None, params, FeedForward("silu", NormOptions(1e-6)))
    assert own.calls == 3
    torch.testing.assert_close(hidden.double(), expected, rtol=1e-5, atol=1e-5)
    ops.feed_forward(hidden, None, params, FeedForward("silu", NormOptions(1e-6)))
    assert own.calls == 6


def test_a_model_runs_on_a_backend_that_has_products_only(register: Register) -> None:
    def answer() -> tuple[int, ...]:
        with hmt.Engine(dtype="float32", context=64, threads=1) as engine:
            request = hmt.Request(input="Once upon a time", max_new_tokens=6, ignore_eos=True)
            return engine.load_model(embedded_model()).infer(request).token_ids

    class Counting(SimpleNamespace):
        calls = 0

        def linear(self, *given: Any) -> torch.Tensor:
            type(self).calls += 1
            return matmul.linear(*given)

    register("cpu", backend_registry.Backend("plain torch", reference, on_host=True))
    expected = answer()
    register("cpu", backend_registry.Backend("counting", Counting(), on_host=True))
    assert answer() == expected and Counting.calls > 6


def test_an_operation_that_nobody_has_is_named(register: Register) -> None:
    register("meta", backend_registry.Backend("own", OwnLinear()))
    with pytest.raises(AttributeError, match="backend own has no operation fetch_rows"):
        backend_registry.backend_on(META).fetch_rows  # noqa: B018
    layout = PageLayout(PageEncoding.F32, 1, 16, 16)
    assert not page_copies.can_copy_pages(META, layout, layout), "so nobody asks for it"
    assert not graph_ops.can_look_up_rows(META)
