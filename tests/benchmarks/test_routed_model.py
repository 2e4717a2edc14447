"""Random models that route by a trace: in every step and layer, and by greedy decoding alone."""

from pathlib import Path

import pytest

import hmt
from hmt.base.errors import ConfigError
from hmt.engine.experts.trace import Routed, TraceFile
from hmt.profiling.random_model import Shape
from hmt_bench.four_bits import four_bit_noise
from hmt_bench.routed_model import FIRST_TOKEN, write_routed_model
from hmt_bench.synthetic_trace import synthetic_trace

SHAPE = Shape(3, 64, 32, 4, 2, 32, vocab_size=96, experts=16, experts_per_token=4)
STEPS = 24


@pytest.fixture(scope="module")
def trace() -> list[Routed]:
    return synthetic_trace(STEPS, layers=range(4, 8), experts=16, top_k=4)[1]


@pytest.mark.parametrize("quantization", ["none", "w4a16"])
def test_greedy_decoding_follows_the_trace(
    tmp_path: Path, trace: list[Routed], quantization: str
) -> None:
    folder = tmp_path / "model"
    nbytes = write_routed_model(folder, SHAPE, trace, noise=four_bit_noise)
    assert nbytes == sum(file.stat().st_size for file in folder.glob("*.safetensors")) - sum(
        8 + int.from_bytes(file.read_bytes()[:8], "little") for file in folder.glob("*.safetensors")
    )
    file = tmp_path / "trace.jsonl"
    options = {"quantization": quantization, "context": 128, "expert_trace": file}
    with hmt.Engine(host_memory="8MiB", **options) as engine:
        model = engine.load_model(folder)
        request = hmt.Request(input=[FIRST_TOKEN + 1], max_new_tokens=50, ignore_eos=True)
        answer = model.infer(request)
    assert list(answer.token_ids) == [FIRST_TOKEN + (2 + n) % STEPS for n in range(50)]
    wanted = {(record.step, record.layer - 4): record.experts for record in trace}
    found = list(TraceFile(file))
    assert len(found) == 50 * 3
    for record in found:
        assert record.experts == wanted[(record.step + 1) % STEPS, record.layer]


def test_a_trace_that_does_not_fit_is_refused(tmp_path: Path, trace: list[Routed]) -> None:
    two_tokens = [record._replace(experts=record.experts * 2) for record in trace]
    for bad in (
        [],
        trace[:-2],
        two_tokens,
        synthetic_trace(STEPS, layers=range(2), experts=16, top_k=4)[1],
        synthetic_trace(STEPS, layers=range(3), experts=16, top_k=3)[1],
        synthetic_trace(STEPS, layers=range(3), experts=32, top_k=4)[1],
        synthetic_trace(40, layers=range(3), experts=16, top_k=4)[1],
    ):
        with pytest.raises(ConfigError, match="cannot route"):
            write_routed_model(tmp_path, SHAPE, bad)
