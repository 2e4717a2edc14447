"""The benchmark of kernels: that it computes what it says, and its bookkeeping."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from hmt.base.errors import ConfigError, MachineError
from hmt.bench import ceilings, gpu_kernels, kernels
from hmt.bench.ceilings import Peaks, ReadRate, computing_with
from hmt.bench.competitors import (
    Competitor,
    attention_competitors,
    formats,
    linear_competitors,
    random_weight,
)
from hmt.cli import bench
from hmt.contracts.encoding import Activations
from hmt.kernels import ops, reference
from hmt.kernels.cpu import extension
from hmt.quant import parse_scheme

needs_native = pytest.mark.skipif(extension.load() is None, reason="needs the compiled kernels")


def contender(calls: tuple[Callable[[], object], ...]) -> Competitor:
    return Competitor("hmt", "x", calls, nbytes=100, operations=1000, peak="int8")


@pytest.mark.parametrize("name", formats())
def test_random_weights_are_finite_and_computed(name: str) -> None:
    form = formats()[name]
    weight = random_weight(form, (48, 128))
    x = torch.randn(3, 128)
    got, want = ops.linear(x, weight), reference.linear(x, weight)
    assert torch.isfinite(got).all() and got.std() > 0
    torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-3 * want.abs().max().item())


def test_names_are_those_of_schemes() -> None:
    for name, form in formats().items():
        if name.startswith(("w", "nv", "mx")):
            scheme = parse_scheme(name)
            found = (scheme.weights, scheme.group_size, scheme.activations)
            assert found == (form.encoding, form.group_size, form.activations)
    a8 = [name for name, form in formats().items() if form.activations is Activations.INT8_TOKEN]
    assert all("a8" in name for name in a8) and len(a8) == 6


def test_every_copy_is_computed_and_none_is_shared() -> None:
    found = list(linear_competitors(32, 128, 2, memory_bytes=18000))
    ours = [c for c in found if c.engine == "hmt"]
    assert [c.name for c in ours] == list(formats())
    assert [c.name for c in found if c.engine == "torch"] == ["bf16", "int8 x int8", "w4a16:64"]
    for one in found:
        assert one.operations == 2 * 2 * 32 * 128
        assert len(one.calls) > 1
        first, *others = [call() for call in one.calls]
        assert isinstance(first, torch.Tensor) and first.shape == (2, 32)
        assert all(torch.equal(first, other) for other in others)


def test_names_choose() -> None:
    found = list(linear_competitors(32, 64, 1, 0, {"w4a8:32", "bf16"}))
    assert [(c.engine, c.name) for c in found] == [
        ("hmt", "bf16"),
        ("hmt", "w4a8:32"),
        ("torch", "bf16"),
    ]


def test_attention_reads_all_pages_of_all_layers() -> None:
    found = list(attention_competitors(2, 40, memory_bytes=1 << 20))
    assert [(c.engine, c.name) for c in found] == [
        ("hmt", "kv bf16"),
        ("hmt", "kv int8"),
        ("hmt", "kv fp8"),
        ("hmt", "kv int4"),
        ("torch", "kv bf16"),
    ]
    assert found[0].nbytes == 2 * 48 * 2 * 8 * 128 * 2  # whole pages of 16 tokens
    for one in found:
        assert len(one.calls) == 1 + (1 << 20) // one.nbytes
        outs = [call() for call in one.calls]
        assert all(torch.isfinite(out).all() for out in outs)  # type: ignore[call-overload]
        assert all(torch.equal(outs[0], out) for out in outs)  # type: ignore[arg-type]


def test_all_kernels_of_a_gpu_are_compiled_before_they_are_timed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gpu_kernels, "_page", lambda layout: torch.tensor(0, dtype=torch.uint8))
    parts = gpu_kernels._tasks(None)
    named = [
        *linear_competitors(32, 128, 1, 0),
        *gpu_kernels._attention(2, 32, None, 0),
        *gpu_kernels._latent(2, 32, None, 0),
        *gpu_kernels._between(1, None),
        *gpu_kernels._recurrent(2, 3, None, 0),
    ]
    found = {one.name for one in named if one.engine == "hmt"}
    assert found == set().union(*parts) and sum(map(len, parts)) == len(found)
    assert set(gpu_kernels._EXPERT_FORMATS) <= found
    assert gpu_kernels._tasks({"rope", "kv int8", "w4a8:32", "x"}) == [
        {"kv int8"},
        {"w4a8:32"},
        {"rope"},
    ]


def test_contenders_take_turns() -> None:
    said: list[str] = []
    first = contender((lambda: said.append("a1"), lambda: said.append("a2")))
    second = contender((lambda: said.append("b"),))
    seconds = kernels.measure([first, second], 2, [lambda: said.append("|")])
    assert [len(times) for times in seconds] == [2, 2]
    rounds = "".join(said).split("|")[1:]
    assert len(rounds) == 2
    for text in rounds:  # in each all calls of the first, copy by copy, then all of the second
        assert text.lstrip("a12").strip("b") == "" and text.startswith("a") and text.endswith("b")
        assert "a1a1" not in text and "a2a2" not in text


def test_medians_rates_and_shares() -> None:
    peaks = {"int8": 1e4}
    found = kernels.result_of("[2, 3]", 1, contender(()), [0.5, 0.1, 4.0], 400.0, peaks)
    assert (found.seconds, found.rate, found.read_share) == (0.5, 200.0, 0.5)
    assert (found.operations_per_s, found.peak_share) == (2000.0, 0.2)
    assert kernels.result_of("", 1, contender(()), [1.0], 1.0, {}).peak_share is None


def test_threads_are_given_back() -> None:
    native, before = extension.load(), torch.get_num_threads()
    threads = native.threads() if native else 0
    with pytest.raises(RuntimeError), computing_with(3):
        assert torch.get_num_threads() == 3 and (native is None or native.threads() == 3)
        raise RuntimeError
    assert torch.get_num_threads() == before
    assert native is None or native.threads() == threads


@needs_native
def test_limits_are_measured_on_every_instruction_set() -> None:
    native = extension.load()
    assert native is not None
    before = native.isa()
    try:
        for isa in native.isas():
            native.set_isa(isa)
            peaks = Peaks(1)
            peaks.sample()
            assert set(peaks.rates) == set(Peaks.KINDS)
            assert all(1e7 < rate < 1e15 for rate in peaks.rates.values())
    finally:
        native.set_isa(before)
    with pytest.raises(ValueError, match="not int3"):
        native.peak_ops("int3", 1, 0.01)


def test_reading_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ceilings, "cache_bytes", lambda: 1 << 16)
    for _ in range(2):
        rate = ReadRate(least_bytes=1 << 20)
        rate.sample()
        assert rate.rate > 1e6
        monkeypatch.setattr(ceilings.extension, "load", lambda: None)


@needs_native
def test_the_command_writes_what_it_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HMT_CACHE", str(tmp_path))
    for module in (ceilings, kernels):
        monkeypatch.setattr(module, "cache_bytes", lambda: 1 << 16)
    monkeypatch.setattr(kernels, "_SAMPLE_S", 1e-4)
    file = tmp_path / "kernels.json"
    arguments = ["kernels", "--threads", "1", "--sizes", "32x64", "--tokens", "1,5"]
    arguments += ["--contexts", "2x32", "--only", "w4a8:32,bf16,kv int8", "--runs", "3"]
    done = CliRunner().invoke(bench.app, [*arguments, "--json", str(file)], catch_exceptions=False)
    assert done.exit_code == 0 and "w4a8:32" in done.output
    content = json.loads(file.read_text())
    found = [(r["case"], r["tokens"], r["engine"], r["name"]) for r in content["results"]]
    linear = [("hmt", "bf16"), ("hmt", "w4a8:32"), ("torch", "bf16")]
    assert found == [
        *(("[32, 64]", 1, *one) for one in linear),
        *(("[32, 64]", 5, *one) for one in linear),
        ("attention to 32", 2, "hmt", "kv int8"),
    ]
    assert content["machine"]["threads"] == 1 and set(content["peaks"]) == set(Peaks.KINDS)


@pytest.mark.parametrize(
    "option, text", [("--sizes", "4096"), ("--tokens", "0"), ("--contexts", "axb")]
)
def test_sizes_that_make_no_sense_are_told(option: str, text: str) -> None:
    done = CliRunner().invoke(bench.app, ["kernels", option, text])
    assert isinstance(done.exception, ConfigError) and option in str(done.exception)


def test_without_kernels_there_is_nothing_to_measure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels.extension, "load", lambda: None)
    with pytest.raises(MachineError, match="no compiled kernels"):
        kernels.run()
