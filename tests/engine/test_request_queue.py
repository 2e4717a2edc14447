"""Who is admitted next, and how prompts share a step: what must always hold."""

from collections import defaultdict

from hypothesis import given
from hypothesis import strategies as st

from hmt.engine.scheduling.prefill_budget import split_prefill_budget
from hmt.engine.scheduling.request_queue import PATIENCE, RequestQueue, first_of

OWNERS = st.sampled_from("abcd")
PRIORITIES = st.integers(-2, 2)
COSTS = st.integers(1, 50)
# None: one is admitted; a number: the one at this place, of those that wait, goes away
EVENTS = st.lists(
    st.one_of(st.tuples(OWNERS, PRIORITIES, COSTS), st.none(), st.integers(0, 20)), max_size=120
)


class Entry:
    def __init__(self, owner: str, priority: int, cost: int, number: int) -> None:
        self.owner, self.priority, self.cost, self.number = owner, priority, cost, number


def add(queue: RequestQueue[Entry], entry: Entry) -> None:
    queue.add(entry, owner=entry.owner, priority=entry.priority, cost=entry.cost)


@given(EVENTS)
def test_everybody_is_admitted_once_in_the_order_of_their_owner(events: list) -> None:
    queue: RequestQueue[Entry] = RequestQueue()
    waiting: list[Entry] = []
    admitted: list[Entry] = []

    def admit() -> None:
        entry = queue.head()
        assert (entry is None) == (not waiting)
        if entry is None:
            return
        assert queue.head() is entry  # looking changes nothing
        mine = [w for w in waiting if (w.owner, w.priority) == (entry.owner, entry.priority)]
        assert entry is mine[0]
        queue.take(entry)
        waiting.remove(entry)
        admitted.append(entry)

    for number, event in enumerate(events):
        if event is None:
            admit()
        elif isinstance(event, tuple):
            entry = Entry(*event, number)
            waiting.append(entry)
            add(queue, entry)
        elif waiting:
            gone = waiting.pop(event % len(waiting))
            queue.remove(gone)
            queue.remove(gone)  # twice does nothing
        assert list(queue) == waiting and len(queue) == len(waiting)
    while waiting:
        admit()
    assert queue.head() is None and len(admitted) == len(set(admitted))


@given(st.lists(st.tuples(OWNERS, COSTS), min_size=2, max_size=80), st.data())
def test_no_owner_that_waits_is_far_behind(entries: list, data: st.DataObject) -> None:
    """Of two owners with something waiting all the time, none is ahead by more than two entries."""
    queue: RequestQueue[Entry] = RequestQueue()
    left: dict[str, int] = defaultdict(int)
    dearest: dict[str, int] = defaultdict(int)
    for number, (owner, cost) in enumerate(entries):
        add(queue, Entry(owner, 0, cost, number))
        left[owner] += 1
        dearest[owner] = max(dearest[owner], cost)
    served: dict[str, int] = dict.fromkeys(left, 0)
    for _ in range(data.draw(st.integers(1, len(entries)))):
        if not all(left.values()):
            return
        entry = queue.head()
        assert entry is not None
        queue.take(entry)
        left[entry.owner] -= 1
        served[entry.owner] += entry.cost
        for one in served:
            for other in served:
                assert abs(served[one] - served[other]) <= dearest[one] + dearest[other]


@given(st.integers(1, 12), st.integers(1, 40))
def test_who_comes_late_is_not_behind_those_who_were_first(early: int, cost: int) -> None:
    """And has saved nothing up: the newcomer is next, but not twice."""
    queue: RequestQueue[Entry] = RequestQueue()
    for number in range(2 * early + 2):
        add(queue, Entry("a", 0, cost, number))
    for _ in range(early):
        queue.take(queue.head())  # type: ignore[arg-type]
    for number in range(3):
        add(queue, Entry("b", 0, cost, 100 + number))
    owners = []
    for _ in range(4):
        entry = queue.head()
        assert entry is not None
        queue.take(entry)
        owners.append(entry.owner)
    assert owners.count("b") == 2


@given(st.lists(st.integers(1, 5), min_size=30, max_size=60), st.integers(1, 12))
def test_a_low_priority_has_its_turn(priorities: list[int], patience: int) -> None:
    """However many of higher ones keep coming."""
    queue: RequestQueue[Entry] = RequestQueue(patience)
    low = Entry("low", 0, 1, -1)
    add(queue, low)
    for turn, priority in enumerate(priorities):
        add(queue, Entry("high", priority, 1, turn))
        entry = queue.head()
        assert entry is not None
        queue.take(entry)
        if entry is low:
            return
        levels = len(set(priorities)) + 1
        assert turn < patience + levels, "it was passed over too often"
    assert patience + len(set(priorities)) >= len(priorities)


def test_a_higher_priority_goes_first() -> None:
    queue: RequestQueue[str] = RequestQueue()
    for priority in (0, 2, 1):
        for number in range(2):
            queue.add(f"{priority}{number}", priority=priority)
    order = []
    while (item := queue.head()) is not None:
        queue.take(item)
        order.append(item)
    assert order == ["20", "21", "10", "11", "00", "01"] and PATIENCE > 4


def test_who_is_not_ready_lets_other_owners_pass_but_not_their_own() -> None:
    queue: RequestQueue[str] = RequestQueue()
    for item, owner in (("a1", "a"), ("a2", "a"), ("b1", "b")):
        queue.add(item, owner=owner)
    assert queue.head(lambda item: item != "a1") == "b1"
    queue.take("b1")
    assert queue.head(lambda item: item != "a1") is None
    assert queue.head() == "a1"


@given(st.lists(st.integers(0, 9), min_size=1, max_size=8), st.integers(0, 20))
def test_who_shares_most_goes_first(shares: list[int], passed: int) -> None:
    place = first_of(shares, passed)
    if passed >= PATIENCE:
        assert place == 0
    else:
        assert shares[place] == max(shares) and max(shares) not in shares[:place]


@given(st.lists(st.integers(0, 3), min_size=2, max_size=60), st.integers(1, 5))
def test_nobody_is_passed_over_for_ever_by_those_who_share_more(
    shares: list[int], patience: int
) -> None:
    """However many of these keep coming; who shares equally much keeps their order."""
    queue: RequestQueue[tuple[int, int]] = RequestQueue(patience)
    passed: dict[tuple[int, int], int] = {}
    left = [(number, share) for number, share in enumerate(shares)]
    while left or passed:
        for item in left[:3]:
            queue.add(item)
            passed[item] = 0
        left = left[3:]
        item = queue.head(shared=lambda one: one[1])
        assert item is not None
        queue.take(item)
        del passed[item]
        for other in passed:
            if other < item:
                assert other[1] < item[1]
                passed[other] += 1
        assert all(count <= patience for count in passed.values())
    assert queue.head() is None


@given(EVENTS, st.data())
def test_who_is_sent_back_has_the_place_of_before(events: list, data: st.DataObject) -> None:
    queue: RequestQueue[Entry] = RequestQueue()
    for number, event in enumerate(events):
        if isinstance(event, tuple):
            add(queue, Entry(*event, number))
            continue
        before, entry = list(queue), queue.head()
        if entry is None:
            assert queue.priority is None
            continue
        assert queue.priority == max(one.priority for one in before)
        taken = queue.take(entry)
        assert entry not in list(queue)
        if data.draw(st.booleans()):
            queue.restore(taken)
            assert list(queue) == before
            mine = [w for w in before if (w.owner, w.priority) == (entry.owner, entry.priority)]
            assert mine[0] is entry
            # It was charged to its owner once, and that was taken back: they are next again.
            alike = [w for w in before if w.priority == entry.priority]
            assert queue.head(alike.__contains__) is entry
            queue.remove(entry)


PROMPTS = st.lists(st.tuples(st.integers(0, 40).map(lambda n: 16 * n), st.integers(1, 900)))


@given(PROMPTS, st.integers(1, 600))
def test_shares_keep_to_the_budget(left: list[tuple[int, int]], budget: int) -> None:
    counts = split_prefill_budget(left, budget)
    assert len(counts) == len(left) and sum(counts) <= budget
    for count, (computed, to_go) in zip(counts, left, strict=True):
        assert 0 <= count <= to_go
        assert count in (0, to_go) or (computed + count) % 16 == 0 or budget < 16
    if left:  # the first goes on by half of the budget, so that all end
        assert counts[0] >= min(left[0][1], max(1, budget // 2 // 16 * 16))
        unserved = budget - sum(counts)
        assert unserved < 16 or counts == [to_go for _, to_go in left]


@given(PROMPTS, st.integers(1, 600))
def test_after_the_first_the_shortest_prompts_are_served(
    left: list[tuple[int, int]], budget: int
) -> None:
    counts = split_prefill_budget(left, budget)
    others = sorted(zip(left[1:], counts[1:], strict=True), key=lambda one: one[0][1])
    whole = [count == to_go for (_, to_go), count in others]
    if False in whole:  # what is longer than one that was not finished has at most a part
        first = whole.index(False)
        longest = others[first][0][1]
        assert all(not done or to_go <= longest for ((_, to_go), _), done in
                   zip(others[first:], whole[first:], strict=True))  # fmt: skip
