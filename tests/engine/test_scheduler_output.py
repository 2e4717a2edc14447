"""A step is data: another process can be sent it, and computes the same from it."""

import pickle
import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from reference import MINI_DENSE, MINI_MOE

import hmt
from hmt.contracts.step import KVOperation, SchedulerOutput, SegmentRequest, Step
from hmt.engine import LoadedModel
from hmt.engine.scheduling.kv_operations import KVOperationLog, repeat_operations
from hmt.hardware import machine
from hmt.hardware.link_rates import LinkRates

OPTIONS: dict[str, Any] = {
    "host_memory": "320MiB", "dtype": "float32", "max_batch": 4, "context": 512,
    "max_prefill_tokens": 48,
}  # fmt: skip
SMALL = st.integers(0, 1 << 20)
SEGMENTS = st.builds(
    SegmentRequest,
    SMALL, SMALL, st.lists(SMALL, min_size=1, max_size=5), st.integers(0, 1), SMALL, SMALL,
    st.integers(0, 3), st.integers(0, 3), SMALL, SMALL, axes=st.just(()),
)  # fmt: skip
# Some with rotary positions on three axes.
SEGMENTS |= SEGMENTS.map(lambda part: part._replace(axes=(tuple(part.tokens),) * 3))
OPERATIONS = st.builds(
    KVOperation,
    st.sampled_from(["open", "fork", "grow", "shrink", "rewind", "park", "resume", "close"]),
    st.lists(SMALL, max_size=3).map(tuple),
    SMALL,
)
OUTPUTS = st.builds(
    SchedulerOutput,
    st.lists(SEGMENTS, max_size=4).map(tuple),
    SMALL,
    st.lists(OPERATIONS, max_size=4).map(tuple),
    st.none() | st.lists(SMALL, max_size=4).map(tuple),
)


@given(OUTPUTS)
def test_what_is_sent_arrives(output: SchedulerOutput) -> None:
    assert SchedulerOutput.from_json(output.to_json()) == output
    assert pickle.loads(pickle.dumps(output)) == output


def test_a_step_that_is_not_run_leaves_its_operations_to_the_next() -> None:
    """As where none of its images can be encoded."""
    handles = iter(range(1, 9))
    log = KVOperationLog(SimpleNamespace(open=lambda _: next(handles), close=lambda _: None))
    first = log.open(16)
    taken = log.take()
    log.open(32)
    log.put_back(taken)
    log.close(first)
    assert [(one.name, one.opened or one.arguments[0]) for one in log.take()] == [
        ("open", 1), ("open", 2), ("close", 1)
    ]  # fmt: skip
    assert log.take() == ()


@given(st.lists(SEGMENTS, max_size=4))
def test_its_rows_are_those_of_the_tensors(segments: list[SegmentRequest]) -> None:
    """In order, and with the positions of their tokens; `Step` counts them for itself."""
    segments = [
        part._replace(
            request=number,
            num_prompt_logprobs=min(part.num_prompt_logprobs, part.length),
            num_pooled=min(part.num_pooled, part.length),
        )
        for number, part in enumerate(segments, 1)
    ]
    output, step = SchedulerOutput(tuple(segments)), Step.build(segments)
    owners = [part.request for part in segments for _ in part.tokens]
    for rows, mine in ((step.scored_rows, output.scored), (step.pooled_rows, output.pooled)):
        assert mine == [(owners[row], int(step.positions[row])) for row in rows.tolist()]
    assert output.sampled == [owners[row] for row in step.logit_rows.tolist()]
    assert output.num_tokens == len(step.token_ids)
    assert (step.axes is not None) == any(part.axes for part in segments)
    if step.axes is not None:
        axes = [part.axes or (range(part.start, part.context),) * 3 for part in segments]
        assert step.axes.tolist() == [[n for part in axes for n in part[axis]] for axis in range(3)]
    assert output.shows_prompts == step.has_prompt_outputs


def prompt(seed: int, tokens: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(16, 500) for _ in range(tokens)]


def keep_busy(model: LoadedModel) -> None:
    """Requests that grow, are sent back and share prompts, a beam search, and teacher forcing."""
    for _ in range(8):  # answers are expected to be short, so that sequences have to grow
        model._core.scheduler._forecast.note("", 1, whole=True)
    drawn = hmt.Sampling(temperature=1.5, seed=3)
    requests = [
        hmt.Request(prompt(seed, 90), 70, sampling=drawn, min_tokens=70, priority=seed % 2)
        for seed in range(5)
    ]
    scored = hmt.Request(prompt(7, 60), 0, prompt_logprobs=2)
    model.infer_batch([*requests, scored])
    model.infer_choices(hmt.Request(prompt(9, 100), 12, sampling=drawn), 6)
    model.beam_search(hmt.Request(prompt(11, 60), 10), 3)
    model.logits(prompt(13, 70), [3, 30, 66, 69], prefill=64)


WAYS = [(MINI_DENSE, {}), (MINI_MOE, {}), (MINI_DENSE, {"gpus": "fake", "gpu_memory": "96MiB"})]


@pytest.mark.parametrize(("path", "way"), WAYS, ids=["dense", "moe", "gpu"])
def test_another_runner_computes_the_same_from_what_it_is_sent(
    path: Any, way: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With weights and a KV cache of its own, and nothing else than texts of JSON."""
    monkeypatch.setitem(machine._links, "a fake device", LinkRates(40e9))
    with hmt.Engine(**OPTIONS, **way) as engine, hmt.Engine(**OPTIONS, **way) as other:
        model, worker = engine.load_model(path), other.load_model(path)
        sent: list[tuple[str, bytes, torch.Tensor]] = []
        run = model._core.runner.run

        def recorded(output: SchedulerOutput, *viewer: Any) -> torch.Tensor:
            logits = run(output, *viewer)
            sent.append((output.to_json(), pickle.dumps(output), logits.clone()))
            return logits

        with monkeypatch.context() as patch:
            patch.setattr(model._core.runner, "run", recorded)
            keep_busy(model)

        kv, handles, names = worker._core.memory.kv.allocator, dict[int, int](), set[str]()
        for text, pickled, wanted in sent:
            output = SchedulerOutput.from_json(text)
            assert output == pickle.loads(pickled)
            names |= {operation.name for operation in output.kv_operations}
            assert torch.equal(compute(worker, output, kv, handles), wanted)
        assert names >= {"open", "fork", "grow", "rewind", "park", "resume", "close"}
        assert model.load.dropped + model.load.parked, "some were sent back"


def compute(
    worker: LoadedModel, output: SchedulerOutput, kv: Any, handles: dict[int, int]
) -> torch.Tensor:
    def work() -> torch.Tensor:
        return worker._core.runner.run(repeat_operations(output, kv, handles)).clone()

    return worker._loop.call(work)
