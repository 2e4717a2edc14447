"""Requests and engines that are dropped, interrupted, shared or broken leave no trace."""

import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from reference import MINI_DENSE, MINI_MOE

import hmt
from hmt.base.errors import BudgetError, Cancelled, ContextLengthError, HMTError, RequestError
from hmt.contracts.request import FinishReason, TokenLogprob
from hmt.engine import EngineConfig, LoadedModel, prepare
from hmt.engine.outputs.sampler import SamplerState
from hmt.planner import PlanOptions, smallest_budget

pytestmark = [pytest.mark.each_once, pytest.mark.usefixtures("quick_processes")]

CHAT = [{"role": "user", "content": "What is 12 + 30?"}]


@pytest.fixture
def model() -> Iterator[LoadedModel]:
    with hmt.Engine(host_memory="8MiB", context=512, max_batch=4) as engine:
        yield engine.load_model(MINI_DENSE)


def settle(model: LoadedModel) -> None:
    """Wait until the engine's thread has done what was posted."""
    model.reset_summary()


def assert_nothing_runs(model: LoadedModel) -> None:
    settle(model)
    assert model._core.scheduler.idle
    assert (
        model._core.memory.kv.allocator.free_tokens
        == model._core.memory.kv.allocator.capacity_tokens
    )


@pytest.mark.parametrize("context", [16, 80, 1040, 2000])
@pytest.mark.parametrize("path", [MINI_DENSE, MINI_MOE])
def test_any_context_loads_and_holds_what_was_asked_for(path: Path, context: int) -> None:
    with hmt.Engine(host_memory="64MiB", context=context) as engine:
        model = engine.load_model(path)
        assert context <= model.plan.kv_tokens < context + 16


@pytest.mark.parametrize("quantization", ["none", "w4a8"])
@pytest.mark.parametrize("path", [MINI_DENSE, MINI_MOE])
def test_the_smallest_budget_serves_a_default_request(path: Path, quantization: str) -> None:
    config = EngineConfig.resolve(host_memory="1GiB", quantization=quantization)
    least = smallest_budget(prepare(path, config).demand, PlanOptions(0))
    # Most of the context is prompt, which takes the most memory, and is soon computed.
    chat = [{"role": "user", "content": "What is 12 + 30? " * 18}]
    with hmt.Engine(host_memory=least, quantization=quantization) as engine:
        answer = engine.load_model(path).infer(hmt.Request(chat, ignore_eos=True))
    assert answer.finish_reason is FinishReason.LENGTH
    assert answer.prompt_tokens + len(answer.token_ids) == 256
    assert len(answer.token_ids) > 5


def test_a_bad_request_in_a_batch_takes_none_with_it(model: LoadedModel) -> None:
    with pytest.raises(ContextLengthError):
        model.infer_batch([hmt.Request(CHAT, 8), hmt.Request(CHAT, 5000)])
    with pytest.raises(ContextLengthError):
        model.infer_batch([hmt.Request(CHAT, 8), hmt.Request(CHAT, 511)])
    assert_nothing_runs(model)


def test_streams_that_are_dropped_are_cancelled(model: LoadedModel) -> None:
    never_started = model.stream(hmt.Request(CHAT, 300, ignore_eos=True))
    started = model.stream(hmt.Request(CHAT, 100, ignore_eos=True))
    next(started)
    never_started.close()
    del never_started, started
    assert_nothing_runs(model)
    assert model.infer(hmt.Request(CHAT, 8)).text == "42"


def test_an_error_of_our_own_fails_one_request_only(
    model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    choose = SamplerState.choose

    def faulty(self: SamplerState, *given: Any) -> TokenLogprob:
        if self._sampling.seed == 13:
            raise ZeroDivisionError("unlucky")
        return choose(self, *given)

    monkeypatch.setattr(SamplerState, "choose", faulty)
    good = model.stream(hmt.Request(CHAT, 8))
    bad = model.stream(hmt.Request(CHAT, 8, sampling=hmt.Sampling(seed=13)))
    assert "".join(event.text for event in good) == "42"
    with pytest.raises(HMTError, match="unlucky"):
        list(bad)
    assert_nothing_runs(model)


def test_closing_a_model_ends_its_requests() -> None:
    engine = hmt.Engine(host_memory="8MiB", context=512)
    stream = engine.load_model(MINI_DENSE).stream(hmt.Request("Once", 400, ignore_eos=True))
    next(stream)
    engine.close()
    with pytest.raises(Cancelled):
        list(stream)
    engine.close()


def test_models_share_the_budget_of_their_engine() -> None:
    with hmt.Engine(host_memory="48MiB", context=256) as engine:
        first, second = engine.load_model(MINI_DENSE), engine.load_model(MINI_DENSE)
        used = [sum(m.summary().used_bytes.values()) for m in (first, second)]
        assert sum(used) <= 48 << 20
        assert second.plan.budgets["host"] <= (48 << 20) - sum(first.plan.reserved.values())
        assert first.infer(hmt.Request(CHAT, 8)).text == second.infer(hmt.Request(CHAT, 8)).text
    with hmt.Engine(host_memory="5MiB", context=256) as engine:
        first = engine.load_model(MINI_DENSE)
        with pytest.raises(BudgetError, match="Other models of this engine hold"):
            engine.load_model(MINI_DENSE)
        first.close()
        assert engine.load_model(MINI_DENSE).infer(hmt.Request(CHAT, 8)).text == "42"


def test_a_failed_load_leaves_neither_threads_nor_memory(tmp_path: Path) -> None:
    def broken(done: int, total: int) -> None:
        raise ZeroDivisionError("the progress bar fell over")

    with hmt.Engine(host_memory="64MiB", context=256) as engine:
        before = set(threading.enumerate())  # other tests' may end meanwhile
        with pytest.raises(ZeroDivisionError):
            engine.load_model(MINI_DENSE, progress=broken)
        assert set(threading.enumerate()) <= before
        assert engine._ledger.reserved_bytes("host") == 0  # type: ignore[arg-type]
        assert engine.load_model(MINI_DENSE).infer(hmt.Request(CHAT, 8)).text == "42"


SPILLED: dict[str, Any] = {
    "quantization": "w4a8", "context": 512, "max_prefill_tokens": 16, "max_batch": 1
}  # fmt: skip
SPILLED_REQUEST = hmt.Request(CHAT * 12, 8, ignore_eos=True)


@pytest.fixture(scope="module")
def unspilled() -> tuple[int, ...]:
    """The answer of weights that all stay in memory."""
    with hmt.Engine(host_memory="64MiB", **SPILLED) as engine:
        return engine.load_model(MINI_DENSE).infer(SPILLED_REQUEST).token_ids


@pytest.mark.parametrize("reader", ["io_uring", "direct", "buffered", "mmap"])
def test_spilled_weights_come_back_whichever_way_they_are_read(
    tmp_path: Path, reader: str, unspilled: tuple[int, ...]
) -> None:
    with hmt.Engine(
        host_memory="3.6MiB", disk_reader=reader, spill_dir=tmp_path, **SPILLED
    ) as engine:
        model = engine.load_model(MINI_DENSE)
        assert model.infer(SPILLED_REQUEST).token_ids == unspilled
    assert not list(tmp_path.iterdir()), "the spill file has no name"


@pytest.mark.parametrize(
    ("tokens", "rows", "prefill"),
    [
        ([], [], None),
        ([5, 4096], [0], None),
        ([-1], [0], None),
        ([5, 6], [2], None),
        ([5, 6], [1, 0], None),
        ([5, 6], [0], 3),
        ([5, 6], [0], -1),
    ],
)
def test_teacher_forcing_refuses_what_cannot_be(
    model: LoadedModel, tokens: list[int], rows: list[int], prefill: int | None
) -> None:
    with pytest.raises(RequestError):
        model.logits(tokens, rows, prefill=prefill)
    assert model.logits([5, 6], []).shape == (0, 4096)
    assert_nothing_runs(model)


CHILD = f"""
import signal, sys, time, hmt
signal.signal(signal.SIGINT, signal.default_int_handler)  # shells ignore it for what is in the back
with hmt.Engine(host_memory="5MiB", context=256) as engine:
    model = engine.load_model({str(MINI_DENSE)!r})
    expected = model.infer(hmt.Request("Once upon a time", 12, ignore_eos=True)).text
    print("ready", flush=True)
    interrupts, end = 0, time.monotonic() + 60  # should one be lost
    while interrupts < 15 and time.monotonic() < end:
        try:
            while True:
                for event in model.stream(hmt.Request("Once upon a time", 30, ignore_eos=True)):
                    pass
        except KeyboardInterrupt:
            interrupts += 1
            print("interrupted", flush=True)
    for attempt in range(3):
        try:
            again = model.infer(hmt.Request("Once upon a time", 12, ignore_eos=True)).text
            assert again == expected
            break
        except KeyboardInterrupt:
            pass
print("done", interrupts)
"""


def test_interrupts_at_any_moment_leave_a_working_engine() -> None:
    dice = random.Random(4)
    child = subprocess.Popen([sys.executable, "-c", CHILD], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    try:
        assert child.stdout.readline() == "ready\n"
        for _ in range(15):
            time.sleep(dice.random() * 0.05)
            child.send_signal(signal.SIGINT)
            if child.stdout.readline() != "interrupted\n":
                break
        rest = child.stdout.read()
        assert child.wait(60) == 0
        assert rest.startswith("done")
    finally:
        child.kill()
        child.communicate()


@pytest.mark.parametrize("name", ["next_step", "fork", "take_ended"])
def test_a_fault_of_the_scheduler_ends_requests_and_not_the_engine(
    name: str, model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    scheduler, faults = model._core.scheduler, [ZeroDivisionError("a fault")]
    own = getattr(scheduler, name)

    def fails_once(*given: Any, **named: Any) -> Any:
        if faults:
            raise faults.pop()
        return own(*given, **named)

    monkeypatch.setattr(scheduler, name, fails_once)
    with pytest.raises(HMTError, match=r"internal error.*a fault"):
        model.infer_batch([hmt.Request(CHAT, 8, ignore_eos=True) for _ in range(3)])
    assert len(model.infer(hmt.Request(CHAT, 8, ignore_eos=True)).token_ids) == 8
    assert_nothing_runs(model)
