"""Who makes room: the coldest that may go, and nobody where that would not be enough."""

from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from hmt.contracts.store import Priority
from hmt.weights.store.victims import choose_victims


@dataclass
class Block:
    nbytes: int
    leases: int
    awaited: Priority | None
    layout: Any = None

    def __post_init__(self) -> None:
        self.layout = SimpleNamespace(slot_bytes=self.nbytes)


blocks = st.lists(
    st.builds(
        Block,
        st.integers(1, 10),
        st.sampled_from([0, 0, 0, 1]),
        st.sampled_from([None, None, *Priority]),
    ),
    max_size=12,
)


@given(
    blocks,
    st.integers(-5, 60),
    st.sampled_from(list(Priority)),
    st.booleans(),
)
@settings(max_examples=300, deadline=None)
def test_as_few_as_needed_in_the_right_order(
    cold: list[Block], nbytes: int, priority: Priority, force: bool
) -> None:
    free = [b for b in cold if not b.leases]
    allowed = [b for b in free if b.awaited is None]
    if priority is not Priority.SPECULATIVE:
        allowed += [b for b in free if b.awaited is Priority.SPECULATIVE]
    if force:
        allowed += [b for b in free if b.awaited in (Priority.DEMAND, Priority.PREFETCH)]
    if priority is Priority.SPECULATIVE and force:
        return  # nobody waits for a guess
    victims = choose_victims(cold, nbytes, priority, force=force)
    if sum(b.nbytes for b in allowed) < nbytes or not allowed:
        assert victims == []
        return
    assert [id(b) for b in victims] == [id(b) for b in allowed[: len(victims)]]
    freed = [b.nbytes for b in victims]
    assert victims and sum(freed) >= nbytes
    assert len(victims) == 1 or sum(freed[:-1]) < nbytes


def test_it_looks_no_further_than_it_must() -> None:
    def cold() -> Iterator[Block]:
        yield Block(1, 1, None)
        yield Block(4, 0, None)
        yield Block(4, 0, None)
        raise AssertionError("thousands of others")

    assert [b.nbytes for b in choose_victims(cold(), 8, Priority.DEMAND, force=False)] == [4, 4]
