"""What steps cost on the CPU: rates are those that the measured steps were made of."""

import json
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hmt.engine.cpu_pace import CpuPace
from hmt.engine.step_rates import LONG, SHORT, TWO_PIECES, process_bytes

from hmt.contracts.machine import Machine
from hmt.engine import cpu_step_rates as rates
from hmt.engine import probe_models as models
from hmt.engine.probe_models import FEW, MANY

MACHINE = Machine("a machine", 2, 1 << 34, 30e9, 3e9, cache_bytes=1 << 28)
STEP_S, ROW_S, LAYER_S = 4e-4, 6e-5, 3e-6
APART_S = {"llama": 3e-5, "qwen3_moe": 9e-5, "deepseek_v3": 2e-4}
LATENT_ROW_S = 15e-6
HELD_S, MISSED_S, LOOKUP_S, WOKEN_S = 1.5e-4, 1e-4, 4e-4, 1e-4
READ_S, WAIT_S, BLOCKS = 2e-4, 3e-4, 7  # of blocks that are read one by one
MIB = 1 << 20
# Of products that take 10 ms by themselves, for one user and for several.
IN_LAYERS = {None: (0.8, 0.9), "w8a8": (0.7, 1.05), "w4a8": (0.1, 3.0)}


def made_up(machine: Machine, case: rates.Case) -> rates.Decoded:
    """Of a step, whose parts are known."""
    with case.model as folder:
        config = json.loads((folder / "config.json").read_text())
    layers, kind, kept = config["num_hidden_layers"], config["model_type"], case.kept
    calls_s, read_bytes, waited_s, beyond_s = STEP_S + case.users * ROW_S, 0.0, 0.0, 0.0
    if kept is None:
        calls_s += layers * (APART_S[kind] + (case.users - 1) * LATENT_ROW_S)
    elif not kept:
        calls_s += layers * APART_S["llama"] + BLOCKS * READ_S
        waited_s = LOOKUP_S + WOKEN_S + BLOCKS * WAIT_S + 6e6 / MACHINE.disk_read_rate
        return rates.Decoded(calls_s, beyond_s, 0, 6e6, 0.0, waited_s, BLOCKS)
    elif kept < 1:
        calls_s += layers * (APART_S["llama"] + HELD_S)
        waited_s, beyond_s = LOOKUP_S, WOKEN_S
        if kept < 0.9:  # experts are missing
            calls_s, read_bytes = calls_s + 5 * MISSED_S, 5.0 * models.EXPERT_BYTES
    wide = config["hidden_size"] == 1024
    if wide:
        kernels_s = 1e-2 * IN_LAYERS[case.scheme][case.users > 1]
        return rates.Decoded(calls_s, kernels_s - 1e-2, 1 << 26, 0.0, kernels_s)
    beyond_s += layers * LAYER_S
    return rates.Decoded(calls_s, beyond_s, 0, read_bytes, waited_s=waited_s)


def test_rates_are_those_that_steps_are_made_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        rates,
        "decoded",
        lambda machine, cases, seconds, pace, *rounds: [made_up(machine, case) for case in cases],
    )

    def prompts(machine: Machine, model: Any, seconds: float, pace: object) -> rates._Prompts:
        """Of each layer 1 ms, and 10 ns for each number of a token; latents, experts take more."""
        latent, experts = model is models.small_latent, "experts" in model.__name__
        width = 1024 if model in (models.wide_model, models.wide_experts) else models.WIDTH
        more_s = 2e-4 if latent else 3e-4 if experts else 0.0
        token_s = width * (1e-8 + experts * models.CHOSEN * 2e-9)
        token_s += latent * models.LATENT_NUMBERS * 4e-9
        places = [(count, tokens) for count in (FEW, MANY) for tokens in (SHORT, LONG)]
        calls_s = {at: 2e-3 + at[0] * 1e-5 for at in places}
        return rates._Prompts(
            {at: 5.0 + at[0] * (1e-3 + more_s + at[1] * token_s) for at in places},
            calls_s | {(FEW, TWO_PIECES): 2e-3 + 7e-4 + 2 * FEW * 1e-5},
            width,
        )

    monkeypatch.setattr(rates, "_prompts", prompts)

    def process_bytes(
        options: dict[str, str],
        model: Any = models.small_model,
        kept: float = 1.0,
        layers: int = FEW,
    ) -> int:
        mib = 20 if kept == 1.0 else 55 if options else 33 if kept < 0.5 else 31
        return mib << 20

    monkeypatch.setattr(rates, "process_bytes", process_bytes)
    # Level up to 14 MiB, and then a straight line over the logarithm; not what users take.
    calls_s = {
        mib * MIB: ROW_S + STEP_S * times
        for mib, times in ((5, 1), (14, 1), (28, 1.5), (56, 2), (224, 3))
    }
    found = rates.cpu_step_rates(MACHINE, 0.0, calls_s=calls_s)
    near = pytest.approx
    assert (found.step_s, found.row_s, found.layer_s) == (near(STEP_S), near(ROW_S), near(LAYER_S))
    dense = APART_S["llama"]
    assert found.apart_layer_s == near(dense)
    assert found.apart_experts_s == near(APART_S["qwen3_moe"] - dense)
    assert found.apart_latent_s == near(APART_S["deepseek_v3"] - dense)
    assert found.apart_latent_row_s == near(LATENT_ROW_S)
    assert (found.prompt_layer_s, found.number_s) == (near(1e-3), near(1e-8))
    assert (found.prompt_latent_s, found.latent_number_s) == (near(2e-4), near(4e-9))
    assert (found.prompt_experts_s, found.expert_number_s) == (near(3e-4), near(2e-9))
    assert (found.piece_s, found.prompt_s) == (near(7e-4), near(2e-3))
    assert found.held_experts_s == near(HELD_S)
    assert found.missed_expert_s == near(MISSED_S)
    assert found.lookup_s == near(LOOKUP_S + WOKEN_S)
    assert (found.read_block_s, found.read_alone_s) == (near(READ_S), near(WAIT_S))
    assert found.cold_calls == {"14MiB": 1.0, "224MiB": near(3.0)}
    assert found.cpu_in_layers == {
        "bf16": near(0.8), "bf16@8": near(0.9), "w8a8": near(0.7), "w8a8@8": near(1.05),
        "w4a8": 0.5, "w4a8@8": 2.0,
    }, "what is more than that is chance"  # fmt: skip
    sizes = found.process_bytes, found.streaming_bytes, found.converting_bytes
    assert sizes == (
        (20 << 20) + rates._CHANCE_BYTES,
        (13 << 20) + rates._STREAMING_CHANCE_BYTES,
        35 << 20,
    )
    quick = rates.cpu_step_rates(MACHINE, 0.0, whole=False)
    assert quick.held_experts_s == quick.lookup_s == 0
    # Nothing tells apart what layers and lookups take.
    assert quick.read_block_s == near(READ_S + FEW * dense / BLOCKS)
    assert quick.read_alone_s == near(WAIT_S + (LOOKUP_S + WOKEN_S) / BLOCKS)
    blind = rates.cpu_step_rates(replace(MACHINE, disk_read_rate=0.0), 0.0, whole=False)
    assert blind.read_block_s == blind.read_alone_s == 0
    assert quick.process_bytes == 0
    assert not quick.cpu_in_layers and not quick.cold_calls


@pytest.mark.parametrize(
    "calls_s",
    [{}, {1e9: 1.0}, {5e6: 1.0, 9e6: 2.0}, {5e6: 0.0, 1e9: 2.0}, {5e6: 0.1, 1e9: 2.0}],
)
def test_what_tells_nothing_of_cold_calls_gives_none(calls_s: dict[float, float]) -> None:
    assert rates._cold_calls(calls_s, 0.1) == {}


def test_calls_that_are_no_slower_with_more_bytes_are_not_faster() -> None:
    found = rates._cold_calls({5e6: 1.0, 100 * MIB: 0.5, 200 * MIB: 0.5}, 0.0)
    assert found == {"14MiB": 1.0, "200MiB": 1.0}


def test_prompts_tell_numbers_from_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of each layer 1 ms, and 1 us for each token, beside the 2 s that the machine predicts."""

    class Loaded:
        def __init__(self, layers: int) -> None:
            spec = SimpleNamespace(hidden_size=100)
            self.layers, self.prepared = layers, SimpleNamespace(model=SimpleNamespace(spec=spec))

        def __enter__(self) -> "Loaded":
            return self

        def __exit__(self, *error: object) -> None:
            pass

    predicted = SimpleNamespace(predict=lambda users, seen, tokens: SimpleNamespace(ttft_s=2.0))
    monkeypatch.setattr(rates, "_Loaded", Loaded)
    monkeypatch.setattr(rates, "pace_of", lambda model: 1.0)
    monkeypatch.setattr(rates, "_costs", lambda model, machine: predicted)
    monkeypatch.setattr(
        rates,
        "_prompt",
        lambda model, tokens: (5.0 + model.layers * (1e-3 + 1e-6 * tokens), 3e-3 + model.layers),
    )
    found = rates._prompts(MACHINE, nullcontext, 0.0)  # type: ignore[arg-type]
    layer_s, token_s = found.of_a_layer()
    assert token_s / found.width == pytest.approx(1e-8)
    assert layer_s == pytest.approx(1e-3)
    assert found.of_a_piece() == (0.0, pytest.approx(3e-3)), "the same with twice as many tokens"
    assert found.beyond_s[FEW, SHORT] == pytest.approx(3.0 + FEW * (1e-3 + 1e-6 * SHORT))


def test_steps_by_turns_are_those_of_the_machines_own_pace(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Half as fast as when it was measured: twice the time, of which the same is found."""
    machine = replace(MACHINE, pace=1e-3, reading_pace=1e-2, arithmetic_pace=1.0)
    slow = CpuPace(2e-3, 2e-2, 2.0)
    loaded = []

    class Loaded:
        def __init__(self, model: Any, kept: float | None, scheme: str | None) -> None:
            loaded.append((kept, scheme))

        def __enter__(self) -> "Loaded":
            return self

        def __exit__(self, *error: object) -> None:
            pass

    def costs(model: Loaded, machine: Machine) -> Any:
        step = SimpleNamespace(seconds=9e7 / machine.ram_read_rate, nbytes={"CPU": 9e7})
        return SimpleNamespace(decode=lambda users, context: step)

    monkeypatch.setattr(rates, "_Loaded", Loaded)
    monkeypatch.setattr(rates, "_costs", costs)
    monkeypatch.setattr(
        rates, "_turn", lambda *given: rates._Turn(4e-4, 2 * (3e-3 + 5e-4), 6e-4, 7.0)
    )
    monkeypatch.setattr(rates, "_read_blocks", lambda model: 5.0)
    monkeypatch.setattr(rates, "pace_of", lambda model: slow.calls_s)
    cases = [rates.Case(nullcontext(Path())), rates.Case(nullcontext(Path()))]
    found = rates.decoded(machine, cases, 0.0, lambda: replace(slow, calls_s=9.0))
    near = pytest.approx
    expected = rates.Decoded(near(2e-4), near(5e-4), 9e7, 7.0, near(3.5e-3), near(3e-4), 5.0)
    assert found == [expected] * 2
    monkeypatch.setattr(
        rates, "_turn", lambda *given: rates._Turn(2 * (3e-3 + 5e-4), 0.0, 0.0, 0.0)
    )
    (found_one,) = rates.decoded(machine, cases[:1], 0.0, lambda: slow)
    assert (found_one.calls_s, found_one.beyond_s) == (near(5e-4), 0.0), "nothing compiled"
    loaded.clear()
    rates.decoded(machine, [replace(cases[0], users=users) for users in (1, 8)], 0.0, lambda: slow)
    rates.decoded(machine, [cases[0], replace(cases[0], scheme="w8a8")], 0.0, lambda: slow)
    assert loaded == [(1.0, None), (1.0, None), (1.0, "w8a8")], "users share a model"


def test_steps_are_measured_for_real() -> None:
    found = rates.cpu_step_rates(MACHINE, 0.3, whole=False)
    assert 0 < found.step_s < 1 and 0 <= found.row_s < 1
    # What others on the machine take may hide the least of these.
    assert 0 <= found.piece_s < 1 and 0 <= found.prompt_layer_s < 1
    assert FEW < MANY


def test_what_a_process_grows_by_is_measured_for_real() -> None:
    alone = process_bytes({})
    assert 10 << 20 < alone < 4 << 30
    assert process_bytes({"host_memory": "1MiB"}) == 0, "no such plan"
