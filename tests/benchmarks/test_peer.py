"""The benchmark beside llama.cpp: what is timed, and what is made of the times."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import hmt
from hmt.base.errors import MachineError, NumericsError
from hmt.profiling.random_model import Shape
from hmt_bench import peer
from hmt_bench.__main__ import app
from hmt_bench.four_bits import SHAPES, write_four_bit_model
from hmt_bench.llama_cpp import load_llama_cpp

SMALL = Shape(2, 64, 96, 4, 2, vocab_size=512)
EXPERTS = Shape(2, 64, 32, 4, 2, 32, vocab_size=512, experts=8, experts_per_token=2)


class Stand:
    """In the place of llama.cpp: the same logits as HMT's, and a note of every call."""

    def __init__(self, model: hmt.LoadedModel) -> None:
        self.model = model
        self.calls: list[tuple[Any, ...]] = []

    def logits(self, tokens: list[int]) -> torch.Tensor:
        return self.model.logits(tokens, [len(tokens) - 1])[0]

    def prompt(self, tokens: list[int], *, flash: bool) -> float:
        self.calls.append(("prompt", list(tokens), flash))
        return 1.0 if flash else 2.0

    def generate(self, prompts: Any, continuations: Any, *, flash: bool) -> float:
        self.calls.append(("generate", prompts, continuations, flash))
        return 2.0 if flash else 1.0


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("peer")
    write_four_bit_model(folder, SMALL)
    options = {"context": 1024, "max_batch": 4, "host_memory": "32MiB", "threads": 1}
    with hmt.Engine(quantization=peer.QUANTIZATION, **options) as engine:
        yield engine.load_model(folder)


def test_all_cases_decode_about_as_many_tokens() -> None:
    prompt, one, four, sixteen = peer.cases()
    assert (prompt.tokens, prompt.steps) == (512, 0)
    assert (one.tokens, four.tokens, sixteen.tokens) == (128, 128, 256)
    assert four.steps == 32 and sixteen.sequences * sixteen.prompt <= peer.PROMPT_TOKENS


def test_the_peer_decodes_the_tokens_that_hmt_chose(model: hmt.LoadedModel) -> None:
    stand, case = Stand(model), peer.Case("two", 2, 8, 5)
    times = peer.Timed(flash=True)
    peer._turn(model, stand, case, times)  # type: ignore[arg-type]
    (_, prompts, continuations, flash), *more = stand.calls
    assert not more and flash and times.peer == [2.0] and len(times.hmt) == 1
    assert times.hmt_bytes[0] > 0
    for prompt, chosen in zip(prompts, continuations, strict=True):
        assert len(prompt) == 8 and len(chosen) == 5
        done = model.infer(hmt.Request(input=prompt, max_new_tokens=6, ignore_eos=True))
        assert list(done.token_ids)[:5] == chosen


def test_the_faster_attention_is_the_peers(model: hmt.LoadedModel) -> None:
    stand = Stand(model)
    generated = peer._warm(model, stand, peer.Case("one", 1, 4, 2), print)  # type: ignore[arg-type]
    assert generated.flash is False
    prompt = peer._warm(model, stand, peer.Case("prompt", prompt=6), print)  # type: ignore[arg-type]
    assert prompt.flash is True and prompt.hmt == prompt.peer == []


def test_medians_rates_and_shares() -> None:
    times = peer.Timed(hmt=[1.0, 2.0, 4.0], peer=[4.0, 1.0, 1.0], hmt_bytes=[10.0] * 3)
    sizes = {"hmt_token_bytes": 10.0, "peer_token_bytes": 20.0}
    found = peer._result(peer.Case("one", 1, 4, 8), times, sizes, 160.0)
    assert (found.hmt_tokens_per_s, found.peer_tokens_per_s, found.ratio) == (4.0, 8.0, 0.5)
    assert (found.hmt_rate, found.peer_rate) == (40.0, 160.0)
    assert (found.hmt_share, found.peer_share) == (0.25, 1.0)
    batch = peer._result(peer.Case("two", 2, 4, 8), times, sizes, 160.0)
    assert batch.hmt_tokens_per_s == 8.0 and batch.hmt_rate is None


def test_another_model_is_not_measured(model: hmt.LoadedModel) -> None:
    stand = Stand(model)
    same = peer.compare(model, stand, [5, 6, 7])  # type: ignore[arg-type]
    assert same["same_argmax"] and same["logits_cosine"] == pytest.approx(1)
    stand.logits = lambda tokens: torch.arange(512.0)  # type: ignore[method-assign]
    with pytest.raises(NumericsError, match="do not compute the same model"):
        peer.compare(model, stand, [5, 6, 7])  # type: ignore[arg-type]


def test_without_llama_cpp_it_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "llama_cpp", None)
    with pytest.raises(MachineError, match=r"GGML_NATIVE=ON.*pip install.*llama-cpp-python"):
        load_llama_cpp()
    with pytest.raises(MachineError):
        peer.run(tmp_path, SMALL)
    assert list(tmp_path.iterdir()) == []  # nothing is written for nothing


def test_unknown_names_are_told() -> None:
    for option in ("--shape", "--peer"):
        done = CliRunner().invoke(app, ["peer", option, "other"])
        assert "choose" in str(done.exception)


@pytest.mark.parametrize("shape", [SMALL, EXPERTS], ids=["llama", "qwen3-moe"])
def test_both_engines_compute_the_same(
    shape: Shape, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("llama_cpp")
    pytest.importorskip("gguf")
    monkeypatch.setenv("HMT_CACHE", str(tmp_path))
    monkeypatch.setitem(SHAPES, "llama-1b", shape)
    monkeypatch.setattr(peer, "cases", lambda: measured)
    monkeypatch.setattr(peer, "ReadRate", FixedRate)
    measured = [peer.Case("prompt", prompt=40), peer.Case("two", 2, 8, 4), peer.Case("1", 1, 8, 4)]
    file = tmp_path / "results" / "peer.json"
    arguments = ["peer", "--threads", "1", "--folder", str(tmp_path), "--json", str(file)]
    done = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert done.exit_code == 0 and "llama.cpp" in done.output
    content = json.loads(file.read_text())
    assert content["agreement"]["logits_cosine"] > 0.99
    assert [result["case"] for result in content["results"]] == ["prompt", "two", "1"]
    assert content["machine"]["threads"] == 1
    assert content["model"]["peer_token_bytes"] < content["model"]["gguf_bytes"]


class FixedRate:
    """In the place of reading memory."""

    rate = 1e10

    def sample(self) -> None:
        pass
