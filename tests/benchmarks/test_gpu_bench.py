"""`python -m hmt_bench gpu` without a GPU: the task on a fake device, and peers on the CPU."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from hmt.base.errors import ConfigError, MachineError
from hmt.engine import Phase
from hmt.hardware import machine
from hmt.hardware.link_rates import LinkRates
from hmt.memory.device import FakeDevice
from hmt.profiling.random_model import Shape
from hmt_bench import gpu, gpu_rates
from hmt_bench.commands import gpu as bench_gpu
from hmt_bench.gpu_rates import Rates
from hmt_bench.offloaded_peer import resident_layers
from hmt_bench.torch_llama import TorchLlama, Weights, random_weights

RATES = Rates(4e12, 50e9, 150e9, 40e9, 120e9, "w4a8:32")
SHAPE = Shape(3, 64, 96, 8, 2, vocab_size=128)
TASK = gpu.Task(batches=(1, 2), tokens=4, prompt=24, runs=2)


class FakePeer:
    name, note, most_tokens = "fake", "says what it is told", 3

    def __init__(self, fits: bool) -> None:
        self.fits, self.asked, self.closed = fits, [], False

    def decode_rate(self, batch: int, tokens: int) -> float:
        self.asked.append((batch, tokens))
        return 10.0 * batch

    def prompt_rate(self, tokens: int) -> float:
        raise RuntimeError("out of memory")

    def close(self) -> None:
        self.closed = True


def test_a_run_adds_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu, "measure_rates", lambda device, encoding: RATES)
    monkeypatch.setitem(machine._links, "a fake device", LinkRates(40e9))
    peers = []

    def peer(shape: Shape, gpu_bytes: int, fits: bool) -> FakePeer:
        assert shape == gpu.SHAPES["small"] and gpu_bytes in (2 << 20, 64 << 20)
        peers.append(FakePeer(fits))
        return peers[-1]

    content = gpu.run(
        *(tmp_path, "small", ("64MiB", "2MiB"), TASK),
        quantization="w4a8:32",
        host_memory="64MiB",
        gpu="fake",
        peer=peer,
    )
    fits, away = content["results"]
    assert [one.fits for one in peers] == [True, False] and all(one.closed for one in peers)
    assert peers[0].asked == [(1, 3)] * 3 + [(2, 3)] * 3
    assert fits["read_bytes"]["copied"] == fits["read_bytes"]["host"] == 0
    assert sum(away["read_bytes"].values()) == fits["read_bytes"]["device"]
    assert away["read_bytes"]["copied"] and away["read_bytes"]["host"]
    for result in (fits, away):
        one, two, prompt = result["cases"]
        read = result["read_bytes"]
        away_s = (read["copied"] + read["host"]) / 160e9
        step_s = away_s + read["device"] / 4e12
        assert one["allowed_tokens_per_s"] == pytest.approx(1 / step_s)
        assert two["allowed_tokens_per_s"] == pytest.approx(2 / step_s)
        assert one["share"] == pytest.approx(one["tokens_per_s"] * step_s)
        assert two["ratio"] == pytest.approx(two["tokens_per_s"] / 20)
        assert len(one["runs"]) == len(one["peer_runs"]) == 2
        assert (one["away_share"] is None) == (result is fits)
        assert prompt["ratio"] is None and prompt["peer_failure"] == "out of memory"
        assert prompt["batch"] == 0 and prompt["share"] is None
    bench_gpu._print(content)
    told = capsys.readouterr().out
    for words in ("64MiB: a token reads", "fake: says what it is told", "2 sequences, 4 tokens"):
        assert words in told
    assert away["cases"][0]["link_share"] > 0 and fits["cases"][0]["link_share"] == 0


def test_rates_are_measured_alone_and_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"_COPY_BYTES": 1 << 16, "_ROWS": 64, "_COLUMNS": 128, "_ROUND_S": 0.02}
    for name, value in {**sizes, "_LEAST_WEIGHTS_BYTES": 1, "_MOST_WEIGHTS_BYTES": 1 << 16}.items():
        monkeypatch.setattr(gpu_rates, name, value)
    monkeypatch.setattr(gpu_rates, "device_read_rate", lambda: 4e12)
    device = FakeDevice()
    with pytest.raises(MachineError, match="--gpu-id"):
        gpu_rates.measure_rates(device, "w4a8:32")
    monkeypatch.setattr(device, "where", SimpleNamespace(type="cuda"))
    monkeypatch.setattr(device, "allocate", lambda nbytes: torch.empty(nbytes, dtype=torch.uint8))
    with pytest.raises(ConfigError, match="w4a8:32"):
        gpu_rates.measure_rates(device, "w4a8:33")
    found = gpu_rates.measure_rates(device, "w4a8:32")
    assert found.device == 4e12 and min(found.link, found.cpu, found.shared_cpu) > 0


def test_shares_come_from_what_was_counted() -> None:
    phase = Phase(seconds=2.0, link_s=1.0, kernel_s=1.5, link_bytes=int(75e9))
    timed = gpu.Timed(1, [4.0, 5.0, 9.0], [2.0, 2.5], [phase, replace(phase, link_s=2.0)])
    read = {"device": int(4e11), "copied": int(4e9), "host": int(12e9)}
    found = gpu.case(timed, TASK, read, RATES)
    assert found.tokens_per_s == 5.0 and found.ratio == pytest.approx(5.0 / 2.25)
    assert found.allowed_tokens_per_s == pytest.approx(5.0) and found.share == pytest.approx(1.0)
    assert found.away_share == pytest.approx(0.5)
    assert found.link_busy == pytest.approx(0.75) and found.cpu_busy == pytest.approx(0.75)
    assert found.link_share == pytest.approx(0.75)


def test_torchs_llama_computes_what_transformers_computes() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(3)
    weights = random_weights(SHAPE, torch.device("cpu"), torch.float32)
    config = LlamaConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=8,
        num_key_value_heads=2,
        rms_norm_eps=1e-6,
        rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
    )
    theirs = LlamaForCausalLM(config).eval()
    theirs.load_state_dict(_state(weights))
    ids = torch.randint(128, (9,))
    with torch.inference_mode():
        wanted = theirs(ids[None]).logits[0]
    ours = TorchLlama(SHAPE, weights, compiled=False)
    torch.testing.assert_close(ours.decode(ids, 16), wanted, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(ours.logits(ids[None]), wanted[-1:], atol=1e-4, rtol=1e-4)
    ours.close()


def test_layers_that_stay_are_those_that_fit() -> None:
    shape = gpu.SHAPES["70b"]
    assert resident_layers(shape, 16 << 30) == 6
    assert resident_layers(shape, 1 << 30) == 0
    assert resident_layers(shape, 1 << 40) == 79


def _state(weights: Weights) -> dict[str, torch.Tensor]:
    state = {
        "model.embed_tokens.weight": weights.embedding,
        "model.norm.weight": weights.norm,
        "lm_head.weight": weights.head,
    }
    for index, layer in enumerate(weights.layers):
        query, key, value = layer.qkv.split((64, 16, 16))
        gate, up = layer.gate_up.chunk(2)
        named = {
            "input_layernorm": layer.attention_norm,
            "post_attention_layernorm": layer.ffn_norm,
            "self_attn.q_proj": query,
            "self_attn.k_proj": key,
            "self_attn.v_proj": value,
            "self_attn.o_proj": layer.out,
            "mlp.gate_proj": gate,
            "mlp.up_proj": up,
            "mlp.down_proj": layer.down,
        }
        state |= {f"model.layers.{index}.{name}.weight": t for name, t in named.items()}
    return state
