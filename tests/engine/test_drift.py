"""Requests that leave the text of calibration: caught, alone, and with neighbours untouched."""

import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from reference import MINI_DENSE, MINI_MOE

import hmt
from hmt.base.errors import ConfigError, HMTError
from hmt.contracts.step import SchedulerOutput, SegmentRequest
from hmt.engine import LoadedModel
from hmt.engine.drift import (
    ActivationStatistics,
    calibrate_activations,
    statistics_beside,
)
from hmt.engine.drift import statistics as drift_statistics
from hmt.engine.drift.calibration import drifts
from hmt.engine.drift.watch import ActivationWatch
from hmt.engine.loading.kv_scales import identity
from hmt.quantizing import calibration_sequences

OPTIONS: dict[str, Any] = {
    "quantization": "w4a8", "host_memory": "320MiB", "dtype": "float32", "context": 2048,
    "max_batch": 8,
}  # fmt: skip
HELD_OUT = Path(__file__).parents[2] / "assets" / "text" / "valid.txt"


def calibrated(source: Path, made: Path, sequences: int) -> Path:
    shutil.copytree(source, made)
    with hmt.Engine(**OPTIONS) as engine:
        model = engine.load_model(made)
        texts = calibration_sequences("builtin", model.tokenizer, sequences, 512)
        found = calibrate_activations(model, texts)
        found.statistics.write(statistics_beside(made), identity(model.prepared.source))
    return made


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return calibrated(MINI_DENSE, tmp_path_factory.mktemp("model") / "dense", 60)


@pytest.fixture(scope="module")
def model(folder: Path) -> Iterator[LoadedModel]:
    with hmt.Engine(**OPTIONS) as engine:
        yield engine.load_model(folder)


@pytest.fixture(scope="module")
def unwatched() -> Iterator[LoadedModel]:
    with hmt.Engine(**OPTIONS) as engine:
        yield engine.load_model(MINI_DENSE)


def ordinary(model: LoadedModel, seed: int, tokens: int = 200) -> list[int]:
    ids = model.tokenizer.encode(HELD_OUT.read_text(encoding="utf-8")[: 1 << 16])
    at = random.Random(seed).randrange(len(ids) - tokens)
    return ids[at : at + tokens]


def strange(seed: int, tokens: int = 150) -> list[int]:
    """Few tokens again and again, as in a table of numbers that never ends."""
    rng = random.Random(seed)
    few = [rng.randrange(16, 4000) for _ in range(3)]
    return [rng.choice(few) for _ in range(tokens)]


def request(prompt: list[int], new: int = 24) -> hmt.Request:
    sampling = hmt.Sampling(logprobs=3)
    return hmt.Request(prompt, new, sampling=sampling, ignore_eos=True)


def test_a_request_that_drifts_is_raised_and_its_neighbours_keep_their_bits(
    model: LoadedModel, unwatched: LoadedModel
) -> None:
    model.reset_summary()
    prompts = [ordinary(model, 1), strange(1), ordinary(model, 2), strange(2, 70)]
    found = model.infer_batch([request(prompt) for prompt in prompts])
    plain = unwatched.infer_batch([request(prompt) for prompt in prompts])
    assert [one.raised_at for one in found] == [None, 150, None, 70]
    assert [one.raised_at for one in plain] == [None] * 4
    assert found[0] == plain[0]  # log-probabilities to the bit
    assert found[2] == plain[2]
    for one, other in ((found[1], plain[1]), (found[3], plain[3])):
        assert one.logprobs[0] == other.logprobs[0]  # of the prompt's last token
        assert one.logprobs[1:] != other.logprobs[1:]
    account = model.summary().drift
    assert account is not None and unwatched.summary().drift is None
    assert (account.requests, account.tokens) == (2, 2 * 23)
    assert account.windows >= 3 + 1 + 3 + 1


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"max_prefill_tokens": 150}, marks=pytest.mark.whole),
        {"executor": "plain"},
        {"speculate": "lookup", "max_prefill_tokens": 64, "max_batch": 4},
        pytest.param({"prefix_cache": True}, marks=pytest.mark.whole),
        {"kv_gpu_memory": "7MiB", "max_prefill_tokens": 32},
        {"host_memory": "9MiB", "context": 512},
    ],
    ids=str,
)
def test_what_is_raised_depends_on_tokens_alone(
    options: dict[str, Any], folder: Path, model: LoadedModel
) -> None:
    requests = [request(strange(3)), request(ordinary(model, 4)), request(strange(5, 30), 120)]
    requests.append(request(strange(6, 66)))  # whose last tokens come in a chunk of their own
    alone = [model.infer(one) for one in requests]
    assert alone[0].raised_at == 150 and alone[1].raised_at is None
    assert alone[2].raised_at in (64 + 16, 128 + 16) and alone[3].raised_at == 66
    with hmt.Engine(**OPTIONS | options) as engine:
        assert engine.load_model(folder).infer_batch(requests) == alone


@pytest.mark.parametrize(
    ("raised", "exact"),
    [({}, {"quantization": "w4a16"}), ({"fallback_model": MINI_DENSE}, {"quantization": None})],
    ids=["activations", "weights"],
)
def test_raised_tokens_are_those_of_a_more_precise_model(
    raised: dict[str, Any], exact: dict[str, Any], folder: Path
) -> None:
    """Over the same KV, logits have its bits."""
    prompt, answer = strange(7, 80), strange(8, 12)

    def run(model: LoadedModel, kv: int, first: int, tokens: list[int], is_raised: bool) -> Any:
        rows = len(tokens)
        segment = SegmentRequest(kv, first, tokens, rows, 96, whole=80, raised=is_raised)
        step = SchedulerOutput((segment,))
        return model._loop.call(lambda: model._core.runner.run(step).clone())

    with hmt.Engine(**OPTIONS | exact) as engine, hmt.Engine(**OPTIONS | raised) as rounded:
        floats, rounding = engine.load_model(MINI_DENSE), rounded.load_model(folder)
        first, second = (
            one._loop.call(lambda one=one: one._core.scheduler.kv.open(96))
            for one in (floats, rounding)
        )
        run(floats, first, 0, prompt, False)
        low = run(rounding, second, 0, prompt, False)
        for layer in range(8):
            there, here = (
                one._core.memory.kv.kernel_pages(layer)[0].memory for one in (floats, rounding)
            )
            there.copy_(here)
        found = [run(rounding, second, 80 + n, [t], True) for n, t in enumerate(answer)]
        wanted = [run(floats, first, 80 + n, [t], False) for n, t in enumerate(answer)]
        assert torch.equal(torch.cat(found), torch.cat(wanted))
        assert not torch.equal(low, run(floats, first, 0, prompt, False))
        for one, kv in ((floats, first), (rounding, second)):
            one._loop.call(lambda one=one, kv=kv: one._core.scheduler.kv.close(kv))


def test_held_out_text_raises_no_alarm(model: LoadedModel, folder: Path) -> None:
    """Under 1% of pieces; and texts of other kinds are beyond the limits."""
    statistics, weights = ActivationStatistics.read(statistics_beside(folder))
    assert weights == identity(model.prepared.source)
    pieces = calibration_sequences(str(HELD_OUT), model.tokenizer, 110, 256)
    assert len(pieces) == 110
    assert sum(drifts(statistics, model.hidden_rows(piece)) for piece in pieces) <= 1
    rng = random.Random(3)
    digits = "".join(rng.choice("0123456789") for _ in range(600))
    script = "".join(chr(rng.randrange(0x4E00, 0x5000)) for _ in range(150))
    for text in (digits, script):
        ids = model.tokenizer.encode(text)[:256]
        assert drifts(statistics, model.hidden_rows(ids))
    assert all(drifts(statistics, model.hidden_rows(strange(seed))) for seed in range(8))


def test_choices_share_what_was_seen_of_their_prompt(model: LoadedModel, folder: Path) -> None:
    asked = hmt.Request(strange(9), 12, sampling=hmt.Sampling(1.0, seed=3), ignore_eos=True)
    wanted = model.infer_choices(asked, 3)
    assert [one.raised_at for one in wanted] == [150] * 3
    assert wanted[0] == model.infer(asked)
    late = hmt.Request(strange(10, 50), 60, sampling=hmt.Sampling(1.0, seed=3), ignore_eos=True)
    apart = [model.infer_choices(late, 3)[0], model.infer(late)]
    assert apart[0] == apart[1]
    with hmt.Engine(**OPTIONS | {"max_batch": 1}) as engine:  # others begin later
        one_by_one = engine.load_model(folder)
        assert one_by_one.infer_choices(asked, 3) == wanted
        assert one_by_one.infer_choices(late, 3) == model.infer_choices(late, 3)


def test_raised_pages_are_not_shared(folder: Path, unwatched: LoadedModel) -> None:
    """A later prompt that holds a raised answer computes it as every prompt is computed."""
    with hmt.Engine(**OPTIONS, prefix_cache=True) as engine:
        model = engine.load_model(folder)
        first = model.infer(request(strange(11), 60))
        assert first.raised_at == 150
        longer = [*strange(11), *first.token_ids]
        again = model.infer(request(longer, 1))
        assert again.logprobs == unwatched.infer(request(longer, 1)).logprobs


def test_experts_and_a_device(tmp_path: Path) -> None:
    made = calibrated(MINI_MOE, tmp_path / "moe", 24)
    devices: list[dict[str, Any]] = [{}, {"gpu_id": "fake", "gpu_memory": "96MiB"}]
    for options in devices:
        with hmt.Engine(**OPTIONS | options) as engine:
            model = engine.load_model(made)
            alone = model.infer(request(ordinary(model, 1)))
            both = model.infer_batch([request(strange(12)), request(ordinary(model, 1))])
            assert alone.raised_at is None and both[0].raised_at == 150
            assert both[1] == alone


def test_captured_steps_show_what_is_watched(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, torch.Tensor]] = []
    see = ActivationWatch.see

    def spy(self: ActivationWatch, step: Any, hidden: torch.Tensor, *, stays: bool = True) -> None:
        see(self, step, hidden, stays=stays)
        for one in self.seen:
            seen.extend((one.first + 8 * n, row.float().clone()) for n, row in enumerate(one.rows))

    monkeypatch.setattr(ActivationWatch, "see", spy)
    rows = []
    for options in ({"gpu_id": "fake", "gpu_memory": "96MiB"}, {}):
        seen.clear()
        with hmt.Engine(**OPTIONS | options) as engine:
            model = engine.load_model(folder)
            model.infer(request(ordinary(model, 6, 60), 80))
        rows.append(dict(seen))
    assert set(rows[0]) == set(rows[1]) == set(range(7, 139, 8))
    for position, numbers in rows[0].items():
        torch.testing.assert_close(numbers, rows[1][position], rtol=0.1, atol=0.5)


def test_without_statistics_nothing_is_read(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    strangers = request(strange(1))
    with hmt.Engine(**OPTIONS) as engine:
        model = engine.load_model(MINI_DENSE)
        assert model._core.runner.watch is None and model.infer(strangers).raised_at is None
    with hmt.Engine(**OPTIONS | {"quantization": "w4a16"}) as engine:  # nothing is rounded
        assert engine.load_model(folder)._core.runner.watch is None
    other = tmp_path / "other"
    shutil.copytree(MINI_MOE, other)
    shutil.copy(statistics_beside(folder), other)
    with hmt.Engine(**OPTIONS) as engine:
        assert engine.load_model(other)._core.runner.watch is None
    assert "was made for other weights" in caplog.text
    statistics_beside(other).write_bytes(b"nothing")
    with hmt.Engine(**OPTIONS) as engine, pytest.raises(ConfigError, match="does not hold"):
        engine.load_model(other)


def test_copies_in_higher_precision_stay_in_the_budget(
    folder: Path, unwatched: LoadedModel
) -> None:
    asked = [request(strange(1)), request(ordinary(unwatched, 1))]
    little = {"host_memory": "9MiB", "context": 512, "fallback_model": str(MINI_DENSE)}
    with hmt.Engine(**OPTIONS | little) as engine:
        model = engine.load_model(folder)
        found = model.infer_batch(asked)
        summary = model.summary()
    assert found[0].raised_at == 150 and found[1] == unwatched.infer(asked[1])
    assert summary.used_bytes["fallback slots"] > 0
    assert sum(summary.used_bytes.values()) <= summary.budget_bytes <= 9 << 20
    with hmt.Engine(**OPTIONS, fallback_model=MINI_DENSE) as engine:
        assert engine.load_model(folder).infer_batch(asked) == found
    for options, said in (
        ({"fallback_model": MINI_MOE}, "another model"),
        ({"fallback_model": MINI_DENSE, "gpu_id": "fake", "gpu_memory": "96MiB"}, "the CPU"),
        ({"fallback_model": MINI_DENSE, "host_memory": "100KiB"}, "give more"),
    ):
        with hmt.Engine(**OPTIONS | options) as engine, pytest.raises(HMTError, match=said):
            engine.load_model(folder)


def test_copies_without_statistics_are_said_to_be_of_no_use(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with hmt.Engine(**OPTIONS, fallback_model=MINI_DENSE) as engine:
        engine.load_model(MINI_DENSE)
    assert "hmt calibrate activations" in caplog.text


def test_distance_is_the_divergence_of_normal_distributions() -> None:
    """Against torch's own closed form, and skewness against numbers that are known."""
    torch.manual_seed(0)
    texts = [(torch.randn(64, 24) * 3 + 1).numpy() for _ in range(20)]
    found = ActivationStatistics.of(texts)
    rows = torch.randn(32, 24) * 2 - 1
    (*_, (blocks, one)) = found.windows(rows.numpy())
    assert blocks == 4
    normal = torch.distributions.Normal
    seen = normal(rows.mean(0), rows.std(0, correction=0))
    known = normal(torch.from_numpy(found.mean), torch.from_numpy(found.deviation))
    wanted = torch.distributions.kl_divergence(seen, known).mean()
    assert one.kl == pytest.approx(float(wanted), rel=1e-4)
    scaled = ((rows - known.mean) / known.stddev).flatten().double()
    skew = ((scaled - scaled.mean()) ** 3).mean() / scaled.var(correction=0) ** 1.5
    assert one.skew == pytest.approx(float(skew), abs=1e-4)
    rows[5, 7] = 3000.0
    (*_, (_, spike)) = found.windows(rows.numpy())
    assert spike.skew > 20
    assert found.is_beyond(spike, 4)
    assert not any(drifts(found, text) for text in texts)


def test_statistics_need_whole_windows() -> None:
    with pytest.raises(ConfigError, match="no text of the calibration has 256 tokens"):
        ActivationStatistics.of([torch.zeros(31, 4).numpy()])
    assert drift_statistics.WINDOW * drift_statistics.BLOCK_TOKENS == 256
