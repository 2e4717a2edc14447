"""Branches of drafts: whichever stays, pages are neither lost nor shared, and answers the same."""

import random
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from draft_oracle import Oracle, always_guess
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import MINI_DENSE

import hmt
from hmt.contracts.model import PAGE_TOKENS
from hmt.contracts.step import SegmentRequest
from hmt.engine import LoadedModel
from hmt.engine.scheduling.draft_branches import DraftBranches
from hmt.engine.scheduling.kv_operations import KVOperationLog
from hmt.engine.scheduling.sequence import SequenceState
from hmt.engine.speculation.draft import Draft, Worth
from hmt.kernels.cpu import extension
from hmt.kvcache import KVAllocator, PagePool

PAGES = 12


@settings(max_examples=60)
@given(data=st.data())
def test_whichever_branch_stays_a_sequence_has_what_it_had(data: st.DataObject) -> None:
    """Against counting: pages that are not reserved are free, once the step is over."""
    kv = KVOperationLog(KVAllocator(PagePool(PAGES)))
    offered: dict[int, list[tuple[int, ...]]] = {}
    branches = DraftBranches(kv, lambda number, sequences: offered[number])
    states = [SequenceState([1] * 5, 5, 200) for _ in range(data.draw(st.integers(1, 3)))]
    for state in states:
        state.computed, state.reserved_tokens = 4, 3 * PAGE_TOKENS
        state.kv = kv.open(state.reserved_tokens)
    for _ in range(data.draw(st.integers(1, 6))):
        segments = []
        for state in states:
            count = data.draw(st.integers(1, 4))
            lengths = data.draw(st.lists(st.integers(1, count), max_size=3))
            offered[state.number] = [(7 + n,) * length for n, length in enumerate(lengths)]
            assert state.kv is not None
            segments.append(
                SegmentRequest(
                    state.kv,
                    state.computed,
                    [1] + [2] * count,
                    count + 1,
                    request=state.number,
                    drafts=count,
                )
            )
        made = branches.with_branches(segments)
        assert [one for one in made if not one.is_branch] == segments
        for state in states:
            own = [one for one in made if one.request == state.number]
            if data.draw(st.integers(0, 9)) == 0:
                branches.drop(state.number)  # it has ended meanwhile, by an error
                continue
            kept = data.draw(st.sampled_from(own))
            branches.keep(state, kept.sequence)
            assert state.kv == kept.sequence
            accepted = data.draw(st.integers(0, len(kept.tokens) - 1))
            state.computed = min(state.computed + 1 + accepted, 2 * PAGE_TOKENS)
        pages = [page for state in states for page in kv.allocator.pages(state.kv or 0).tolist()]
        assert len(pages) == len(set(pages)) == 3 * len(states)
        assert kv.allocator.free_tokens == (PAGES - len(pages)) * PAGE_TOKENS
        assert all(kv.allocator.reserved_tokens(s.kv or 0) == s.reserved_tokens for s in states)


class Branching(Oracle):
    """Its draft is mostly wrong, and one of the alternatives mostly right."""

    def propose(
        self, number: int, scope: str, tokens: Sequence[int], most: int, worth: Worth
    ) -> Draft:
        """Up to four tokens of each."""
        known = next((one for one in self.sequences if one[: len(tokens)] == list(tokens)), [])
        right = tuple(known[len(tokens) :][: min(4, most)])
        if not right:
            return Draft()
        wrong = [((t + n) % 200 + 16, *right[1:]) for n, t in enumerate(right[:1] * 2, 1)]
        chains = [right, *wrong]
        self._random.shuffle(chains)
        first, *others = (Draft(chain, ("oracle",) * len(chain)) for chain in chains)
        return Draft(first.tokens, first.classes, tuple(others))


@pytest.fixture(scope="module")
def loaded() -> Iterator[LoadedModel]:
    options: dict[str, Any] = {"host_memory": "320MiB", "context": 1024, "prefix_cache": True}
    with hmt.Engine(**options) as engine:
        yield engine.load_model(MINI_DENSE)


@pytest.mark.skipif(extension.load() is None, reason="torch's results depend on the number of rows")
def test_branches_change_no_answer(loaded: LoadedModel) -> None:
    """Alone and in a batch, over the ends of pages, with prefixes that others share."""
    rng = random.Random(3)
    asked = [
        hmt.Request(
            [20 + (7 * n) % 300 for n in range(length)], 50, ignore_eos=True,
            sampling=hmt.Sampling(temperature=temperature, seed=rng.randrange(99)),
        )
        for length, temperature in ((30, 0.0), (30, 0.9), (47, 0.9))
    ]  # fmt: skip
    speculator = loaded._core.speculator
    speculator._proposer = None
    wanted = [loaded.infer(one).token_ids for one in asked]
    known = [[*one.input, *answer] for one, answer in zip(asked, wanted, strict=True)]
    always_guess(loaded, Branching(known, seed=1))
    for batch in (asked[:1], asked[1:2], asked):
        loaded.reset_summary()
        assert [one.token_ids for one in loaded.infer_batch(batch)] == wanted[
            asked.index(batch[0]) :
        ][: len(batch)]
        account = loaded.summary().speculation
        assert account.accepted > 1.5 * account.steps, "branches that are right stay"
        tokens = loaded.summary().generation.tokens
        assert tokens == sum(49 for _ in batch), "prompts give one of 50"
    free = loaded._core.scheduler._allocator
    assert not free.sequences and free.free_tokens == free.capacity_tokens
