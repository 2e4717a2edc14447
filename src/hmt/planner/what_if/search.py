"""The choice for a device that costs least: greedy by seconds saved per byte.

It starts with nothing on the device, and takes one step after the other: a few layers' attention,
a few networks, one more expert of each layer, the head; always the step that saves most seconds
for the bytes that it takes.  Steps get smaller when the large ones no longer fit.  At the end it
gives back half, all or one of what it took of each sort, in turn, and fills the room again: a step
that was right when the device was empty may not be when it is full.
"""

from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from functools import cache

from hmt.contracts.machine import Machine
from hmt.planner.cost.cost_model import CostModel
from hmt.planner.placement.device import DeviceChoice
from hmt.planner.placement.device_estimate import DeviceEstimate

Weigh = Callable[[CostModel], float]
"""What a plan costs for a goal: the less the better."""

_STEPS = (16, 64)  # parts of the layers that one step takes at first, and then
_NOTHING = DeviceChoice(0)
_ROUNDS = 3
_SORTS = ("staying", "copied", "expert_slots", "staging_slots")
_IMPROVED = 3  # of the starts, those that are gone on with


def cheapest(draft: DeviceEstimate, machine: Machine, weigh: Weigh) -> list[DeviceChoice]:
    """The best choices that were found, the best first; without layers the CPU is alone.

    A draft is not quite the plan: whoever can should compare the plans of these.
    """
    search = _Search(draft, machine, weigh)
    fullest = list(dict.fromkeys(_fullest(draft)))
    starts = [_NOTHING, *fullest]
    starts += [search.most(start, sort) for start in fullest for sort in _SORTS]
    filled = sorted({search.fill(start): None for start in starts}, key=search.cost)
    found = {search.improved(start): None for start in filled[:_IMPROVED]}
    return sorted((*found, *filled[:1], _NOTHING), key=search.cost)


def _fullest(draft: DeviceEstimate) -> Iterator[DeviceChoice]:
    """As much attention as fits: with or without the head, and with room for what is brought."""
    ends = [(True, 0, 0), (False, 0, 0), (True, draft.layers, 0)]
    if draft.experts:
        ends += [(True, 0, 1), (False, 0, 1)]
    for head, copied, staging in ends:
        for layers in range(draft.layers, 0, -1):
            choice = DeviceChoice(
                layers, head=head, copied=min(copied, layers), staging_slots=staging
            )
            if draft.room.taken(choice) is not None:
                yield choice
                break


class _Search:
    def __init__(self, draft: DeviceEstimate, machine: Machine, weigh: Weigh) -> None:
        self._draft, self._machine, self._weigh = draft, machine, weigh
        self._costs: dict[DeviceChoice, float] = {}
        self.taken = cache(draft.room.taken)

    def cost(self, choice: DeviceChoice) -> float:
        """Seconds, or what the goal weighs."""
        if choice not in self._costs:
            model = CostModel(self._draft.loads(choice), self._machine)
            self._costs[choice] = self._weigh(model)
        return self._costs[choice]

    def most(self, choice: DeviceChoice, sort: str) -> DeviceChoice:
        """With as much of one sort as fits, whatever it saves: where a greedy step sees no gain."""
        for _ in range(2 * _STEPS[0]):  # slots that take no room would never end
            more = [
                after
                for after in self._steps(choice, _STEPS[0])
                if getattr(after, sort) > getattr(choice, sort)
                and after.layers == choice.layers
                and self.taken(after) is not None
            ]
            if not more:
                break
            choice = more[0]
        return choice

    def improved(self, choice: DeviceChoice) -> DeviceChoice:
        """With half, all or one of each sort given back, and the room filled again, while it helps.

        Half alone left 9 of 984 comparisons with more of something slower, 3.8% at worst.
        """
        for _ in range(_ROUNDS):
            before = choice
            for field in fields(DeviceChoice):
                given: int = getattr(choice, field.name)
                for kept in dict.fromkeys((given // 2, 0, given - 1)) if given else ():
                    less = replace(choice, **{field.name: type(given)(kept)})  # type: ignore[arg-type]
                    again = self.fill(self.fill(less, without=field.name))
                    if self.cost(again) < self.cost(choice):
                        choice = again
            if choice == before:
                break
        return choice

    def fill(self, choice: DeviceChoice, without: str = "") -> DeviceChoice:
        """Take steps until none fits that saves anything; none of the sort `without`."""
        for parts in _STEPS:
            while True:
                better = self._step(choice, parts, without)
                if better is None:
                    break
                choice = better
        return choice

    def _step(self, choice: DeviceChoice, parts: int, without: str) -> DeviceChoice | None:
        now, before = self.cost(choice), self.taken(choice) or 0
        best, best_worth = None, 0.0
        for after in self._steps(choice, parts):
            if without and getattr(after, without) > getattr(choice, without):
                continue
            taken = self.taken(after)
            if taken is None:
                continue
            worth = (now - self.cost(after)) / max(1, taken - before)
            if worth > best_worth:
                best, best_worth = after, worth
        return best

    def _steps(self, choice: DeviceChoice, parts: int) -> Iterator[DeviceChoice]:
        layers, experts = self._draft.layers, self._draft.experts
        unit = max(1, layers // parts)
        more = min(layers, choice.layers + unit)
        if choice.layers < layers:
            yield replace(choice, layers=more)
            # A network on the device is worth most where attention is there, too.
            yield replace(choice, layers=more, staying=choice.staying + more - choice.layers)
        if not choice.layers:
            return
        if not choice.head:
            yield replace(choice, head=True)
        if choice.staying < choice.layers:
            yield replace(choice, staying=min(choice.layers, choice.staying + unit))
        if choice.staying + choice.copied < choice.layers:
            yield replace(choice, copied=choice.copied + unit)
        if choice.copied and choice.staying < choice.layers:
            less = max(0, choice.copied - unit)
            yield replace(choice, staying=min(choice.layers, choice.staying + unit), copied=less)
        if experts:
            slots = max(1, experts // parts)
            staging = max(1, choice.staging_slots)
            yield replace(choice, staging_slots=choice.staging_slots + 1)
            if choice.expert_slots < experts:
                slots = min(experts, choice.expert_slots + slots)
                yield replace(choice, expert_slots=slots, staging_slots=staging)
