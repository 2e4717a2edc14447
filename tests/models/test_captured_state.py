"""Models with recurrent state on an emulated device: captured steps, and where state lies."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from hybrid_models import drawn, ids, publish
from torch import Tensor

import hmt
from hmt.base.errors import BudgetError
from hmt.contracts.plan import Tier
from hmt.contracts.step import SchedulerOutput
from hmt.engine import LoadedModel
from hmt.engine.engine_core import EngineCore
from hmt.engine.execution.graphs.runner import GraphRunner
from hmt.hardware import machine
from hmt.hardware.link_rates import LinkRates
from hmt.kvcache import PagedKV, SplitKVCache, StateStore
from hmt.memory.device import FakeDevice

OPTIONS: dict[str, Any] = {
    "dtype": "float32", "max_prefill_tokens": 16, "host_memory": "96MiB", "context": 800,
    "max_batch": 3,
}  # fmt: skip
GPU: dict[str, Any] = {"gpus": "fake", "gpu_memory": "64MiB"}
POSITIONS = 400
NEVER = "no model writes this"


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def folder(name: str) -> Path:
        if name not in made:
            made[name] = tmp_path_factory.mktemp(name)
            publish(name, made[name], 2 * POSITIONS)
        return made[name]

    return folder


@pytest.fixture(autouse=True)
def _link(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HMT_POISON", "on")
    monkeypatch.setitem(machine._links, "a fake device", LinkRates(40e9, 30e9, 90e9))


def graphs_of(model: LoadedModel) -> GraphRunner:
    found = model._core.runner.executor.graphs
    assert isinstance(found, GraphRunner), model.summary().notes
    return found


NAMES = ["qwen3_next-0", "qwen3_5_text-0", "qwen3_5_moe_text-0", "lfm2-0", "lfm2_moe-0"]
NAMES += ["kimi_linear-0", "bailing_hybrid-0", "olmo_hybrid-0", "minimax-0"]
NAMES += [
    "mamba2-1",
    "granitemoehybrid-0",
    "falcon_h1-0",
    "nemotron_h-0",
    "nemotron_h-3",
    "jamba-0",
]


@pytest.mark.parametrize("name", NAMES)
def test_decoding_steps_are_captured(name: str, folder_of: Callable[[str], Path]) -> None:
    """With the same bits, in batches that change, and from a first token on."""
    requests = [drawn(ids(count, count), count) for count in (3, 40, 1, 17)]
    found = []
    for way in ({"executor": "plain"}, {}):
        with hmt.Engine(**OPTIONS, **GPU, **way) as engine:
            model = engine.load_model(folder_of(name))
            answers = [one.token_ids for one in model.infer_batch(requests)]
            logits = model.logits(ids(40, 5), range(40), prefill=17)
            again = model.logits(ids(4, 6), range(4), prefill=0)
            found.append((answers, logits, again))
            if not way:
                captured = graphs_of(model)
                assert captured.works and captured.graphs[False] and not model.summary().notes
                assert all(one.recorded for one in captured.graphs[False].values())
    assert found[0][0] == found[1][0]
    assert torch.equal(found[0][1], found[1][1]) and torch.equal(found[0][2], found[1][2])


def greedy(tokens: list[int], new: int) -> hmt.Request:
    return hmt.Request(tokens, new, ignore_eos=True)


@pytest.mark.parametrize(
    ("name", "shared"),
    [
        pytest.param(name, bool(n % 2), marks=[pytest.mark.whole] if n % 3 else [])
        for n, name in enumerate(NAMES)
    ],
)
def test_the_next_step_begins_on_a_guess(
    name: str, shared: bool, folder_of: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Right or wrong, and with others that come and end meanwhile, it changes no bit."""
    requests = [
        greedy(ids(20, 1), 60), drawn(ids(33, 2), 2, 25), greedy(ids(41, 3), 44),
        drawn(ids(9, 4), 3, 30), greedy(ids(20, 1) + ids(12, 5), 37),
    ]  # fmt: skip
    accept, seen = EngineCore._accept, dict[tuple[int, int], Tensor]()

    def watched(self: EngineCore, output: SchedulerOutput, logits: Tensor) -> Any:
        rows = [segment for segment in output.segments if segment.num_logit_rows]
        for segment, row in zip(rows, logits, strict=True):
            seen[segment.request, segment.context] = row.clone()
        return accept(self, output, logits)

    monkeypatch.setattr(EngineCore, "_accept", watched)
    found = []
    for way in ({"executor": "plain"}, {}):
        seen.clear()
        with hmt.Engine(**OPTIONS, **GPU, **way, prefix_cache=shared) as engine:
            model = engine.load_model(folder_of(name))
            answers = [one.token_ids for one in model.infer_batch(requests)]
            answers += [model.infer(request).token_ids for request in requests[::2]]
            # The last prompts and answers, with checkpoints that were made on the way.
            longer = [*ids(20, 1), *answers[0], *ids(5, 6)]
            answers.append(model.infer(greedy(longer, 20)).token_ids)
            first = min(request for request, _ in seen)
            logits = {(request - first, at): row for (request, at), row in seen.items()}
            found.append((answers, logits))
            if not way:
                graphs = graphs_of(model)
                assert graphs.works and not model.summary().notes
                assert 20 < graphs.async_steps.right < graphs.async_steps.begun
                if shared:
                    assert model.summary().prompt.tokens < 260
    assert found[0][0] == found[1][0] and found[0][1].keys() == found[1][1].keys()
    assert all(torch.equal(row, found[1][1][at]) for at, row in found[0][1].items())


def test_a_guess_needs_a_spare_slot(folder_of: Callable[[str], Path]) -> None:
    """Two of three sequences have one; a sequence that waits takes the place of one."""
    requests = [greedy(ids(20, seed), 30) for seed in range(3)]
    with hmt.Engine(**OPTIONS, **GPU) as engine:
        model = engine.load_model(folder_of("qwen3_5_text-0"))
        graphs, slots = graphs_of(model), model._core.memory.kv.states.slots
        assert (slots.count, slots.spare) == (3, 2)
        alone = [model.infer(request).token_ids for request in requests]
        begun = graphs.async_steps.begun
        assert [one.token_ids for one in model.infer_batch(requests[:2])] == alone[:2]
        both = graphs.async_steps.begun
        assert both > begun
        assert [one.token_ids for one in model.infer_batch(requests)] == alone
        assert model._loop.call(lambda: slots.spare_free) == 2


def test_captured_steps_take_turns_with_others(folder_of: Callable[[str], Path]) -> None:
    """A step that is timed over and over, or that cannot be captured, changes no token."""
    folder, request = folder_of("qwen3_5_text-0"), drawn(ids(40), 1, 30)
    with hmt.Engine(**OPTIONS) as engine:
        wanted = engine.load_model(folder).infer(request).token_ids
    with hmt.Engine(**OPTIONS, **GPU) as engine:
        model = engine.load_model(folder)
        stream = model.stream(request)
        found = [next(stream).token_id for _ in range(6)]
        assert 0 < model.replayed_s(5) < 10
        other = model.infer(drawn(ids(30, 9), 2)).token_ids
        found += [event.token_id for event in stream]
        assert found == list(wanted)
        assert model.infer(drawn(ids(30, 9), 2)).token_ids == other


def test_a_failed_capture_is_told_and_changes_no_token(
    folder_of: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, request = folder_of("qwen3_next-0"), drawn(ids(40), 1, 20)
    with hmt.Engine(**OPTIONS) as engine:
        wanted = engine.load_model(folder).infer(request).token_ids

    def fails(self: FakeDevice, compute: object) -> None:
        raise RuntimeError("the driver says no")

    with monkeypatch.context() as patch, hmt.Engine(**OPTIONS, **GPU) as engine:
        patch.setattr(FakeDevice, "capture", fails)
        model = engine.load_model(folder)
        assert model.infer(request).token_ids == wanted
        [note] = model.summary().notes
        assert "not captured" in note and "the driver says no" in note


def test_state_goes_with_its_sequence(folder_of: Callable[[str], Path]) -> None:
    """Forked, dropped for others and computed again, with state and layers on the device."""
    folder = folder_of("qwen3_5_text-0")
    requests = [drawn(ids(60, seed), seed, 100, stop=NEVER, priority=seed % 2) for seed in range(4)]
    with hmt.Engine(**OPTIONS) as engine:
        model = engine.load_model(folder)
        alone = [model.infer(request).token_ids for request in requests]
        apart = [model.infer(drawn(ids(37, 5), seed)).token_ids for seed in range(7, 10)]
    with hmt.Engine(**OPTIONS | GPU | {"context": POSITIONS}) as engine:
        model = engine.load_model(folder)
        for _ in range(8):  # as after answers of one token: all begin, although not all fit
            model._core.scheduler._forecast.note("", 1, whole=True)
        assert [answer.token_ids for answer in model.infer_batch(requests)] == alone
        assert model._core.scheduler.load.dropped
        answers = model.infer_choices(drawn(ids(37, 5), 7), 3)
        assert [answer.token_ids for answer in answers] == apart
        assert graphs_of(model).works


def test_state_is_on_the_device_while_pages_are_in_host_memory(
    folder_of: Callable[[str], Path],
) -> None:
    folder, prompt = folder_of("qwen3_next-0"), ids(520, 3)
    with hmt.Engine(**OPTIONS) as engine:
        model = engine.load_model(folder)
        apart = [model.infer(drawn(prompt, seed, 20)).token_ids for seed in (1, 2)]
    tiers = {"kv_gpu_memory": "30KiB", "kv_host_memory": "1MiB", "context": 1280}
    with hmt.Engine(**OPTIONS | GPU | tiers) as engine:
        model = engine.load_model(folder)
        answers = model.infer_choices(drawn(prompt, 1, 20), 2)
        assert [answer.token_ids for answer in answers] == apart
        captured = graphs_of(model)
        assert captured.works and captured.graphs[True], "captured with pages in host memory"


@pytest.mark.parametrize("restarts", [False, True])
def test_a_conversation_goes_on_from_states_on_the_device(
    restarts: bool, folder_of: Callable[[str], Path], tmp_path: Path
) -> None:
    folder, tokens = folder_of("qwen3_next-0"), ids(70, 1)
    kept = OPTIONS | GPU | {"prefix_cache": True, "host_memory": "192MiB"}
    if restarts:
        kept["prefix_cache_dir"] = str(tmp_path)
    with hmt.Engine(**OPTIONS) as plain:
        alone = plain.load_model(folder)
        engine = hmt.Engine(**kept)
        try:
            model = engine.load_model(folder)
            for turn in range(3):
                if restarts and turn:
                    engine.close()
                    engine = hmt.Engine(**kept)
                    model = engine.load_model(folder)
                before = model.summary().prompt.tokens
                wanted = alone.infer(drawn(tokens, turn, 20)).token_ids
                assert model.infer(drawn(tokens, turn, 20)).token_ids == wanted
                computed = model.summary().prompt.tokens - before
                assert computed <= (25 + 16 if turn else len(tokens))
                tokens = [*tokens, *wanted, *ids(25, 10 + turn)]
            assert graphs_of(model).works
        finally:
            engine.close()


def test_the_device_counts_the_states_of_its_layers(folder_of: Callable[[str], Path]) -> None:
    reserved, counted = [], []
    for batch, shared in ((1, False), (5, False), (1, True)):
        options = OPTIONS | GPU | {"context": POSITIONS}
        options |= {"max_batch": batch, "prefix_cache": shared}
        with hmt.Engine(**options) as engine:
            model = engine.load_model(folder_of("qwen3_next-0"))
            spec, share = model.prepared.model.spec, model.plan.device
            used = sum(model._core.memory.device_account(model.plan).used_bytes.values())
            assert used <= sum(share.reserved.values()) <= model.plan.budgets[Tier.DEVICE]
            states = batch * 5 if shared else batch + (batch + 1) // 2
            states *= spec.state_bytes
            counted.append(states)
            pages = model.plan.kv_tokens * model.prepared.demand.kv_token_bytes
            assert states + pages <= share.reserved["kv"]
            store = model._core.memory.kv.states
            assert store._memory.nbytes == states
            reserved.append(share.reserved["kv"])
    slack = 256 * spec.layers  # each layer's is rounded up
    for more, states in zip(reserved, counted, strict=True):
        assert abs(more - reserved[0] - (states - counted[0])) <= slack


def test_each_layers_state_is_where_it_computes(folder_of: Callable[[str], Path]) -> None:
    folder, request = folder_of("qwen3_5_text-0"), drawn(ids(40), 1, 20)
    with hmt.Engine(**OPTIONS) as engine:
        wanted = engine.load_model(folder).infer(request).token_ids
    for nbytes in range(200_000, 4_000_000, 50_000):
        try:
            with hmt.Engine(**OPTIONS, gpus="fake", gpu_memory=nbytes) as engine:
                model = engine.load_model(folder)
                kv, there = model._core.memory.kv, model.plan.stage_devices
                if not isinstance(kv, SplitKVCache):
                    continue
                stateful = set(model.prepared.model.spec.state_layers)
                for device, cache in kv._by_device.items():
                    own = {layer for layer in stateful if there.get(layer) == device}
                    assert cache.states._layers.keys() == own
                assert model.infer(request).token_ids == wanted
                [note] = model.summary().notes
                assert note.startswith("decoding steps are not captured")
                return
        except BudgetError:
            continue
    raise AssertionError("no budget of the device is between all and nothing")


def test_copies_between_steps_are_on_the_computing_queue(
    folder_of: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On another queue, the next step could begin before a fork's state is there."""
    depth, seen = 0, []

    @contextmanager
    def stream(self: FakeDevice) -> Iterator[None]:
        nonlocal depth
        depth += 1
        yield
        depth -= 1

    def watched(owner: type, name: str) -> None:
        own = getattr(owner, name)

        def call(*args: Any) -> Any:
            seen.append((name, depth))
            return own(*args)

        monkeypatch.setattr(owner, name, call)

    monkeypatch.setattr(FakeDevice, "compute_stream", stream)
    for owner, names in ((StateStore, ("copy", "keep", "restore")), (PagedKV, ("copy_page",))):
        for name in names:
            watched(owner, name)
    with hmt.Engine(**OPTIONS, **GPU, prefix_cache=True) as engine:
        model = engine.load_model(folder_of("qwen3_5_text-0"))
        model.infer_choices(drawn(ids(37, 5), 7), 3)
        model.infer(drawn(ids(37, 5) + ids(5), 7))
    assert {name for name, _ in seen} == {"copy", "keep", "restore", "copy_page"}
    assert all(within for _, within in seen) and depth == 0
