"""Models with recurrent state in the engine: chunks, batches, choices, preemption, memory."""

import random
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from default_part import after_first
from hybrid_models import drawn, ids, publish
from single_answers import SingleAnswers
from transformers import PreTrainedModel

import hmt
from hmt.base.errors import BudgetError, HMTError
from hmt.contracts.plan import Tier
from hmt.contracts.request import TokenEvent
from hmt.engine import LoadedModel
from hmt.hardware import machine
from hmt.hardware.link_rates import LinkRates
from hmt.kernels.cpu import extension
from hmt.kvcache import SplitKVCache
from hmt.kvcache.prefix import saved_states
from hmt.models.decoder import Decoder
from hmt.planner import explain

OPTIONS: dict[str, Any] = {"dtype": "float32", "max_prefill_tokens": 16, "host_memory": "64MiB"}
POSITIONS = 400
NEVER = "no model writes this"


# The first four: state beside pages, state alone, tokens that are state, and both in one layer;
# they try all ways, below.  Each family goes through test_parity.
FAMILIES = (
    "qwen3_next-0",
    "mamba2-1",
    "qwen4_exp_text-0",
    "falcon_h1-0",
    "qwen3_5_text-0",
    "kimi_linear-0",
    "minimax-0",
    "glm5_next_text-0",
)


def one_way_of(family: str, *ways: str) -> str:
    """The way that a family tries; the first four families try each.

    Where state lies is known to memory and the cache alone, which see bytes, and what it holds to a
    family's layers alone: all pairs of both take twice the time.
    """
    return ways[FAMILIES.index(family) % len(ways)]


@pytest.fixture(scope="module", params=after_first(FAMILIES, 4))
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def made(
    family: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Path, PreTrainedModel]]:
    folder = tmp_path_factory.mktemp(family)
    yield folder, publish(family, folder, POSITIONS)


@pytest.fixture(scope="module")
def alone(made: tuple[Path, PreTrainedModel]) -> Iterator[SingleAnswers]:
    with hmt.Engine(**OPTIONS, context=POSITIONS, max_batch=1) as engine:
        yield SingleAnswers(engine.load_model(made[0]))


def is_free(model: LoadedModel) -> bool:
    kv = model._core.memory.kv.allocator
    return model._loop.call(lambda: kv.free_tokens) == kv.capacity_tokens and not kv.sequences


def test_chunks_do_not_change_a_bit(made: tuple[Path, PreTrainedModel]) -> None:
    folder, reference = made
    tokens = ids(150)
    rows = range(len(tokens))
    found = []
    for chunk, prefill in ((16, 150), (7, 150), (13, 90), (1, 20), (150, 150)):
        options = OPTIONS | {"max_prefill_tokens": chunk, "context": POSITIONS, "max_batch": 1}
        with hmt.Engine(**options) as engine:
            found.append(engine.load_model(folder).logits(tokens, rows, prefill=prefill))
    with torch.inference_mode():
        wanted = reference(torch.tensor([tokens])).logits[0]
    if extension.load() is not None:  # torch adds otherwise, by how many tokens there are
        assert all(torch.equal(found[0], other) for other in found[1:4])
    # More than 16 tokens at once are multiplied with f32 weights by torch, which adds otherwise.
    for logits in found:
        assert float((logits - wanted).abs().max()) <= 1e-4 * max(1.0, float(wanted.std()))


def test_requests_that_run_together_answer_as_alone(made: tuple[Path, PreTrainedModel]) -> None:
    folder, _ = made
    requests = [drawn(ids(count, count), count) for count in (3, 40, 17, 90, 1)]
    with hmt.Engine(**OPTIONS, context=1024, max_batch=3) as engine:
        model = engine.load_model(folder)
        alone = [model.infer(request).token_ids for request in requests]
        assert [answer.token_ids for answer in model.infer_batch(requests)] == alone
        assert is_free(model)


WAYS: dict[str, dict[str, Any]] = {
    "near": {},
    "few at once": {"max_batch": 2},
    "levels": {"kv_gpu_memory": "1MiB"},
    "gpu": {"gpus": "fake", "gpu_memory": "64MiB"},
    "both": {"gpus": "fake"},
}


@pytest.mark.parametrize("near", [True, False])
def test_choices_share_a_prompt(
    near: bool,
    family: str,
    made: tuple[Path, PreTrainedModel],
    alone: SingleAnswers,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(machine._links, "a fake device", LinkRates(40e9))
    folder, _ = made
    way = "near" if near else one_way_of(family, "few at once", "levels", "gpu", "both")
    options = OPTIONS | {"context": 2 * POSITIONS, "max_batch": 4} | WAYS[way]
    prompt = ids(151, 5)
    apart = [alone(drawn(prompt, seed)) for seed in range(7, 12)]
    if way == "both":
        options["gpu_memory"] = least_gpu_memory(folder, options)
    with hmt.Engine(**options) as engine:
        model = engine.load_model(folder)
        assert isinstance(model._core.memory.kv, SplitKVCache) == (way == "both")
        answers = model.infer_choices(drawn(prompt, 7), 5)
        assert [answer.token_ids for answer in answers] == apart
        assert model.summary().prompt.tokens == len(prompt)
        assert is_free(model)


def least_gpu_memory(folder: Path, options: dict[str, Any]) -> int:
    """With which some layers compute on the device, and some do not."""
    for nbytes in range(200_000, 4_000_000, 50_000):
        try:
            with hmt.Engine(**options, gpu_memory=nbytes) as engine:
                stages = engine.load_model(folder).plan.device.stages
                if stages:
                    assert len(stages) < 4
                    return nbytes
        except BudgetError:
            continue
    raise AssertionError("no budget of the device is between all and nothing")


def test_sequences_that_give_way_are_computed_again(
    made: tuple[Path, PreTrainedModel], alone: SingleAnswers
) -> None:
    folder, _ = made
    requests = [drawn(ids(60, seed), seed, 100, stop=NEVER, priority=seed % 2) for seed in range(4)]
    with hmt.Engine(**OPTIONS, context=POSITIONS, max_batch=3) as engine:
        model = engine.load_model(folder)
        for _ in range(8):  # as after answers of one token
            model._core.scheduler._forecast.note("", 1, whole=True)
        answers = [answer.token_ids for answer in model.infer_batch(requests)]
        assert answers == list(map(alone, requests))
        load = model._core.scheduler.load
        assert load.dropped and not load.parked, "all began although not all fit"
        assert is_free(model)


class Second:
    """Begins another request with the sixth token of one."""

    def __init__(self, model: LoadedModel, request: hmt.Request) -> None:
        self.model, self.request = model, request
        self.tokens: tuple[list[int], list[int]] = ([], [])
        self.ended = [threading.Event(), threading.Event()]

    def listener(self, number: int) -> Any:
        def put(event: TokenEvent | HMTError | None) -> None:
            assert isinstance(event, TokenEvent), event
            self.tokens[number].append(event.token_id)
            if number == 0 and len(self.tokens[0]) == 6:
                self.model.begin(self.request, [self.listener(1)])
            if event.finish_reason is not None:
                self.ended[number].set()

        return SimpleNamespace(put=put)

    def run(self, first: hmt.Request) -> list[tuple[int, ...]]:
        self.model.begin(first, [self.listener(0)])
        assert all(one.wait(60) for one in self.ended)
        return [tuple(tokens) for tokens in self.tokens]


def computed_tokens(model: LoadedModel) -> int:
    summary = model.summary()
    return int(summary.prompt.tokens + summary.generation.tokens)


@pytest.mark.parametrize("near", [True, False])
def test_who_was_sent_back_goes_on_where_it_was(
    near: bool,
    family: str,
    made: tuple[Path, PreTrainedModel],
    alone: SingleAnswers,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With nothing computed again: its state and pages have stayed."""
    monkeypatch.setitem(machine._links, "a fake device", LinkRates(40e9))
    folder, _ = made
    way = "near" if near else one_way_of(family, "levels", "gpu", "prefixes")
    requests = drawn(ids(41, 1), 1, 30), drawn(ids(52, 2), 2, 9, priority=1)
    options = OPTIONS | {"context": POSITIONS, "max_batch": 1}
    answers = list(map(alone, requests))
    options |= {"prefix_cache": True} if way == "prefixes" else WAYS[way]
    with hmt.Engine(**options) as engine:
        model = engine.load_model(folder)
        assert Second(model, requests[1]).run(requests[0]) == answers
        assert is_free(model)
        load = model._core.scheduler.load
        assert load.parked == 1 and not load.dropped
        assert computed_tokens(model) == 41 + 29 + 52 + 8


@pytest.mark.parametrize("family", ["qwen3_next-0", "mamba2-1"], indirect=True)
def test_who_gives_its_pages_up_has_them_on_the_disk(
    made: tuple[Path, PreTrainedModel], alone: SingleAnswers, tmp_path: Path
) -> None:
    """No more than a page and the last token are computed again each time."""
    folder, _ = made
    requests = [drawn(ids(60, seed), seed, 100, stop=NEVER, priority=seed % 2) for seed in range(6)]
    options = OPTIONS | {"context": POSITIONS, "max_batch": 5, "host_memory": "160MiB"}
    wanted = sum(60 + len(alone(request)) - 1 for request in requests)
    with hmt.Engine(**options, prefix_cache_dir=str(tmp_path)) as engine:
        model = engine.load_model(folder)
        for _ in range(8):
            model._core.scheduler._forecast.note("", 1, whole=True)
        answers = [answer.token_ids for answer in model.infer_batch(requests)]
        assert answers == list(map(alone, requests))
        load = model._core.scheduler.load
        assert load.dropped
        assert computed_tokens(model) <= wanted + load.dropped * 17
        assert model._core.memory.prefixes.saved_states._store.counters.read_pages
        assert is_free(model)
        check_checkpoints(model)


def test_beams_are_those_of_transformers(made: tuple[Path, PreTrainedModel]) -> None:
    folder, reference = made
    prompt = ids(33, 3)
    wanted = reference.generate(
        torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
        num_beams=3, num_return_sequences=3, max_new_tokens=8, do_sample=False,
        early_stopping=False, eos_token_id=None, pad_token_id=0,
        use_cache=False,  # MiniMax' does not follow beams
    )  # fmt: skip
    with hmt.Engine(**OPTIONS, context=POSITIONS, max_batch=3) as engine:
        model = engine.load_model(folder)
        found = model.beam_search(hmt.Request(prompt, 8, ignore_eos=True), 3)
        assert [list(one.token_ids) for one in found] == wanted[:, len(prompt) :].tolist()
        assert is_free(model)


def test_state_is_part_of_the_budget(made: tuple[Path, PreTrainedModel]) -> None:
    folder, _ = made
    reserved, found = [], []
    for batch, shared in ((1, False), (5, False), (1, True)):
        options = OPTIONS | {"context": POSITIONS, "max_batch": batch, "prefix_cache": shared}
        with hmt.Engine(**options, draft_tokens=0) as engine:  # without a journal
            model = engine.load_model(folder)
            spec = model.prepared.model.spec
            states_of = (*spec.state, *spec.second_state)
            matrices = sum(one.nbytes for state in states_of for one in state)
            assert spec.state_bytes == matrices > 0
            reserved.append(model.plan.reserved["kv"])
            used = model._core.memory.used_bytes()["kv"]
            pages = model.plan.kv_tokens * model.prepared.demand.kv_token_bytes
            states = batch * 5 if shared else batch + (batch + 1) // 2
            found.append(states)
            assert pages + states * spec.state_bytes <= used <= reserved[-1]
            prepared = model.prepared
            shown = explain(model.plan, prepared.demand, prepared.machine)
            assert f"{states} recurrent states of " in shown
            assert engine._ledger.reserved_bytes(Tier.HOST) <= 64 << 20
    for more, states in zip(reserved, found, strict=True):
        least = reserved[0] + (states - found[0]) * spec.state_bytes
        assert abs(more - least) < 3 * 4096


def check_checkpoints(model: LoadedModel) -> int:
    """Every spare slot is free, of a sequence that runs, or of a page; how many are of pages."""
    states = model._core.memory.kv.states
    held, slots = states.checkpoints, states.slots
    running = sum(map(len, held._running.values()))
    assert slots.spare_free + held.kept + running == slots.spare
    assert model._loop.call(lambda: slots._free.free - slots.spare_free) == slots.count
    return held.kept


@pytest.mark.parametrize("way", [{}, {"kv_gpu_memory": "1MiB"}], ids=["near", "levels"])
def test_a_conversation_computes_what_is_new(
    made: tuple[Path, PreTrainedModel], alone: SingleAnswers, way: dict[str, Any]
) -> None:
    """Each turn goes on from where the last answer ended; an edited one from before the edit."""
    folder, _ = made
    options = OPTIONS | {"context": POSITIONS, "max_batch": 2}
    with hmt.Engine(**options, prefix_cache=True, **way) as engine:
        model = engine.load_model(folder)
        tokens, before = ids(70, 1), 0
        turns = [tokens]
        for turn in range(5):
            request = drawn(tokens, turn, 20)
            answer = model.infer(request)
            assert answer.token_ids == alone(request)
            computed = model.summary().prompt.tokens - before
            before += computed
            assert computed <= (70 if not turn else 25 + 16), (
                "the answer's last page, and what is new"
            )
            tokens = [*tokens, *answer.token_ids, *ids(25, 10 + turn)]
            turns.append(tokens)
        # The fourth message is another: all before it is there, but for less than a page.
        edited = [*turns[2], *ids(40, 99)]
        assert model.infer(drawn(edited, 7)).token_ids == alone(drawn(edited, 7))
        computed = model.summary().prompt.tokens - before
        assert computed <= 40 + 25 + 16
        assert check_checkpoints(model) > 3


def test_checkpoints_give_way_and_answers_stay(
    made: tuple[Path, PreTrainedModel], alone: SingleAnswers
) -> None:
    """More beginnings than there is room for, with sequences that are sent back."""
    folder, _ = made
    rng = random.Random(5)
    heads = [ids(rng.choice([16, 33, 64, 90]), 50 + n) for n in range(4)]
    requests = [
        drawn([*rng.choice(heads), *ids(rng.choice([1, 15, 16, 30]), n)], n, 24, stop=NEVER)
        for n in range(10)
    ]
    options = OPTIONS | {"max_batch": 3}
    wanted = list(map(alone, requests))
    with hmt.Engine(**options, context=POSITIONS, prefix_cache=True) as engine:
        model = engine.load_model(folder)
        for _ in range(8):
            model._core.scheduler._forecast.note("", 1, whole=True)
        for _ in range(2):
            assert [answer.token_ids for answer in model.infer_batch(requests)] == wanted
            check_checkpoints(model)
        tree = model._core.memory.prefixes.tree
        assert tree.counters.hits and tree.counters.evicted
        apart = [model.infer(drawn(heads[3] + ids(9), seed)).token_ids for seed in (1, 2, 3)]
        answers = model.infer_choices(drawn(heads[3] + ids(9), 1), 3)
        assert [answer.token_ids for answer in answers] == apart
        model._loop.call(tree.clear)
        assert check_checkpoints(model) == 0


def test_a_conversation_goes_on_after_a_restart(
    family: str,
    made: tuple[Path, PreTrainedModel],
    alone: SingleAnswers,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """From the disk, where states lie in pieces; a damaged one is computed again."""
    way = one_way_of(family, "levels", "near")
    monkeypatch.setattr(saved_states, "_PIECE_BYTES", {"levels": 1 << 22, "near": 1000}[way])
    folder, _ = made
    options = OPTIONS | {"context": POSITIONS, "max_batch": 2}
    kept = options | {"prefix_cache_dir": str(tmp_path), "host_memory": "160MiB"} | WAYS[way]
    tokens = ids(70, 1)
    for turn in range(5):
        wanted = alone(drawn(tokens, turn, 20))
        if turn >= 3:
            damage(tmp_path, turn - 3)
        with hmt.Engine(**kept) as engine:
            model = engine.load_model(folder)
            request = drawn(tokens, turn, 20)
            assert model.infer(request).token_ids == wanted
            computed = model.summary().prompt.tokens
            assert computed <= (25 + 16 if 0 < turn < 3 else len(tokens))
            assert turn < 3 or computed > 25 + 16, "what was damaged counts as never kept"
            assert engine._ledger.reserved_bytes(Tier.HOST) <= 160 << 20
        tokens = [*tokens, *wanted, *ids(25, 10 + turn)]


def test_a_state_is_read_from_the_disk_once(
    family: str, made: tuple[Path, PreTrainedModel], alone: SingleAnswers, tmp_path: Path
) -> None:
    """The next prompt with the same beginning has it in memory, pages and state."""
    folder, _ = made
    way = one_way_of(family, "near", "levels")
    options = OPTIONS | {"context": POSITIONS, "max_batch": 2}
    kept = options | {"prefix_cache_dir": str(tmp_path), "host_memory": "160MiB"} | WAYS[way]
    head = ids(70, 1)
    requests = [drawn([*head, *ids(9, n)], n, 20) for n in range(4)]
    wanted = list(map(alone, requests))
    with hmt.Engine(**kept) as engine:
        engine.load_model(folder).infer(drawn(head, 0, 1))
    read = []
    with hmt.Engine(**kept) as engine:
        model = engine.load_model(folder)
        prefixes = model._core.memory.prefixes
        for request, answer in zip(requests, wanted, strict=True):
            assert model.infer(request).token_ids == answer
            counters = prefixes.store.counters, prefixes.saved_states._store.counters
            read.append([counted.read_pages for counted in counters])
        assert min(read[0]) > 0 and read[1:] == read[:1] * 3
        assert model.summary().prompt.tokens <= 4 * (9 + 16)
        check_checkpoints(model)


def damage(folder: Path, which: int) -> None:
    """Change a byte at the end of every file of pages, or of every file of states."""
    names = [file.name for file in folder.glob("*") if len(file.name) > 40]
    kinds = sorted({name[:32] for name in names})
    assert len(kinds) == 2
    for name in names:
        if name.startswith(kinds[which]):
            content = bytearray((folder / name).read_bytes())
            content[-1] ^= 255
            (folder / name).write_bytes(content)


@pytest.mark.parametrize("shared", [False, True], ids=["apart", "prefixes"])
def test_a_step_that_failed_is_not_gone_on_from(
    shared: bool,
    made: tuple[Path, PreTrainedModel],
    alone: SingleAnswers,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Layers before the one that failed have advanced their state: no request may use it."""
    folder, _ = made
    # With drafts there would be fewer steps than are let fail.
    options = OPTIONS | {"context": 2 * POSITIONS, "max_batch": 3, "speculate": "off"}
    wanted = [alone(drawn(ids(40, seed), seed)) for seed in range(3)]
    # One by one, as where blocks are read: layers in one call fail together.
    monkeypatch.setattr(Decoder, "fused_layers", lambda *_: None)
    with hmt.Engine(**options, prefix_cache=shared) as engine:
        model = engine.load_model(folder)
        computed, layer = 0, type(model.prepared.model).layer

        def fails(self: Any, index: int, *args: Any) -> torch.Tensor:
            nonlocal computed
            computed += 1
            if computed in failing:
                raise BudgetError("a layer fails")
            return layer(self, index, *args)

        failing = set[int]()
        monkeypatch.setattr(type(model.prepared.model), "layer", fails)
        for number in (2, 6, 11, 14, 30):  # in the first steps of a prompt, and later
            computed, failing = 0, {number}
            with pytest.raises(BudgetError, match="a layer fails"):
                model.infer(drawn(ids(40, 0), 0))
        failing = set()
        requests = [drawn(ids(40, seed), seed) for seed in range(3)]
        assert [answer.token_ids for answer in model.infer_batch(requests)] == wanted
